//! The load: runs that leave marks in their sessions. Calls are retried until an api accepts them.

use std::{
    fmt,
    future::Future,
    panic::AssertUnwindSafe,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use codelia_proto::v1::{
    CancelRunRequest, CreateSessionRequest, Run, SandboxMode, Session, StartRunRequest,
};
use futures::FutureExt;
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};
use tonic::{Code, Status};
use tonic_types::StatusExt;

use super::{
    plan::{Job, Kind},
    watcher::Watched,
};
use crate::{Client, Exec, Transcript, command};

/// How long a call is retried. Longer than any fault.
const RETRY_TIMEOUT: Duration = Duration::from_secs(180);
/// How long an attached or watched run may take, including its time in the queue.
pub(crate) const RUN_TIMEOUT: Duration = Duration::from_secs(120);
/// How long one call may take.
const CALL_TIMEOUT: Duration = Duration::from_secs(8);
pub(crate) const RETRY_DELAY: Duration = Duration::from_millis(100);

/// Leaves a mark: one line with the run's number and a random word, which the run also prints. The
/// line has 32 bytes, so that it is never written in part. Then it prints numbered lines.
const SCRIPT: &str = r#"
word=$(od -An -N12 -tx1 /dev/urandom | tr -d ' \n')
echo "$1 $word" >> marks || exit 9
echo "$word"
[ $4 -eq 0 ] || awk -v run="$1" -v lines="$4" 'BEGIN { for (i = 0; i < lines; i++) printf "%s %024d\n", run, i }'
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

/// What a run printed.
#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct Output(pub(crate) Vec<u8>);

impl Output {
    /// The first line.
    pub(crate) fn word(&self) -> &str {
        let line = self.0.split(|byte| *byte == b'\n').next().unwrap_or_default();
        std::str::from_utf8(line).unwrap_or_default()
    }
}

impl fmt::Debug for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let start = &self.0[..self.0.len().min(40)];
        write!(f, "{:?} ({} bytes)", String::from_utf8_lossy(start), self.0.len())
    }
}

/// What the caller of a run observed.
#[derive(Debug, Default)]
pub(crate) struct Observed {
    pub(crate) number: usize,
    /// The index of its tenant.
    pub(crate) tenant: usize,
    /// Its caller canceled it or disconnected, or its session ended.
    pub(crate) may_be_canceled: bool,
    /// Its caller called `Exec`: the run ends with the connection between api and worker.
    pub(crate) is_attached: bool,
    /// How many lines it prints after its word.
    pub(crate) lines: u32,
    /// Its output, if the caller stayed attached to the end.
    pub(crate) printed: Option<Output>,
    /// What a watcher of it received.
    pub(crate) watched: Option<Watched>,
    /// What the other tenant could reach.
    pub(crate) exposed: Vec<String>,
}

/// Clients of one tenant for all apis.
#[derive(Debug, Clone)]
pub(crate) struct Callers {
    pub(crate) tenant: usize,
    pub(crate) clients: Vec<Client>,
    /// Clients of the other tenant.
    pub(crate) others: Vec<Client>,
    /// How many bytes before its position a watcher resumes: 0, or a planted defect.
    pub(crate) watch_overlap: i64,
}

impl Callers {
    /// Calls one api after another until one accepts.
    pub(crate) async fn retry<T, F>(
        &self,
        what: &str,
        first: usize,
        call: impl Fn(Client) -> F,
    ) -> Result<T>
    where
        F: Future<Output = Result<T, Status>>,
    {
        match self.retry_until(what, first, call).await? {
            Ok(answer) => Ok(answer),
            Err(status) => bail!("{what}: refused permanently: {status:?}"),
        }
    }

    /// Calls one api after another until one accepts or refuses permanently.
    pub(crate) async fn retry_until<T, F>(
        &self,
        what: &str,
        first: usize,
        call: impl Fn(Client) -> F,
    ) -> Result<Result<T, Status>>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let deadline = Instant::now() + RETRY_TIMEOUT;
        let mut last = None;
        for attempt in first.. {
            let client = self.clients[attempt % self.clients.len()].clone();
            match timeout(CALL_TIMEOUT, call(client)).await {
                Ok(Ok(answer)) => return Ok(Ok(answer)),
                Ok(Err(status)) if is_retryable(&status)? => last = Some(status),
                Ok(Err(status)) => return Ok(Err(status)),
                Err(_) => {}
            }
            if Instant::now() > deadline {
                break;
            }
            sleep(RETRY_DELAY).await;
        }
        bail!("{what}: no api accepted it, last error: {last:?}")
    }

    pub(crate) async fn session(&self, number: usize, mode: SandboxMode) -> Result<Session> {
        let idempotency_key = format!("session-{number}");
        let request = CreateSessionRequest {
            mode: mode.into(),
            idempotency_key,
            ..CreateSessionRequest::default()
        };
        self.create_session(number, request).await
    }

    pub(crate) async fn create_session(
        &self,
        number: usize,
        request: CreateSessionRequest,
    ) -> Result<Session> {
        self.retry("create a session", number, |client| {
            let request = request.clone();
            async move { client.create(request).await }
        })
        .await
    }

    /// Waits for the job's round, then starts its run, and watches or cancels it if it shall.
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
        let probed =
            async { if job.is_probed { self.probe(&run.name, session).await } else { Vec::new() } };
        let (exposed, canceled, watched) =
            futures::join!(probed, self.cancel(job, &run), self.watch_if(job, &run));
        canceled?;
        let may_be_canceled = matches!(job.kind, Kind::Canceled(_));
        Ok(Observed { may_be_canceled, watched, exposed, ..self.observed(job) })
    }

    pub(crate) fn observed(&self, job: Job) -> Observed {
        let lines = lines_of(job);
        Observed { number: job.number, tenant: self.tenant, lines, ..Observed::default() }
    }

    async fn watch_if(&self, job: Job, run: &Run) -> Option<Watched> {
        if job.is_watched { Some(self.watch(&run.name, job.api).await) } else { None }
    }

    /// Cancels a run if it shall be canceled.
    async fn cancel(&self, job: Job, run: &Run) -> Result<()> {
        let Kind::Canceled(after) = job.kind else { return Ok(()) };
        sleep(after).await;
        let cancel = CancelRunRequest { name: run.name.clone(), ..Default::default() };
        self.retry("cancel a run", job.api, |client| {
            let cancel = cancel.clone();
            async move { client.runs().cancel_run(cancel).await }
        })
        .await?;
        Ok(())
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
        // Events that contradict each other panic. Then nothing counts as printed, which is a
        // finding.
        let printed = async {
            let finished = AssertUnwindSafe(exec.finish_without_timeout()).catch_unwind().await;
            let output = |transcript: Transcript| Output(transcript.stdout);
            finished.map_or_else(|_| Ok(Output(Vec::new())), |finished| finished.map(output))
        };
        let printed = match job.kind {
            Kind::Canceled(after) => timeout(after, printed).await.ok(),
            _ => Some(timeout(RUN_TIMEOUT, printed).await.context("attached run timed out")?),
        };
        let printed = printed.and_then(Result::ok);
        let may_be_canceled = printed.is_none() || calls.into_inner() > 1;
        Ok(Observed { may_be_canceled, is_attached: true, printed, ..self.observed(job) })
    }

    pub(crate) async fn close(&self, session: &str) -> Result<()> {
        self.retry("close a session", 0, |client| async move { client.close(session).await })
            .await?;
        Ok(())
    }
}

fn lines_of(job: Job) -> u32 {
    if let Kind::Loud(lines) = job.kind { lines } else { 0 }
}

pub(crate) fn request(job: Job, session: &str) -> StartRunRequest {
    let ticks = match job.kind {
        Kind::Long(ticks) => ticks,
        Kind::Canceled(_) => 20,
        Kind::Quick | Kind::Failing | Kind::Loud(_) => 0,
    };
    let code = if job.kind == Kind::Failing { FAILED_EXIT } else { 0 };
    let (number, lines) = (format!("{:06}", job.number), lines_of(job).to_string());
    let arguments = [&number, &ticks.to_string(), &code.to_string(), &lines];
    let mut request = command(session, &["sh", "-c", SCRIPT, "sh"]);
    let command = request.command.get_or_insert_default();
    command.argv.extend(arguments.into_iter().cloned());
    request.retries = job.retries;
    request.labels.insert(LABEL.to_owned(), job.number.to_string());
    request.idempotency_key = format!("run-{}", job.number);
    request
}

/// What a run prints after its word.
pub(crate) fn expected_lines(number: usize, lines: u32) -> impl Iterator<Item = u8> {
    (0..lines).flat_map(move |line| format!("{number:06} {line:024}\n").into_bytes())
}

/// Whether a refused call may be retried. A retryable refusal without `RetryInfo` is an error.
pub(crate) fn is_retryable(status: &Status) -> Result<bool> {
    let details = status.get_error_details();
    let reason = details.error_info().map(|info| info.reason.as_str());
    match (status.code(), reason) {
        // The connection broke before an answer.
        (Code::Unavailable | Code::Unknown | Code::Cancelled | Code::Internal, None) => Ok(true),
        (Code::Unavailable, Some(_)) if details.retry_info().is_none() => {
            bail!("UNAVAILABLE without RetryInfo: {status:?}")
        }
        (Code::Unavailable | Code::DeadlineExceeded | Code::ResourceExhausted, Some(_)) => Ok(true),
        // All workers may be restarting, or gone for long by a clock that jumped.
        (Code::FailedPrecondition, Some("MODE_UNAVAILABLE" | "SESSION_DATA_LOST")) => Ok(true),
        _ => Ok(false),
    }
}
