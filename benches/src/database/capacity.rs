//! What one run costs: processor time of each process of an installation, statements and log (WAL) of
//! the database. `docs/scaling.md` and ADR 7 compute with it.

use std::{
    collections::BTreeMap,
    fmt,
    time::{Duration, Instant},
};

use anyhow::Result;
use codelia_store::LocalPostgres;
use codelia_tests::{Cluster, ClusterOptions, Database};

use super::statement_counts::CountStart;
use crate::{measure::Measured, modes, processor_time::ProcessorTime, report::Report, runs::Runs};

/// How many seconds runs are counted in each mode.
pub(crate) const SECONDS: u64 = 5;

const WARM_UP: Duration = Duration::from_secs(1);
/// Processes that use less are not shown: there are none, or the clock does not see them.
const MIN_MILLIS: f64 = 0.01;

/// The cost of one run in one mode.
#[derive(Debug)]
pub(crate) struct Capacity {
    mode: &'static str,
    sessions: &'static str,
    runs_per_second: f64,
    /// Milliseconds of one run, by process.
    millis: BTreeMap<&'static str, f64>,
    /// What the database did for one run.
    database: Vec<String>,
}

/// Measures concurrent runs in each mode: in sessions that exist, and in a new one for each.
pub(crate) async fn measure(server: &LocalPostgres, cores: usize, seconds: u64) -> Result<Vec<Capacity>> {
    let window = Duration::from_secs(seconds);
    let shape = ClusterOptions { slots: 4 * cores, ..ClusterOptions::default() };
    let cluster = Cluster::start_on(Database::on(server).await?, shape).await?;
    let mut all = Vec::new();
    for mode in modes::served(&cluster, &modes::ALL, &mut Report::default()).await? {
        let name = mode.as_str();
        let runs = Runs::prepare_in(&cluster, mode, &format!("capacity-{name}"), 4 * cores).await?;
        // The first runs fill caches.
        runs.outcome(WARM_UP).await?;
        all.push(Capacity::of(&cluster, name, "sessions that exist", runs.outcome(window)).await?);
        let client = Runs::client(&cluster, &format!("sessions-{name}")).await?;
        let sessions = Measured::of(4 * cores, window, |_| Runs::first_byte_then_close(&client, mode));
        all.push(Capacity::of(&cluster, name, "a new session for each", sessions).await?);
    }
    cluster.end().await?;
    Ok(all)
}

impl Capacity {
    async fn of(
        cluster: &Cluster,
        mode: &'static str,
        sessions: &'static str,
        runs: impl Future<Output = Result<Measured>>,
    ) -> Result<Self> {
        let counts = CountStart::now(&cluster.database).await?;
        let before = ProcessorTime::of(cluster).await?;
        let begin = Instant::now();
        let count = runs.await?.count();
        let took = begin.elapsed().as_secs_f64();
        let used = ProcessorTime::of(cluster).await?.since(&before);
        let counts = counts.end(&cluster.database).await?;
        #[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^53")]
        let count = count as f64;
        let millis = used.into_iter().map(|(name, seconds)| (name, seconds * 1000.0 / count));
        Ok(Self {
            mode,
            sessions,
            runs_per_second: count / took,
            millis: millis.collect(),
            database: counts.lines(count),
        })
    }
}

impl fmt::Display for Capacity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "mode {}, {}: {:.0} runs/s; processor time of one run, runs/s for each core",
            self.mode, self.sessions, self.runs_per_second
        )?;
        for (process, millis) in self.millis.iter().filter(|(_, millis)| **millis > MIN_MILLIS) {
            writeln!(f, "    {process:<24} {millis:>7.2} ms {:>9.0}", 1000.0 / millis)?;
        }
        self.database.iter().try_for_each(|line| writeln!(f, "    {line}"))
    }
}
