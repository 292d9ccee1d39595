//! The environment of a command: enough for ordinary work, and nothing leaked by the worker.

use std::{
    fs::{self, File},
    io::Read,
    os::unix::fs::MetadataExt,
};

use codelia_backends::Stdio;
use codelia_types::{Outcome, TerminalSize};

use crate::harness::{Fixture, command, in_every_mode};

async fn workspace_is_session_directory_owned_by_user(fixture: Fixture) {
    let session = fixture.session();
    session.write("before", "from outside");
    let finished = fixture
        .sh(&session, "pwd; cat before; echo from inside > after; id -u; id -un; echo $HOME")
        .await;
    let uid = fixture.ids_inside(&session).uid;
    assert_eq!(
        finished.stdout,
        format!("/workspace\nfrom outside{uid}\ncodelia\n/workspace\n"),
        "{finished:?}"
    );
    let after = session.dir.join("after");
    assert_eq!(fs::read_to_string(&after).unwrap(), "from inside\n");
    let owner = fs::metadata(&after).unwrap();
    assert_eq!((owner.uid(), owner.gid()), (session.ids.uid, session.ids.gid));
}

async fn workspace_allows_no_setuid_and_no_devices(fixture: Fixture) {
    let options =
        fixture.stdout_of("awk '$5 == \"/workspace\" { print $6 }' /proc/self/mountinfo").await;
    let has = |option| options.trim().split(',').any(|found| found == option);
    assert!(has("rw") && has("nosuid") && has("nodev"), "{options}");
}

async fn working_directory_is_below_workspace(fixture: Fixture) {
    let session = fixture.session();
    fs::create_dir(session.dir.join("deep")).unwrap();
    session.chown(&session.dir.join("deep"));
    let mut pwd = command(&["pwd"]);
    pwd.working_directory = "deep".to_owned();
    assert_eq!(
        fixture.launch(&session, &pwd).await.unwrap().finish().await.stdout,
        "/workspace/deep\n"
    );
    pwd.working_directory = "../tmp".to_owned();
    assert!(fixture.launch(&session, &pwd).await.is_err());
}

async fn private_directories_are_emptied_after_each_run(fixture: Fixture) {
    let session = fixture.session();
    let dirs = "/tmp /var/tmp /run /dev/shm";
    let write = format!("for d in {dirs}; do echo x > $d/mine || exit 1; done");
    assert_eq!(fixture.sh(&session, &write).await.outcome, Outcome::Exited(0));
    let look = format!("for d in {dirs}; do ls -A $d; done");
    assert_eq!(fixture.sh(&session, &look).await.stdout, "");
}

async fn command_inherits_only_three_streams(fixture: Fixture) {
    // The control: this process has a descriptor that a plain spawn passes on.
    let open = File::open("/etc/passwd").unwrap();
    rustix::io::fcntl_setfd(&open, rustix::io::FdFlags::empty()).unwrap();
    let plain = std::process::Command::new("ls").arg("/proc/self/fd").output().unwrap();
    let count = |listed: &str| listed.split_whitespace().count();
    assert!(count(&String::from_utf8_lossy(&plain.stdout)) > 4);
    // Three streams and the listed directory.
    let listed = fixture.stdout_of("exec ls /proc/self/fd").await;
    assert_eq!(count(&listed), 4, "{listed}");
}

async fn environment_is_clean(fixture: Fixture) {
    let listed = fixture.stdout_of("exec env").await;
    let mut names: Vec<_> = listed.lines().filter_map(|line| line.split('=').next()).collect();
    names.sort_unstable();
    assert_eq!(names, ["HOME", "LANG", "PATH", "PWD"], "PWD is set by the shell");
}

async fn init_cannot_be_killed_from_inside(fixture: Fixture) {
    assert_eq!(
        fixture.stdout_of("kill -9 1; kill -STOP 1; kill -TERM 1; echo alive").await,
        "alive\n"
    );
}

async fn dev_is_minimal(fixture: Fixture) {
    let listed = fixture.stdout_of("ls /dev").await;
    let allowed =
        "core fd full mqueue null ptmx pts random shm stderr stdin stdout tty urandom zero"
            .split(' ')
            .collect::<Vec<_>>();
    let unexpected: Vec<_> = listed.lines().filter(|name| !allowed.contains(name)).collect();
    assert!(unexpected.is_empty(), "{unexpected:?}");
    assert_eq!(
        fixture
            .stdout_of(
                "head -c 3 /dev/zero | wc -c; echo x > /dev/null; head -c 2 /dev/urandom | wc -c"
            )
            .await,
        "3\n2\n"
    );
}

async fn sockets_pipes_locks_and_memfds_work(fixture: Fixture) {
    let script = r#"
        perl -MSocket -e 'socketpair(A,B,AF_UNIX,SOCK_STREAM,0) or die; syswrite(A,"pair\n"); sysread(B,$x,9); print $x' &&
        perl -MSocket -e 'socket(L,AF_UNIX,SOCK_STREAM,0); bind(L,pack_sockaddr_un("s")) or die; listen(L,1);
            socket(C,AF_UNIX,SOCK_STREAM,0); connect(C,pack_sockaddr_un("s")) or die; print "file\n"' &&
        perl -MSocket -e 'socket(L,AF_UNIX,SOCK_STREAM,0); bind(L,pack_sockaddr_un("\0x")) or die; listen(L,1);
            socket(C,AF_UNIX,SOCK_STREAM,0); connect(C,pack_sockaddr_un("\0x")) or die; print "abstract\n"' &&
        perl -MSocket -e 'socket(L,AF_INET,SOCK_STREAM,0); bind(L,pack_sockaddr_in(7300,INADDR_LOOPBACK)) or die; listen(L,1);
            socket(C,AF_INET,SOCK_STREAM,0); connect(C,pack_sockaddr_in(7300,INADDR_LOOPBACK)) or die; print "loopback\n"' &&
        perl -e '$m="m"; $f=syscall(319,$m,0); $f>=0 or die; open(M,"+<&=",$f) or die; print M "x"; print "memfd\n"' &&
        flock lock echo locked && mkfifo p && { echo fifo > p & cat p; }"#;
    assert_eq!(
        fixture.stdout_of(script).await,
        "pair\nfile\nabstract\nloopback\nmemfd\nlocked\nfifo\n"
    );
}

/// Runs a script on a terminal of 97 columns and 31 rows and returns what it shows.
async fn on_terminal(fixture: &Fixture, script: &str) -> (String, Outcome) {
    let prepared = fixture.backend.prepare(&fixture.plan(&fixture.session())).await.unwrap();
    let stdio = Stdio::Terminal(TerminalSize { columns: 97, rows: 31 });
    let launched = prepared.launch(&command(&["sh", "-c", script]), stdio).await.unwrap();
    let mut running = launched.running;
    let mut controller = File::from(launched.terminal.unwrap());
    let output = tokio::task::spawn_blocking(move || {
        let mut output = Vec::new();
        // A closed terminal ends with EIO.
        let _ = controller.read_to_end(&mut output);
        String::from_utf8(output).unwrap()
    });
    let (outcome, _) = running.wait().await;
    assert!(running.destroy().await.is_clean());
    (output.await.unwrap(), outcome)
}

async fn terminal_is_controlling_and_new_ptys_open(fixture: Fixture) {
    let script = "stty size; echo controlling > /dev/tty; script -qc 'tty; echo inner' /dev/null";
    let (output, outcome) = on_terminal(&fixture, script).await;
    assert!(output.starts_with("31 97\r\ncontrolling\r\n/dev/pts/"), "{output:?}");
    assert!(output.ends_with("inner\r\n"), "{output:?}");
    assert_eq!(outcome, Outcome::Exited(0));
}

async fn terminal_is_found_in_own_devpts(fixture: Fixture) {
    // The device by name, its owner, and the only other entry of a file system of its own.
    let script = "tty; tty <&2; test -O $(tty) && echo own; ls /dev/pts
        perl -MPOSIX -e 'print ttyname(1), qq(\\n)'; echo by-name > $(tty)";
    let (output, outcome) = on_terminal(&fixture, script).await;
    let lines: Vec<&str> = output.split_whitespace().collect();
    let expected = ["/dev/pts/0", "/dev/pts/0", "own", "0", "ptmx", "/dev/pts/0", "by-name"];
    assert_eq!(
        (lines.as_slice(), outcome),
        (expected.as_slice(), Outcome::Exited(0)),
        "{output:?}"
    );
}

async fn streams_and_exit_codes_pass_through(fixture: Fixture) {
    let session = fixture.session();
    let finished =
        fixture.start(&session, "tr a-z A-Z; echo no >&2; exit 7").await.finish_with("hello").await;
    assert_eq!((finished.stdout.as_str(), finished.stderr.as_str()), ("HELLO", "no\n"));
    assert_eq!(finished.outcome, Outcome::Exited(7));
    assert_eq!(fixture.sh(&session, "kill -SEGV $$").await.outcome, Outcome::Signaled(11));
}

async fn missing_program_is_refused(fixture: Fixture) {
    let refused = fixture.launch(&fixture.session(), &command(&["no-such-program"])).await;
    assert!(matches!(refused, Err(codelia_backends::Error::Refused(_))));
}

in_every_mode!(
    workspace_is_session_directory_owned_by_user,
    workspace_allows_no_setuid_and_no_devices,
    working_directory_is_below_workspace,
    private_directories_are_emptied_after_each_run,
    command_inherits_only_three_streams,
    environment_is_clean,
    init_cannot_be_killed_from_inside,
    dev_is_minimal,
    sockets_pipes_locks_and_memfds_work,
    terminal_is_controlling_and_new_ptys_open,
    terminal_is_found_in_own_devpts,
    streams_and_exit_codes_pass_through,
    missing_program_is_refused,
);
