//! Measures sandbox setup against the raw tool. Both alternate, so that noise of the machine
//! affects them alike. Run as root: `cargo run --release -p codelia-backends --example
//! setup_latency`.

// A measurement that cannot continue has failed.
#![allow(clippy::unwrap_used)]

use std::{
    collections::BTreeMap,
    fs::{self, File, Permissions},
    os::unix::{
        fs::{PermissionsExt, chown},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use codelia_backends::{
    Backend, Capabilities, CgroupParent, ContainerOptions, Stdio, ToolOptions, bwrap, container, find_init,
    nsjail,
};
use codelia_policy::{HostInfo, Ids, Limits, LimitsRequest, Plan, PlanTarget, Policy, RunSpec};
use codelia_types::{CommandSpec, Mode, NetworkMode, RunId, SessionId};

const ROUNDS: usize = 200;
/// A container takes a hundred times as long, so it is measured every tenth round.
const CONTAINER_INTERVAL: usize = 10;
const IDS: Ids = Ids { uid: 399_000, gid: 399_000 };
const PROGRAM: &str = "/usr/bin/true";

// The namespaces and mounts of the default plan, as arguments of the raw tools. The files of `/etc`
// are added at run time.
const RAW_BWRAP: &str = "--unshare-all --die-with-parent --as-pid-1 --cap-drop ALL --clearenv \
    --hostname codelia --uid 1000 --gid 1000 --ro-bind /usr /usr --symlink usr/bin /bin \
    --symlink usr/lib /lib --symlink usr/lib64 /lib64 --proc /proc --dev /dev --tmpfs /dev/shm \
    --tmpfs /tmp --tmpfs /var/tmp --tmpfs /run";
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
    raw_name: &'static str,
    raw_tool: RawTool,
    backend: Box<dyn Backend>,
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
    fn new(raw_name: &'static str, raw_tool: RawTool, backend: Box<dyn Backend>, interval: usize) -> Self {
        let (raw, cold, prepared, whole, proxy) = Default::default();
        Self { raw_name, raw_tool, backend, interval, raw, cold, prepared, whole, proxy }
    }

    /// Measures the raw tool, then the backend: from the plan to the command's `execve`, cold and
    /// prepared, and the whole run with its receipt.
    async fn measure(&mut self, plan: &Plan) {
        self.raw.push(self.raw_tool.run());
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
        print(self.raw_name, self.raw);
        print(&format!("{mode}, cold setup"), self.cold);
        if !self.proxy.is_empty() {
            print(&format!("{mode}, cold setup with proxy"), self.proxy);
        }
        print(&format!("{mode}, prepared setup"), self.prepared);
        print(&format!("{mode}, whole run with receipt"), self.whole);
    }
}

fn plan(mode: Mode, network: NetworkMode, session: &Path, host: &HostInfo) -> Plan {
    let spec = RunSpec {
        command: command(),
        mode,
        network: Some(network),
        limits: Limits { cpu_millicores: 2000, ..Limits::default() },
        requested_limits: LimitsRequest::default(),
        policy: Policy::default(),
        ends_with_caller: false,
        tool: None,
        transaction: None,
    };
    let target =
        PlanTarget { sandbox: RunId::generate(), session: SessionId::generate(), root: session.to_owned() };
    Plan::isolated(target, &spec, host, IDS).unwrap()
}

fn command() -> CommandSpec {
    CommandSpec::new([PROGRAM])
}

fn null_stdio() -> Stdio {
    let null = || File::options().read(true).write(true).open("/dev/null").unwrap().into();
    Stdio::Files { stdin: null(), stdout: null(), stderr: null() }
}

fn print(name: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let percentile =
        |percent: usize| times[(times.len() * percent / 100).min(times.len() - 1)].as_secs_f64() * 1000.0;
    println!(
        "{name:32} p50 {:7.2} ms   p95 {:7.2} ms   p99 {:7.2} ms",
        percentile(50),
        percentile(95),
        percentile(99)
    );
}

fn create_session(directory: &Path) -> PathBuf {
    fs::set_permissions(directory, Permissions::from_mode(0o711)).unwrap();
    let session = directory.join("session");
    fs::create_dir(&session).unwrap();
    chown(&session, Some(IDS.uid), Some(IDS.gid)).unwrap();
    session
}

fn tool_options(program: &Path) -> ToolOptions {
    ToolOptions {
        init: find_init().unwrap(),
        program: program.to_owned(),
        cgroup_parent: CgroupParent::default(),
        sandbox_uids: None,
        engine_sockets: Vec::new(),
        watch_limits: false,
    }
}

/// All modes with their raw tools. `etc` are the files of `/etc` that sandboxes see.
fn comparisons(directory: &Path, session: &Path, etc: &[PathBuf]) -> [Comparison; 3] {
    let bwrap_program = PathBuf::from("bwrap");
    let nsjail_program = std::env::var_os("CODELIA_NSJAIL").map_or("nsjail".into(), PathBuf::from);
    let socket = std::env::var_os("CODELIA_TEST_ENGINE").map_or("/var/run/docker.sock".into(), PathBuf::from);
    let options = ContainerOptions {
        init: find_init().unwrap(),
        socket: socket.clone(),
        runtime: None,
        image: "codelia-base".to_owned(),
        profile_images: BTreeMap::new(),
        control_dir: directory.join("containers"),
        worker: "benchmark".to_owned(),
    };
    let bwrap_backend = Box::new(bwrap(tool_options(&bwrap_program)).unwrap());
    let nsjail_backend = Box::new(nsjail(tool_options(&nsjail_program)).unwrap());
    let container_backend = Box::new(container(options).unwrap());

    let each = |argument: &dyn Fn(&str) -> String| -> String {
        etc.iter().map(|path| argument(path.to_str().unwrap())).collect()
    };
    let (session, socket) = (session.display(), socket.display());
    let raw_bwrap = RawTool {
        program: bwrap_program,
        arguments: format!(
            "{RAW_BWRAP} {} --bind {session} /workspace {PROGRAM}",
            each(&|path| format!("--ro-bind {path} {path} "))
        ),
        uid: IDS.uid,
    };
    let raw_nsjail = RawTool {
        program: nsjail_program,
        arguments: format!(
            "{RAW_NSJAIL} {} --bindmount {session}:/workspace -- {PROGRAM}",
            each(&|path| format!("--bindmount_ro {path} "))
        ),
        uid: IDS.uid,
    };
    let raw_container = RawTool {
        program: PathBuf::from("docker"),
        arguments: format!(
            "--host unix://{socket} {RAW_CONTAINER} --volume={session}:/workspace codelia-base {PROGRAM}"
        ),
        uid: 0,
    };
    [
        Comparison::new("raw bwrap … true", raw_bwrap, bwrap_backend, 1),
        Comparison::new("raw nsjail … true", raw_nsjail, nsjail_backend, 1),
        Comparison::new("docker run … true", raw_container, container_backend, CONTAINER_INTERVAL),
    ]
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let directory = tempfile::tempdir().unwrap();
    let session = create_session(directory.path());
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
                comparison.measure(&plan(mode, NetworkMode::None, &session, &host)).await;
                if host.enforceable.egress {
                    let plan = plan(mode, NetworkMode::Proxy, &session, &host);
                    comparison.measure_proxy(&plan).await;
                }
            }
        }
    }
    usable.into_iter().for_each(Comparison::print);
}
