//! Runs in mode `bwrap`: with a prepared sandbox, concurrently, and in new sessions.

use std::time::Duration;

use anyhow::Result;
use codelia_store::LocalPostgres;
use codelia_tests::{Cluster, ClusterOptions, Database};

use crate::{ROUNDS, TURN, bare::exec::Loop, measure::Measured, report::Report, runs::Runs};

const RAW: &str = "raw `bwrap … true`, all cores";
const TOGETHER: &str = "Exec `true` in bwrap, concurrent";
const STEADY: &str = "Exec `echo` in bwrap to first byte, steady session";
const BURST: &str = "burst of 100 new sessions, call to first byte";

/// Number of sessions in a burst.
const NEW_SESSIONS: usize = 100;
/// Pause between runs of a steady session, in which the worker prepares a sandbox.
const PAUSE: Duration = Duration::from_millis(30);

/// Measures all rows in turns. The first round is warm-up.
pub(crate) async fn measure(server: &LocalPostgres, cores: usize) -> Result<Report> {
    let settings = vec![("CODELIA_SANDBOX_MODE", "bwrap".to_owned())];
    let shape = ClusterOptions { slots: 8 * cores, settings, ..ClusterOptions::default() };
    let cluster = Cluster::start_on(Database::on(server).await?, shape).await?;
    let steady = Runs::prepare(&cluster, "steady", 1).await?;
    let together = Runs::prepare(&cluster, "together", 4 * cores).await?;

    let mut report = Report::default();
    let (mut hits, mut runs) = (0, 0);
    for round in 0..=ROUNDS {
        let (first_byte, prepared) = steady.steady(TURN, PAUSE).await?;
        let turn =
            [(RAW, Loop::of_bwrap(cores).measure(TURN).await?), (TOGETHER, together.outcome(TURN).await?)];
        if round > 0 {
            runs += first_byte.count();
            hits += prepared;
            report.add(STEADY, first_byte);
            turn.into_iter().for_each(|(name, measured)| report.add(name, measured));
        }
    }
    report.add(BURST, burst(&cluster).await?);
    cluster.end().await?;

    report.check_p95(STEADY, Duration::from_millis(5))?;
    report.check_p95(BURST, Duration::from_millis(150))?;
    let share = report.of(TOGETHER)?.rate() / report.of(RAW)?.rate();
    report.check_ratio("runs of `true` relative to the raw tool's loop", share, 0.5);
    report.check_ratio("runs with a prepared sandbox in a steady session", ratio(hits, runs), 0.9);
    Ok(report)
}

/// Measures the first byte in sessions that are created concurrently.
async fn burst(cluster: &Cluster) -> Result<Measured> {
    let client = Runs::client(cluster, "burst").await?;
    Measured::each(NEW_SESSIONS, |_| Runs::first_byte_in_new_session(&client)).await
}

#[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^53")]
fn ratio(part: u64, whole: u64) -> f64 {
    part as f64 / whole as f64
}
