//! The load: runs that leave marks in their sessions. Calls are retried until an api accepts them.

use std::{
    future::Future,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use codelia_proto::v1::{CancelRunRequest, CreateSessionRequest, SandboxMode, Session, StartRunRequest};
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};
use tonic::{Code, Status};
use tonic_types::StatusExt;

use super::plan::{Job, Kind};
use crate::{Client, Exec, command};

/// How long a call is retried. Longer than any fault.
const RETRY_TIMEOUT: Duration = Duration::from_secs(60);
/// How long an attached run may take, including its time in the queue.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(120);
/// How long one call may take.
const CALL_TIMEOUT: Duration = Duration::from_secs(8);

/// Leaves a mark: one line with the run's number and a random word, which the run also prints. The
/// line has 32 bytes, so that it is never written in part.
const SCRIPT: &str = r#"
word=$(od -An -N12 -tx1 /dev/urandom | tr -d ' \n')
echo "$1 $word" >> marks || exit 9
echo "$word"
i=0
while [ $i -lt $2 ]; do sleep 0.2; echo "$1 ------------------------" >> marks || exit 9; i=$((i+1)); done
exit $3
"#;
/// Exit code of a run that could not write its mark.
pub(crate) const DISK_FULL_EXIT: i64 = 9;
/// Exit code of a failing run.
pub(crate) const FAILED_EXIT: i64 = 3;

/// The label with the number of a run.
pub(crate) const LABEL: &str = "chaos";

/// What the caller of a run observed.
#[derive(Debug, Default)]
pub(crate) struct Observed {
    pub(crate) number: usize,
    /// Its caller canceled it or disconnected.
    pub(crate) may_be_canceled: bool,
    /// Its output, if the caller stayed attached to the end.
    pub(crate) printed: Option<String>,
}

/// Clients of all apis.
#[derive(Debug, Clone)]
pub(crate) struct Callers {
    clients: Vec<Client>,
}

impl Callers {
    pub(crate) fn new(clients: Vec<Client>) -> Self {
        Self { clients }
    }

    /// Calls one api after another until one accepts.
    pub(crate) async fn retry<T, F>(&self, what: &str, first: usize, call: impl Fn(Client) -> F) -> Result<T>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let deadline = Instant::now() + RETRY_TIMEOUT;
        let mut last = None;
        for attempt in first.. {
            let client = self.clients[attempt % self.clients.len()].clone();
            match timeout(CALL_TIMEOUT, call(client)).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(status)) if is_retryable(&status)? => last = Some(status),
                Ok(Err(status)) => bail!("{what}: refused permanently: {status:?}"),
                Err(_) => {}
            }
            if Instant::now() > deadline {
                break;
            }
            sleep(Duration::from_millis(100)).await;
        }
        bail!("{what}: no api accepted it, last error: {last:?}")
    }

    pub(crate) async fn session(&self, number: usize, mode: SandboxMode) -> Result<Session> {
        let request = CreateSessionRequest {
            mode: mode.into(),
            idempotency_key: format!("session-{number}"),
            ..CreateSessionRequest::default()
        };
        self.retry("create a session", number, |client| {
            let request = request.clone();
            async move { client.create(request).await }
        })
        .await
    }

    /// Waits for the job's round, then starts its run, and cancels it if that is its kind.
    pub(crate) async fn start(
        &self,
        job: Job,
        session: &str,
        mut round: watch::Receiver<usize>,
    ) -> Result<Observed> {
        round.wait_for(|now| *now > job.round).await?;
        sleep(job.delay).await;
        let request = request(job, session);
        if job.is_attached {
            return self.attach(job, request).await;
        }
        let run = self
            .retry("start a run", job.api, |client| {
                let request = request.clone();
                async move { client.start(request).await }
            })
            .await?;
        let Kind::Canceled(after) = job.kind else {
            return Ok(Observed { number: job.number, ..Observed::default() });
        };
        sleep(after).await;
        let cancel = CancelRunRequest { name: run.name, ..Default::default() };
        self.retry("cancel a run", job.api, |client| {
            let cancel = cancel.clone();
            async move { client.runs().cancel_run(cancel).await }
        })
        .await?;
        Ok(Observed { number: job.number, may_be_canceled: true, printed: None })
    }

    /// Starts a run and stays attached. The run ends with the call, which ends early if this caller
    /// retries or disconnects, or if a fault breaks the connection.
    async fn attach(&self, job: Job, request: StartRunRequest) -> Result<Observed> {
        let calls = AtomicUsize::new(0);
        let exec = self.retry("exec", job.api, |client| {
            let request = request.clone();
            calls.fetch_add(1, Ordering::Relaxed);
            async move { Exec::start(&client, request).await }
        });
        let exec = exec.await?;
        let transcript = match job.kind {
            Kind::Canceled(after) => timeout(after, exec.finish_without_timeout()).await.ok(),
            _ => Some(
                timeout(ATTACH_TIMEOUT, exec.finish_without_timeout())
                    .await
                    .context("attached run timed out")?,
            ),
        };
        let printed = transcript.and_then(Result::ok).map(|transcript| transcript.stdout_text());
        let may_be_canceled = printed.is_none() || calls.into_inner() > 1;
        Ok(Observed { number: job.number, may_be_canceled, printed })
    }

    pub(crate) async fn close(&self, session: &str) -> Result<()> {
        self.retry("close a session", 0, |client| async move { client.close(session).await }).await?;
        Ok(())
    }
}

fn request(job: Job, session: &str) -> StartRunRequest {
    let ticks = match job.kind {
        Kind::Long(ticks) => ticks,
        Kind::Canceled(_) => 20,
        Kind::Quick | Kind::Failing => 0,
    };
    let code = if job.kind == Kind::Failing { FAILED_EXIT } else { 0 };
    let number = format!("{:06}", job.number);
    let mut request =
        command(session, &["sh", "-c", SCRIPT, "sh", &number, &ticks.to_string(), &code.to_string()]);
    request.retries = job.retries;
    request.labels.insert(LABEL.to_owned(), job.number.to_string());
    request.idempotency_key = format!("run-{}", job.number);
    request
}

/// Whether a refused call may be retried. A retryable refusal without `RetryInfo` is an error.
fn is_retryable(status: &Status) -> Result<bool> {
    let details = status.get_error_details();
    let reason = details.error_info().map(|info| info.reason.as_str());
    match (status.code(), reason) {
        // The connection broke before an answer.
        (Code::Unavailable | Code::Unknown | Code::Cancelled | Code::Internal, None) => Ok(true),
        (Code::Unavailable, Some(_)) if details.retry_info().is_none() => {
            bail!("UNAVAILABLE without RetryInfo: {status:?}")
        }
        (Code::Unavailable | Code::DeadlineExceeded | Code::ResourceExhausted, Some(_)) => Ok(true),
        // All workers may be restarting.
        (Code::FailedPrecondition, Some("MODE_UNAVAILABLE")) => Ok(true),
        _ => Ok(false),
    }
}
