//! What one seed stands for: the load, and in which order which faults happen to whom and for how long.

use std::time::Duration;

use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};

use super::Options;
use crate::WORKER_LEASE_SECONDS;

/// Apis, workers on one root, and workers with a small disk of their own.
pub(crate) const APIS: usize = 2;
pub(crate) const WORKERS: usize = 3;
/// The worker whose root can be filled.
pub(crate) const SMALL: usize = WORKERS - 1;

/// What happens to the installation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// `kill -9` of a worker.
    KillWorker,
    /// `kill -9` of an api.
    KillApi,
    /// SIGSTOP of a worker, SIGCONT after more than its lease.
    PauseWorker,
    /// Postgres is stopped fast, and started again.
    StopPostgres,
    /// Postgres is stopped at once, as in a crash, and started again.
    CrashPostgres,
    /// All connections of a process to Postgres break.
    Cut,
    /// A worker cannot reach Postgres for longer than its lease.
    Partition,
    /// A process gets nothing from Postgres for a while, on connections that stay.
    Stall,
    /// The disk of a worker's root is full.
    FullDisk,
    /// An operator drains a worker, which is then restarted.
    Drain,
    /// All workers are restarted one after another.
    RollingRestart,
}

impl Fault {
    /// All of them.
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

/// One fault of a round.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Strike {
    pub(crate) fault: Fault,
    /// Whom it happens to: a worker or an api.
    pub(crate) target: usize,
}

/// Some runs, and what happens meanwhile.
#[derive(Debug, Clone)]
pub(crate) struct Round {
    /// From the runs being let go to the faults.
    pub(crate) before: Duration,
    pub(crate) strikes: Vec<Strike>,
    /// From the faults to their end.
    pub(crate) during: Duration,
}

/// What a run does beside leaving its mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Quick,
    Failing,
    /// Goes on for so many fifths of a second, and leaves a mark in each.
    Long(u32),
    /// Somebody asks for its end after a while, or leaves if it ends with its caller.
    Canceled(Duration),
}

/// A run that will be asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Job {
    pub(crate) number: usize,
    pub(crate) session: usize,
    pub(crate) retries: i32,
    pub(crate) kind: Kind,
    /// Whether its caller stays with it, by `Exec`, so that it ends with its caller.
    pub(crate) is_attended: bool,
    /// Its round, and how long after its beginning.
    pub(crate) round: usize,
    pub(crate) after: Duration,
    /// Which api is asked first.
    pub(crate) api: usize,
}

/// Everything a seed stands for.
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

fn round(random: &mut StdRng, faults: &[Fault]) -> Round {
    let count = random.random_range(1..=2.min(faults.len()));
    let lease = Duration::from_secs(WORKER_LEASE_SECONDS);
    let strikes: Vec<_> = faults.choose_multiple(random, count).map(|fault| strike(random, *fault)).collect();
    let is_long = |strike: &Strike| matches!(strike.fault, Fault::PauseWorker | Fault::Partition);
    let during = if strikes.iter().any(is_long) {
        lease + Duration::from_millis(random.random_range(1000..3000))
    } else {
        Duration::from_millis(random.random_range(100..2500))
    };
    Round { before: Duration::from_millis(random.random_range(50..1000)), strikes, during }
}

fn strike(random: &mut StdRng, fault: Fault) -> Strike {
    let of = match fault {
        Fault::KillApi => APIS,
        Fault::Cut | Fault::Stall => WORKERS + APIS,
        _ => WORKERS,
    };
    Strike { fault, target: random.random_range(0..of) }
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
        is_attended: random.random_ratio(1, 4),
        round: number * rounds / options.runs.max(1),
        after: Duration::from_millis(random.random_range(0..4000)),
        api: random.random_range(0..APIS),
    }
}
