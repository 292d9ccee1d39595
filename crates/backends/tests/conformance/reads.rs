//! Reads that wait for a person's decision: what they wait for, what each decision does, and that
//! no way around it leads to a byte that nobody allowed. Each attack must succeed where no read
//! waits.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Command, sync::LazyLock};

use codelia_backends::{AskedReads, ReadDecision, ReadRequest};
use codelia_policy::FilesystemMode;
use codelia_telemetry::task;
use codelia_types::Outcome;
use tempfile::TempDir;

use crate::{
    harness::{Finished, Fixture, Kind, Session, Started, command, in_mode, launch_in},
    require::available,
};

/// Names a directory that is not in `/tmp`, for a user who cannot write to `/srv`.
pub(crate) const OUTSIDE_TMP: &str = "CODELIA_TEST_OUTSIDE_TMP";

/// Its name in a session's directory.
const NAME: &str = "reads_probe";

/// The program, compiled once for each test process. `None` without a compiler.
static PROGRAM: LazyLock<Option<Vec<u8>>> = LazyLock::new(|| {
    let source = std::env::temp_dir().join(format!("{NAME}-{}.c", std::process::id()));
    fs::write(&source, include_str!("reads_probe.c")).unwrap();
    let target = std::env::temp_dir().join(format!("{NAME}-{}", std::process::id()));
    let flags = ["-O1", "-w", "-pthread", "-static", "-o"];
    let compiled = Command::new("cc").args(flags).arg(&target).arg(&source).status();
    fs::remove_file(source).unwrap();
    if !compiled.is_ok_and(|status| status.success()) {
        return None;
    }
    let program = fs::read(&target).unwrap();
    fs::remove_file(target).unwrap();
    Some(program)
});

/// Creates a session with the probe in it, or returns `None` if it cannot be compiled.
fn session_with_probe(fixture: &Fixture) -> Option<Session> {
    let missing = PROGRAM.is_none().then_some("cc cannot build static C programs");
    if !available("compiler", missing) {
        return None;
    }
    let session = fixture.session();
    let path = session.dir.join(NAME);
    fs::write(&path, PROGRAM.as_ref()?).unwrap();
    fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
    session.chown(&path);
    Some(session)
}

/// A host directory with files that everyone may read: `open/file` holds `fine`, `closed/file`
/// holds `treasure`.
fn host_directory() -> TempDir {
    let dir = directory_outside_tmp();
    for (name, text) in [("open", "fine\n"), ("closed", "treasure\n")] {
        fs::create_dir(dir.path().join(name)).unwrap();
        for file in ["file", "second", "third"] {
            fs::write(dir.path().join(name).join(file), text).unwrap();
        }
    }
    dir
}

/// A directory where the sandbox has nothing of its own.
fn directory_outside_tmp() -> TempDir {
    let parent = std::env::var_os(OUTSIDE_TMP).unwrap_or("/srv".into());
    let dir = tempfile::tempdir_in(parent).unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    dir
}

impl Fixture {
    /// Has reads of these paths wait.
    fn ask_for(&mut self, paths: &[&Path]) {
        let files = &mut self.policy.filesystem;
        files.mode = Some(FilesystemMode::Dynamic);
        files.read_only_paths = Some(paths.iter().map(|path| (*path).to_owned()).collect());
    }

    async fn start_asking(&self, session: &Session, argv: &[&str]) -> (Started, AskedReads) {
        let mut prepared = self.backend.prepare(&self.plan(session)).await.unwrap();
        let reads = prepared.take_reads().unwrap();
        assert!(prepared.take_reads().is_none());
        (launch_in(prepared, &command(argv)).await.unwrap(), reads)
    }

    /// Runs a command. Allows what is below a directory and denies the rest.
    async fn run_allowing(&self, session: &Session, argv: &[&str], allowed: &Path) -> Finished {
        let (started, mut reads) = self.start_asking(session, argv).await;
        let allowed = allowed.to_owned();
        let decider = task::background("decisions of the test", async move {
            let mut asked = Vec::new();
            while let Some(ReadRequest { path, .. }) = reads.next().await {
                reads.decide(file(&path, path.starts_with(&allowed)));
                asked.push(path);
            }
            asked
        });
        let finished = started.finish().await;
        decider.await.unwrap();
        finished
    }
}

fn file(path: &Path, allow: bool) -> ReadDecision {
    ReadDecision { path: path.to_owned(), is_directory: false, allow }
}

fn directory(path: &Path, allow: bool) -> ReadDecision {
    ReadDecision { path: path.to_owned(), is_directory: true, allow }
}

async fn read_waits_until_it_is_allowed(mut fixture: Fixture) {
    let dir = host_directory();
    fixture.ask_for(&[dir.path()]);
    let path = dir.path().display();
    // Listing and status need no decision; runtime, workspace and /tmp neither.
    let script = format!(
        "ls {path}/open >/tmp/l; stat {path}/open/file >/dev/null && cat /tmp/l; echo now; cat {path}/open/file; cat {path}/open/file"
    );
    let (mut started, mut reads) =
        fixture.start_asking(&fixture.session(), &["sh", "-c", &script]).await;
    let lines = [started.line(), started.line(), started.line(), started.line()];
    assert_eq!(lines, ["file", "second", "third", "now"]);
    let asked = reads.next().await.unwrap().path;
    assert_eq!(asked, dir.path().join("open/file"));
    reads.decide(file(&asked, true));
    let finished = started.finish().await;
    assert_eq!(
        (finished.stdout.as_str(), &finished.outcome),
        ("fine\nfine\n", &Outcome::Exited(0))
    );
    assert!(finished.violations.is_empty(), "{finished:?}");
    assert_eq!(reads.next().await, None, "asked once for both reads");
}

async fn denied_read_fails_with_eacces(mut fixture: Fixture) {
    let dir = host_directory();
    fixture.ask_for(&[dir.path()]);
    let Some(session) = session_with_probe(&fixture) else { return };
    let path = dir.path().join("closed/file").display().to_string();
    let argv = [&format!("./{NAME}"), "read", path.as_str()];
    let finished = fixture.run_allowing(&session, &argv, Path::new("/nowhere")).await;
    assert_eq!(finished.stdout, "errno 13\n", "{finished:?}");
    // The control: the same read succeeds where none waits.
    fixture.policy.filesystem.mode = None;
    assert_eq!(fixture.run(&session, &argv).await.stdout, "treasure\n");
}

async fn calls_in_one_directory_are_one_request(mut fixture: Fixture) {
    let dir = host_directory();
    fixture.ask_for(&[dir.path()]);
    let path = dir.path().join("open");
    let script = "for f in file second third; do cat \"$0\"/$f & done; wait";
    let argv = ["sh", "-c", script, path.to_str().unwrap()];
    let (started, mut reads) = fixture.start_asking(&fixture.session(), &argv).await;
    let first = reads.next().await.unwrap().path;
    assert_eq!(first.parent(), Some(path.as_path()));
    // A decision about one file has the next one asked for.
    reads.decide(file(&first, true));
    let second = reads.next().await.unwrap().path;
    assert_ne!(first, second);
    reads.decide(directory(&path, true));
    let finished = started.finish().await;
    assert_eq!(finished.stdout, "fine\nfine\nfine\n", "{finished:?}");
    assert_eq!(reads.next().await, None);
}

async fn decision_about_directory_holds_below(mut fixture: Fixture) {
    let dir = host_directory();
    fixture.ask_for(&[dir.path()]);
    let path = dir.path().display();
    let script = format!("cat {path}/open/file {path}/closed/file {path}/closed/second; true");
    let (started, reads) = fixture.start_asking(&fixture.session(), &["sh", "-c", &script]).await;
    reads.decide(directory(dir.path(), true));
    reads.decide(directory(&dir.path().join("closed"), false));
    reads.decide(file(&dir.path().join("closed/second"), true));
    let finished = started.finish().await;
    assert_eq!(finished.stdout, "fine\ntreasure\n", "closed/second alone: {finished:?}");
}

async fn waiting_call_ends_with_its_run(mut fixture: Fixture) {
    let dir = host_directory();
    fixture.ask_for(&[dir.path()]);
    let path = dir.path().join("closed/file").display().to_string();
    let (started, mut reads) = fixture.start_asking(&fixture.session(), &["cat", &path]).await;
    let asked = reads.next().await.unwrap().path;
    started.running.kill_tree().await;
    let finished = started.finish().await;
    assert_eq!((finished.outcome, finished.stdout), (Outcome::Signaled(9), String::new()));
    // Too late: nobody is there.
    reads.decide(file(&asked, true));
    assert_eq!(reads.next().await, None);
}

async fn read_is_denied_if_nobody_can_be_asked(mut fixture: Fixture) {
    let dir = host_directory();
    fixture.ask_for(&[dir.path()]);
    let script = format!("cat {}/closed/file; echo over", dir.path().display());
    let (started, reads) = fixture.start_asking(&fixture.session(), &["sh", "-c", &script]).await;
    drop(reads);
    let finished = started.finish().await;
    assert_eq!(finished.stdout, "over\n", "{finished:?}");
    assert!(finished.stderr.contains("Permission denied"), "{finished:?}");
}

/// The request was sent, and then the one who decides went away without receiving it.
async fn read_is_denied_when_nobody_is_left_to_ask(mut fixture: Fixture) {
    let dir = host_directory();
    fixture.ask_for(&[dir.path()]);
    let script = format!("cat {}/closed/file; echo over", dir.path().display());
    let (started, mut reads) =
        fixture.start_asking(&fixture.session(), &["sh", "-c", &script]).await;
    assert!(reads.next().await.is_some());
    drop(reads);
    let finished = started.finish().await;
    assert_eq!(finished.stdout, "over\n", "{finished:?}");
}

async fn files_keep_their_permissions(mut fixture: Fixture) {
    let dir = host_directory();
    fs::set_permissions(dir.path().join("closed/file"), fs::Permissions::from_mode(0o600)).unwrap();
    fs::set_permissions(dir.path().join("open"), fs::Permissions::from_mode(0o700)).unwrap();
    fixture.ask_for(&[dir.path()]);
    let script = format!("cat {0}/closed/file {0}/open/file; echo over", dir.path().display());
    let session = fixture.session();
    let finished = fixture.run_allowing(&session, &["sh", "-c", &script], dir.path()).await;
    if session.ids.uid == codelia_sys::process::own_uid() {
        return; // The worker's own user owns the files.
    }
    assert_eq!(finished.stdout, "over\n", "an allowed read passes no permission: {finished:?}");
}

/// Ways to a file by name that are not its own. `$D` is the host directory.
const SCRIPTS: &[(&str, &str)] = &[
    ("the path", "cat $D/closed/file"),
    ("dots", "cat $D/open/../closed/file $D/open/.././closed//file"),
    ("a link in the workspace", "ln -s $D/closed/file l; cat l"),
    ("a link to a directory", "ln -s $D/closed d; cat d/file; cd d; cat file"),
    ("a chain of links", "ln -s $D a; ln -s a/closed b; ln -s b/file c; cat c"),
    ("the working directory", "cd $D/closed; cat file ./file ../closed/file"),
    ("/proc/self/cwd", "cd $D/closed; cat /proc/self/cwd/file"),
    ("/proc/self/root", "cat /proc/self/root$D/closed/file"),
    ("/proc/1/root", "cat /proc/1/root$D/closed/file"),
    ("a shell's own redirection", "read x <$D/closed/file; echo $x"),
    ("reading and writing", "exec 3<>$D/closed/file; cat <&3"),
    ("standard input again", "cat /dev/stdin <$D/closed/file"),
    ("the loader", "$(ls /lib64/ld-linux-x86-64.so.2) $D/closed/program"),
    ("the interpreter of a script", "printf '#!%s\\n' $D/closed/program >s; chmod +x s; ./s"),
    ("executing it", "$D/closed/program"),
    ("another process", "sh -c 'cat $D/closed/file' & wait"),
];

async fn no_name_leads_around_a_decision(mut fixture: Fixture) {
    let dir = host_directory();
    let program = dir.path().join("closed/program");
    fs::copy("/bin/echo", &program).unwrap();
    let path = dir.path().display().to_string();
    let mut wrong = Vec::new();
    for (what, script) in SCRIPTS {
        let script = format!("export D={path}; {script}");
        // `echo` without arguments prints an empty line.
        let is_reached = |stdout: &str| stdout.contains("treasure") || stdout.contains('\n');
        fixture.ask_for(&[dir.path()]);
        let denied = fixture
            .run_allowing(&fixture.session(), &["sh", "-c", &script], Path::new("/nowhere"))
            .await;
        if denied.stdout.contains("treasure")
            || denied.stdout.lines().any(str::is_empty) && !what.contains("redirection")
        {
            wrong.push(format!("{what}: {denied:?}"));
        }
        // The control. A root process of the sandbox cannot be entered, and nothing opens for
        // writing.
        fixture.policy.filesystem.mode = None;
        let control = fixture.sh(&fixture.session(), &script).await;
        if !is_reached(&control.stdout) && !["/proc/1/root", "reading and writing"].contains(what) {
            wrong.push(format!("control of {what}: {control:?}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

async fn no_race_leads_around_a_decision(mut fixture: Fixture) {
    let dir = host_directory();
    let Some(session) = session_with_probe(&fixture) else { return };
    let (open, closed) = (dir.path().join("open"), dir.path().join("closed"));
    let text = |path: &Path| path.display().to_string();
    let (open_file, closed_file) = (text(&open.join("file")), text(&closed.join("file")));
    let (open_dir, closed_dir) = (text(&open), text(&closed));
    let probe = format!("./{NAME}");
    let attacks: [&[&str]; 6] = [
        &[&probe, "rewrite", &open_file, &closed_file],
        &[&probe, "relink", &open_file, &closed_file],
        &[&probe, "move", &open_dir, &closed_dir],
        &[&probe, "replace", &open_dir, &closed_dir],
        &[&probe, "memory", &closed_file],
        &[&probe, "again", &closed_file],
    ];
    for attack in attacks {
        fixture.ask_for(&[dir.path()]);
        let argv = [attack, &["2000"]].concat();
        let finished = fixture.run_allowing(&session, &argv, &open).await;
        assert!(!finished.stdout.contains("treasure"), "{attack:?} reached an unapproved file");
        if attack.len() == 4 {
            assert!(
                finished.stdout.contains("fine"),
                "{attack:?} reads what is allowed: {finished:?}"
            );
        }
        fixture.policy.filesystem.mode = None;
        let control = fixture.run(&session, &[attack, &["20000000"]].concat()).await;
        assert!(control.stdout.contains("treasure"), "control of {attack:?}: {control:?}");
    }
}

/// The same directory at two paths: a decision about one is none about the other.
async fn alias_of_a_directory_is_asked_for(mut fixture: Fixture) {
    let (dir, alias) = (host_directory(), directory_outside_tmp());
    let mounted = Command::new("mount")
        .arg("--bind")
        .args([&dir.path().join("closed"), alias.path()])
        .status();
    let is_mounted = mounted.is_ok_and(|status| status.success());
    if !available("root", (!is_mounted).then_some("only root can mount")) {
        return;
    }
    fixture.ask_for(&[dir.path(), alias.path()]);
    let script = format!(
        "cat {}/file; cat {}/closed/file; true",
        alias.path().display(),
        dir.path().display()
    );
    let argv = ["sh", "-c", &script];
    let finished =
        fixture.run_allowing(&fixture.session(), &argv, &dir.path().join("closed")).await;
    let through_alias =
        fixture.run_allowing(&fixture.session(), &argv, Path::new("/nowhere")).await;
    fixture.policy.filesystem.mode = None;
    let control = fixture.sh(&fixture.session(), &script).await;
    let unmounted = Command::new("umount").arg(alias.path()).status().unwrap();
    assert!(unmounted.success());
    assert_eq!(finished.stdout, "treasure\n", "one of two: {finished:?}");
    assert_eq!(through_alias.stdout, "", "{through_alias:?}");
    assert_eq!(control.stdout, "treasure\ntreasure\n");
}

/// Prints what a read costs that is decided already, and what a build costs. Asserts only that both
/// work.
async fn cost_of_asked_reads_is_printed(mut fixture: Fixture) {
    let dir = host_directory();
    let Some(session) = session_with_probe(&fixture) else { return };
    let include = dir.path().join("open");
    for number in 0..100 {
        fs::write(include.join(format!("h{number}.h")), format!("int f{number}(void);\n")).unwrap();
    }
    let headers: String = (0..100).map(|number| format!("#include \"h{number}.h\"\n")).collect();
    session.write("part.h", &headers);
    for number in 0..10 {
        session.write(&format!("{number}.c"), &format!("#include \"part.h\"\nint g{number};\n"));
    }
    session.write("main.c", "#include \"part.h\"\nint main(void) { return 0; }\n");
    let build = format!(
        "s=$(date +%s%N); for c in *.c; do gcc -I{} -c $c -o ${{c%.c}}.o || exit 1; done; gcc *.o -o main \
         && ./main && e=$(date +%s%N); echo $(((e - s) / 1000000))",
        include.display()
    );
    let path = include.join("file").display().to_string();
    let probe = format!("./{NAME}");
    for mode in [None, Some(FilesystemMode::Dynamic)] {
        fixture.ask_for(&[dir.path()]);
        fixture.policy.filesystem.mode = mode;
        for (what, argv) in [
            ("ns for each of 10000 asked reads", vec![&*probe, "many", &path, "10000"]),
            (
                "ns for each of 10000 free reads",
                vec![&*probe, "many", "/workspace/part.h", "10000"],
            ),
            ("ms to build 11 files with 100 headers", vec!["sh", "-c", &build]),
        ] {
            let finished = match mode {
                None => fixture.run(&session, &argv).await,
                Some(_) => fixture.run_allowing(&session, &argv, &include).await,
            };
            assert_eq!(finished.outcome, Outcome::Exited(0), "{finished:?}");
            println!("{:?} {mode:?}: {} {what}", fixture.kind, finished.stdout.trim());
        }
    }
}

#[tokio::test]
async fn container_refuses_dynamic_mode_by_field() {
    let Some(mut fixture) = Fixture::new(Kind::Runc).await else { return };
    fixture.ask_for(&[Path::new("/opt")]);
    let error = fixture.try_plan(&fixture.session()).unwrap_err();
    assert_eq!(error.field, "policy.filesystem.mode");
    assert!(error.to_string().contains("bwrap"), "{error}");
}

macro_rules! in_modes_that_ask {
    ($($name:ident),+ $(,)?) => {
        in_mode!(bwrap = Bwrap: $($name),+);
        in_mode!(nsjail = Nsjail: $($name),+);
        in_mode!(native = Native: $($name),+);
    };
}

in_modes_that_ask!(
    read_waits_until_it_is_allowed,
    denied_read_fails_with_eacces,
    calls_in_one_directory_are_one_request,
    decision_about_directory_holds_below,
    waiting_call_ends_with_its_run,
    read_is_denied_if_nobody_can_be_asked,
    read_is_denied_when_nobody_is_left_to_ask,
    files_keep_their_permissions,
    no_name_leads_around_a_decision,
    no_race_leads_around_a_decision,
    alias_of_a_directory_is_asked_for,
    cost_of_asked_reads_is_printed,
);
