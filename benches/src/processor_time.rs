//! Processor time and context switches of the processes of an installation, from `/proc`.

use std::{collections::BTreeMap, fs};

use anyhow::{Context, Result};
use codelia_tests::Cluster;

/// Clock ticks of `/proc/PID/stat` in a second, the same on every Linux.
const TICKS_PER_SECOND: f64 = 100.0;
/// The processes of mode `native` that hold the namespaces of a session.
const ZYGOTES: &str = "zygotes";

/// The seconds that each kind of process has used since it started.
#[derive(Debug)]
pub(crate) struct ProcessorTime(BTreeMap<&'static str, f64>);

impl ProcessorTime {
    /// Reads it for the first api and worker of the cluster, for Postgres, for this process, which
    /// is the client, and for the processes below the worker: those that live, which are zygotes of
    /// sessions, tools and commands, and those that have ended. The rest of the machine is mostly
    /// kernel threads, which remove namespaces and control groups.
    pub(crate) async fn read(cluster: &Cluster) -> Result<Self> {
        let machine = machine_seconds()?;
        let processes = Processes::read(cluster).await?;
        let own = |pids: &[u32]| pids.iter().map(|pid| processes.all[pid].own).sum::<f64>();
        let ended =
            |pids: &[u32]| pids.iter().map(|pid| processes.all[pid].ended_children).sum::<f64>();
        let mut times: BTreeMap<_, _> =
            processes.kinds.iter().map(|(kind, pids)| (*kind, own(pids))).collect();
        let ended_in_sandboxes =
            ended(&processes.kinds["worker"]) + ended(&processes.kinds[ZYGOTES]);
        times.insert("sandbox and command", ended_in_sandboxes);
        *times.entry("Postgres").or_default() += ended(&[processes.postmaster]);
        let known: f64 = times.values().sum();
        times.insert("rest of the machine", machine - known);
        Ok(Self(times))
    }

    /// The seconds used since an earlier reading, by kind of process.
    pub(crate) fn since(&self, before: &Self) -> BTreeMap<&'static str, f64> {
        since(&self.0, &before.0)
    }
}

/// Context switches of the threads of each kind of process, and of the machine. Sandboxes and
/// zygotes end meanwhile, so only the machine's number has theirs. It also has the switches to and
/// from idling.
#[derive(Debug)]
pub(crate) struct ContextSwitches(BTreeMap<&'static str, f64>);

impl ContextSwitches {
    /// Reads the switches of the processes of a cluster, as [`ProcessorTime::read`].
    pub(crate) async fn read(cluster: &Cluster) -> Result<Self> {
        let processes = Processes::read(cluster).await?;
        let switches = |pids: &Vec<u32>| pids.iter().map(|pid| switches_of(*pid)).sum::<f64>();
        let lasting = processes.kinds.iter().filter(|(kind, _)| **kind != ZYGOTES);
        let mut all: BTreeMap<_, _> = lasting.map(|(kind, pids)| (*kind, switches(pids))).collect();
        let stat = fs::read_to_string("/proc/stat")?;
        let machine =
            stat.lines().find_map(|line| line.strip_prefix("ctxt ")).context("no ctxt")?;
        all.insert("machine", machine.parse()?);
        Ok(Self(all))
    }

    /// The switches since an earlier reading, by kind of process.
    pub(crate) fn since(&self, before: &Self) -> BTreeMap<&'static str, f64> {
        since(&self.0, &before.0)
    }
}

fn since(
    now: &BTreeMap<&'static str, f64>,
    before: &BTreeMap<&'static str, f64>,
) -> BTreeMap<&'static str, f64> {
    now.iter()
        .map(|(name, now)| (*name, now - before.get(name).copied().unwrap_or_default()))
        .collect()
}

/// The switches of all living threads of a process; none if it has ended.
fn switches_of(pid: u32) -> f64 {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let statuses =
        threads.filter_map(|thread| fs::read_to_string(thread.path().join("status")).ok());
    let count = |line: &str| line.split_once("ctxt_switches:")?.1.trim().parse::<f64>().ok();
    statuses.map(|status| status.lines().filter_map(count).sum::<f64>()).sum()
}

/// The processes of an installation.
struct Processes {
    /// The processes of the machine, by id.
    all: BTreeMap<u32, Stat>,
    /// The ids of those of the installation that live.
    kinds: BTreeMap<&'static str, Vec<u32>>,
    /// The process that all backends of Postgres descend from.
    postmaster: u32,
}

impl Processes {
    async fn read(cluster: &Cluster) -> Result<Self> {
        let backend =
            cluster.database.number("SELECT pid::bigint FROM pg_stat_activity LIMIT 1").await?;
        // Processes may end meanwhile.
        let pids = fs::read_dir("/proc")?
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let all: BTreeMap<u32, Stat> =
            pids.filter_map(|pid| Some((pid, Stat::read(pid).ok()?))).collect();
        let postmaster = all.get(&u32::try_from(backend)?).context("the backend has ended")?.parent;
        let backends =
            all.iter().filter(|(_, stat)| stat.parent == postmaster).map(|(pid, _)| *pid);
        let worker = cluster.workers[0].process.pid();
        let kinds = BTreeMap::from([
            ("client", vec![std::process::id()]),
            ("api", vec![cluster.apis[0].process.pid()]),
            ("worker", vec![worker]),
            (ZYGOTES, below(&all, worker)),
            ("Postgres", backends.chain([postmaster]).collect()),
        ]);
        for pid in kinds.values().flatten() {
            all.get(pid).with_context(|| format!("process {pid} has ended"))?;
        }
        Ok(Self { all, kinds, postmaster })
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
fn below(all: &BTreeMap<u32, Stat>, pid: u32) -> Vec<u32> {
    let mut found = Vec::new();
    let mut parents = vec![pid];
    while let Some(parent) = parents.pop() {
        for (pid, _) in all.iter().filter(|(_, stat)| stat.parent == parent) {
            parents.push(*pid);
            found.push(*pid);
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
    let busy: f64 = ticks
        .iter()
        .enumerate()
        .filter(|(index, _)| !(3..5).contains(index))
        .map(|(_, ticks)| ticks)
        .sum();
    Ok(busy / TICKS_PER_SECOND)
}

/// Times of a process from `/proc/PID/stat`, in seconds.
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
