//! Compares what a run of `true` costs: raw bubblewrap, the backend of mode `bwrap`, and that of mode
//! `native`. Each runs in turn, two at once. Run as root: `cargo run --release -p codelia-backends
//! --example throughput`.

// A measurement that cannot continue has failed.
#![allow(clippy::unwrap_used)]

use std::{
    fs::{self, File, Permissions},
    os::unix::{
        fs::{PermissionsExt, chown},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

use codelia_backends::{
    Backend, CgroupParent, NativeOptions, Stdio, ToolOptions, bwrap, find_init, host_runtime, native,
};
use codelia_policy::{HostInfo, Ids, Limits, LimitsRequest, Plan, PlanTarget, Policy, RunSpec};
use codelia_types::{CommandSpec, RunId, SessionId};
use tokio::task::{JoinSet, spawn_blocking};

const RUNS: usize = 400;
const ROUNDS: usize = 3;
const AT_ONCE: u32 = 2;
const FIRST_UID: u32 = 399_100;
/// Kernel threads destroy what a run has left to them after it.
const SETTLE_TIME: Duration = Duration::from_millis(300);

const RAW: &str = "--unshare-all --die-with-parent --as-pid-1 --cap-drop ALL --clearenv --hostname codelia \
    --uid 1000 --gid 1000 --ro-bind /usr /usr --symlink usr/bin /bin --symlink usr/lib /lib \
    --symlink usr/lib64 /lib64 --proc /proc --dev /dev --tmpfs /dev/shm --tmpfs /tmp --tmpfs /var/tmp \
    --tmpfs /run";

/// A session of one of the callers.
struct Session {
    id: SessionId,
    directory: PathBuf,
    ids: Ids,
}

fn create_session(parent: &Path, number: u32) -> Session {
    let (directory, id) = (parent.join(number.to_string()), FIRST_UID + number);
    fs::create_dir(&directory).unwrap();
    chown(&directory, Some(id), Some(id)).unwrap();
    Session { id: SessionId::generate(), directory, ids: Ids { uid: id, gid: id } }
}

fn plan(backend: &dyn Backend, session: &Session, host: &HostInfo) -> Plan {
    let spec = RunSpec {
        command: CommandSpec::new(["/usr/bin/true"]),
        mode: backend.mode(),
        network: None,
        limits: Limits { cpu_millicores: 2000, ..Limits::default() },
        requested_limits: LimitsRequest::default(),
        policy: Policy::default(),
        ends_with_caller: false,
        tool: None,
        transaction: None,
    };
    let (sandbox, root) = (RunId::generate(), session.directory.clone());
    Plan::isolated(PlanTarget { sandbox, session: session.id, root }, &spec, host, session.ids).unwrap()
}

async fn run_in(backend: &dyn Backend, session: &Session, host: &HostInfo) {
    let null = || File::options().read(true).write(true).open("/dev/null").unwrap().into();
    let stdio = Stdio::Files { stdin: null(), stdout: null(), stderr: null() };
    let prepared = backend.prepare(&plan(backend, session, host)).await.unwrap();
    let mut running = prepared.launch(&CommandSpec::new(["/usr/bin/true"]), stdio).await.unwrap().running;
    running.wait().await;
    assert!(running.destroy().await.is_clean());
}

fn run_raw(session: &Session, etc: &[PathBuf]) {
    let mut tool = Command::new("bwrap");
    tool.args(RAW.split_whitespace());
    for path in etc {
        tool.arg("--ro-bind").args([path, path]);
    }
    tool.arg("--bind").arg(&session.directory).args(["/workspace", "/usr/bin/true"]);
    tool.current_dir("/").uid(session.ids.uid).gid(session.ids.gid);
    assert!(tool.status().unwrap().success());
}

/// Time that all processors were busy, in milliseconds.
fn busy_ms() -> u64 {
    let text = fs::read_to_string("/proc/stat").unwrap();
    let fields =
        text.lines().next().unwrap().split_whitespace().skip(1).map(|word| word.parse::<u64>().unwrap());
    // User, nice, system, interrupts and soft interrupts, in hundredths of a second.
    let counted = [true, true, true, false, false, true, true];
    fields.zip(counted).filter_map(|(time, counts)| counts.then_some(time * 10)).sum()
}

async fn measure(name: &str, work: impl Fn(Arc<Session>) -> JoinSet<()>, sessions: &[Arc<Session>]) {
    let (began, busy) = (Instant::now(), busy_ms());
    let callers: Vec<_> = sessions.iter().map(|session| work(session.clone())).collect();
    for caller in callers {
        caller.join_all().await;
    }
    let elapsed = began.elapsed();
    tokio::time::sleep(SETTLE_TIME).await;
    let each = (busy_ms() - busy) as f64 / RUNS as f64;
    println!(
        "{name:16} {:6.0} runs/s   {each:5.2} ms processor time each",
        RUNS as f64 / elapsed.as_secs_f64()
    );
}

#[tokio::main(worker_threads = 2)]
async fn main() {
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), Permissions::from_mode(0o711)).unwrap();
    let (init, cgroup_parent) = (find_init().unwrap(), CgroupParent::default());
    let options = ToolOptions {
        init: init.clone(),
        program: "bwrap".into(),
        cgroup_parent: cgroup_parent.clone(),
        sandbox_uids: None,
        engine_sockets: Vec::new(),
        watch_limits: false,
    };
    let native_options = NativeOptions {
        init,
        cgroup_parent,
        engine_sockets: Vec::new(),
        watch_limits: false,
        max_templates: 8,
    };
    let backends: [Arc<dyn Backend>; 2] =
        [Arc::new(bwrap(options).unwrap()), Arc::new(native(native_options).unwrap())];
    let sessions: Vec<_> =
        (0..AT_ONCE).map(|number| Arc::new(create_session(directory.path(), number))).collect();
    let (runtime, each) = (host_runtime(), RUNS / AT_ONCE as usize);
    for _ in 0..ROUNDS {
        let etc = runtime.shown.clone();
        let raw = |session: Arc<Session>| {
            let (mut caller, etc) = (JoinSet::new(), etc.clone());
            caller.spawn(async move {
                let work = move || (0..each).for_each(|_| run_raw(&session, &etc));
                spawn_blocking(work).await.unwrap();
            });
            caller
        };
        measure("raw bwrap", raw, &sessions).await;
        for backend in &backends {
            let host = HostInfo { enforceable: backend.probe().await.enforceable, runtime: runtime.clone() };
            let work = |session: Arc<Session>| {
                let (mut caller, backend, host) = (JoinSet::new(), backend.clone(), host.clone());
                caller.spawn(async move {
                    for _ in 0..each {
                        run_in(&*backend, &session, &host).await;
                    }
                });
                caller
            };
            measure(&format!("backend {}", backend.mode()), work, &sessions).await;
        }
    }
    backends.iter().for_each(|backend| backend.shutdown());
}
