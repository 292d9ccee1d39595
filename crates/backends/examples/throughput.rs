//! Compares what a run of `true` costs: raw bubblewrap, and the backends that make namespaces. Each
//! runs in turn, two at once. Run as root: `cargo run --release -p codelia-backends --example
//! throughput`, with the names of modes to measure these alone.

// A measurement that cannot continue has failed.
#![allow(clippy::unwrap_used)]

mod subjects;

use std::{
    fs::{self, Permissions},
    os::unix::{fs::PermissionsExt, process::CommandExt},
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

use codelia_backends::{Backend, host_runtime};
use codelia_policy::HostInfo;
use codelia_types::NetworkMode;
use subjects::{Session, command, namespace_backends, null_stdio};
use tokio::task::{JoinHandle, spawn_blocking};

const RUNS: usize = 400;
const ROUNDS: usize = 3;
const AT_ONCE: u32 = 2;
/// Kernel threads destroy what a run has left to them after it.
const SETTLE_TIME: Duration = Duration::from_millis(300);

async fn run_in(backend: &dyn Backend, session: &Session, host: &HostInfo) {
    let plan = session.plan(backend.mode(), NetworkMode::None, host);
    let prepared = backend.prepare(&plan).await.unwrap();
    let mut running = prepared.launch(&command(), null_stdio()).await.unwrap().running;
    running.wait().await;
    assert!(running.destroy().await.is_clean());
}

fn run_raw(session: &Session, arguments: &str) {
    let mut tool = Command::new("bwrap");
    tool.args(arguments.split_whitespace())
        .current_dir("/")
        .uid(session.ids.uid)
        .gid(session.ids.gid);
    assert!(tool.status().unwrap().success());
}

/// Time that all processors were busy, in milliseconds.
fn busy_ms() -> u64 {
    let text = fs::read_to_string("/proc/stat").unwrap();
    let fields = text
        .lines()
        .next()
        .unwrap()
        .split_whitespace()
        .skip(1)
        .map(|word| word.parse::<u64>().unwrap());
    // User, nice, system, interrupts and soft interrupts, in hundredths of a second.
    let counted = [true, true, true, false, false, true, true];
    fields.zip(counted).filter_map(|(time, counts)| counts.then_some(time * 10)).sum()
}

async fn measure(
    name: &str,
    work: impl Fn(Arc<Session>) -> JoinHandle<()>,
    sessions: &[Arc<Session>],
) {
    let (began, busy) = (Instant::now(), busy_ms());
    let callers: Vec<_> = sessions.iter().map(|session| work(session.clone())).collect();
    for caller in callers {
        caller.await.unwrap();
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
    let sessions: Vec<_> =
        (0..AT_ONCE).map(|number| Arc::new(Session::create(directory.path(), number))).collect();
    let (runtime, each) = (host_runtime(), RUNS / AT_ONCE as usize);
    let mut backends = Vec::new();
    let named: Vec<_> = std::env::args().skip(1).collect();
    let is_named = |mode: &str| named.is_empty() || named.iter().any(|name| name == mode);
    for backend in
        namespace_backends().into_iter().filter(|backend| is_named(backend.mode().as_str()))
    {
        let found = backend.probe().await;
        if found.usable {
            backends.push((
                backend,
                HostInfo { enforceable: found.enforceable, runtime: runtime.clone() },
            ));
        } else {
            println!("skipped: {}: {:?}", found.mode, found.gaps);
        }
    }
    for _ in 0..ROUNDS {
        let raw = |session: Arc<Session>| {
            let arguments = session.raw_bwrap(&runtime.shown);
            spawn_blocking(move || (0..each).for_each(|_| run_raw(&session, &arguments)))
        };
        if named.is_empty() {
            measure("raw bwrap", raw, &sessions).await;
        }
        for (backend, host) in &backends {
            let work = |session: Arc<Session>| {
                let (backend, host) = (backend.clone(), host.clone());
                #[expect(
                    clippy::disallowed_methods,
                    reason = "a measurement has no service to stop"
                )]
                tokio::spawn(async move {
                    for _ in 0..each {
                        run_in(&*backend, &session, &host).await;
                    }
                })
            };
            measure(&format!("backend {}", backend.mode()), work, &sessions).await;
        }
    }
    backends.iter().for_each(|(backend, _)| backend.shutdown());
}
