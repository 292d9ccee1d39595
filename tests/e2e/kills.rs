//! Ends 500 runs in every ending and every mode, and checks that nothing is left on the host.

use std::{env, fs, ops::Range, time::Duration};

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::{
    CancelRunRequest, CreateSessionRequest, Limits, Run, SandboxMode, StartRunRequest, outcome,
    run_event::Kind,
};
use codelia_sys::{Pid, process};
use codelia_tests::{
    Client, Cluster, ClusterOptions, ENGINE_SOCKET, HostSnapshot, available, eventually, is_root,
    shell, user_processes, within,
};
use rustix::process::Signal;

use crate::isolation::is_usable;

const RUNS: usize = 500;
const CONCURRENT: usize = 10;

/// Rounds in which the worker is killed. Their runs have no receipt.
const WORKER_KILLS: usize = 5;

/// Modes: name and protocol value.
const MODES: [(&str, SandboxMode); 5] = [
    ("bwrap", SandboxMode::Bwrap),
    ("nsjail", SandboxMode::Nsjail),
    ("native", SandboxMode::Native),
    ("logical", SandboxMode::Logical),
    ("container", SandboxMode::Container),
];

/// Each container has a process of this name around it.
const SHIM: &str = "containerd-shim";

/// Commands that do not end by themselves.
const ENDLESS: [&str; 2] =
    ["sleep 1000 & (setsid sleep 1000 &) ; sleep 1000", "sleep 1000 & kill -STOP $!; sleep 1000"];

/// A command that ignores signals. Each one takes the whole kill grace.
const STUBBORN: &str = "trap '' TERM INT HUP; (setsid sleep 1000 &); while :; do sleep 0.1; done";
const ONE_STUBBORN_IN: usize = 20;

/// Commands that end by themselves.
const SHORT: [&str; 4] =
    ["true", "setsid sleep 1000 & exit 3", "kill -9 $$", "(sleep 1000 &); echo out"];

/// How a run is ended.
#[derive(Debug, Clone, Copy)]
enum Ending {
    ByItself,
    Timeout,
    Cancel,
    /// Kill a process that the worker or its engine started: a tool, the holder of a zygote, or
    /// init in mode `logical`. The sandbox may not be complete yet.
    KillTool,
    KillInit,
    KillCommand,
}

const ENDINGS: [Ending; 9] = [
    Ending::ByItself,
    Ending::Timeout,
    Ending::Cancel,
    Ending::KillTool,
    Ending::KillInit,
    Ending::KillCommand,
    Ending::ByItself,
    Ending::Cancel,
    Ending::KillTool,
];

/// Pseudo-random numbers, the same in every test run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).expect("31 bits") % sides
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.roll(from.len())]
    }
}

/// A session and the mode of its runs.
struct Session {
    name: String,
    mode: SandboxMode,
}

impl Session {
    fn run(&self, script: &str) -> StartRunRequest {
        StartRunRequest { mode: self.mode.into(), ..shell(&self.name, script) }
    }
}

/// One run and how to end it.
struct Victim {
    request: StartRunRequest,
    ending: Ending,
    /// Time between its start and its end.
    pause: Duration,
    target: usize,
}

impl Victim {
    fn new(session: &Session, dice: &mut Dice) -> Self {
        let ending = dice.pick(&ENDINGS);
        let script = match ending {
            Ending::ByItself => dice.pick(&SHORT),
            _ if dice.roll(ONE_STUBBORN_IN) == 0 => STUBBORN,
            _ => dice.pick(&ENDLESS),
        };
        let mut request = session.run(script);
        if matches!(ending, Ending::Timeout) {
            let nanos = i32::try_from(50 + dice.roll(200)).expect("small") * 1_000_000;
            let timeout = Some(prost_types::Duration { seconds: 0, nanos });
            request.limits = Some(Limits { timeout, ..Limits::default() });
        }
        Self {
            request,
            ending,
            pause: Duration::from_millis(dice.roll(40) as u64),
            target: dice.roll(1000),
        }
    }

    /// Starts and ends the run. A kill may hit another run, or a prepared sandbox.
    async fn start_and_end(self, client: &Client, worker: Pid) -> Result<Run> {
        let run = client.start(self.request).await?;
        if !matches!(self.ending, Ending::ByItself | Ending::Timeout) {
            started(client, &run.name).await?;
            tokio::time::sleep(self.pause).await;
            match self.ending {
                Ending::KillTool => kill_one(&tools(worker), self.target)?,
                Ending::KillInit => kill_one(&inits(worker), self.target)?,
                Ending::KillCommand => kill_one(&commands(), self.target)?,
                Ending::Cancel | Ending::ByItself | Ending::Timeout => {}
            }
            client
                .runs()
                .cancel_run(CancelRunRequest { name: run.name.clone(), ..Default::default() })
                .await?;
        }
        client.watch_to_end(&run.name, 0).await?.finished.context("an end")
    }
}

/// Waits until a run's command has started, or the run has ended.
pub(crate) async fn started(client: &Client, name: &str) -> Result<()> {
    let mut events = client.watch(name, 0).await?;
    while let Some(event) = within("the start", events.message()).await? {
        if let Some(Kind::Started(_) | Kind::Finished(_)) = event.event.and_then(|event| event.kind)
        {
            return Ok(());
        }
    }
    Ok(())
}

fn below(pid: Pid) -> Vec<Pid> {
    process::descendants(pid).unwrap_or_default()
}

fn is_called(pid: Pid, name: &str) -> bool {
    fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|found| found.contains(name))
}

/// Includes processes of session users: those in containers are not descendants of the worker.
fn inits(worker: Pid) -> Vec<Pid> {
    let theirs =
        user_processes(&users()).into_iter().filter_map(|pid| Pid::from_raw(pid.cast_signed()));
    below(worker).into_iter().chain(theirs).filter(|pid| is_called(*pid, "codelia-init")).collect()
}

/// Processes of commands, whichever run they belong to.
fn commands() -> Vec<Pid> {
    let theirs =
        user_processes(&users()).into_iter().filter_map(|pid| Pid::from_raw(pid.cast_signed()));
    theirs.filter(|pid| is_called(*pid, "sh") || is_called(*pid, "sleep")).collect()
}

/// Returns children of the worker, and the engine's processes around an init.
fn tools(worker: Pid) -> Vec<Pid> {
    let around = inits(worker).into_iter().filter_map(parent).filter(|pid| is_called(*pid, SHIM));
    let started = below(worker).into_iter().filter(|pid| parent(*pid) == Some(worker));
    started.chain(around).collect()
}

fn parent(pid: Pid) -> Option<Pid> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    Pid::from_raw(stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()?)
}

fn kill_one(candidates: &[Pid], number: usize) -> Result<()> {
    let Some(pid) = candidates.get(number % candidates.len().max(1)) else { return Ok(()) };
    process::kill(*pid).with_context(|| format!("kill {pid}"))
}

fn worker_pid(cluster: &Cluster) -> Result<Pid> {
    Pid::from_raw(cluster.workers[0].process.pid().cast_signed()).context("a process id")
}

/// Users of this test process only, so that their leftovers can be found.
fn users() -> Range<u32> {
    let base = 1_000_000_000 + std::process::id() % 100_000 * 1000;
    base..base + 1000
}

async fn installation() -> Result<Cluster> {
    let users = users();
    let settings = vec![
        ("CODELIA_SANDBOX_MODE", "logical".to_owned()),
        ("CODELIA_SANDBOX_UID_BASE", users.start.to_string()),
        ("CODELIA_SANDBOX_UID_COUNT", users.len().to_string()),
        ("CODELIA_SANDBOX_CONTAINER_SOCKET", env::var(ENGINE_SOCKET).unwrap_or_default()),
    ];
    Cluster::start_with(ClusterOptions { slots: CONCURRENT, settings, ..ClusterOptions::default() })
        .await
}

/// Ends a round's runs by killing their worker.
async fn kill_worker(
    cluster: &mut Cluster,
    client: &Client,
    requests: Vec<StartRunRequest>,
) -> Result<()> {
    let mut names = Vec::new();
    for request in requests {
        let run = client.start(request).await?;
        started(client, &run.name).await?;
        names.push(run.name);
    }
    let worker = &mut cluster.workers[0].process;
    worker.signal(Signal::KILL)?;
    worker.exited().await?;
    cluster.restart_worker(0).await?;
    for name in names {
        let ended = client.watch_to_end(&name, 0).await?;
        ensure!(matches!(ended.outcome(), outcome::Kind::Lost(_)), "{ended:?}");
    }
    Ok(())
}

fn is_zero(run: &Run) -> bool {
    let receipt = run.receipt.unwrap_or_default();
    let counts =
        [receipt.processes, receipt.mounts, receipt.cgroups, receipt.sockets, receipt.directories];
    counts == [0; 5]
}

/// The control: the snapshot differs while a run is active.
async fn control(
    cluster: &Cluster,
    client: &Client,
    session: &Session,
    idle: &HostSnapshot,
) -> Result<()> {
    let run = client.start(session.run("sleep 1000")).await?;
    started(client, &run.name).await?;
    let busy = HostSnapshot::take(cluster, &users(), &[cluster.workers[0].process.pid()])?;
    ensure!(busy.processes != idle.processes, "processes are not seen");
    ensure!(busy.namespaces != idle.namespaces, "namespaces are not seen");
    ensure!(busy.directories != idle.directories, "directories are not seen");
    match session.mode {
        SandboxMode::Container => {
            ensure!(busy.containers != idle.containers, "containers are not seen")
        }
        _ => ensure!(busy.cgroups != idle.cgroups, "control groups are not seen"),
    }
    client
        .runs()
        .cancel_run(CancelRunRequest { name: run.name.clone(), ..Default::default() })
        .await?;
    client.watch_to_end(&run.name, 0).await?;
    Ok(())
}

/// Creates one session per mode that works here.
async fn sessions(cluster: &Cluster, client: &Client) -> Result<Vec<Session>> {
    let mut sessions = Vec::new();
    for (word, mode) in MODES {
        if is_usable(cluster, word).await? {
            let name = client.create(CreateSessionRequest::default()).await?.name;
            sessions.push(Session { name, mode });
        }
    }
    Ok(sessions)
}

/// Orders sessions by round. Containers are slow and get half as many rounds.
fn turns(sessions: &[Session]) -> impl Iterator<Item = &Session> {
    let is_slow = |session: &&Session| session.mode == SandboxMode::Container;
    let (slow, quick): (Vec<_>, Vec<_>) = sessions.iter().partition(is_slow);
    [quick.clone(), quick, slow].concat().into_iter().cycle()
}

#[tokio::test]
async fn random_kills_of_500_runs_leave_nothing() -> Result<()> {
    if !available("root", (!is_root()).then_some("only root can give sessions their own users")) {
        return Ok(());
    }
    let mut cluster = installation().await?;
    let client = cluster.tenant("a").await?;
    let mut pids = vec![cluster.workers[0].process.pid()];
    let idle = HostSnapshot::take(&cluster, &users(), &pids)?;
    let sessions = sessions(&cluster, &client).await?;
    for session in sessions.iter().filter(|session| session.mode != SandboxMode::Logical) {
        control(&cluster, &client, session, &idle).await?;
    }

    let mut dice = Dice(20_240_607);
    let rounds = RUNS / CONCURRENT;
    for (round, session) in (0..rounds).zip(turns(&sessions)) {
        if round % (rounds / WORKER_KILLS) == 4 {
            let requests = (0..CONCURRENT).map(|_| session.run(dice.pick(&ENDLESS))).collect();
            kill_worker(&mut cluster, &client, requests).await?;
            pids.push(cluster.workers[0].process.pid());
            continue;
        }
        let worker = worker_pid(&cluster)?;
        let victims: Vec<_> = (0..CONCURRENT).map(|_| Victim::new(session, &mut dice)).collect();
        let ended = victims.into_iter().map(|victim| victim.start_and_end(&client, worker));
        for run in futures::future::try_join_all(ended).await? {
            ensure!(run.outcome.is_some() && is_zero(&run), "round {round}: {run:?}");
        }
    }

    for session in &sessions {
        client.close(&session.name).await?;
    }
    let settled =
        || async { (HostSnapshot::take(&cluster, &users(), &pids).ok()? == idle).then_some(()) };
    let waited = tokio::time::timeout(
        codelia_tests::TIMEOUT - Duration::from_secs(5),
        eventually("settled", settled),
    );
    if waited.await.is_err() {
        assert_eq!(
            HostSnapshot::take(&cluster, &users(), &pids)?,
            idle,
            "the host differs from before"
        );
    }
    cluster.end().await
}
