//! Chaos tests: real processes execute runs with known side effects while faults from a seed happen.
//! Afterwards nothing may be lost, doubled or left behind.

mod checks;
mod disk;
mod load;
mod plan;
mod system;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::{SandboxMode, Session};
use futures::{StreamExt, TryStreamExt, stream};
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};

pub use checks::Findings;
use load::Observed;
pub use plan::Fault;
use plan::Plan;
use system::TestSystem;

use crate::{Proxy, Replacement};

/// How long the system may take to recover after the faults: leases expire, are swept and are
/// acquired again.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Number of runs in each round of faults.
const RUNS_PER_ROUND: usize = 60;

/// Options of one chaos test.
#[derive(Debug, Clone)]
pub struct Options {
    /// The seed of all random choices.
    pub seed: u64,
    /// Number of runs.
    pub runs: usize,
    /// Number of sessions.
    pub sessions: usize,
    /// Modes of the sessions, assigned in turn.
    pub modes: Vec<SandboxMode>,
    /// Maximum duration of a run, in ticks of 0.2 s.
    pub max_run_ticks: u32,
    /// Faults to choose from.
    pub faults: Vec<Fault>,
    /// A safeguard to disable, to show that the checks notice its absence.
    pub disabled: DisabledSafeguard,
}

/// A safeguard of Codelia that the test disables from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DisabledSafeguard {
    /// None.
    None,
    /// Self-fencing: leases expire in the database long before their workers expect it.
    SelfFencing,
    /// Self-fencing, and the lease check of the commit: the proxy removes it from the statement.
    CommitGuard,
}

impl DisabledSafeguard {
    fn replacements(self) -> &'static [Replacement] {
        match self {
            Self::CommitGuard => &[
                (
                    "AND r.worker_id = $2 AND r.incarnation = $3 AND r.lease_epoch = $4\n      -- No",
                    "\n      -- No",
                ),
                (
                    "AND s.lease_worker = $2 AND s.lease_incarnation = $3 AND s.lease_epoch = $4\n      -- and",
                    "\n      -- and",
                ),
                (
                    "AND w.incarnation = $3 AND w.lease_until > now()\n    RETURNING r.*\n),\ncommitted",
                    "\n    RETURNING r.*\n),\ncommitted",
                ),
            ],
            Self::None | Self::SelfFencing => &[],
        }
    }

    fn statements(self) -> Option<&'static str> {
        let shorten = "
            CREATE FUNCTION chaos_shorten() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN NEW.lease_until := least(NEW.lease_until, now() + interval '2 seconds'); RETURN NEW; END $$;
            CREATE TRIGGER chaos_shorter BEFORE INSERT OR UPDATE ON workers
            FOR EACH ROW EXECUTE FUNCTION chaos_shorten();";
        (self != Self::None).then_some(shorten)
    }

    fn settings(self) -> Option<(&'static str, &'static str)> {
        (self != Self::None).then_some(("CODELIA_WORKER_LEASE_TTL_SECONDS", "9"))
    }
}

/// The result of one chaos test.
#[derive(Debug)]
pub struct Report {
    /// Number of runs by outcome.
    pub outcomes: BTreeMap<String, usize>,
    /// Number of faults.
    pub faults: usize,
    /// Violations that were found.
    pub findings: Findings,
    /// Statements that a proxy rewrote to disable a safeguard.
    pub rewritten_statements: usize,
    /// Duration of the test.
    pub took: Duration,
}

/// Runs one seed.
///
/// # Errors
/// If the harness fails, or a call is refused permanently.
pub async fn run_seed(options: &Options) -> Result<Report> {
    let began = Instant::now();
    let rounds = (options.runs / RUNS_PER_ROUND).max(3);
    let plan = Plan::new(options, rounds);
    let mut system = TestSystem::start(options.disabled).await?;
    let callers = system.callers.clone();
    let sessions: Vec<Session> = stream::iter(0..options.sessions)
        .map(|number| callers.session(number, options.modes[number % options.modes.len()]))
        .buffered(8)
        .try_collect()
        .await?;

    let (round, _) = watch::channel(0);
    let load = stream::iter(plan.jobs.iter())
        .map(|job| callers.start(*job, &sessions[job.session].name, round.subscribe()))
        .buffer_unordered(plan.jobs.len())
        .try_collect::<Vec<Observed>>();
    let (observed, ()) = futures::try_join!(load, run_rounds(&mut system, &plan, &round))?;

    let mut findings = Findings::default();
    let outcomes = recover(&mut system, &observed, &sessions, &mut findings).await?;
    let rewritten_statements = system.proxies.iter().map(Proxy::replaced).sum();
    shut_down(system, options.seed, &sessions, &mut findings).await?;
    let faults = plan.rounds.iter().map(|round| round.faults.len()).sum();
    Ok(Report { outcomes, faults, findings, rewritten_statements, took: began.elapsed() })
}

/// Runs one round after another.
async fn run_rounds(system: &mut TestSystem, plan: &Plan, now: &watch::Sender<usize>) -> Result<()> {
    for round in &plan.rounds {
        now.send_modify(|now| *now += 1);
        sleep(round.before).await;
        system.start_faults(round).await?;
        sleep(round.during).await;
        system.end_faults(round).await?;
    }
    Ok(())
}

/// Waits until every run has an outcome, then checks them.
async fn recover(
    system: &mut TestSystem,
    observed: &[Observed],
    sessions: &[Session],
    findings: &mut Findings,
) -> Result<BTreeMap<String, usize>> {
    let unfinished = "SELECT count(*) FROM runs WHERE state <> 'ended'";
    let database = &system.cluster.database;
    let recovered = async {
        while database.number(unfinished).await.unwrap_or(1) > 0 {
            sleep(POLL_INTERVAL).await;
        }
    };
    if timeout(RECOVERY_TIMEOUT, recovered).await.is_err() {
        eprintln!("some runs did not end within {RECOVERY_TIMEOUT:?}");
    }
    let mut connection = database.connection().await?;
    let runs = checks::load_runs(&mut connection).await?;
    checks::close(connection).await;
    let roots = system.roots();
    let mut lines = BTreeMap::new();
    for session in sessions {
        let id = session.session_id.parse().context("invalid session id")?;
        lines.insert(id, checks::read_lines(&roots, id));
    }
    checks::check_runs(observed, &runs, &lines, &system.paused, findings);
    Ok(checks::count_outcomes(&runs))
}

/// Stops everything and finds leftovers.
async fn shut_down(
    mut system: TestSystem,
    seed: u64,
    sessions: &[Session],
    findings: &mut Findings,
) -> Result<()> {
    for session in sessions {
        system.callers.close(&session.name).await?;
    }
    let database = &system.cluster.database;
    let open = "SELECT count(*) FROM sessions WHERE removed_at IS NULL";
    let swept = async {
        while database.number(open).await? > 0 || !checks::find_sandboxes(&system.pids)?.is_empty() {
            sleep(POLL_INTERVAL).await;
        }
        anyhow::Ok(())
    };
    if let Ok(swept) = timeout(RECOVERY_TIMEOUT, swept).await {
        swept?;
    }
    let mut connection = database.connection().await?;
    checks::find_rows(&mut connection, findings).await?;
    checks::close(connection).await;
    system.roots().iter().for_each(|root| checks::find_files(root, findings));
    let (pids, directory) = (system.pids.clone(), system.cluster.directory().to_owned());
    system.stop_processes().await?;
    checks::find_mounts_and_sockets(&directory, findings)?;
    findings.leftovers.extend(checks::find_sandboxes(&pids)?);
    if !findings.is_clean() {
        println!("       logs: {}", keep_logs(&directory, seed)?.display());
    }
    system.end().await?;
    ensure!(!directory.exists(), "{} was not removed", directory.display());
    Ok(())
}

/// Copies the logs of a failed seed to the temporary directory.
fn keep_logs(directory: &Path, seed: u64) -> Result<PathBuf> {
    let kept = std::env::temp_dir().join(format!("codelia-chaos-{seed}"));
    fs::create_dir_all(&kept)?;
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.path().extension().is_some_and(|extension| extension == "log") {
            fs::copy(entry.path(), kept.join(entry.file_name()))?;
        }
    }
    Ok(kept)
}
