//! Processor time of one run in each process of an installation. `docs/scaling.md` computes with it.

use std::{
    collections::BTreeMap,
    fmt, fs,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use codelia_store::LocalPostgres;
use codelia_tests::{Cluster, ClusterOptions, Database};

use crate::runs::Runs;

/// How long runs are counted in each mode.
const WINDOW: Duration = Duration::from_secs(20);
/// Clock ticks of `/proc/PID/stat` in a second, the same on every Linux.
const TICKS_PER_SECOND: f64 = 100.0;

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
        let postmaster = postmaster(&cluster).await?;
        let before = usage(&cluster, postmaster)?;
        let begin = Instant::now();
        let count = runs.outcome(WINDOW).await?.count();
        let took = begin.elapsed().as_secs_f64();
        let after = usage(&cluster, postmaster)?;
        #[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^53")]
        let count = count as f64;
        let millis = after.iter().map(|(name, ticks)| {
            let spent = ticks - before.get(name).copied().unwrap_or_default();
            (*name, spent / TICKS_PER_SECOND * 1000.0 / count)
        });
        all.push(Capacity { mode, runs_per_second: count / took, millis: millis.collect() });
        cluster.end().await?;
    }
    Ok(all)
}

/// The process that all backends of the database descend from.
async fn postmaster(cluster: &Cluster) -> Result<u32> {
    let backend = cluster.database.number("SELECT pid::bigint FROM pg_stat_activity LIMIT 1").await?;
    Ok(Stat::read(u32::try_from(backend)?)?.parent)
}

/// Clock ticks that each kind of process has used.
fn usage(cluster: &Cluster, postmaster: u32) -> Result<BTreeMap<&'static str, f64>> {
    let api = Stat::read(cluster.apis[0].process.pid())?;
    let worker = Stat::read(cluster.workers[0].process.pid())?;
    let server = Stat::read(postmaster)?;
    let mut postgres = server.own + server.ended_children;
    for entry in fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // A process may have ended meanwhile.
        let Ok(stat) = Stat::read(pid) else { continue };
        if stat.parent == postmaster {
            postgres += stat.own;
        }
    }
    Ok(BTreeMap::from([
        ("api", api.own),
        ("worker", worker.own),
        ("sandbox and command", worker.ended_children),
        ("Postgres", postgres),
    ]))
}

/// What `/proc/PID/stat` says about a process, in clock ticks.
#[derive(Debug)]
struct Stat {
    parent: u32,
    own: f64,
    ended_children: f64,
}

impl Stat {
    fn read(pid: u32) -> Result<Self> {
        let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        // The name may contain spaces; it ends with the last parenthesis.
        let (_, fields) = text.rsplit_once(") ").context("malformed stat")?;
        let fields: Vec<&str> = fields.split(' ').collect();
        let ticks = |index: usize| -> Result<f64> { Ok(fields.get(index).context("short stat")?.parse()?) };
        Ok(Self {
            parent: fields.get(1).context("short stat")?.parse()?,
            own: ticks(11)? + ticks(12)?,
            ended_children: ticks(13)? + ticks(14)?,
        })
    }
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
