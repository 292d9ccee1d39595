//! Processor time of one run in each process of an installation. `docs/scaling.md` computes with it.

use std::{
    collections::BTreeMap,
    fmt,
    time::{Duration, Instant},
};

use anyhow::Result;
use codelia_store::LocalPostgres;
use codelia_tests::{Cluster, ClusterOptions, Database};

use crate::{processor_time::ProcessorTime, runs::Runs};

/// How long runs are counted in each mode.
const WINDOW: Duration = Duration::from_secs(20);

/// Processor time of one run in one mode.
#[derive(Debug)]
pub(crate) struct Capacity {
    mode: &'static str,
    runs_per_second: f64,
    /// Milliseconds of one run, by process.
    millis: BTreeMap<&'static str, f64>,
}

/// Measures concurrent runs of `true` in each mode.
pub(crate) async fn measure(server: &LocalPostgres, cores: usize) -> Result<Vec<Capacity>> {
    let mut all = Vec::new();
    for mode in ["logical", "bwrap"] {
        let settings = vec![("CODELIA_SANDBOX_MODE", mode.to_owned())];
        let shape = ClusterOptions { slots: 4 * cores, settings, ..ClusterOptions::default() };
        let cluster = Cluster::start_on(Database::on(server).await?, shape).await?;
        let runs = Runs::prepare(&cluster, "capacity", 4 * cores).await?;
        let before = ProcessorTime::of(&cluster).await?;
        let begin = Instant::now();
        let count = runs.outcome(WINDOW).await?.count();
        let took = begin.elapsed().as_secs_f64();
        let used = ProcessorTime::of(&cluster).await?.since(&before);
        #[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^53")]
        let count = count as f64;
        let millis = used.into_iter().map(|(name, seconds)| (name, seconds * 1000.0 / count));
        all.push(Capacity { mode, runs_per_second: count / took, millis: millis.collect() });
        cluster.end().await?;
    }
    Ok(all)
}

impl fmt::Display for Capacity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "mode {}: {:.0} runs/s; processor time of one run, runs/s for each core",
            self.mode, self.runs_per_second
        )?;
        for (process, millis) in &self.millis {
            writeln!(f, "    {process:<24} {millis:>7.2} ms {:>9.0}", 1000.0 / millis)?;
        }
        Ok(())
    }
}
