//! Time to first byte in mode `bwrap` next to neighbours that use all they can get, with normal and
//! with idle CPU priority of commands.

use anyhow::Result;
use codelia_store::LocalPostgres;
use codelia_tests::{Cluster, ClusterOptions, Database};
use futures::future::{Either, join_all, select};

use crate::{TURN, measure::Measured, noise, report::Report, runs::Runs};

const ALONE: &str = "first byte, alone";
const NEXT_TO_ALL: &str = "… next to all of these";

/// Fewer rounds than elsewhere, because there are many rows.
const ROUNDS: usize = 2;

/// Measures all rows in turns. The first round is warm-up.
pub(crate) async fn measure(server: &LocalPostgres, cores: usize, cpu_idle: bool) -> Result<Report> {
    let settings = vec![
        ("CODELIA_SANDBOX_MODE", "bwrap".to_owned()),
        ("CODELIA_SANDBOX_CPU_IDLE", cpu_idle.to_string()),
    ];
    let shape = ClusterOptions { slots: 8 * cores, settings, ..ClusterOptions::default() };
    let cluster = Cluster::start_on(Database::on(server).await?, shape).await?;
    let quiet = Runs::prepare(&cluster, "quiet", 1).await?;
    let noisy = Runs::prepare(&cluster, "noisy", noise::HOGS.len()).await?;

    let mut report = Report::default();
    for round in 0..=ROUNDS {
        let mut turn = vec![(ALONE, quiet.first_byte(TURN).await?)];
        for (row, hog) in noise::HOGS {
            turn.push((row, next_to(&quiet, &noisy, &[hog]).await?));
        }
        turn.push((NEXT_TO_ALL, next_to(&quiet, &noisy, &noise::HOGS.map(|(_, hog)| hog)).await?));
        if round > 0 {
            turn.into_iter().for_each(|(name, measured)| report.add(name, measured));
        }
    }
    cluster.end().await?;
    Ok(report)
}

/// Measures the quiet tenant's first byte while the noisy tenant runs the hogs.
async fn next_to(quiet: &Runs, noisy: &Runs, hogs: &[&str]) -> Result<Measured> {
    let noise = join_all(hogs.iter().enumerate().map(|(lane, hog)| noisy.repeat(lane, hog)));
    let measured = std::pin::pin!(quiet.first_byte(TURN));
    match select(measured, std::pin::pin!(noise)).await {
        Either::Left((measured, _)) => measured,
        Either::Right((ended, _)) => anyhow::bail!("the noisy runs ended: {ended:?}"),
    }
}
