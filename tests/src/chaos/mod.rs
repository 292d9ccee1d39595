//! Chaos: a load of runs with known side effects on real processes, random faults from a seed, and a
//! count of what was lost, doubled or left behind.

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
use load::Seen;
pub use plan::Fault;
use plan::Plan;
use system::TestSystem;

use crate::{Proxy, Replacement};

/// How long everything may take to come to its end when the faults are over: leases run out, are
/// swept, and are taken again.
const SETTLING: Duration = Duration::from_secs(60);
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// Runs for each round of faults.
const RUNS_A_ROUND: usize = 60;

/// What one seed is played with.
#[derive(Debug, Clone)]
pub struct Options {
    /// Everything that is left to chance comes from it.
    pub seed: u64,
    /// How many runs.
    pub runs: usize,
    /// In how many sessions.
    pub sessions: usize,
    /// Modes of the sessions, in turn.
    pub modes: Vec<SandboxMode>,
    /// How long the max_run_ticks run takes, in fifths of a second.
    pub max_run_ticks: u32,
    /// What may happen.
    pub faults: Vec<Fault>,
    /// What is taken from Codelia, to see that it is missed.
    pub disabled: DisabledSafeguard,
}

/// Something that Codelia does and that is undone from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DisabledSafeguard {
    /// Nothing.
    None,
    /// Leases run out in the database long before their workers know.
    SelfFencing,
    /// And the guard of a commit, which is what is left then, is taken out of the statement on its way.
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
                    "AND w.incarnation = $3 AND w.lease_until > now()\n    RETURNING r.id, r.session_id",
                    "\n    RETURNING r.id, r.session_id",
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

/// What one seed came to.
#[derive(Debug)]
pub struct Report {
    /// Runs by outcome.
    pub outcomes: BTreeMap<String, usize>,
    /// How many faults there were.
    pub faults: usize,
    /// What is wrong.
    pub findings: Findings,
    /// Statements that a disabled changed on their way.
    pub rewritten_statements: usize,
    /// How long it took.
    pub took: Duration,
}

/// Plays one seed.
///
/// # Errors
/// If the harness itself fails, or a caller is refused for good.
pub async fn run_seed(options: &Options) -> Result<Report> {
    let began = Instant::now();
    let rounds = (options.runs / RUNS_A_ROUND).max(3);
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
        .try_collect::<Vec<Seen>>();
    let (seen, ()) = futures::try_join!(load, strike_all(&mut system, &plan, &round))?;

    let mut findings = Findings::default();
    let outcomes = settle(&mut system, &seen, &sessions, &mut findings).await?;
    let rewritten_statements = system.proxies.iter().map(Proxy::replaced).sum();
    clear_away(system, options.seed, &sessions, &mut findings).await?;
    let faults = plan.rounds.iter().map(|round| round.strikes.len()).sum();
    Ok(Report { outcomes, faults, findings, rewritten_statements, took: began.elapsed() })
}

/// One round after another.
async fn strike_all(system: &mut TestSystem, plan: &Plan, now: &watch::Sender<usize>) -> Result<()> {
    for round in &plan.rounds {
        now.send_modify(|now| *now += 1);
        sleep(round.before).await;
        system.strike(round).await?;
        sleep(round.during).await;
        system.heal(round).await?;
    }
    Ok(())
}

/// Waits until every run has its outcome, and judges them.
async fn settle(
    system: &mut TestSystem,
    seen: &[Seen],
    sessions: &[Session],
    findings: &mut Findings,
) -> Result<BTreeMap<String, usize>> {
    let all_ended = "SELECT count(*) FROM runs WHERE state <> 'ended'";
    let database = &system.cluster.database;
    let settled = async {
        while database.number(all_ended).await.unwrap_or(1) > 0 {
            sleep(LOOK_AGAIN).await;
        }
    };
    if timeout(SETTLING, settled).await.is_err() {
        eprintln!("not every run came to its end within {SETTLING:?}");
    }
    let mut connection = database.connection().await?;
    let runs = checks::recorded(&mut connection).await?;
    checks::done(connection).await;
    let roots = system.roots();
    let mut lines = BTreeMap::new();
    for session in sessions {
        let id = session.session_id.parse().context("a session's id")?;
        lines.insert(id, checks::lines(&roots, id));
    }
    checks::judge(seen, &runs, &lines, &system.paused, findings);
    Ok(checks::outcomes(&runs))
}

/// Ends everything, and looks for what is left.
async fn clear_away(
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
        while database.number(open).await? > 0 || !checks::sandboxes_left(&system.pids)?.is_empty() {
            sleep(LOOK_AGAIN).await;
        }
        anyhow::Ok(())
    };
    if let Ok(swept) = timeout(SETTLING, swept).await {
        swept?;
    }
    let mut connection = database.connection().await?;
    checks::rows_left(&mut connection, findings).await?;
    checks::done(connection).await;
    system.roots().iter().for_each(|root| checks::files_left(root, findings));
    let (pids, directory) = (system.pids.clone(), system.cluster.directory().to_owned());
    system.stop_processes().await?;
    checks::mounts_and_sockets_left(&directory, findings)?;
    findings.leftovers.extend(checks::sandboxes_left(&pids)?);
    if !findings.is_clean() {
        println!("       logs: {}", keep_logs(&directory, seed)?.display());
    }
    system.end().await?;
    ensure!(!directory.exists(), "{} is left", directory.display());
    Ok(())
}

/// Keeps the logs of every process of a seed that failed.
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
