//! Chaos tests: real processes execute runs with known side effects while faults from a seed
//! happen. Afterwards nothing may be lost, doubled or left behind.

mod checks;
mod clock;
mod content;
mod database;
mod defect;
mod disk;
mod fault_log;
mod load;
mod lost_window;
mod plan;
mod server;
mod short_sessions;
mod system;
mod tenants;
mod uploads;
mod watcher;

use std::{
    collections::{BTreeMap, BTreeSet},
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
pub use defect::Defect;
use load::{Callers, Observed};
pub use lost_window::{LostWindow, promote_lagging_standby};
pub use plan::Fault;
use plan::Plan;
use short_sessions::ShortObserved;
use system::TestSystem;
use tenants::tenant_of;
use uploads::Uploaded;

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
    /// Whether the processes reach Postgres through PgBouncer in transaction mode.
    pub pooler: bool,
    /// A safeguard to disable, to show that the checks notice its absence.
    pub disabled: DisabledSafeguard,
    /// Defects to plant, to show that the checks notice them.
    pub defects: Vec<Defect>,
    /// The share that must exit of the runs that nobody may have canceled.
    pub min_exits: f64,
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
                    "AND s.lease_worker || '' = $2 AND s.lease_incarnation = $3 AND s.lease_epoch = $4\n      -- and",
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
        (self != Self::None).then_some(("CODELIA_WORKER_LEASE_TTL", "9s"))
    }
}

/// The result of one chaos test.
#[derive(Debug)]
pub struct Report {
    /// Number of runs by outcome.
    pub outcomes: BTreeMap<String, usize>,
    /// The faults.
    pub faults: Vec<Fault>,
    /// Violations that were found.
    pub findings: Findings,
    /// Statements that a proxy rewrote to disable a safeguard.
    pub rewritten_statements: usize,
    /// How often a watcher of a run had to watch again.
    pub resumed_watches: usize,
    /// Duration of the test.
    pub took: Duration,
}

/// What all callers observed.
struct LoadReport {
    runs: Vec<Observed>,
    short: Vec<ShortObserved>,
    uploads: Vec<Uploaded>,
}

fn plan(options: &Options) -> Plan {
    Plan::new(options, (options.runs / RUNS_PER_ROUND).max(3))
}

/// The faults of a seed.
#[must_use]
pub fn planned_faults(options: &Options) -> Vec<Fault> {
    let events = plan(options).rounds.into_iter().flat_map(|round| round.faults);
    events.map(|event| event.fault).collect()
}

/// Runs one seed.
///
/// # Errors
/// If the harness fails, or a call is refused permanently.
pub async fn run_seed(options: &Options) -> Result<Report> {
    let began = Instant::now();
    let plan = plan(options);
    let mut system = TestSystem::start(options).await?;
    let callers = system.callers.clone();
    let sessions: Vec<Session> = stream::iter(0..options.sessions)
        .map(|number| {
            callers[tenant_of(number)].session(number, options.modes[number % options.modes.len()])
        })
        .buffered(8)
        .try_collect()
        .await?;

    let (round, _) = watch::channel(0);
    let load = load(&callers, &plan, &sessions, options, &round);
    let rounds = run_rounds(&mut system, &plan, &options.defects, &round);
    let (observed, ()) = futures::try_join!(load, rounds)?;

    let mut findings = Findings::default();
    let outcomes = recover(&mut system, &observed, &sessions, options, &mut findings).await?;
    let rewritten_statements = system.proxies.iter().map(Proxy::replaced).sum();
    let resumed_watches = observed
        .runs
        .iter()
        .filter_map(|run| run.watched.as_ref())
        .map(|watched| watched.resumed)
        .sum();
    shut_down(system, options.seed, &sessions, &mut findings).await?;
    let faults = planned_faults(options);
    let took = began.elapsed();
    Ok(Report { outcomes, faults, findings, rewritten_statements, resumed_watches, took })
}

/// Makes all calls of the plan.
async fn load(
    callers: &[Callers],
    plan: &Plan,
    sessions: &[Session],
    options: &Options,
    round: &watch::Sender<usize>,
) -> Result<LoadReport> {
    let callers_of = |session: usize| &callers[tenant_of(session)];
    let name = |session: usize| sessions[session].name.as_str();
    let runs = stream::iter(plan.jobs.iter())
        .map(|job| callers_of(job.session).start(*job, name(job.session), round.subscribe()))
        .buffer_unordered(plan.jobs.len())
        .try_collect();
    let short = stream::iter(plan.short_sessions.iter())
        .map(|short| {
            let mode = options.modes[short.number % options.modes.len()];
            callers_of(short.number).visit(short, mode, round.subscribe())
        })
        .buffer_unordered(plan.short_sessions.len())
        .try_collect();
    let uploads = stream::iter(plan.uploads.iter())
        .map(|upload| {
            callers_of(upload.session).upload(*upload, name(upload.session), round.subscribe())
        })
        .buffer_unordered(plan.uploads.len().max(1))
        .try_filter_map(|uploaded| async { Ok(uploaded) })
        .try_collect();
    let (runs, short, uploads) = futures::try_join!(runs, short, uploads)?;
    Ok(LoadReport { runs, short, uploads })
}

/// Runs one round after another.
async fn run_rounds(
    system: &mut TestSystem,
    plan: &Plan,
    defects: &[Defect],
    now: &watch::Sender<usize>,
) -> Result<()> {
    for round in &plan.rounds {
        now.send_modify(|now| *now += 1);
        sleep(round.before).await;
        system.plant(defects).await?;
        system.start_faults(round).await?;
        sleep(round.during).await;
        system.end_faults(round).await?;
    }
    Ok(())
}

/// Waits until every run has an outcome and every short session has ended, then checks them.
async fn recover(
    system: &mut TestSystem,
    observed: &LoadReport,
    sessions: &[Session],
    options: &Options,
    findings: &mut Findings,
) -> Result<BTreeMap<String, usize>> {
    let unfinished = "SELECT (SELECT count(*) FROM runs WHERE state <> 'ended')
                           + (SELECT count(*) FROM sessions WHERE state = 'open' AND expires_at < now())";
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
    let runs =
        checks::load_runs(&mut connection, &system::output_directory(&system.cluster)).await?;
    let renewals = fault_log::load_renewals(&mut connection).await?;
    let ends = short_sessions::load_ends(&mut connection).await?;
    checks::close(connection).await;
    let roots = system.roots();
    let mut lines = BTreeMap::new();
    for session in sessions {
        let id = session.session_id.parse().context("invalid session id")?;
        lines.insert(id, checks::read_lines(&roots, id));
    }
    let short = observed.short.iter().flat_map(|short| &short.runs);
    let all: Vec<&Observed> = observed.runs.iter().chain(short).collect();
    checks::check_runs(&all, &runs, &lines, system, findings);
    content::check_losses(&runs, &system.log, &renewals, findings);
    content::check_exits(&observed.runs, &runs, options.min_exits, &system.log, findings);
    short_sessions::check_ends(&observed.short, &ends, findings);
    check_calls(system, observed, sessions, options, findings).await?;
    Ok(checks::count_outcomes(&runs))
}

/// Reads all uploads back, and lists everything as the other tenant.
async fn check_calls(
    system: &TestSystem,
    observed: &LoadReport,
    sessions: &[Session],
    options: &Options,
    findings: &mut Findings,
) -> Result<()> {
    if options.defects.contains(&Defect::FileChanged) {
        uploads::change_files(&system.roots(), sessions, &observed.uploads)?;
    }
    for uploaded in &observed.uploads {
        let session = &sessions[uploaded.session].name;
        system.callers[tenant_of(uploaded.session)]
            .check_upload(uploaded, session, findings)
            .await?;
    }
    for callers in &system.callers {
        let is_own = |number: &usize| tenant_of(*number) == callers.tenant;
        let own: BTreeSet<String> = (0..sessions.len())
            .filter(is_own)
            .map(|number| sessions[number].name.clone())
            .collect();
        callers.check_lists(&own, findings).await?;
    }
    Ok(())
}

/// Stops everything and finds leftovers.
async fn shut_down(
    mut system: TestSystem,
    seed: u64,
    sessions: &[Session],
    findings: &mut Findings,
) -> Result<()> {
    for (number, session) in sessions.iter().enumerate() {
        system.callers[tenant_of(number)].close(&session.name).await?;
    }
    let database = &system.cluster.database;
    let open = "SELECT count(*) FROM sessions WHERE removed_at IS NULL";
    let swept = async {
        while database.number(open).await? > 0 || !checks::find_sandboxes(&system.pids)?.is_empty()
        {
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
