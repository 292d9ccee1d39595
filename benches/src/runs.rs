//! Ours: runs in leased sessions through the public API, each lane with a session of its own.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use codelia_proto::v1::{StartRunRequest, outcome::Kind};
use codelia_tests::{Client, Cluster, Exec, command};

use crate::measure::Measured;

/// Sessions that a worker holds.
#[derive(Debug)]
pub(crate) struct Runs {
    client: Client,
    sessions: Vec<String>,
}

impl Runs {
    /// Makes the sessions and runs once in each, so that they are leased.
    pub(crate) async fn prepare(cluster: &Cluster, tenant: &str, lanes: usize) -> Result<Self> {
        let quotas = codelia_store::Quotas { requests_per_second: 1_000_000, ..Default::default() };
        let client = cluster.tenant_with(tenant, quotas).await?;
        let mut sessions = Vec::new();
        for _ in 0..lanes {
            let session = client.session().await?;
            client.exec(&session.name, "true").await?;
            sessions.push(session.name);
        }
        Ok(Self { client, sessions })
    }

    /// From the call to the first byte of output.
    pub(crate) async fn first_byte(&self, time: Duration) -> Result<Measured> {
        Measured::of(self.sessions.len(), time, async |lane| {
            let begin = Instant::now();
            let mut exec = Exec::start(&self.client, command(&self.sessions[lane], &["echo", "x"])).await?;
            exec.until("output", |seen| !seen.stdout.is_empty()).await?;
            let latency = begin.elapsed();
            exec.finish().await?;
            Ok(latency)
        })
        .await
    }

    /// From the call to the outcome of `true`.
    pub(crate) async fn outcome(&self, time: Duration) -> Result<Measured> {
        Measured::of(self.sessions.len(), time, |lane| self.run(command(&self.sessions[lane], &["true"])))
            .await
    }

    async fn run(&self, request: StartRunRequest) -> Result<Duration> {
        let begin = Instant::now();
        let seen = Exec::start(&self.client, request).await?.finish().await?;
        ensure!(seen.outcome() == Kind::Exited(0), "{seen:?}");
        Ok(begin.elapsed())
    }
}
