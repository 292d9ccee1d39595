//! Cost of disk limits: a new session with its first run, and a run in it, with each mechanism that
//! works here, in rounds.

use std::time::Instant;

use anyhow::{Context, Result};
use codelia_store::{LocalPostgres, Quotas};
use codelia_tests::{Client, Cluster, ClusterOptions, Database, Process};
use codelia_types::DiskMechanism;
use serde_json::Value;

use crate::{ROUND_TIME, ROUNDS, measure::Measured, report::Report};

/// An installation that uses one mechanism.
struct Installation {
    mechanism: DiskMechanism,
    cluster: Cluster,
    client: Client,
    session: String,
}

impl Installation {
    async fn start(
        server: &LocalPostgres,
        mechanism: DiskMechanism,
        report: &mut Report,
    ) -> Result<Option<Self>> {
        let settings = vec![("CODELIA_WORKER_DISK", mechanism.to_string())];
        let shape = ClusterOptions { workers: 0, settings, ..ClusterOptions::default() };
        let mut cluster = Cluster::start_on(Database::on(server).await?, shape).await?;
        if let Some(missing) = missing(&cluster).await? {
            report.note(&missing);
            cluster.end().await?;
            return Ok(None);
        }
        cluster.add_worker().await?;
        let quotas =
            Quotas { sessions: i64::MAX, requests_per_second: 1_000_000, ..Quotas::default() };
        let client = cluster.tenant_with("load", quotas).await?;
        let session = client.session().await?.name;
        client.exec(&session, "true").await?;
        Ok(Some(Self { mechanism, cluster, client, session }))
    }

    /// From the creation of a session to the end of its first run. Closing it does not count.
    async fn new_session(&self) -> Result<Measured> {
        Measured::repeat(1, ROUND_TIME, async |_| {
            let begin = Instant::now();
            let session = self.client.session().await?.name;
            self.client.exec(&session, "true").await?;
            let took = begin.elapsed();
            self.client.close(&session).await?;
            Ok(took)
        })
        .await
    }

    async fn run(&self) -> Result<Measured> {
        Measured::repeat(1, ROUND_TIME, async |_| {
            let begin = Instant::now();
            self.client.exec(&self.session, "true").await?;
            Ok(begin.elapsed())
        })
        .await
    }
}

/// The reason why the configured mechanism does not work here.
async fn missing(cluster: &Cluster) -> Result<Option<String>> {
    let mut doctor = cluster.command("doctor", "doctor")?;
    doctor.arg("--json");
    let found: Value = serde_json::from_str(&Process::finish(doctor, b"").await?.stdout)?;
    let checks = found["checks"].as_array().context("checks")?;
    let check =
        checks.iter().find(|check| check["check"] == "disk limits").context("disk limits")?;
    Ok((check["good"] != true).then(|| check["found"].as_str().unwrap_or_default().to_owned()))
}

/// Measures all mechanisms in rounds.
pub(crate) async fn measure(server: &LocalPostgres) -> Result<Report> {
    let mut report = Report::default();
    let mut all = Vec::new();
    for mechanism in DiskMechanism::ALL {
        all.extend(Installation::start(server, mechanism, &mut report).await?);
    }
    for _ in 0..ROUNDS {
        for installation in &all {
            let mechanism = installation.mechanism;
            report.add(
                &format!("new session and its first run, {mechanism}"),
                installation.new_session().await?,
            );
            report.add(&format!("run in a session, {mechanism}"), installation.run().await?);
        }
    }
    for installation in all {
        installation.cluster.end().await?;
    }
    Ok(report)
}
