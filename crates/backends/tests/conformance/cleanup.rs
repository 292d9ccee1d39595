//! A sandbox leaves no process, mount, control group or directory, however its run ends.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Write,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    pin::pin,
    process::{Child, ChildStdin, Command, Stdio},
    time::{Duration, Instant},
};

use codelia_sys::{Pid, process};
use codelia_types::{LostReason, Outcome};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::time::timeout;

use crate::harness::{Fixture, Kind, ORPHANS, Session, command, in_every_mode, is_root};

/// A wait that takes this long has failed.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Lists the processes of a session's user. Matches names too: without root, that user is ours.
fn pids_of(session: &Session) -> Vec<Pid> {
    let is_of_session = |pid: &Pid| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let uid = format!("Uid:\t{}\t", session.ids.uid);
        let name = ["sleep", "codelia-init", "bwrap", "nsjail", ".codelia-init"];
        let is_named = name.iter().any(|name| status.starts_with(&format!("Name:\t{name}\n")));
        status.contains(&uid) && is_named && !status.contains("State:\tZ")
    };
    let names = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.file_name());
    let pids = names.filter_map(|name| Pid::from_raw(name.to_str()?.parse().ok()?));
    pids.filter(is_of_session).collect()
}

fn processes_of(session: &Session) -> BTreeMap<PathBuf, String> {
    let command = |pid: Pid| {
        let dir = PathBuf::from(format!("/proc/{pid}"));
        let line = fs::read_to_string(dir.join("cmdline")).unwrap_or_default();
        (dir, line)
    };
    pids_of(session).into_iter().map(command).collect()
}

/// Returns the control groups of a session's processes, except those this process is in.
fn groups_of(session: &Session) -> BTreeSet<PathBuf> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap();
    let processes = processes_of(session).into_keys();
    let listed: Vec<_> =
        processes.filter_map(|dir| fs::read_to_string(dir.join("cgroup")).ok()).collect();
    let theirs = listed
        .iter()
        .flat_map(|text| text.lines())
        .filter(|line| !own.lines().any(|own| own == *line));
    theirs.filter_map(group_directory).collect()
}

/// Whether a group still exists. Those that the next sandbox uses again exist, but must be empty.
fn is_left(group: &Path) -> bool {
    let is_pooled =
        group.file_name().is_some_and(|name| name.to_string_lossy().starts_with("pooled-"));
    let processes = fs::read_to_string(group.join("cgroup.procs"));
    processes.is_ok_and(|processes| !is_pooled || !processes.is_empty())
}

/// Parses a line `id:controllers:path` of cgroup v1 (one hierarchy per controller) or v2.
fn group_directory(line: &str) -> Option<PathBuf> {
    let mut fields = line.splitn(3, ':').skip(1);
    let (controllers, path) = (fields.next()?, fields.next()?.trim_start_matches('/'));
    let mounted = ["/sys/fs/cgroup".to_owned(), format!("/sys/fs/cgroup/{controllers}")];
    mounted
        .iter()
        .map(|mount| Path::new(mount).join(path))
        .find(|dir| dir.join("cgroup.procs").exists())
}

/// The mounts on this host of a session's directory or below it.
fn mounts_of(session: &Session) -> Vec<String> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let directory = session.dir.to_str().unwrap();
    mounts.lines().filter(|line| line.contains(directory)).map(str::to_owned).collect()
}

#[tokio::test]
async fn mounts_of_a_session_are_seen() {
    let Some(fixture) = Fixture::new(Kind::Bwrap).await else { return };
    if !is_root("only root can mount") {
        return;
    }
    let session = fixture.session();
    assert_eq!(mounts_of(&session), Vec::<String>::new());
    let mount = |program: &str, arguments: &[&str]| {
        let status = Command::new(program).args(arguments).arg(&session.dir).status().unwrap();
        assert!(status.success(), "{program}: {status}");
    };
    mount("mount", &["--bind", session.dir.to_str().unwrap()]);
    let seen = mounts_of(&session);
    mount("umount", &[]);
    assert_eq!(seen.len(), 1, "{seen:?}");
}

/// Finds directories that tools and sandboxes made for the session's user.
fn directories_of(session: &Session) -> Vec<PathBuf> {
    let uid = session.ids.uid.to_string();
    let entries = ["/tmp", "/run/user", "/dev/shm"]
        .map(Path::new)
        .into_iter()
        .filter_map(|dir| fs::read_dir(dir).ok());
    let paths = entries.flat_map(|entries| entries.flatten()).map(|entry| entry.path());
    paths.filter(|path| path.display().to_string().contains(&format!(".{uid}."))).collect()
}

pub(crate) async fn eventually(condition: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !holds() {
        assert!(Instant::now() < deadline, "timed out after {TIMEOUT:?}: {condition}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

async fn hidden_processes_die_with_the_command(fixture: Fixture) {
    let session = fixture.session();
    let hide =
        "setsid sleep 1001 & (setsid sh -c 'sleep 1002 & sleep 1003' &) & nohup sleep 1004 >/dev/null 2>&1 &
        sh -c 'trap \"\" TERM HUP INT; sleep 1005' & sleep 1006 & kill -STOP $!; echo hidden";
    let finished = fixture.sh(&session, hide).await;
    assert_eq!((finished.stdout.as_str(), finished.outcome), ("hidden\n", Outcome::Exited(0)));
    assert_eq!(processes_of(&session), BTreeMap::new());
}

async fn kill_tree_kills_processes_that_ignore_signals(fixture: Fixture) {
    let session = fixture.session();
    let stubborn =
        "trap '' TERM HUP INT QUIT; setsid sh -c 'trap \"\" TERM; sleep 1001' & sleep 1002 & kill -STOP $!
        echo ready; while :; do sleep 1003; done";
    let mut started = fixture.start(&session, stubborn).await;
    assert_eq!(started.line(), "ready");
    eventually("the control: live processes are seen", || processes_of(&session).len() > 2).await;
    started.running.signal(15).await;
    started.running.kill_tree().await;
    assert_eq!(started.running.wait().await.0, Outcome::Signaled(9));
    assert!(started.running.destroy().await.is_clean());
    assert_eq!(processes_of(&session), BTreeMap::new());
}

async fn command_dies_when_keep_alive_expires(fixture: Fixture) {
    let session = fixture.session();
    let mut started = fixture
        .start(&session, "setsid sleep 1001 & echo ready; read word; echo $word; sleep 1002")
        .await;
    assert_eq!(started.line(), "ready");
    started.running.remote().keep_alive(Duration::from_secs(3600));
    started.stdin.write_all(b"the control: it runs\n").unwrap();
    assert_eq!(started.line(), "the control: it runs");
    started.running.remote().keep_alive(Duration::from_millis(1));
    // Nothing polls the sandbox, as if the worker were paused.
    eventually("the command is dead", || {
        !processes_of(&session).values().any(|line| line.contains("sleep"))
    })
    .await;
    assert_eq!(started.running.wait().await.0, Outcome::Lost(LostReason::WorkerLost));
    assert!(started.running.destroy().await.is_clean());
    assert_eq!(processes_of(&session), BTreeMap::new());
}

async fn remote_kills_command_without_runtime(fixture: Fixture) {
    let session = fixture.session();
    let mut started = fixture
        .start(&session, "setsid sleep 1001 & echo ready; read word; echo $word; sleep 1002")
        .await;
    assert_eq!(started.line(), "ready");
    let remote = started.running.remote();
    started.stdin.write_all(b"the control: it runs\n").unwrap();
    assert_eq!(started.line(), "the control: it runs");
    // The output ends with the last process that can write to it.
    let mut stdout = started.stdout;
    let end = std::thread::spawn(move || std::io::copy(&mut stdout, &mut std::io::sink()));
    assert!(!end.is_finished(), "the control: the output is open");
    std::thread::spawn(move || remote.kill()).join().unwrap();
    // Nothing polls the sandbox, as if the runtime were busy.
    eventually("the command is dead", || end.is_finished()).await;
    assert_eq!(started.running.wait().await.0, Outcome::Signaled(9));
    assert!(started.running.destroy().await.is_clean());
}

async fn discarded_sandbox_leaves_nothing(fixture: Fixture) {
    let session = fixture.session();
    let plan = fixture.plan(&session);
    let prepared = fixture.backend.prepare(&plan).await.unwrap();
    let groups = groups_of(&session);
    assert!(!groups.is_empty(), "the control: a live sandbox has groups");
    assert!(!processes_of(&session).is_empty(), "the control: a live sandbox has processes");
    assert!(groups.iter().any(|dir| is_left(dir)), "the control: a live sandbox's groups are seen");
    assert!(prepared.discard().await.is_clean());
    assert_eq!(
        groups.iter().filter(|dir| is_left(dir)).collect::<Vec<_>>(),
        Vec::<&PathBuf>::new()
    );
    assert_eq!(processes_of(&session), BTreeMap::new());
    assert_eq!(directories_of(&session), Vec::<PathBuf>::new());
    assert_eq!(mounts_of(&session), Vec::<String>::new());
    assert_eq!(fs::read_dir(&session.dir).unwrap().count(), 0);
}

async fn dropped_sandbox_is_destroyed(fixture: Fixture) {
    let session = fixture.session();
    let plan = fixture.plan(&session);
    let prepared = fixture.backend.prepare(&plan).await.unwrap();
    let groups = groups_of(&session);
    drop(prepared);
    eventually("the prepared sandbox is gone", || {
        !groups.iter().any(|dir| is_left(dir)) && processes_of(&session).is_empty()
    })
    .await;
    let started = fixture.start(&session, "sleep 1000").await;
    drop(started.running);
    eventually("the running sandbox is gone", || {
        processes_of(&session).is_empty() && fixture.leftovers() == 0
    })
    .await;
}

async fn teardown_waits_for_free_descriptors(fixture: Fixture) {
    let session = fixture.session();
    let mut started = fixture.start(&session, "echo ready; sleep 1001").await;
    assert_eq!(started.line(), "ready");
    started.running.kill_tree().await;
    started.running.wait().await;
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..limit }).unwrap();
    assert!(fs::File::open("/dev/null").is_err(), "the control: no descriptor is free");
    let mut teardown = pin!(started.running.destroy());
    let early = timeout(Duration::from_secs(1), &mut teardown).await;
    setrlimit(Resource::Nofile, limit).unwrap();
    assert!(early.is_err(), "a teardown that saw nothing reported {early:?}");
    let receipt = teardown.await;
    assert!(receipt.is_clean(), "{receipt:?}");
    assert_eq!(processes_of(&session), BTreeMap::new());
}

async fn killed_prepared_sandbox_is_not_alive(fixture: Fixture) {
    let session = fixture.session();
    let prepared = fixture.backend.prepare(&fixture.plan(&session)).await.unwrap();
    assert!(prepared.is_alive());
    for pid in pids_of(&session) {
        process::kill(pid).unwrap();
    }
    eventually("the sandbox is reported dead", || !prepared.is_alive()).await;
    assert!(prepared.discard().await.is_clean());
}

/// Starts bubblewrap as a user. Returns it, its child, and the pipe that the child blocks on.
#[expect(clippy::zombie_processes, reason = "the caller waits for it")]
fn blocked_bwrap(uid: u32) -> (Child, Pid, ChildStdin) {
    let mut command = Command::new("bwrap");
    command.args("--unshare-user --unshare-pid --ro-bind / / --block-fd 0 true".split(' '));
    let mut tool =
        command.uid(uid).gid(uid).current_dir("/").stdin(Stdio::piped()).spawn().unwrap();
    let deadline = Instant::now() + TIMEOUT;
    while Instant::now() < deadline {
        if let [child] = process::descendants(Pid::from_child(&tool)).unwrap()[..] {
            let pipe = tool.stdin.take().unwrap();
            return (tool, child, pipe);
        }
        assert!(tool.try_wait().unwrap().is_none(), "bubblewrap exited");
    }
    panic!("bubblewrap started no process");
}

#[tokio::test]
async fn sweep_kills_orphans_of_killed_bubblewrap() {
    let Some(fixture) = Fixture::new(Kind::Bwrap).await else { return };
    if !is_root("only root can start bubblewrap as another user") {
        return;
    }
    // The children stay blocked while these pipes are open.
    let (mut killed, orphan, _first) = blocked_bwrap(*ORPHANS.start());
    let (mut living, child, _second) = blocked_bwrap(*ORPHANS.start());
    let (mut foreign, stranger, _third) = blocked_bwrap(*ORPHANS.end() + 1);
    for tool in [&mut killed, &mut foreign] {
        tool.kill().unwrap();
        tool.wait().unwrap();
    }
    assert!(process::is_alive(orphan), "the control: the orphan survives without a sweep");
    fixture.backend.upkeep().await.unwrap();
    eventually("the orphan is dead", || !process::is_alive(orphan)).await;
    assert!(process::is_alive(child) && process::is_alive(stranger));
    process::kill(stranger).unwrap();
    process::kill(child).unwrap();
    living.wait().unwrap();
}

async fn refused_launch_leaves_nothing(fixture: Fixture) {
    let session = fixture.session();
    assert!(fixture.launch(&session, &command(&["/no/such/program"])).await.is_err());
    assert_eq!(processes_of(&session), BTreeMap::new());
}

async fn missing_session_directory_is_a_named_error(fixture: Fixture) {
    let session = fixture.session();
    let mut plan = fixture.plan(&session);
    for mount in &mut plan.mounts {
        if let codelia_policy::Mount::Bind { source, writable: true, .. } = mount {
            *source = "/no/such/session".into();
        }
    }
    let error = fixture.backend.prepare(&plan).await.unwrap_err();
    let message = error.to_string();
    assert!(message.contains("/no/such/session") || message.contains("/workspace"), "{message}");
    assert_eq!(processes_of(&session), BTreeMap::new());
}

/// Kills many concurrent sandboxes of one session at different times.
async fn random_kills_of_many_sandboxes_leave_nothing(fixture: Fixture) {
    let session = fixture.session();
    let fixture = std::sync::Arc::new(fixture);
    let session = std::sync::Arc::new(session);
    // An emulated host takes seconds to start so many.
    let places = std::sync::Arc::new(tokio::sync::Semaphore::new(8));
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..24_u64 {
        let (fixture, session, places) = (fixture.clone(), session.clone(), places.clone());
        tasks.spawn(async move {
            let _place = places.acquire().await.unwrap();
            let mut started = fixture.start(&session, "sleep 1000 & sleep 0.05").await;
            if number % 3 != 0 {
                tokio::time::sleep(Duration::from_millis(number * 3)).await;
                started.running.kill_tree().await;
            }
            started.running.wait().await;
            started.running.destroy().await
        });
    }
    while let Some(receipt) = tasks.join_next().await {
        assert!(receipt.unwrap().is_clean());
    }
    assert_eq!(processes_of(&session), BTreeMap::new());
    assert_eq!(directories_of(&session), Vec::<PathBuf>::new());
    assert_eq!(mounts_of(&session), Vec::<String>::new());
}

in_every_mode!(
    hidden_processes_die_with_the_command,
    kill_tree_kills_processes_that_ignore_signals,
    command_dies_when_keep_alive_expires,
    remote_kills_command_without_runtime,
    discarded_sandbox_leaves_nothing,
    dropped_sandbox_is_destroyed,
    teardown_waits_for_free_descriptors,
    killed_prepared_sandbox_is_not_alive,
    refused_launch_leaves_nothing,
    missing_session_directory_is_a_named_error,
    random_kills_of_many_sandboxes_leave_nothing,
);
