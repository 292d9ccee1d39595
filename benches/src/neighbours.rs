//! Time to first byte in the fastest mode that isolates, next to neighbours that use all they can
//! get, with normal or with idle CPU priority of commands.

use anyhow::{Context, Result};
use codelia_store::LocalPostgres;
use codelia_tests::{Cluster, ClusterOptions, Database};
use futures::future::{Either, join_all, select};

use crate::{ROUND_TIME, measure::Measured, modes, noise, report::Report, runs::Runs};

const ALONE: &str = "first byte, alone";
const NEXT_TO_ALL: &str = "… next to all of these";

/// Fewer rounds than elsewhere, because there are many rows.
const ROUNDS: usize = 2;
/// How many times longer the p95 may be next to any one hog, with normal CPU priority.
const MAX_FACTOR: f64 = 1.5;

/// Measures all rows in rounds. The first round is warm-up.
pub(crate) async fn measure(
    server: &LocalPostgres,
    cores: usize,
    cpu_idle: bool,
) -> Result<Report> {
    let settings = vec![("CODELIA_SANDBOX_CPU_IDLE", cpu_idle.to_string())];
    let shape = ClusterOptions { slots: 8 * cores, settings, ..ClusterOptions::default() };
    let cluster = Cluster::start_on(Database::on(server).await?, shape).await?;
    let mut report = Report::default();
    let served = modes::served(&cluster, &modes::ISOLATING, &mut report).await?;
    let mode = *served.last().context("no mode isolates")?;
    report.note(&format!("mode {}, sandbox.cpu_idle: {cpu_idle}", mode.as_str()));
    let quiet = Runs::prepare_in(&cluster, mode, "quiet", 1).await?;
    let noisy = Runs::prepare_in(&cluster, mode, "noisy", noise::HOGS.len()).await?;

    for round in 0..=ROUNDS {
        let mut measured_rows = vec![(ALONE, quiet.first_byte(ROUND_TIME).await?)];
        for (row, hog) in noise::HOGS {
            measured_rows.push((row, next_to(&quiet, &noisy, &[hog]).await?));
        }
        measured_rows
            .push((NEXT_TO_ALL, next_to(&quiet, &noisy, &noise::HOGS.map(|(_, hog)| hog)).await?));
        if round > 0 {
            measured_rows.into_iter().for_each(|(name, measured)| report.add(name, measured));
        }
    }
    cluster.end().await?;
    check(&mut report, cpu_idle)?;
    Ok(report)
}

/// Compares the slowest row next to one hog with the row alone.
fn check(report: &mut Report, cpu_idle: bool) -> Result<()> {
    let p95 = |name: &str| anyhow::Ok(report.find(name)?.percentile(95.0).as_secs_f64());
    let alone = p95(ALONE)?;
    let mut slowest = (0.0, "");
    for (row, _) in noise::HOGS {
        let factor = p95(row)? / alone;
        if factor > slowest.0 {
            slowest = (factor, row);
        }
    }
    let (factor, row) = slowest;
    if cpu_idle {
        report.note(&format!("slowest p95 {row}: {factor:.2} ×"));
    } else {
        report.check_factor(&format!("p95 of a neighbour, slowest {row}"), factor, MAX_FACTOR);
    }
    Ok(())
}

/// Measures the quiet tenant's first byte while the noisy tenant runs the hogs.
async fn next_to(quiet: &Runs, noisy: &Runs, hogs: &[&str]) -> Result<Measured> {
    let noise = join_all(hogs.iter().enumerate().map(|(lane, hog)| noisy.repeat(lane, hog)));
    let measured = std::pin::pin!(quiet.first_byte(ROUND_TIME));
    match select(measured, std::pin::pin!(noise)).await {
        Either::Left((measured, _)) => measured,
        Either::Right((ended, _)) => anyhow::bail!("the noisy runs ended: {ended:?}"),
    }
}
