//! Compiles and runs the C program that makes system calls.

use std::{os::unix::fs::PermissionsExt, path::PathBuf, process::Command, sync::LazyLock};

use codelia_types::{Outcome, Violation};

use crate::{
    harness::{Finished, Fixture, Kind, Session},
    require::available,
};

pub(crate) const EPERM: i32 = 1;
pub(crate) const EACCES: i32 = 13;
pub(crate) const EINVAL: i32 = 22;
pub(crate) const ENOSYS: i32 = 38;
pub(crate) const EPROTONOSUPPORT: i32 = 93;
pub(crate) const SIGSYS: i32 = 31;

/// Its name in a session's directory.
const NAME: &str = "syscall_probe";

/// Compiled once per test process. `None` without a compiler.
static PROGRAM: LazyLock<Option<PathBuf>> = LazyLock::new(|| {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/filter/syscall_probe.c");
    let target = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(NAME);
    // Another test process may be executing the old file.
    let new = target.with_extension(std::process::id().to_string());
    let flags = ["-O1", "-pthread", "-static", "-o"];
    let compiled = Command::new("cc").args(flags).arg(&new).arg(source).status();
    if !compiled.is_ok_and(|status| status.success()) {
        return None;
    }
    std::fs::rename(new, &target).unwrap();
    Some(target)
});

/// Creates a session with the program in it, or returns `None` if the program cannot be compiled.
pub(crate) fn session(fixture: &Fixture) -> Option<Session> {
    let missing = PROGRAM.is_none().then_some("cc cannot build static C programs");
    if !available("compiler", missing) {
        return None;
    }
    let program = PROGRAM.as_ref()?;
    let session = fixture.session();
    let path = session.dir.join(NAME);
    std::fs::copy(program, &path).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
    session.chown(&path);
    Some(session)
}

/// Runs the program with these arguments.
pub(crate) async fn probe(fixture: &Fixture, session: &Session, args: &[&str]) -> Finished {
    let program = format!("./{NAME}");
    let argv: Vec<&str> = std::iter::once(program.as_str()).chain(args.iter().copied()).collect();
    fixture.run(session, &argv).await
}

/// Makes a call by number. Returns its errno, 0 for none, and the reported violations.
pub(crate) async fn call(
    fixture: &Fixture,
    session: &Session,
    nr: i64,
    args: &[u64],
) -> (i32, Vec<Violation>) {
    let words: Vec<String> = std::iter::once("call".to_owned())
        .chain(std::iter::once(nr.to_string()))
        .chain(args.iter().map(ToString::to_string))
        .collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let finished = probe(fixture, session, &words).await;
    assert_eq!(finished.outcome, Outcome::Exited(0), "{finished:?}");
    (finished.stdout.trim().parse().unwrap(), finished.violations)
}

/// Returns a fixture and session without a filter.
pub(crate) async fn unfiltered() -> (Fixture, Session) {
    let fixture = Fixture::new(Kind::Logical).await.unwrap();
    let session = session(&fixture).unwrap();
    (fixture, session)
}
