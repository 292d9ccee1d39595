//! The little program, and what it said.

use std::{os::unix::fs::PermissionsExt, path::PathBuf, process::Command, sync::LazyLock};

use codelia_types::{Outcome, Violation};

use crate::harness::{Finished, Fixture, Kind, Session};

pub(crate) const EPERM: i32 = 1;
pub(crate) const EACCES: i32 = 13;
pub(crate) const ENOSYS: i32 = 38;
pub(crate) const SIGSYS: i32 = 31;

/// Where it is in a session's directory.
const NAME: &str = "attempt";

/// Compiled once for each run of the tests; without a compiler there is none.
static PROGRAM: LazyLock<Option<PathBuf>> = LazyLock::new(|| {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/filter/syscall_probe.c");
    let target = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(NAME);
    // Another run of the tests may be executing the old one.
    let new = target.with_extension(std::process::id().to_string());
    let flags = ["-O1", "-pthread", "-static", "-o"];
    let compiled = Command::new("cc").args(flags).arg(&new).arg(source).status();
    if !compiled.is_ok_and(|status| status.success()) {
        return None;
    }
    std::fs::rename(new, &target).unwrap();
    Some(target)
});

/// A fixture with the program, and a session for it. If it cannot be compiled the caller returns, unless
/// that is required.
pub(crate) fn session(fixture: &Fixture) -> Option<Session> {
    let Some(program) = &*PROGRAM else {
        let required = std::env::var("CODELIA_TEST_REQUIRE").unwrap_or_default();
        assert!(required.is_empty(), "a compiler of static C programs is required");
        println!("skipped: no compiler of static C programs");
        return None;
    };
    let session = fixture.session();
    let path = session.dir.join(NAME);
    std::fs::copy(program, &path).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
    session.chown(&path);
    Some(session)
}

/// Runs the program with these words.
pub(crate) async fn attempt(fixture: &Fixture, session: &Session, words: &[&str]) -> Finished {
    let program = format!("./{NAME}");
    let argv: Vec<&str> = std::iter::once(program.as_str()).chain(words.iter().copied()).collect();
    fixture.run(session, &argv).await
}

/// The errno a call of the program got, 0 for none, and what was told of it.
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
    let finished = attempt(fixture, session, &words).await;
    assert_eq!(finished.outcome, Outcome::Exited(0), "{finished:?}");
    (finished.stdout.trim().parse().unwrap(), finished.violations)
}

/// Where there is no filter.
pub(crate) async fn unfiltered() -> (Fixture, Session) {
    let fixture = Fixture::new(Kind::Logical).await.unwrap();
    let session = session(&fixture).unwrap();
    (fixture, session)
}
