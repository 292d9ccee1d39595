//! Runs in mode bwrap: with a prepared sandbox, many at once beside the raw tool, and in new sessions.

use std::time::Duration;

use anyhow::Result;
use codelia_store::LocalPostgres;
use codelia_tests::{Cluster, ClusterOptions, Database};

use crate::{ROUNDS, TURN, bare::exec::Loop, measure::Measured, report::Report, runs::Runs};

const RAW: &str = "raw `bwrap … true`, all cores";
const TOGETHER: &str = "Exec `true` in bwrap, many at once";
const STEADY: &str = "Exec `echo` in bwrap to first byte, steady session";
const BURST: &str = "burst of 100 new sessions, call to first byte";

/// How many sessions come at once in a burst.
const NEW_SESSIONS: usize = 100;
/// A person or an agent looks at what came before it asks for more: time in which a sandbox is prepared.
const THINKING: Duration = Duration::from_millis(30);

/// Measures it all in turns; the first round warms up.
pub(crate) async fn measure(server: &LocalPostgres, cores: usize) -> Result<Report> {
    let settings = vec![("CODELIA_SANDBOX_MODE", "bwrap".to_owned())];
    let shape = ClusterOptions { slots: 8 * cores, settings, ..ClusterOptions::default() };
    let cluster = Cluster::start_on(Database::on(server).await?, shape).await?;
    let steady = Runs::prepare(&cluster, "steady", 1).await?;
    let together = Runs::prepare(&cluster, "together", 4 * cores).await?;

    let mut report = Report::default();
    let (mut hits, mut runs) = (0, 0);
    for round in 0..=ROUNDS {
        let (first_byte, prepared) = steady.steady(TURN, THINKING).await?;
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

    report.judge_p95(STEADY, Duration::from_millis(5))?;
    report.judge_p95(BURST, Duration::from_millis(150))?;
    let share = report.of(TOGETHER)?.rate() / report.of(RAW)?.rate();
    report.judge_share("runs of `true`, of the raw tool's loop", share, 0.5);
    report.judge_share("prepared sandboxes met in a steady session", ratio(hits, runs), 0.9);
    Ok(report)
}

/// First bytes in sessions that are all asked for at once.
async fn burst(cluster: &Cluster) -> Result<Measured> {
    let client = Runs::client(cluster, "burst").await?;
    Measured::each(NEW_SESSIONS, |_| Runs::first_byte_of_a_new_session(&client)).await
}

#[expect(clippy::cast_precision_loss, reason = "nobody counts that far")]
fn ratio(part: u64, whole: u64) -> f64 {
    part as f64 / whole as f64
}
