//! Objects of the host and of neighbours that have no path below the workspace: IPC, sockets of
//! container engines, devices, processes.

use std::{
    fs::{self, Permissions},
    os::unix::{fs::PermissionsExt, net::UnixListener, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use codelia_backends::Error;
use codelia_sys::process;
use codelia_types::Outcome;

use crate::harness::{Finished, Fixture, Kind, Session, command, in_every_mode, in_mode, is_root};

/// Creates System V objects and a POSIX queue with this key.
const CREATE: &str = r#"perl -e '$k = $ENV{KEY}; $n = "codelia$k"; defined shmget($k, 4096, 01666) or die "shm $!";
    defined msgget($k, 01666) or die "msg $!"; defined semget($k, 1, 01666) or die "sem $!";
    syscall(240, $n, 0102, 0666, 0) >= 0 or die "mq $!"'"#;

/// Prints those of these objects that exist here.
const FIND: &str = r#"perl -e '$k = $ENV{KEY}; $n = "codelia$k"; print "shm " if defined shmget($k, 0, 0);
    print "msg " if defined msgget($k, 0); print "sem " if defined semget($k, 0, 0);
    print "mq" if syscall(240, $n, 2, 0, 0) >= 0; print "\n"'"#;

const ALL: &str = "shm msg sem mq\n";

/// Runs a script in a session with these variables.
async fn run_with(
    fixture: &Fixture,
    session: &Session,
    script: &str,
    env: &[(&str, String)],
) -> Finished {
    let mut shell = command(&["sh", "-c", script]);
    shell.env = env.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
    let finished = fixture.launch(session, &shell).await.unwrap().finish().await;
    assert_eq!(finished.outcome, Outcome::Exited(0), "{finished:?}");
    finished
}

/// Runs a script on the host and returns its output.
fn on_host(script: &str, key: u32) -> String {
    let output =
        Command::new("sh").args(["-c", script]).env("KEY", key.to_string()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// IPC objects of the host.
struct HostIpc(u32);

impl HostIpc {
    fn create() -> Self {
        let ipc = Self(0x0c0d_0000 + std::process::id() % 0xffff);
        on_host(CREATE, ipc.0);
        ipc
    }
}

impl Drop for HostIpc {
    fn drop(&mut self) {
        let key = self.0;
        on_host(&format!("ipcrm -M {key} -Q {key} -S {key}"), key);
        on_host(r#"perl -e '$n = "codelia$ENV{KEY}"; syscall(241, $n) == 0 or die'"#, key);
    }
}

async fn ipc_objects_are_isolated(fixture: Fixture) {
    let ipc = HostIpc::create();
    let env = [("KEY", ipc.0.to_string())];
    assert_eq!(on_host(FIND, ipc.0), ALL, "the control: they exist on the host");
    let neighbour = fixture.session();
    let mut shell =
        command(&["sh", "-c", &format!("{CREATE} && echo made && {FIND} && read line")]);
    shell.env = env.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
    let mut running = fixture.launch(&neighbour, &shell).await.unwrap();
    assert_eq!(running.line(), "made");
    assert_eq!(running.line(), ALL.trim_end(), "the control: they exist in the neighbour");
    for session in [fixture.session(), neighbour] {
        assert_eq!(
            run_with(&fixture, &session, FIND, &env).await.stdout,
            "\n",
            "not even its own session's"
        );
    }
    assert_eq!(running.finish_with("\n").await.outcome, Outcome::Exited(0));
}

/// Connects to a socket on the host that stands for an engine's.
const CONNECT: &str = r#"perl -MSocket -e 'for (split / /, $ENV{SOCKETS}) { socket(S, AF_UNIX, SOCK_STREAM, 0);
    connect(S, pack_sockaddr_un($_)) and print "reached $_\n" }'"#;

/// Sockets of the engines of a user, where rootless engines have them.
struct RootlessSockets {
    dir: PathBuf,
    _listeners: Vec<UnixListener>,
}

impl RootlessSockets {
    fn create() -> Self {
        // No user has this id.
        let dir = PathBuf::from(format!("/run/user/{}", 1_900_000_000 + std::process::id()));
        fs::create_dir_all(dir.join("podman")).unwrap();
        let paths = ["docker.sock", "podman/podman.sock"].map(|name| dir.join(name));
        let listeners = paths.iter().map(|path| UnixListener::bind(path).unwrap()).collect();
        for path in paths.iter().map(PathBuf::as_path).chain([dir.as_path(), &dir.join("podman")]) {
            fs::set_permissions(path, Permissions::from_mode(0o777)).unwrap();
        }
        Self { dir, _listeners: listeners }
    }

    /// The sockets under both names of `/run`.
    fn paths(&self) -> String {
        let names = ["docker.sock", "podman/podman.sock"].map(|name| self.dir.join(name));
        let names = names.map(|path| format!("{0} /var{0}", path.display()));
        names.join(" ")
    }
}

impl Drop for RootlessSockets {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.dir).unwrap();
    }
}

async fn engine_sockets_are_invisible(mut fixture: Fixture) {
    if !is_root("only root can create sockets below /run/user") {
        return;
    }
    let sockets = RootlessSockets::create();
    let env = [("SOCKETS", sockets.paths())];
    let host =
        Command::new("sh").args(["-c", CONNECT]).env("SOCKETS", sockets.paths()).output().unwrap();
    let seen = String::from_utf8(host.stdout).unwrap();
    assert!(seen.contains("docker.sock") && seen.contains("podman.sock"), "the control: {seen}");
    let opened =
        [None, Some("/var/run"), Some("/run/user")].into_iter().chain([sockets.dir.to_str()]);
    for path in opened {
        fixture.policy.filesystem.read_only_paths = path.map(|path| vec![PathBuf::from(path)]);
        let session = fixture.session();
        match fixture.backend.prepare(&fixture.plan(&session)).await {
            // The engine's own socket is there too, or /var/run is /run in the image.
            Err(Error::Unenforceable { field: "policy.filesystem" } | Error::InitFailed(_))
                if fixture.kind.is_container() => {}
            // Or gVisor refuses to mount below that link.
            Err(Error::Engine { step: "start the container", .. })
                if fixture.kind == Kind::Runsc && path == Some("/var/run") => {}
            prepared => {
                assert!(prepared.unwrap().discard().await.is_clean());
                let finished = run_with(&fixture, &session, CONNECT, &env).await;
                assert_eq!(finished.stdout, "", "{path:?}");
            }
        }
    }
}

async fn configured_engine_socket_is_invisible(mut fixture: Fixture) {
    let socket = fixture.configured_engine_socket();
    let directory = socket.parent().unwrap().to_owned();
    fs::create_dir(&directory).unwrap();
    let _listener = UnixListener::bind(&socket).unwrap();
    let other = directory.join("other.sock");
    let _other = UnixListener::bind(&other).unwrap();
    for path in [&directory, &socket, &other] {
        fs::set_permissions(path, Permissions::from_mode(0o777)).unwrap();
    }
    fixture.policy.filesystem.read_only_paths = Some(vec![directory]);
    let env = [("SOCKETS", format!("{} {}", socket.display(), other.display()))];
    let finished = run_with(&fixture, &fixture.session(), CONNECT, &env).await;
    assert_eq!(
        finished.stdout,
        format!("reached {}\n", other.display()),
        "the control: another socket"
    );
}

async fn device_nodes_cannot_be_opened(fixture: Fixture) {
    if !is_root("only root can create devices") {
        return;
    }
    let session = fixture.session();
    let device = session.dir.join("node");
    // Engines let containers open some devices, such as zero, but not kmsg.
    let minor = if fixture.kind.is_container() { "11" } else { "5" };
    assert!(Command::new("mknod").arg(&device).args(["c", "1", minor]).status().unwrap().success());
    fs::set_permissions(&device, Permissions::from_mode(0o666)).unwrap();
    let open =
        |path: &str| format!(r#"perl -e 'print open(F, "<", "{path}") ? "opened" : "refused"'"#);
    let host =
        Command::new("sh").args(["-c", &open("node")]).current_dir(&session.dir).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&host.stdout), "opened", "the control: it is a device");
    assert_eq!(fixture.sh(&session, &open("node")).await.stdout, "refused");
    assert_eq!(fixture.sh(&session, &open("/dev/zero")).await.stdout, "opened", "/dev still works");
}

/// Traces its own child, then tries each of `TARGETS` in three ways.
const TRACE: &str = r#"perl -e '$| = 1; defined($child = fork) or die; if (!$child) { sleep 1000; exit }
    print "own\n" if syscall(101, 0x4206, $child, 0, 0) == 0;
    for $pid (split / /, $ENV{TARGETS}) {
        print "traced $pid\n" if syscall(101, 0x4206, $pid + 0, 0, 0) == 0;
        ($maps) = grep { /stack/ } do { open(M, "<", "/proc/$pid/maps"); <M> };
        print "read $pid\n" if open(F, "<", "/proc/$pid/mem") && $maps =~ /^(\w+)/ && sysseek(F, hex $1, 0)
            && sysread(F, $x, 8);
        $fd = syscall(434, $pid + 0, 0); print "took $pid\n" if $fd >= 0 && syscall(438, $fd, 0, 0) >= 0 }
    kill 9, $child'"#;

/// A process of the host, with the user of a session.
struct HostProcess(Child);

impl HostProcess {
    fn start(session: &Session) -> Self {
        let mut sleep = Command::new("sleep");
        sleep.arg("1000").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        if process::own_uid() == 0 {
            sleep.uid(session.ids.uid).gid(session.ids.gid).current_dir("/");
        }
        Self(sleep.spawn().unwrap())
    }
}

impl Drop for HostProcess {
    fn drop(&mut self) {
        let _ = (self.0.kill(), self.0.wait());
    }
}

async fn debugging_reaches_only_own_sandbox(mut fixture: Fixture) {
    fixture.policy.process.debug = Some(true);
    let session = fixture.session();
    let victim = HostProcess::start(&session);
    // gVisor protects no process inside from others there.
    let init = if fixture.kind == Kind::Runsc { "" } else { "1 " };
    let env = [("TARGETS", format!("{init}{}", victim.0.id()))];
    assert_eq!(run_with(&fixture, &session, TRACE, &env).await.stdout, "own\n");
}

#[tokio::test]
async fn debugging_reaches_the_host_without_isolation() {
    if !is_root("a host may keep users from tracing their own processes") {
        return;
    }
    let Some(fixture) = Fixture::new(Kind::Logical).await else { return };
    let session = fixture.session();
    let victim = HostProcess::start(&session);
    let pid = victim.0.id();
    let env = [("TARGETS", pid.to_string())];
    let expected = format!("own\ntraced {pid}\nread {pid}\ntook {pid}\n");
    assert_eq!(run_with(&fixture, &session, TRACE, &env).await.stdout, expected);
}

/// Mount points whose options lack one of these words.
async fn mounts_without(fixture: &Fixture, options: &[&str]) -> Vec<String> {
    let table = fixture.stdout_of("cat /proc/self/mountinfo").await;
    let lacks = |line: &str| {
        let mut fields = line.split(' ').skip(4);
        let (target, found) = (fields.next()?, fields.next()?);
        let has = |option: &&str| found.split(',').any(|word| word == *option);
        (!options.iter().all(has)).then(|| target.to_owned())
    };
    table.lines().filter_map(lacks).collect()
}

async fn mounts_are_nosuid_and_nodev(fixture: Fixture) {
    let is_device = |path: &str| Path::new(path).starts_with("/dev") && path != "/dev";
    // The root that nsjail makes is empty and read-only.
    let is_exempt = |path: &str| is_device(path) || fixture.kind == Kind::Nsjail && path == "/";
    let mut lacking = mounts_without(&fixture, &["nosuid", "nodev"]).await;
    lacking.retain(|path| !is_exempt(path));
    assert_eq!(lacking, Vec::<String>::new());
    assert!(!mounts_without(&fixture, &["noexec"]).await.contains(&"/proc".to_owned()));
}

in_every_mode!(
    ipc_objects_are_isolated,
    engine_sockets_are_invisible,
    device_nodes_cannot_be_opened,
    debugging_reaches_only_own_sandbox,
);

// In a container, the masks and small files of the engine lack `nodev`.
in_mode!(bwrap_alone = Bwrap: mounts_are_nosuid_and_nodev, configured_engine_socket_is_invisible);
in_mode!(nsjail_alone = Nsjail: mounts_are_nosuid_and_nodev, configured_engine_socket_is_invisible);
in_mode!(native_alone = Native: mounts_are_nosuid_and_nodev, configured_engine_socket_is_invisible);
