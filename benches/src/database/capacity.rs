//! The cost of one run: processor time and context switches of each process of an installation,
//! statements and log (WAL) of the database, and allocations in a build that counts them.
//! `docs/scaling.md` and `docs/measurements.md` have its numbers.

use std::{
    collections::BTreeMap,
    fmt,
    time::{Duration, Instant},
};

use anyhow::Result;
use codelia_store::LocalPostgres;
use codelia_tests::{Cluster, ClusterOptions, Database};

use super::statement_counts::CountStart;
use crate::{
    measure::Measured,
    modes,
    processor_time::{ContextSwitches, ProcessorTime},
    report::Report,
    runs::Runs,
    scrape::{free_address, scrape},
};

/// How many seconds runs are counted in each mode.
pub(crate) const SECONDS: u64 = 5;

/// The counter of a build with the feature `count-allocations`.
const ALLOCATIONS: &str = "codelia_allocations_total";
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
    /// Context switches of one run, by process.
    switches: BTreeMap<&'static str, f64>,
    /// Allocations of one run, by process, in a build that counts them.
    allocations: BTreeMap<&'static str, f64>,
    /// The work of the database for one run.
    database: Vec<String>,
}

/// Measures concurrent runs in each mode: in sessions that exist, and in a new one for each.
pub(crate) async fn measure(
    server: &LocalPostgres,
    cores: usize,
    seconds: u64,
) -> Result<Vec<Capacity>> {
    let window = Duration::from_secs(seconds);
    let shape =
        ClusterOptions { apis: 0, workers: 0, slots: 4 * cores, ..ClusterOptions::default() };
    let mut cluster = Cluster::start_on(Database::on(server).await?, shape).await?;
    let pages = MetricsPages { api: free_address().await?, worker: free_address().await? };
    cluster.add_api_with(&[("CODELIA_METRICS_LISTEN", &pages.api)]).await?;
    cluster.add_worker_with(&[("CODELIA_METRICS_LISTEN", &pages.worker)]).await?;
    let mut all = Vec::new();
    for mode in modes::served(&cluster, &modes::ALL, &mut Report::default()).await? {
        let name = mode.as_str();
        let runs = Runs::prepare_in(&cluster, mode, &format!("capacity-{name}"), 4 * cores).await?;
        // The first runs fill caches.
        runs.outcome(WARM_UP).await?;
        all.push(
            Capacity::measure(&cluster, &pages, name, "sessions that exist", runs.outcome(window))
                .await?,
        );
        let client = Runs::client(&cluster, &format!("sessions-{name}")).await?;
        let sessions =
            Measured::repeat(4 * cores, window, |_| Runs::first_byte_then_close(&client, mode));
        all.push(
            Capacity::measure(&cluster, &pages, name, "a new session for each", sessions).await?,
        );
    }
    cluster.end().await?;
    Ok(all)
}

/// The addresses of the metrics pages.
struct MetricsPages {
    api: String,
    worker: String,
}

impl MetricsPages {
    /// How often each process has allocated; empty if the build does not count it.
    async fn allocations(&self) -> Result<BTreeMap<&'static str, f64>> {
        let mut counts = BTreeMap::new();
        for (process, address) in [("api", &self.api), ("worker", &self.worker)] {
            let page = scrape(address).await?;
            let line = page.lines().find(|line| line.starts_with(ALLOCATIONS));
            if let Some(value) = line.and_then(|line| line.rsplit(' ').next()) {
                counts.insert(process, value.parse()?);
            }
        }
        Ok(counts)
    }
}

/// Writes a line with a count for each process, if there are any.
fn write_counts(
    f: &mut fmt::Formatter<'_>,
    what: &str,
    counts: &BTreeMap<&str, f64>,
) -> fmt::Result {
    if counts.is_empty() {
        return Ok(());
    }
    let counts: Vec<_> =
        counts.iter().map(|(process, count)| format!("{process} {count:.1}")).collect();
    writeln!(f, "    {what} of one run: {}", counts.join(", "))
}

impl Capacity {
    async fn measure(
        cluster: &Cluster,
        pages: &MetricsPages,
        mode: &'static str,
        sessions: &'static str,
        runs: impl Future<Output = Result<Measured>>,
    ) -> Result<Self> {
        let counts = CountStart::now(&cluster.database).await?;
        let allocations = pages.allocations().await?;
        let switches = ContextSwitches::read(cluster).await?;
        let before = ProcessorTime::read(cluster).await?;
        let begin = Instant::now();
        let count = runs.await?.count();
        let took = begin.elapsed().as_secs_f64();
        let used = ProcessorTime::read(cluster).await?.since(&before);
        let switches = ContextSwitches::read(cluster).await?.since(&switches);
        let counts = counts.end(&cluster.database).await?;
        let allocations = pages
            .allocations()
            .await?
            .into_iter()
            .map(|(process, now)| (process, now - allocations[process]));
        #[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^53")]
        let count = count as f64;
        let millis = used.into_iter().map(|(name, seconds)| (name, seconds * 1000.0 / count));
        let of_one = |(name, all): (&'static str, f64)| (name, all / count);
        Ok(Self {
            mode,
            sessions,
            runs_per_second: count / took,
            millis: millis.collect(),
            switches: switches.into_iter().map(of_one).collect(),
            allocations: allocations.map(of_one).collect(),
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
        write_counts(f, "context switches", &self.switches)?;
        write_counts(f, "allocations", &self.allocations)?;
        self.database.iter().try_for_each(|line| writeln!(f, "    {line}"))
    }
}
