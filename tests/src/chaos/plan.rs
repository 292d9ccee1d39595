//! The plan of one seed: the load, and the order, targets and durations of the faults.

use std::time::Duration;

use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};

use super::Options;
use crate::WORKER_LEASE_SECONDS;

/// Number of apis.
pub(crate) const APIS: usize = 2;
/// Number of workers. The last one has a small disk, the others share a root.
pub(crate) const WORKERS: usize = 3;
/// The worker whose disk can be filled.
pub(crate) const SMALL_DISK_WORKER: usize = WORKERS - 1;

/// A fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// `kill -9` of a worker.
    KillWorker,
    /// `kill -9` of an api.
    KillApi,
    /// SIGSTOP of a worker, and SIGCONT after its lease expired.
    PauseWorker,
    /// Fast shutdown and restart of Postgres.
    StopPostgres,
    /// Immediate shutdown of Postgres, like a crash, and restart.
    CrashPostgres,
    /// All connections of a process to Postgres break.
    Cut,
    /// A worker cannot reach Postgres for longer than its lease.
    Partition,
    /// Connections of a process to Postgres stay open but transfer nothing for a while.
    Stall,
    /// The disk of a worker's root is full.
    FullDisk,
    /// An operator drains a worker, and it restarts.
    Drain,
    /// All workers restart one after another.
    RollingRestart,
}

impl Fault {
    /// All faults.
    pub const ALL: [Self; 11] = [
        Self::KillWorker,
        Self::KillApi,
        Self::PauseWorker,
        Self::StopPostgres,
        Self::CrashPostgres,
        Self::Cut,
        Self::Partition,
        Self::Stall,
        Self::FullDisk,
        Self::Drain,
        Self::RollingRestart,
    ];
}

/// A fault and its target.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FaultEvent {
    pub(crate) fault: Fault,
    /// The index of the worker or api.
    pub(crate) target: usize,
}

/// A round of runs and faults.
#[derive(Debug, Clone)]
pub(crate) struct Round {
    /// Time from the start of the runs to the faults.
    pub(crate) before: Duration,
    pub(crate) faults: Vec<FaultEvent>,
    /// Duration of the faults.
    pub(crate) during: Duration,
}

/// What a run does in addition to leaving its mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Quick,
    Failing,
    /// Runs for this many ticks of 0.2 s and leaves a line in each.
    Long(u32),
    /// Its caller cancels it after this time, or disconnects if it is attached.
    Canceled(Duration),
}

/// A run to start.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Job {
    pub(crate) number: usize,
    pub(crate) session: usize,
    pub(crate) retries: i32,
    pub(crate) kind: Kind,
    /// Whether its caller stays attached with `Exec`, so that the run ends with the call.
    pub(crate) is_attached: bool,
    /// The round in which it starts, and the delay from the start of the round.
    pub(crate) round: usize,
    pub(crate) delay: Duration,
    /// The api that is called first.
    pub(crate) api: usize,
}

/// Everything that a seed determines.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) rounds: Vec<Round>,
    pub(crate) jobs: Vec<Job>,
}

impl Plan {
    pub(crate) fn new(options: &Options, rounds: usize) -> Self {
        let mut random = StdRng::seed_from_u64(options.seed);
        let rounds: Vec<_> = (0..rounds).map(|_| round(&mut random, &options.faults)).collect();
        let job = |number| job(&mut random, options, number, rounds.len());
        let jobs = (0..options.runs).map(job).collect();
        Self { rounds, jobs }
    }
}

fn round(random: &mut StdRng, kinds: &[Fault]) -> Round {
    let count = random.random_range(1..=2.min(kinds.len()));
    let lease = Duration::from_secs(WORKER_LEASE_SECONDS);
    let faults: Vec<_> =
        kinds.choose_multiple(random, count).map(|fault| fault_event(random, *fault)).collect();
    let is_long = |event: &FaultEvent| matches!(event.fault, Fault::PauseWorker | Fault::Partition);
    let during = if faults.iter().any(is_long) {
        lease + Duration::from_millis(random.random_range(1000..3000))
    } else {
        Duration::from_millis(random.random_range(100..2500))
    };
    Round { before: Duration::from_millis(random.random_range(50..1000)), faults, during }
}

fn fault_event(random: &mut StdRng, fault: Fault) -> FaultEvent {
    let targets = match fault {
        Fault::KillApi => APIS,
        Fault::Cut | Fault::Stall => WORKERS + APIS,
        _ => WORKERS,
    };
    FaultEvent { fault, target: random.random_range(0..targets) }
}

fn job(random: &mut StdRng, options: &Options, number: usize, rounds: usize) -> Job {
    let kind = match random.random_range(0..20) {
        0..10 => Kind::Quick,
        10..12 => Kind::Failing,
        12..18 => Kind::Long(random.random_range(1..=options.max_run_ticks)),
        _ => Kind::Canceled(Duration::from_millis(random.random_range(0..1500))),
    };
    Job {
        number,
        session: random.random_range(0..options.sessions),
        retries: if random.random_ratio(1, 4) { 2 } else { 0 },
        kind,
        is_attached: random.random_ratio(1, 4),
        round: number * rounds / options.runs.max(1),
        delay: Duration::from_millis(random.random_range(0..4000)),
        api: random.random_range(0..APIS),
    }
}
