//! Processor time of the processes of an installation, from `/proc`.

use std::{collections::BTreeMap, fs};

use anyhow::{Context, Result};
use codelia_tests::Cluster;

/// Clock ticks of `/proc/PID/stat` in a second, the same on every Linux.
const TICKS_PER_SECOND: f64 = 100.0;

/// The seconds that each kind of process has used since it started.
#[derive(Debug)]
pub(crate) struct ProcessorTime(BTreeMap<&'static str, f64>);

impl ProcessorTime {
    /// Reads it for the first api and worker of the cluster, for the worker's descendants, for Postgres, for
    /// this process, which is the client, and for the whole machine. What the machine used beyond the processes
    /// is the work of the kernel that no process is charged for, such as the removal of namespaces.
    pub(crate) async fn of(cluster: &Cluster) -> Result<Self> {
        let backend = cluster.database.number("SELECT pid::bigint FROM pg_stat_activity LIMIT 1").await?;
        // The process that all backends descend from.
        let postmaster = Stat::read(u32::try_from(backend)?)?.parent;
        let api = Stat::read(cluster.apis[0].process.pid())?;
        let worker = Stat::read(cluster.workers[0].process.pid())?;
        let server = Stat::read(postmaster)?;
        let mut postgres = server.own + server.ended_children;
        let mut sandboxes = worker.ended_children;
        for entry in fs::read_dir("/proc")?.flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            // A process may have ended meanwhile.
            let Ok(stat) = Stat::read(pid) else { continue };
            if stat.parent == postmaster {
                postgres += stat.own;
            } else if stat.parent == cluster.workers[0].process.pid() {
                // The holder of a session's template lives on; what it started has ended.
                sandboxes += stat.own + stat.ended_children;
            }
        }
        let client = Stat::read(std::process::id())?.own;
        let processes = client + api.own + worker.own + sandboxes + postgres;
        Ok(Self(BTreeMap::from([
            ("client", client),
            ("api", api.own),
            ("worker", worker.own),
            ("sandbox and command", sandboxes),
            ("Postgres", postgres),
            ("kernel threads and others", busy_seconds()? - processes),
        ])))
    }

    /// The seconds used since an earlier reading, by kind of process.
    pub(crate) fn since(&self, before: &Self) -> BTreeMap<&'static str, f64> {
        self.0
            .iter()
            .map(|(name, now)| (*name, now - before.0.get(name).copied().unwrap_or_default()))
            .collect()
    }
}

/// The time that all processors of the machine have worked, from `/proc/stat`.
fn busy_seconds() -> Result<f64> {
    let text = fs::read_to_string("/proc/stat")?;
    let line = text.lines().next().context("empty /proc/stat")?;
    let ticks: Vec<f64> =
        line.split_whitespace().skip(1).take(7).map(str::parse).collect::<Result<_, _>>()?;
    // The fourth and fifth are idle and waiting for a disk.
    let idle: f64 = ticks.iter().skip(3).take(2).sum();
    Ok((ticks.iter().sum::<f64>() - idle) / TICKS_PER_SECOND)
}

/// The time that the host of this virtual machine gave to others, from `/proc/stat`, in ticks.
#[derive(Debug)]
pub(crate) struct Stolen {
    stolen: f64,
    all: f64,
}

impl Stolen {
    /// Reads it since the machine started, for all processors.
    pub(crate) fn read() -> Result<Self> {
        let text = fs::read_to_string("/proc/stat")?;
        let line = text.lines().next().context("empty /proc/stat")?;
        // The fields after the eighth are contained in the first two.
        let ticks: Vec<f64> =
            line.split_whitespace().skip(1).take(8).map(str::parse).collect::<Result<_, _>>()?;
        Ok(Self { stolen: *ticks.get(7).context("short /proc/stat")?, all: ticks.iter().sum() })
    }

    /// The share of all processor time since an earlier reading.
    pub(crate) fn share_since(&self, before: &Self) -> f64 {
        (self.stolen - before.stolen) / (self.all - before.all).max(1.0)
    }
}

/// What `/proc/PID/stat` says about a process, in seconds.
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
        let seconds = |index: usize| -> Result<f64> {
            Ok(fields.get(index).context("short stat")?.parse::<f64>()? / TICKS_PER_SECOND)
        };
        Ok(Self {
            parent: fields.get(1).context("short stat")?.parse()?,
            own: seconds(11)? + seconds(12)?,
            ended_children: seconds(13)? + seconds(14)?,
        })
    }
}
