//! Runs in leased sessions through the public API. Each lane has its own session.

use std::{
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use codelia_proto::{
    duration_to_proto,
    v1::{CreateSessionRequest, Limits, SandboxMode, StartRunRequest, outcome::Kind},
};
use codelia_tests::{Client, Cluster, Exec, Transcript, command, shell};
use codelia_types::{Mode, SessionId};
use futures::{StreamExt, TryStreamExt, stream};

use crate::measure::Measured;

/// Timeout of one noisy run.
const NOISE_TIMEOUT: Duration = Duration::from_secs(2);
/// Sessions that are created at the same time.
const CONCURRENT: usize = 8;

/// Sessions that a worker holds.
#[derive(Debug)]
pub(crate) struct Runs {
    client: Client,
    sessions: Vec<String>,
}

impl Runs {
    /// Creates sessions in mode `logical` and runs once in each, so that they are leased.
    pub(crate) async fn prepare(cluster: &Cluster, tenant: &str, lanes: usize) -> Result<Self> {
        Self::prepare_in(cluster, Mode::Logical, tenant, lanes).await
    }

    /// Like [`Runs::prepare`] in any mode.
    pub(crate) async fn prepare_in(
        cluster: &Cluster,
        mode: Mode,
        tenant: &str,
        lanes: usize,
    ) -> Result<Self> {
        let client = Self::client(cluster, tenant).await?;
        let sessions = stream::iter(0..lanes).map(|_| async {
            let session = create_session(&client, mode).await?;
            client.exec(&session, "true").await?;
            anyhow::Ok(session)
        });
        let sessions = sessions.buffered(CONCURRENT).try_collect().await?;
        Ok(Self { client, sessions })
    }

    /// Returns a client of a new tenant with a high request quota.
    pub(crate) async fn client(cluster: &Cluster, tenant: &str) -> Result<Client> {
        let quotas = codelia_store::Quotas {
            sessions: 1_000_000,
            requests_per_second: 1_000_000,
            ..Default::default()
        };
        cluster.tenant_with(tenant, quotas).await
    }

    /// Measures from the call to the first byte of output.
    pub(crate) async fn first_byte(&self, time: Duration) -> Result<Measured> {
        Measured::repeat(self.sessions.len(), time, async |lane| {
            let (latency, _) = first_byte(&self.client, echo(&self.sessions[lane])).await?;
            Ok(latency)
        })
        .await
    }

    /// Like [`Runs::first_byte`] with a pause before each run. Counts runs in prepared sandboxes.
    pub(crate) async fn steady(&self, time: Duration, pause: Duration) -> Result<(Measured, u64)> {
        let prepared = AtomicU64::new(0);
        let measured = Measured::repeat(self.sessions.len(), time, async |lane| {
            tokio::time::sleep(pause).await;
            let (latency, seen) = first_byte(&self.client, echo(&self.sessions[lane])).await?;
            let was_prepared = seen.started.is_some_and(|started| started.prepared);
            prepared.fetch_add(u64::from(was_prepared), Ordering::Relaxed);
            Ok(latency)
        })
        .await?;
        Ok((measured, prepared.into_inner()))
    }

    /// Measures from the call that creates a session to the first byte of its first run. Also
    /// returns the name of the session, which is to be closed.
    pub(crate) async fn first_byte_in_new_session(
        client: &Client,
        mode: Mode,
    ) -> Result<(Duration, String)> {
        let new_session = CreateSessionRequest {
            mode: SandboxMode::from(mode).into(),
            ..CreateSessionRequest::default()
        };
        let request = StartRunRequest { new_session: Some(new_session), ..echo("") };
        let (latency, seen) = first_byte(client, request).await?;
        let (session, _) = seen.run().name.split_once("/runs/").context("the name of a run")?;
        Ok((latency, session.to_owned()))
    }

    /// Like [`Runs::first_byte_in_new_session`], and closes the session.
    pub(crate) async fn first_byte_then_close(client: &Client, mode: Mode) -> Result<Duration> {
        let (latency, session) = Self::first_byte_in_new_session(client, mode).await?;
        client.close(&session).await?;
        Ok(latency)
    }

    /// Runs a script repeatedly, whatever its outcome.
    pub(crate) async fn repeat(&self, lane: usize, script: &str) -> Result<()> {
        loop {
            let mut request = shell(&self.sessions[lane], script);
            request.limits = Some(Limits {
                timeout: Some(duration_to_proto(NOISE_TIMEOUT)),
                ..Limits::default()
            });
            Exec::start(&self.client, request).await?.finish().await?;
        }
    }

    /// Measures from the call to the outcome of `true`.
    pub(crate) async fn outcome(&self, time: Duration) -> Result<Measured> {
        Measured::repeat(self.sessions.len(), time, |lane| {
            self.run(command(&self.sessions[lane], &["true"]))
        })
        .await
    }

    /// Like [`Runs::outcome`] with this many callers, which use all sessions in turn.
    pub(crate) async fn in_turn(&self, callers: usize, time: Duration) -> Result<Measured> {
        let next = AtomicUsize::new(0);
        Measured::repeat(callers, time, |_| {
            let session = next.fetch_add(1, Ordering::Relaxed) % self.sessions.len();
            self.run(command(&self.sessions[session], &["true"]))
        })
        .await
    }

    /// The id of a session.
    pub(crate) fn session_id(&self, lane: usize) -> Result<SessionId> {
        let name = &self.sessions[lane];
        Ok(name.rsplit('/').next().unwrap_or(name).parse()?)
    }

    async fn run(&self, request: StartRunRequest) -> Result<Duration> {
        let begin = Instant::now();
        let seen = Exec::start(&self.client, request).await?.finish().await?;
        ensure!(seen.outcome() == Kind::Exited(0), "{seen:?}");
        Ok(begin.elapsed())
    }
}

/// Creates a session in a mode. Returns its name.
pub(crate) async fn create_session(client: &Client, mode: Mode) -> Result<String> {
    let request = CreateSessionRequest {
        mode: SandboxMode::from(mode).into(),
        ..CreateSessionRequest::default()
    };
    Ok(client.create(request).await?.name)
}

fn echo(session: &str) -> StartRunRequest {
    command(session, &["echo", "x"])
}

/// Measures from the call to the first byte. Returns everything that the run sent, too.
async fn first_byte(client: &Client, request: StartRunRequest) -> Result<(Duration, Transcript)> {
    let begin = Instant::now();
    let mut exec = Exec::start(client, request).await?;
    exec.until("output", |seen| !seen.stdout.is_empty()).await?;
    let latency = begin.elapsed();
    Ok((latency, exec.finish().await?))
}
