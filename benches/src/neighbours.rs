//! First bytes in mode bwrap beside neighbours who take all they can get: where commands share processors with everybody, and
//! where they yield.

use anyhow::Result;
use codelia_store::LocalPostgres;
use codelia_tests::{Cluster, ClusterOptions, Database};
use futures::future::{Either, join_all, select};

use crate::{TURN, measure::Measured, noise, report::Report, runs::Runs};

const ALONE: &str = "a neighbour's first byte, alone";
const BESIDE_ALL: &str = "… beside all of these at once";

/// There are many rows.
const ROUNDS: usize = 2;

/// Measures it all in turns; the first round warms up.
pub(crate) async fn measure(server: &LocalPostgres, cores: usize, yields: bool) -> Result<Report> {
    let settings =
        vec![("CODELIA_SANDBOX_MODE", "bwrap".to_owned()), ("CODELIA_SANDBOX_CPU_IDLE", yields.to_string())];
    let shape = ClusterOptions { slots: 8 * cores, settings, ..ClusterOptions::default() };
    let cluster = Cluster::start_on(Database::on(server).await?, shape).await?;
    let quiet = Runs::prepare(&cluster, "quiet", 1).await?;
    let noisy = Runs::prepare(&cluster, "noisy", noise::HOGS.len()).await?;

    let mut report = Report::default();
    for round in 0..=ROUNDS {
        let mut turn = vec![(ALONE, quiet.first_byte(TURN).await?)];
        for (row, hog) in noise::HOGS {
            turn.push((row, beside(&quiet, &noisy, &[hog]).await?));
        }
        turn.push((BESIDE_ALL, beside(&quiet, &noisy, &noise::HOGS.map(|(_, hog)| hog)).await?));
        if round > 0 {
            turn.into_iter().for_each(|(name, measured)| report.add(name, measured));
        }
    }
    cluster.end().await?;
    Ok(report)
}

/// The quiet one's first byte while the noisy one does its worst.
async fn beside(quiet: &Runs, noisy: &Runs, hogs: &[&str]) -> Result<Measured> {
    let noise = join_all(hogs.iter().enumerate().map(|(lane, hog)| noisy.again_and_again(lane, hog)));
    let measured = std::pin::pin!(quiet.first_byte(TURN));
    match select(measured, std::pin::pin!(noise)).await {
        Either::Left((measured, _)) => measured,
        Either::Right((ended, _)) => anyhow::bail!("the noise ended: {ended:?}"),
    }
}
