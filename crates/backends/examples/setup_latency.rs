//! What setting up a sandbox costs beside its raw tool, in turns, so that a noisy moment hits
//! everybody alike. Run by root: `cargo run --release -p codelia-backends --example setup_latency`.

// A measurement that cannot go on has failed.
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
    Backend, CgroupParent, ContainerOptions, Stdio, ToolOptions, bwrap, container, find_init, nsjail,
};
use codelia_policy::{HostInfo, Ids, Limits, LimitsRequest, Plan, PlanTarget, Policy, RunSpec};
use codelia_types::{CommandSpec, Mode, RunId, SessionId};

const ROUNDS: usize = 200;
/// A container takes a hundred times as long.
const ROUNDS_OF_A_CONTAINER: usize = 20;
const IDS: Ids = Ids { uid: 399_000, gid: 399_000 };

/// The same namespaces and mounts, asked of the tools by hand; the files of `/etc` are added as they are found.
const RAW_BWRAP: &str = "--unshare-all --die-with-parent --as-pid-1 --cap-drop ALL --clearenv --hostname codelia \
    --uid 1000 --gid 1000 --ro-bind /usr /usr --symlink usr/bin /bin --symlink usr/lib /lib --symlink usr/lib64 /lib64 \
    --proc /proc --dev /dev --tmpfs /dev/shm --tmpfs /tmp --tmpfs /var/tmp --tmpfs /run";
const RAW_NSJAIL: &str = "--really_quiet --mode o --user 1000 --group 1000 --hostname codelia --disable_rlimits \
    --bindmount_ro /usr --symlink usr/bin:/bin --symlink usr/lib:/lib --symlink usr/lib64:/lib64 --bindmount_ro /dev/null \
    --tmpfsmount /tmp --tmpfsmount /var/tmp --tmpfsmount /run";

const RAW_CONTAINER: &str = "run --rm --network none --read-only --cap-drop ALL --ipc none --user 399000:399000 \
    --security-opt no-new-privileges --log-driver none --tmpfs /tmp --tmpfs /var/tmp --tmpfs /run";

struct Bench {
    session: PathBuf,
    host: HostInfo,
}

impl Bench {
    fn plan(&self, mode: Mode) -> Plan {
        let spec = RunSpec {
            command: command(),
            mode,
            network: None,
            limits: Limits { cpu_millis: 2000, ..Limits::default() },
            requested_limits: LimitsRequest::default(),
            policy: Policy::default(),
            ends_with_caller: false,
        };
        Plan::isolated(
            PlanTarget {
                sandbox: RunId::generate(),
                session: SessionId::generate(),
                root: self.session.clone(),
            },
            &spec,
            &self.host,
            IDS,
        )
        .unwrap()
    }

    /// From the plan to the command's execve, cold and prepared, and the whole run with its receipt.
    async fn ours(&self, backend: &dyn Backend) -> [Duration; 3] {
        let plan = self.plan(backend.mode());
        let begun = Instant::now();
        let prepared = backend.prepare(&plan).await.unwrap();
        let launched = prepared.launch(&command(), null()).await.unwrap();
        let cold = begun.elapsed();
        let mut running = launched.running;
        running.wait().await;
        assert!(running.destroy().await.is_clean());
        [cold, launched.setup_time, begun.elapsed()]
    }
}

fn raw(program: &Path, arguments: &str) -> Duration {
    raw_as(IDS.uid, program, arguments)
}

fn raw_as(user: u32, program: &Path, arguments: &str) -> Duration {
    let begun = Instant::now();
    let mut tool = Command::new(program);
    tool.args(arguments.split_whitespace()).current_dir("/").uid(user).gid(user);
    tool.env_clear().env("PATH", "/usr/bin");
    assert!(tool.status().unwrap().success(), "{tool:?}");
    begun.elapsed()
}

fn command() -> CommandSpec {
    CommandSpec {
        argv: vec!["/usr/bin/true".to_owned()],
        env: BTreeMap::new(),
        working_directory: String::new(),
        terminal: None,
        stdin: false,
    }
}

fn null() -> Stdio {
    let null = || File::options().read(true).write(true).open("/dev/null").unwrap().into();
    Stdio { stdin: null(), stdout: null(), stderr: null() }
}

fn print(name: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |share: usize| times[(times.len() * share / 100).min(times.len() - 1)].as_secs_f64() * 1000.0;
    println!("{name:32} p50 {:7.2} ms   p95 {:7.2} ms   p99 {:7.2} ms", at(50), at(95), at(99));
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let place = tempfile::tempdir().unwrap();
    fs::set_permissions(place.path(), Permissions::from_mode(0o711)).unwrap();
    let session = place.path().join("session");
    fs::create_dir(&session).unwrap();
    chown(&session, Some(IDS.uid), Some(IDS.gid)).unwrap();
    let jail = std::env::var_os("CODELIA_NSJAIL").map_or("nsjail".into(), PathBuf::from);
    let init = find_init().unwrap();
    let (program, groups) = (PathBuf::from("bwrap"), CgroupParent::default());
    let wrap = bwrap(ToolOptions { init: init.clone(), program, cgroup_parent: groups, sandbox_uids: None })
        .unwrap();
    let (program, groups) = (jail.clone(), CgroupParent::default());
    let cell = nsjail(ToolOptions { init: init.clone(), program, cgroup_parent: groups, sandbox_uids: None })
        .unwrap();
    let socket = std::env::var_os("CODELIA_TEST_ENGINE").map_or("/var/run/docker.sock".into(), PathBuf::from);
    let can = container(ContainerOptions {
        init,
        socket: socket.clone(),
        runtime: None,
        image: "codelia-base".to_owned(),
        profile_images: std::collections::BTreeMap::new(),
        control_dir: place.path().join("containers"),
        worker: "benchmark".to_owned(),
    })
    .unwrap();
    let found = [wrap.probe().await, cell.probe().await, can.probe().await];
    for one in found.iter().filter(|one| !one.usable) {
        println!("skipped: {}: {:?}", one.mode, one.gaps);
    }
    let runtime = codelia_backends::host_runtime();
    let bench = Bench { host: HostInfo { enforceable: found[0].enforceable, runtime }, session };

    let session = bench.session.display();
    let etc = |how: &dyn Fn(&str) -> String| -> String {
        bench.host.runtime.shown.iter().map(|path| how(path.to_str().unwrap())).collect()
    };
    let raw_bwrap = format!(
        "{RAW_BWRAP} {} --bind {session} /workspace /usr/bin/true",
        etc(&|path| format!("--ro-bind {path} {path} "))
    );
    let raw_nsjail = format!(
        "{RAW_NSJAIL} {} --bindmount {session}:/workspace -- /usr/bin/true",
        etc(&|path| format!("--bindmount_ro {path} "))
    );
    let raw_container = format!(
        "--host unix://{} {RAW_CONTAINER} --volume={session}:/workspace codelia-base /usr/bin/true",
        socket.display()
    );
    let mut times: [Vec<Duration>; 12] = Default::default();
    for round in 0..ROUNDS {
        times[0].push(raw(Path::new("bwrap"), &raw_bwrap));
        let ours = bench.ours(&wrap).await;
        (1..=3).for_each(|index| times[index].push(ours[index - 1]));
        if found[1].usable {
            times[4].push(raw(&jail, &raw_nsjail));
            let ours = bench.ours(&cell).await;
            (5..=7).for_each(|index| times[index].push(ours[index - 5]));
        }
        if found[2].usable && round % (ROUNDS / ROUNDS_OF_A_CONTAINER) == 0 {
            times[8].push(raw_as(0, Path::new("docker"), &raw_container));
            let ours = bench.ours(&can).await;
            (9..=11).for_each(|index| times[index].push(ours[index - 9]));
        }
    }
    let names = [
        "raw bwrap … true",
        "bwrap, cold setup",
        "bwrap, prepared setup",
        "bwrap, whole run with receipt",
        "raw nsjail … true",
        "nsjail, cold setup",
        "nsjail, prepared setup",
        "nsjail, whole run with receipt",
        "docker run … true",
        "container, cold setup",
        "container, prepared setup",
        "container, whole run with receipt",
    ];
    for (name, times) in names.into_iter().zip(times).filter(|(_, times)| !times.is_empty()) {
        print(name, times);
    }
}
