//! Measures sandbox setup against the raw tool. Both alternate, so that noise of the machine
//! affects them alike. Run as root: `cargo run --release -p codelia-backends --example
//! setup_latency`.

// A measurement that cannot continue has failed.
#![allow(clippy::unwrap_used)]

mod subjects;

use std::{
    collections::BTreeMap,
    fs::{self, Permissions},
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

use codelia_backends::{Backend, Capabilities, ContainerOptions, container, find_init};
use codelia_policy::{HostInfo, Plan};
use codelia_types::NetworkMode;
use subjects::{PROGRAM, Session, command, namespace_backends, nsjail_program, null_stdio};

const ROUNDS: usize = 200;
/// A container takes a hundred times as long, so it is measured every tenth round.
const CONTAINER_INTERVAL: usize = 10;

// The namespaces and mounts of the default plan, as arguments of the raw tools. The files of `/etc`
// are added at run time.
const RAW_NSJAIL: &str = "--really_quiet --mode o --user 1000 --group 1000 --hostname codelia \
    --disable_rlimits --bindmount_ro /usr --symlink usr/bin:/bin --symlink usr/lib:/lib \
    --symlink usr/lib64:/lib64 --bindmount_ro /dev/null --tmpfsmount /tmp --tmpfsmount /var/tmp \
    --tmpfsmount /run";
const RAW_CONTAINER: &str = "run --rm --network none --read-only --cap-drop ALL --ipc none \
    --user 399000:399000 --security-opt no-new-privileges --log-driver none --tmpfs /tmp \
    --tmpfs /var/tmp --tmpfs /run";

/// A raw tool with its arguments.
struct RawTool {
    program: PathBuf,
    arguments: String,
    uid: u32,
}

impl RawTool {
    fn run(&self) -> Duration {
        let start = Instant::now();
        let mut tool = Command::new(&self.program);
        tool.args(self.arguments.split_whitespace()).current_dir("/").uid(self.uid).gid(self.uid);
        tool.env_clear().env("PATH", "/usr/bin");
        assert!(tool.status().unwrap().success(), "{tool:?}");
        start.elapsed()
    }
}

/// A mode and its raw tool, with their measurements.
struct Comparison {
    /// `None` if another one measures the same tool.
    raw_tool: Option<(&'static str, RawTool)>,
    backend: Arc<dyn Backend>,
    /// Measure in every n-th round.
    interval: usize,
    raw: Vec<Duration>,
    cold: Vec<Duration>,
    prepared: Vec<Duration>,
    whole: Vec<Duration>,
    /// Like `cold`, in network mode `proxy`.
    proxy: Vec<Duration>,
}

impl Comparison {
    fn new(
        raw_tool: Option<(&'static str, RawTool)>,
        backend: Arc<dyn Backend>,
        interval: usize,
    ) -> Self {
        let (raw, cold, prepared, whole, proxy) = Default::default();
        Self { raw_tool, backend, interval, raw, cold, prepared, whole, proxy }
    }

    /// Measures the raw tool, then the backend: from the plan to the command's `execve`, cold and
    /// prepared, and the whole run with its receipt.
    async fn measure(&mut self, plan: &Plan) {
        self.raw.extend(self.raw_tool.as_ref().map(|(_, tool)| tool.run()));
        let start = Instant::now();
        let prepared = self.backend.prepare(plan).await.unwrap();
        let launched = prepared.launch(&command(), null_stdio()).await.unwrap();
        self.cold.push(start.elapsed());
        self.prepared.push(launched.setup_time);
        let mut running = launched.running;
        running.wait().await;
        assert!(running.destroy().await.is_clean());
        self.whole.push(start.elapsed());
    }

    /// Measures the setup in network mode `proxy`, with the sockets handed over.
    async fn measure_proxy(&mut self, plan: &Plan) {
        let start = Instant::now();
        let mut prepared = self.backend.prepare(plan).await.unwrap();
        let sockets = prepared.take_egress().unwrap();
        let mut running = prepared.launch(&command(), null_stdio()).await.unwrap().running;
        self.proxy.push(start.elapsed());
        running.wait().await;
        assert!(running.destroy().await.is_clean());
        drop(sockets);
    }

    fn print(self) {
        let mode = self.backend.mode();
        if let Some((name, _)) = self.raw_tool {
            print(name, self.raw);
        }
        print(&format!("{mode}, cold setup"), self.cold);
        if !self.proxy.is_empty() {
            print(&format!("{mode}, cold setup with proxy"), self.proxy);
        }
        print(&format!("{mode}, prepared setup"), self.prepared);
        print(&format!("{mode}, whole run with receipt"), self.whole);
    }
}

fn print(name: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let percentile = |percent: usize| {
        times[(times.len() * percent / 100).min(times.len() - 1)].as_secs_f64() * 1000.0
    };
    println!(
        "{name:32} p50 {:7.2} ms   p95 {:7.2} ms   p99 {:7.2} ms",
        percentile(50),
        percentile(95),
        percentile(99)
    );
}

/// All modes with their raw tools. `etc` are the files of `/etc` that sandboxes see.
fn comparisons(directory: &Path, session: &Session, etc: &[PathBuf]) -> [Comparison; 4] {
    let socket = std::env::var_os("CODELIA_TEST_ENGINE")
        .map_or("/var/run/docker.sock".into(), PathBuf::from);
    let options = ContainerOptions {
        init: find_init().unwrap(),
        socket: socket.clone(),
        runtime: None,
        image: "codelia-base".to_owned(),
        profile_images: BTreeMap::new(),
        control_dir: directory.join("containers"),
        worker: "benchmark".to_owned(),
    };
    let [bwrap, nsjail, native] = namespace_backends();
    let container = Arc::new(container(options).unwrap());
    let (workspace, socket) = (session.directory.display(), socket.display());
    let raw_bwrap = RawTool {
        program: "bwrap".into(),
        arguments: session.raw_bwrap(etc),
        uid: session.ids.uid,
    };
    let etc: String =
        etc.iter().map(|path| format!("--bindmount_ro {} ", path.display())).collect();
    let raw_nsjail = RawTool {
        program: nsjail_program(),
        arguments: format!("{RAW_NSJAIL} {etc} --bindmount {workspace}:/workspace -- {PROGRAM}"),
        uid: session.ids.uid,
    };
    let raw_container = RawTool {
        program: PathBuf::from("docker"),
        arguments: format!(
            "--host unix://{socket} {RAW_CONTAINER} --volume={workspace}:/workspace codelia-base {PROGRAM}"
        ),
        uid: 0,
    };
    [
        Comparison::new(Some(("raw bwrap … true", raw_bwrap)), bwrap, 1),
        Comparison::new(None, native, 1),
        Comparison::new(Some(("raw nsjail … true", raw_nsjail)), nsjail, 1),
        Comparison::new(Some(("docker run … true", raw_container)), container, CONTAINER_INTERVAL),
    ]
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), Permissions::from_mode(0o711)).unwrap();
    let session = Session::create(directory.path(), 0);
    let runtime = codelia_backends::host_runtime();
    let mut usable = Vec::new();
    let mut enforceable = None;
    for comparison in comparisons(directory.path(), &session, &runtime.shown) {
        let found: Capabilities = comparison.backend.probe().await;
        // Plans use what the first mode, bwrap, can enforce.
        enforceable.get_or_insert(found.enforceable);
        if found.usable {
            usable.push(comparison);
        } else {
            println!("skipped: {}: {:?}", found.mode, found.gaps);
        }
    }
    let host = HostInfo { enforceable: enforceable.unwrap(), runtime };
    for round in 0..ROUNDS {
        for comparison in &mut usable {
            if round % comparison.interval == 0 {
                let mode = comparison.backend.mode();
                comparison.measure(&session.plan(mode, NetworkMode::None, &host)).await;
                if host.enforceable.egress {
                    comparison.measure_proxy(&session.plan(mode, NetworkMode::Proxy, &host)).await;
                }
            }
        }
    }
    for comparison in usable {
        comparison.backend.shutdown();
        comparison.print();
    }
}
