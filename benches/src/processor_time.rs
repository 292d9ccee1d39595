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
    /// Reads it for the first api and worker of the cluster, for Postgres, for this process, which is the
    /// client, and for the processes below the worker: those that live, which are templates of sessions,
    /// tools and commands, and those that have ended. The rest of the machine is mostly kernel threads,
    /// which remove namespaces and control groups.
    pub(crate) async fn of(cluster: &Cluster) -> Result<Self> {
        let backend = cluster.database.number("SELECT pid::bigint FROM pg_stat_activity LIMIT 1").await?;
        let machine = machine_seconds()?;
        // Processes may end meanwhile.
        let pids =
            fs::read_dir("/proc")?.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let all: BTreeMap<u32, Stat> = pids.filter_map(|pid| Some((pid, Stat::read(pid).ok()?))).collect();
        let stat = |pid: u32| all.get(&pid).with_context(|| format!("process {pid} has ended"));
        // The process that all backends descend from.
        let postmaster = stat(u32::try_from(backend)?)?.parent;
        let server = stat(postmaster)?;
        let backends = all.values().filter(|stat| stat.parent == postmaster).map(|stat| stat.own);
        let worker_pid = cluster.workers[0].process.pid();
        let worker = stat(worker_pid)?;
        let below = below(&all, worker_pid);
        let mut times = BTreeMap::from([
            ("client", stat(std::process::id())?.own),
            ("api", stat(cluster.apis[0].process.pid())?.own),
            ("worker", worker.own),
            ("templates", below.iter().map(|stat| stat.own).sum()),
            (
                "sandbox and command",
                worker.ended_children + below.iter().map(|stat| stat.ended_children).sum::<f64>(),
            ),
            ("Postgres", server.own + server.ended_children + backends.sum::<f64>()),
        ]);
        let known: f64 = times.values().sum();
        times.insert("rest of the machine", machine - known);
        Ok(Self(times))
    }

    /// The seconds used since an earlier reading, by kind of process.
    pub(crate) fn since(&self, before: &Self) -> BTreeMap<&'static str, f64> {
        self.0
            .iter()
            .map(|(name, now)| (*name, now - before.0.get(name).copied().unwrap_or_default()))
            .collect()
    }
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

/// The processes below one.
fn below(all: &BTreeMap<u32, Stat>, pid: u32) -> Vec<&Stat> {
    let (mut found, mut parents) = (Vec::new(), vec![pid]);
    while let Some(parent) = parents.pop() {
        for (pid, stat) in all.iter().filter(|(_, stat)| stat.parent == parent) {
            parents.push(*pid);
            found.push(stat);
        }
    }
    found
}

/// The seconds that all processors were busy since the machine started, with kernel and interrupts.
fn machine_seconds() -> Result<f64> {
    let text = fs::read_to_string("/proc/stat")?;
    let line = text.lines().next().context("empty /proc/stat")?;
    let ticks: Vec<f64> =
        line.split_whitespace().skip(1).take(7).map(str::parse).collect::<Result<_, _>>()?;
    // Not the fourth and fifth, in which they were idle.
    let busy: f64 =
        ticks.iter().enumerate().filter(|(index, _)| !(3..5).contains(index)).map(|(_, ticks)| ticks).sum();
    Ok(busy / TICKS_PER_SECOND)
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
