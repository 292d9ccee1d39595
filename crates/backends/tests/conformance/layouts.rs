//! Layouts of the workspace: read-only except for some directories, and execution only where it is
//! allowed.

use std::{
    fs::{self, Permissions},
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    path::Path,
};

use codelia_backends::Error;
use codelia_policy::{Format, Policy};
use codelia_types::Outcome;

use crate::harness::{Fixture, Kind, Session, command, in_every_mode};

const CARGO: &str = "layout: {read_only_workspace: true, directories: [{path: target}, {path: logs}, \
                     {path: a/b}], executable_paths: [target]}";

/// Whether this kind has layouts. One without must refuse them by field.
fn has_layout(fixture: &mut Fixture, policy: &str) -> bool {
    fixture.policy = Policy::parse(policy, Format::Yaml).unwrap();
    if fixture.host.enforceable.layouts {
        return true;
    }
    assert!(fixture.kind.is_container(), "every other mode has layouts");
    assert_eq!(fixture.try_plan(&fixture.session()).unwrap_err().field, "policy.layout");
    false
}

async fn output(fixture: &Fixture, session: &Session, script: &str) -> String {
    let finished = fixture.sh(session, script).await;
    assert_eq!(finished.outcome, Outcome::Exited(0), "{finished:?}");
    finished.stdout
}

/// Reports for each path whether a file can be written there.
const WRITE: &str = r#"for path in /workspace /workspace/src /workspace/target /workspace/logs /workspace/a /workspace/a/b /tmp; do
    if (echo x > "$path/written") 2> /dev/null; then echo "$path yes"; else echo "$path no"; fi
done"#;

async fn only_directories_of_a_layout_are_writable(mut fixture: Fixture) {
    let all = |answer: &str| {
        let paths = ["", "/src", "/target", "/logs", "/a", "/a/b"];
        paths.map(|path| format!("/workspace{path} {answer}\n")).concat() + "/tmp yes\n"
    };
    let create = |session: &Session, names: &[&str]| {
        for name in names {
            fs::create_dir_all(session.dir.join(name)).unwrap();
            session.chown(&session.dir.join(name));
        }
    };
    let session = fixture.session();
    create(&session, &["src", "target", "logs", "a", "a/b"]);
    assert_eq!(output(&fixture, &session, WRITE).await, all("yes"), "the control");
    if !has_layout(&mut fixture, CARGO) {
        return;
    }
    let session = fixture.session();
    create(&session, &["src"]);
    session.write("src/main.rs", "the source");
    let expected = all("no").replace("target no", "target yes").replace("logs no", "logs yes");
    assert_eq!(output(&fixture, &session, WRITE).await, expected.replace("a/b no", "a/b yes"));
    for name in ["target", "a", "a/b"] {
        let owner = fs::metadata(session.dir.join(name)).unwrap().uid();
        assert_eq!(owner, session.ids.uid, "{name} belongs to the session's user");
    }
    assert!(session.dir.join("target/written").exists(), "it is the session's own directory");
    let attack = "cat src/main.rs; rm -f src/main.rs; mv target other; rmdir logs; ln -s /tmp new; chmod 777 . 2>&1";
    let finished = fixture.sh(&session, &format!("{attack}; umount /workspace/target; true")).await;
    assert!(finished.stdout.starts_with("the source"), "{finished:?}");
    assert!(session.dir.join("src/main.rs").exists() && session.dir.join("target").is_dir());
    assert!(!session.dir.join("new").exists() && session.dir.join("logs").is_dir());
}

/// Copies a program and a script to a place, executes both, and loads the program with the dynamic
/// linker.
const EXECUTE: &str = r#"loader=$(ls /lib64/ld-linux-x86-64.so.2 /lib/ld-linux-aarch64.so.1 2> /dev/null | head -1)
for path in /workspace /workspace/logs /workspace/target /tmp /var/tmp /dev/shm /run; do
    if ! cp /usr/bin/true "$path/program" 2> /dev/null; then echo "$path read-only"; continue; fi
    printf '#!/bin/sh\nexit 0\n' > "$path/script"; chmod 755 "$path/program" "$path/script"
    answers=
    for how in "$path/program" "$path/script" "$loader $path/program" "sh $path/script"; do
        if $how 2> /dev/null; then answers="$answers yes"; else answers="$answers no"; fi
    done
    echo "$path$answers"
done"#;

async fn files_are_executed_only_where_the_layout_allows(mut fixture: Fixture) {
    let expected = |workspace: &str, other: &str| {
        let mut lines = format!(
            "/workspace {workspace}\n/workspace/logs {other}\n/workspace/target yes yes yes yes\n"
        );
        for path in ["/tmp", "/var/tmp", "/dev/shm", "/run"] {
            lines += &format!("{path} {other}\n");
        }
        lines
    };
    let session = fixture.session();
    for name in ["logs", "target"] {
        fs::create_dir(session.dir.join(name)).unwrap();
        session.chown(&session.dir.join(name));
    }
    let yes = "yes yes yes yes";
    assert_eq!(output(&fixture, &session, EXECUTE).await, expected(yes, yes), "the control");
    // An interpreter reads a script, it does not execute it.
    let no = "no no no yes";
    if !has_layout(&mut fixture, CARGO) {
        return;
    }
    assert_eq!(output(&fixture, &fixture.session(), EXECUTE).await, expected("read-only", no));
    let layout = "layout: {directories: [{path: logs}], executable_paths: [target]}";
    assert!(has_layout(&mut fixture, layout));
    assert_eq!(output(&fixture, &fixture.session(), EXECUTE).await, expected(no, no));
    // Executable memory of a file needs the same right.
    let map = "import mmap, sys
for path in sys.argv[1:]:
    with open(path + '/program', 'rb') as file:
        try:
            mmap.mmap(file.fileno(), 4096, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
            print(path, 'yes')
        except PermissionError:
            print(path, 'no')";
    let session = fixture.session();
    session.write("map.py", map);
    let script = "cp /usr/bin/true /tmp/program; cp /usr/bin/true target/program; python3 map.py /tmp target";
    if !fixture.kind.is_container() && Path::new("/usr/bin/python3").exists() {
        assert_eq!(output(&fixture, &session, script).await, "/tmp no\ntarget yes\n");
    }
}

/// Creates a file in memory, writes a program into it, and executes it.
const MEMORY: &str = "import os, ctypes
fd = ctypes.CDLL(None, use_errno=True).memfd_create(b'program', int(os.environ.get('SEAL', '0')))
if fd < 0:
    print('refused')
else:
    os.write(fd, open('/usr/bin/true', 'rb').read())
    pid = os.fork()
    if pid == 0:
        try:
            os.execve(fd, ['true'], {})
        except PermissionError:
            os._exit(9)
    print('exit', os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))";

async fn file_in_memory_is_not_executed(mut fixture: Fixture) {
    if fixture.kind.is_container() || !Path::new("/usr/bin/python3").exists() {
        return;
    }
    let run = async |fixture: &Fixture, seal: &str| {
        let session = fixture.session();
        session.write("memory.py", MEMORY);
        output(fixture, &session, &format!("{seal} python3 memory.py")).await
    };
    assert_eq!(run(&fixture, "").await, "exit 0\n", "the control");
    assert!(has_layout(&mut fixture, CARGO));
    assert_eq!(run(&fixture, "").await, "refused\n");
    // MFD_NOEXEC_SEAL, which kernels before 6.3 do not know.
    assert!(["exit 9\n", "refused\n"].contains(&&*run(&fixture, "SEAL=8").await));
}

/// A link in place of a directory leads nowhere: the run is refused.
async fn layout_follows_no_link(mut fixture: Fixture) {
    if !has_layout(&mut fixture, CARGO) {
        return;
    }
    let outside = tempfile::tempdir().unwrap();
    fs::set_permissions(outside.path(), Permissions::from_mode(0o777)).unwrap();
    for link in ["target", "a"] {
        let session = fixture.session();
        symlink(outside.path(), session.dir.join(link)).unwrap();
        let error = fixture.launch(&session, &command(&["true"])).await.err();
        assert!(matches!(error, Some(Error::Refused(_))), "{link}: {error:?}");
    }
    assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
}

async fn layout_serves_several_sandboxes_of_a_session(mut fixture: Fixture) {
    if !has_layout(&mut fixture, CARGO) {
        return;
    }
    let session = fixture.session();
    for number in 0..3 {
        let script = format!(
            "echo {number} >> target/log; cat target/log | wc -l; echo x > no 2>/dev/null || echo refused"
        );
        assert_eq!(output(&fixture, &session, &script).await, format!("{}\nrefused\n", number + 1));
    }
    // The next one has no layout: nothing of it is left.
    fixture.policy = Policy::default();
    assert_eq!(output(&fixture, &session, "echo x > yes && cat target/log | wc -l").await, "3\n");
    assert!(
        matches!(fixture.kind, Kind::Bwrap | Kind::Nsjail | Kind::Native)
            || fixture.kind.is_container()
    );
}

in_every_mode!(
    only_directories_of_a_layout_are_writable,
    files_are_executed_only_where_the_layout_allows,
    file_in_memory_is_not_executed,
    layout_follows_no_link,
    layout_serves_several_sandboxes_of_a_session,
);
