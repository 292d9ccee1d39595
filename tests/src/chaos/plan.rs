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

const RUNS_OF_SHORT_SESSION: usize = 4;
const RUNS_PER_UPLOAD: usize = 6;
/// Lines of a loud run: more bytes than a worker keeps before it stores them.
const MAX_LINES: u32 = 60_000;

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
    /// SIGTERM of an api, and restart.
    RestartApi,
    /// All connections of apis to a worker break.
    CutWorker,
    /// Connections of apis to a worker stay open but transfer nothing for a while.
    StallWorker,
    /// Connections of apis to a worker end for one side only; the other side notices nothing.
    HalfOpen,
    /// `kill -9` of a backend of Postgres, which then ends all others and recovers.
    KillBackend,
    /// The disk of Postgres is full.
    FullDatabaseDisk,
    /// The clock of Postgres is ahead for a while.
    ClockForward,
    /// The clock of Postgres is behind for a while.
    ClockBackward,
    /// Postgres is killed and its standby promoted.
    Failover,
}

impl Fault {
    /// Faults of every seed.
    pub const ALL: [Self; 16] = [
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
        Self::RestartApi,
        Self::CutWorker,
        Self::StallWorker,
        Self::HalfOpen,
        Self::KillBackend,
    ];
    /// Faults that need a special server: they must be named.
    pub const SPECIAL: [Self; 4] =
        [Self::FullDatabaseDisk, Self::ClockForward, Self::ClockBackward, Self::Failover];
}

/// A fault and its target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FaultEvent {
    pub(crate) fault: Fault,
    /// The index of the worker, api or proxy; for a half-open connection also the side.
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
    /// Prints this many lines.
    Loud(u32),
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
    /// Whether its caller watches it to the end with `WatchRun`.
    pub(crate) is_watched: bool,
    /// Whether the other tenant tries to reach it.
    pub(crate) is_probed: bool,
    /// The round in which it starts, and the delay from the start of the round.
    pub(crate) round: usize,
    pub(crate) delay: Duration,
    /// The api that is called first.
    pub(crate) api: usize,
}

/// A file to upload.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Upload {
    pub(crate) number: usize,
    pub(crate) session: usize,
    pub(crate) round: usize,
    pub(crate) delay: Duration,
}

/// A session that ends during the faults, and its runs.
#[derive(Debug, Clone)]
pub(crate) struct ShortSession {
    pub(crate) number: usize,
    pub(crate) round: usize,
    /// How long it lives; it expires, unless its caller closes it then.
    pub(crate) life: Duration,
    pub(crate) is_closed: bool,
    pub(crate) jobs: Vec<Job>,
}

/// Everything that a seed determines.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) rounds: Vec<Round>,
    pub(crate) jobs: Vec<Job>,
    pub(crate) uploads: Vec<Upload>,
    pub(crate) short_sessions: Vec<ShortSession>,
}

impl Plan {
    pub(crate) fn new(options: &Options, rounds: usize) -> Self {
        let mut random = StdRng::seed_from_u64(options.seed);
        let rounds: Vec<_> = (0..rounds).map(|_| round(&mut random, &options.faults)).collect();
        let mut job = |number| job(&mut random, options, number, rounds.len());
        let jobs = (0..options.runs).map(&mut job).collect();
        // Two for each round: one is closed, one expires. Their runs have the numbers after all
        // others.
        let first = |session| options.runs + session * RUNS_OF_SHORT_SESSION;
        let runs = |session| (first(session)..first(session + 1)).map(&mut job).collect();
        let short_jobs: Vec<Vec<Job>> = (0..rounds.len() * 2).map(runs).collect();
        let short = |(number, jobs)| ShortSession {
            number,
            round: number / 2,
            life: Duration::from_millis(random.random_range(1000..5000)),
            is_closed: number % 2 == 0,
            jobs,
        };
        let short_sessions = short_jobs.into_iter().enumerate().map(short).collect();
        let uploads = (0..options.runs / RUNS_PER_UPLOAD)
            .map(|number| Upload {
                number,
                session: random.random_range(0..options.sessions),
                round: number * rounds.len() * RUNS_PER_UPLOAD / options.runs,
                delay: Duration::from_millis(random.random_range(0..4000)),
            })
            .collect();
        Self { rounds, jobs, uploads, short_sessions }
    }
}

fn round(random: &mut StdRng, kinds: &[Fault]) -> Round {
    let count = random.random_range(1..=2.min(kinds.len()));
    let lease = Duration::from_secs(WORKER_LEASE_SECONDS);
    let faults: Vec<_> =
        kinds.choose_multiple(random, count).map(|fault| fault_event(random, *fault)).collect();
    let is_long = |event: &FaultEvent| {
        matches!(event.fault, Fault::PauseWorker | Fault::Partition | Fault::FullDatabaseDisk)
    };
    let during = if faults.iter().any(is_long) {
        lease + Duration::from_millis(random.random_range(1000..3000))
    } else {
        Duration::from_millis(random.random_range(100..2500))
    };
    Round { before: Duration::from_millis(random.random_range(50..1000)), faults, during }
}

fn fault_event(random: &mut StdRng, fault: Fault) -> FaultEvent {
    let targets = match fault {
        Fault::KillApi | Fault::RestartApi => APIS,
        Fault::Cut | Fault::Stall => WORKERS + APIS,
        Fault::HalfOpen => WORKERS * 2,
        _ => WORKERS,
    };
    FaultEvent { fault, target: random.random_range(0..targets) }
}

fn job(random: &mut StdRng, options: &Options, number: usize, rounds: usize) -> Job {
    let kind = match random.random_range(0..20) {
        0..10 => Kind::Quick,
        10..12 => Kind::Failing,
        12..17 => Kind::Long(random.random_range(1..=options.max_run_ticks)),
        17..18 => Kind::Loud(random.random_range(MAX_LINES / 4..=MAX_LINES)),
        _ => Kind::Canceled(Duration::from_millis(random.random_range(0..1500))),
    };
    let (retries, is_attached) =
        (if random.random_ratio(1, 4) { 2 } else { 0 }, random.random_ratio(1, 4));
    Job {
        number,
        session: random.random_range(0..options.sessions),
        retries,
        kind,
        is_attached,
        // Each attempt of a retried run prints again.
        is_watched: !is_attached && retries == 0 && random.random_ratio(1, 2),
        is_probed: random.random_ratio(1, 5),
        round: number * rounds / options.runs.max(1),
        delay: Duration::from_millis(random.random_range(0..4000)),
        api: random.random_range(0..APIS),
    }
}
