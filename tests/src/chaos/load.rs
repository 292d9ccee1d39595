//! The load: runs that leave marks in their sessions, asked for until somebody accepts them.

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

/// How long somebody asks before giving up: longer than any fault.
const INSISTENCE: Duration = Duration::from_secs(60);
/// How long somebody stays with a run before something must be wrong: it may be queued behind many others.
const STAY: Duration = Duration::from_secs(120);
/// How long one answer may take.
const ANSWER: Duration = Duration::from_secs(8);

/// A mark is one line of 32 bytes, so that none is ever written in part: the run's number and a
/// word of its own, which it also prints.
const SCRIPT: &str = r#"
word=$(od -An -N12 -tx1 /dev/urandom | tr -d ' \n')
echo "$1 $word" >> marks || exit 9
echo "$word"
i=0
while [ $i -lt $2 ]; do sleep 0.2; echo "$1 ------------------------" >> marks || exit 9; i=$((i+1)); done
exit $3
"#;
/// How a run exits that could not leave its mark.
pub(crate) const NO_ROOM: i64 = 9;
/// How a failing run exits.
pub(crate) const FAILED: i64 = 3;

/// Names a run to the harness.
pub(crate) const LABEL: &str = "chaos";

/// What the caller of a run knows of it.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) number: usize,
    /// It was asked to end, or its caller is gone.
    pub(crate) may_be_canceled: bool,
    /// All that it printed, if its caller stayed to its end.
    pub(crate) printed: Option<String>,
}

/// Those who ask, over all apis.
#[derive(Debug, Clone)]
pub(crate) struct Callers {
    clients: Vec<Client>,
}

impl Callers {
    pub(crate) fn new(clients: Vec<Client>) -> Self {
        Self { clients }
    }

    /// Asks one api after another until one answers.
    pub(crate) async fn insist<T, F>(&self, what: &str, first: usize, ask: impl Fn(Client) -> F) -> Result<T>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let deadline = Instant::now() + INSISTENCE;
        let mut last = None;
        for turn in first.. {
            let client = self.clients[turn % self.clients.len()].clone();
            match timeout(ANSWER, ask(client)).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(status)) if may_ask_again(&status)? => last = Some(status),
                Ok(Err(status)) => bail!("{what}: refused for good: {status:?}"),
                Err(_) => {}
            }
            if Instant::now() > deadline {
                break;
            }
            sleep(Duration::from_millis(100)).await;
        }
        bail!("{what}: nobody accepted it; last: {last:?}")
    }

    pub(crate) async fn session(&self, number: usize, mode: SandboxMode) -> Result<Session> {
        let request = CreateSessionRequest {
            mode: mode.into(),
            idempotency_key: format!("session-{number}"),
            ..CreateSessionRequest::default()
        };
        self.insist("a session", number, |client| {
            let request = request.clone();
            async move { client.create(request).await }
        })
        .await
    }

    /// Waits for its round, then asks for a run, and for its end if that is its kind.
    pub(crate) async fn start(
        &self,
        job: Job,
        session: &str,
        mut round: watch::Receiver<usize>,
    ) -> Result<Seen> {
        round.wait_for(|now| *now > job.round).await?;
        sleep(job.after).await;
        let request = request(job, session);
        if job.is_attended {
            return self.attend(job, request).await;
        }
        let run = self
            .insist("a run", job.api, |client| {
                let request = request.clone();
                async move { client.start(request).await }
            })
            .await?;
        let Kind::Canceled(after) = job.kind else {
            return Ok(Seen { number: job.number, ..Seen::default() });
        };
        sleep(after).await;
        let cancel = CancelRunRequest { name: run.name };
        self.insist("a cancel", job.api, |client| {
            let cancel = cancel.clone();
            async move { client.runs().cancel_run(cancel).await }
        })
        .await?;
        Ok(Seen { number: job.number, may_be_canceled: true, printed: None })
    }

    /// Starts a run and stays with it. It ends when the call does, whoever breaks it: this caller, by asking anew or by
    /// leaving, or a fault.
    async fn attend(&self, job: Job, request: StartRunRequest) -> Result<Seen> {
        let calls = AtomicUsize::new(0);
        let exec = self.insist("a conversation", job.api, |client| {
            let request = request.clone();
            calls.fetch_add(1, Ordering::Relaxed);
            async move { Exec::start(&client, request).await }
        });
        let exec = exec.await?;
        let seen = match job.kind {
            Kind::Canceled(after) => timeout(after, exec.finish_without_timeout()).await.ok(),
            _ => Some(
                timeout(STAY, exec.finish_without_timeout()).await.context("the end of a conversation")?,
            ),
        };
        let printed = seen.and_then(Result::ok).map(|seen| seen.stdout_text());
        let may_be_canceled = printed.is_none() || calls.into_inner() > 1;
        Ok(Seen { number: job.number, may_be_canceled, printed })
    }

    pub(crate) async fn close(&self, session: &str) -> Result<()> {
        self.insist("the end of a session", 0, |client| async move { client.close(session).await }).await?;
        Ok(())
    }
}

fn request(job: Job, session: &str) -> StartRunRequest {
    let ticks = match job.kind {
        Kind::Long(ticks) => ticks,
        Kind::Canceled(_) => 20,
        Kind::Quick | Kind::Failing => 0,
    };
    let code = if job.kind == Kind::Failing { FAILED } else { 0 };
    let number = format!("{:06}", job.number);
    let mut request =
        command(session, &["sh", "-c", SCRIPT, "sh", &number, &ticks.to_string(), &code.to_string()]);
    request.retries = job.retries;
    request.labels.insert(LABEL.to_owned(), job.number.to_string());
    request.idempotency_key = format!("run-{}", job.number);
    request
}

/// Whether a refusal invites to ask again. One that does not say so as it must is an error.
fn may_ask_again(status: &Status) -> Result<bool> {
    let details = status.get_error_details();
    let reason = details.error_info().map(|info| info.reason.as_str());
    match (status.code(), reason) {
        // The connection broke: nobody said anything.
        (Code::Unavailable | Code::Unknown | Code::Cancelled | Code::Internal, None) => Ok(true),
        (Code::Unavailable, Some(_)) if details.retry_info().is_none() => {
            bail!("UNAVAILABLE without RetryInfo: {status:?}")
        }
        (Code::Unavailable | Code::DeadlineExceeded | Code::ResourceExhausted, Some(_)) => Ok(true),
        // All workers may be on their way back.
        (Code::FailedPrecondition, Some("MODE_UNAVAILABLE")) => Ok(true),
        _ => Ok(false),
    }
}
