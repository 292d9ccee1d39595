//! Five hundred runs, ended in every way there is, in every mode: nothing of them is left on the host.

use std::{ops::Range, time::Duration};

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::{
    CancelRunRequest, CreateSessionRequest, Limits, Run, SandboxMode, StartRunRequest, outcome,
    run_event::Kind,
};
use codelia_sys::{Pid, process};
use codelia_tests::{Client, Cluster, Host, Shape, eventually, is_root, shell, within};
use rustix::process::Signal;

use crate::isolation::is_usable;

const RUNS: usize = 500;
const AT_ONCE: usize = 10;

/// In so many rounds the worker is killed: their runs have no receipt, for nobody is left to write one.
const WORKER_KILLS: usize = 5;

/// A mode is one row: its word and its name in the protocol.
const MODES: [(&str, SandboxMode); 3] =
    [("bwrap", SandboxMode::Bwrap), ("nsjail", SandboxMode::Nsjail), ("logical", SandboxMode::Logical)];

/// Commands that do not end by themselves.
const ENDLESS: [&str; 2] =
    ["sleep 1000 & (setsid sleep 1000 &) ; sleep 1000", "sleep 1000 & kill -STOP $!; sleep 1000"];

/// One that does not end when it is asked to either; each takes the time that it is given for that.
const STUBBORN: &str = "trap '' TERM INT HUP; (setsid sleep 1000 &); while :; do sleep 0.1; done";
const ONE_STUBBORN_IN: usize = 20;

/// Commands that do.
const SHORT: [&str; 4] = ["true", "setsid sleep 1000 & exit 3", "kill -9 $$", "(sleep 1000 &); echo out"];

/// How a run is ended.
#[derive(Debug, Clone, Copy)]
enum Way {
    ByItself,
    Timeout,
    Cancel,
    /// Whatever process the worker started: a tool, or init where there is none.
    KillTool,
    KillInit,
}

const WAYS: [Way; 8] = [
    Way::ByItself,
    Way::Timeout,
    Way::Cancel,
    Way::KillTool,
    Way::KillInit,
    Way::ByItself,
    Way::Cancel,
    Way::KillTool,
];

/// The same numbers in every test run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).expect("31 bits") % sides
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.roll(from.len())]
    }
}

/// One run that is to be ended.
struct Attempt {
    request: StartRunRequest,
    way: Way,
    /// Between its start and its end.
    pause: Duration,
    victim: usize,
}

impl Attempt {
    fn new(session: &str, mode: SandboxMode, dice: &mut Dice) -> Self {
        let way = dice.pick(&WAYS);
        let script = match way {
            Way::ByItself => dice.pick(&SHORT),
            _ if dice.roll(ONE_STUBBORN_IN) == 0 => STUBBORN,
            _ => dice.pick(&ENDLESS),
        };
        let mut request = StartRunRequest { mode: mode.into(), ..shell(session, script) };
        if matches!(way, Way::Timeout) {
            let nanos = i32::try_from(50 + dice.roll(200)).expect("small") * 1_000_000;
            let timeout = Some(prost_types::Duration { seconds: 0, nanos });
            request.limits = Some(Limits { timeout, ..Limits::default() });
        }
        Self { request, way, pause: Duration::from_millis(dice.roll(40) as u64), victim: dice.roll(1000) }
    }

    /// From its start to its end. What it was killed for need not be what ended it: a kill may meet another
    /// run, or a sandbox that waits for one.
    async fn carry_out(self, client: &Client, worker: Pid) -> Result<Run> {
        let run = client.start(self.request).await?;
        if !matches!(self.way, Way::ByItself | Way::Timeout) {
            started(client, &run.name).await?;
            tokio::time::sleep(self.pause).await;
            match self.way {
                Way::KillTool => kill_one(&tools(worker), self.victim)?,
                Way::KillInit => kill_one(&inits(worker), self.victim)?,
                Way::Cancel | Way::ByItself | Way::Timeout => {}
            }
            client.runs().cancel_run(CancelRunRequest { name: run.name.clone() }).await?;
        }
        client.watch_to_end(&run.name, 0).await?.finished.context("an end")
    }
}

/// Waits until a run's command was started, or its end.
async fn started(client: &Client, name: &str) -> Result<()> {
    let mut events = client.watch(name, 0).await?;
    while let Some(event) = within("the start", events.message()).await? {
        if let Some(Kind::Started(_) | Kind::Finished(_)) = event.event.and_then(|event| event.kind) {
            return Ok(());
        }
    }
    Ok(())
}

fn below(pid: Pid) -> Vec<Pid> {
    process::descendants(pid).unwrap_or_default()
}

fn is_init(pid: Pid) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.contains("codelia-init"))
}

fn inits(worker: Pid) -> Vec<Pid> {
    below(worker).into_iter().filter(|pid| is_init(*pid)).collect()
}

fn children(worker: Pid) -> Vec<Pid> {
    let is_child = |pid: &Pid| stat_field(*pid, 1).is_some_and(|parent| parent == worker.to_string());
    below(worker).into_iter().filter(is_child).collect()
}

/// Whether a tool has made its sandbox. One that is killed before leaves a process that waits for it, which
/// nobody knows of: see the threat model.
fn is_made(tool: Pid) -> bool {
    is_init(tool) || below(tool).into_iter().any(is_init)
}

fn tools(worker: Pid) -> Vec<Pid> {
    children(worker).into_iter().filter(|tool| is_made(*tool)).collect()
}

/// A field of a process's `stat` behind its name, from 0.
fn stat_field(pid: Pid, index: usize) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    Some(stat.rsplit_once(") ")?.1.split(' ').nth(index)?.to_owned())
}

fn kill_one(candidates: &[Pid], number: usize) -> Result<()> {
    let Some(pid) = candidates.get(number % candidates.len().max(1)) else { return Ok(()) };
    process::kill(*pid).with_context(|| format!("kill {pid}"))
}

fn worker_pid(cluster: &Cluster) -> Result<Pid> {
    Pid::from_raw(cluster.workers[0].process.pid().cast_signed()).context("a process id")
}

/// A test's own users, so that what they leave is known.
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
    ];
    Cluster::with(Shape { slots: AT_ONCE, settings, ..Shape::default() }).await
}

/// Ends a round's runs by the death of their worker.
async fn kill_worker(cluster: &mut Cluster, client: &Client, requests: Vec<StartRunRequest>) -> Result<()> {
    let mut names = Vec::new();
    for request in requests {
        let run = client.start(request).await?;
        started(client, &run.name).await?;
        names.push(run.name);
    }
    let pid = worker_pid(cluster)?;
    let all_made = || async { children(pid).into_iter().all(is_made).then_some(()) };
    eventually("every sandbox is made", all_made).await;
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
    let counts = [receipt.processes, receipt.mounts, receipt.cgroups, receipt.sockets, receipt.directories];
    counts == [0; 5]
}

/// What is different while a run goes on: else nothing could be seen to be left.
async fn control(
    cluster: &Cluster,
    client: &Client,
    request: StartRunRequest,
    idle: &Host,
    pids: &[u32],
) -> Result<()> {
    let run = client.start(request).await?;
    started(client, &run.name).await?;
    let busy = Host::of(cluster, &users(), pids)?;
    ensure!(busy.processes != idle.processes, "processes are not seen");
    ensure!(busy.namespaces != idle.namespaces, "namespaces are not seen");
    ensure!(busy.cgroups != idle.cgroups, "control groups are not seen");
    ensure!(busy.directories != idle.directories, "directories are not seen");
    client.runs().cancel_run(CancelRunRequest { name: run.name.clone() }).await?;
    client.watch_to_end(&run.name, 0).await?;
    Ok(())
}

#[tokio::test]
async fn five_hundred_runs_that_are_killed_at_random_leave_nothing() -> Result<()> {
    if !is_root() {
        eprintln!("skipped: only root has users to know its sessions by");
        return Ok(());
    }
    let mut cluster = installation().await?;
    let client = cluster.tenant("a").await?;
    let mut pids = vec![cluster.workers[0].process.pid()];
    let idle = Host::of(&cluster, &users(), &pids)?;
    let mut sessions = Vec::new();
    for (word, mode) in MODES {
        if is_usable(&cluster, word).await? {
            let session = client.create(CreateSessionRequest::default()).await?;
            sessions.push((session.name, mode));
        }
    }
    if let Some((session, mode)) = sessions.iter().find(|(_, mode)| *mode != SandboxMode::Logical) {
        let request = StartRunRequest { mode: (*mode).into(), ..shell(session, "sleep 1000") };
        control(&cluster, &client, request, &idle, &pids).await?;
    }

    let mut dice = Dice(20_240_607);
    let rounds = RUNS / AT_ONCE;
    for round in 0..rounds {
        let (session, mode) = &sessions[round % sessions.len()];
        let attempts: Vec<_> = (0..AT_ONCE).map(|_| Attempt::new(session, *mode, &mut dice)).collect();
        if round % (rounds / WORKER_KILLS) == 4 {
            let requests = (0..AT_ONCE).map(|_| shell(session, dice.pick(&ENDLESS)));
            let requests = requests.map(|request| StartRunRequest { mode: (*mode).into(), ..request });
            kill_worker(&mut cluster, &client, requests.collect()).await?;
            pids.push(cluster.workers[0].process.pid());
            continue;
        }
        let worker = worker_pid(&cluster)?;
        let ended = attempts.into_iter().map(|attempt| attempt.carry_out(&client, worker));
        for run in futures::future::try_join_all(ended).await? {
            ensure!(run.outcome.is_some() && is_zero(&run), "round {round}: {run:?}");
        }
    }

    for (session, _) in &sessions {
        client.close(session).await?;
    }
    let settled = || async { (Host::of(&cluster, &users(), &pids).ok()? == idle).then_some(()) };
    let waited = tokio::time::timeout(
        codelia_tests::PATIENCE - Duration::from_secs(5),
        eventually("settled", settled),
    );
    if waited.await.is_err() {
        assert_eq!(Host::of(&cluster, &users(), &pids)?, idle, "left behind, or lost");
    }
    cluster.end().await
}
