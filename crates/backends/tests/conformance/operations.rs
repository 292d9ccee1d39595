//! The log of signals and file operations: what it shows, that it is bounded, that it lets nothing
//! pass which the policy denies, and which patterns are suspicious.

use codelia_backends::{Operation, Operations};
use codelia_policy::{SyscallMode, SyscallPolicy};
use codelia_types::Outcome;

use crate::harness::{Finished, Fixture, Kind, Session, in_mode};

impl Fixture {
    /// Has signals and file operations logged.
    fn log_everything(&mut self) {
        self.policy.logging.signals = Some(true);
        self.policy.logging.file_operations = Some(true);
    }

    /// Runs a script that must succeed, and returns what was logged.
    async fn logged(&self, session: &Session, script: &str) -> Operations {
        let Finished { outcome, stderr, operations, .. } = self.sh(session, script).await;
        assert_eq!(outcome, Outcome::Exited(0), "{stderr}");
        operations.unwrap()
    }
}

/// Whether a call with this beginning was logged for a file, such as `rename` for `renameat2`.
fn has(operations: &Operations, call: &str, path: &str, to: Option<&str>) -> bool {
    let is_it = |it: &&Operation| {
        it.call.starts_with(call) && it.path.as_deref() == Some(path) && it.to.as_deref() == to
    };
    operations.kept.iter().any(|it| is_it(&it) && it.pid.is_some_and(|pid| pid > 1))
}

async fn changes_of_files_are_logged(mut fixture: Fixture) {
    let session = fixture.session();
    let script =
        "echo a > a; mkdir d; mv a d/b; ln d/b c; ln -s c s; chmod 640 c; cd d; cat b; rm ../c";
    let finished = fixture.sh(&session, script).await;
    assert_eq!(finished.operations, None, "nothing is logged unless the policy says so");
    fixture.policy.logging.file_operations = Some(true);
    let session = fixture.session();
    let logged = fixture.logged(&session, script).await;
    for (call, path, to) in [
        ("open", "/workspace/a", None),
        ("mkdir", "/workspace/d", None),
        ("rename", "/workspace/a", Some("/workspace/d/b")),
        ("link", "/workspace/d/b", Some("/workspace/c")),
        ("symlink", "/workspace/s", Some("c")),
        ("unlink", "/workspace/d/../c", None),
    ] {
        assert!(has(&logged, call, path, to), "{call} {path}: {logged:#?}");
    }
    let chmod = logged.kept.iter().find(|it| it.mode.is_some()).unwrap();
    assert_eq!((chmod.path.as_deref(), chmod.mode), (Some("/workspace/c"), Some(0o640)));
    assert!(!has(&logged, "open", "/workspace/d/b", None), "a read changes nothing: {logged:#?}");
    assert!(logged.kept.iter().all(|it| it.signal.is_none()), "{logged:#?}");
    assert_eq!((logged.dropped, logged.suspicious.len()), (0, 0), "{logged:#?}");
}

async fn signals_are_logged(mut fixture: Fixture) {
    fixture.policy.logging.signals = Some(true);
    let session = fixture.session();
    let script = "sleep 100 & kill -15 $!; wait $!; echo $! > target; kill -0 1; kill -0 $$";
    let logged = fixture.logged(&session, script).await;
    let target: i32 =
        std::fs::read_to_string(session.dir.join("target")).unwrap().trim().parse().unwrap();
    let sent =
        |it: &&Operation| it.call == "kill" && it.target == Some(target) && it.signal == Some(15);
    assert!(logged.kept.iter().any(|it| sent(&it)), "{logged:#?}");
    assert!(logged.kept.iter().all(|it| it.path.is_none()), "no files: {logged:#?}");
    assert!(logged.suspicious.is_empty(), "to ask for a process is not: {logged:#?}");
}

async fn suspicious_patterns_are_found(mut fixture: Fixture) {
    fixture.log_everything();
    let create = "i=0; while [ $i -lt 520 ]; do : > f$i; i=$((i+1)); done";
    for (script, pattern) in [
        ("kill -s TERM 1; true".to_owned(), "signal_to_init"),
        ("trap '' USR1; kill -s USR1 -- -1; true".to_owned(), "signal_to_all_processes"),
        (
            "i=1000; while [ $i -lt 1060 ]; do kill -s TERM $i 2>/dev/null; i=$((i+1)); done; true"
                .to_owned(),
            "signals_to_many_processes",
        ),
        (format!("{create}; rm f*"), "many_deletions"),
    ] {
        let logged = fixture.logged(&fixture.session(), &script).await;
        let found: Vec<_> = logged.suspicious.keys().copied().collect();
        assert_eq!(found, [pattern], "{script}");
    }
    let control = fixture.logged(&fixture.session(), &format!("{create}; rm f1*")).await;
    assert!(control.suspicious.is_empty(), "{:?}", control.suspicious);
}

/// The flood is seen: each of its operations is counted.
async fn flood_of_operations_is_bounded(mut fixture: Fixture) {
    fixture.log_everything();
    let name = "n".repeat(200);
    let script = format!("i=0; while [ $i -lt 3000 ]; do : > {name}$i; i=$((i+1)); done");
    let logged = fixture.logged(&fixture.session(), &script).await;
    let total: u64 = logged.totals.values().sum();
    let kept: u64 = logged.kept.iter().map(|it| it.count).sum();
    let text: usize = logged.kept.iter().flat_map(|it| &it.path).map(String::len).sum();
    assert!(total >= 3000, "{:?}", logged.totals);
    assert_eq!(kept + logged.dropped, total);
    assert!(logged.kept.len() <= 1000 && text <= 65 * 1024, "{} {text}", logged.kept.len());
    assert!(logged.dropped > 0);
    let repeat = "i=0; while [ $i -lt 100 ]; do kill -0 $$; i=$((i+1)); done";
    let same = fixture.logged(&fixture.session(), repeat).await;
    assert_eq!(
        same.kept.iter().filter(|it| it.call == "kill").map(|it| it.count).sum::<u64>(),
        100
    );
    assert_eq!(
        same.kept.iter().filter(|it| it.call == "kill").count(),
        1,
        "equal ones are one entry"
    );
}

/// A denied call arrives in the same way as a logged one. It must not continue.
async fn logged_call_that_is_denied_stays_denied(mut fixture: Fixture) {
    fixture.log_everything();
    let script = "echo a > f; rm f; ls f";
    let control = fixture.sh(&fixture.session(), script).await;
    assert_ne!(control.outcome, Outcome::Exited(0), "it is removed: {control:?}");
    let names = ["unlink", "unlinkat"].map(str::to_owned).to_vec();
    fixture.policy.syscalls =
        SyscallPolicy { mode: Some(SyscallMode::Deny), names, ..SyscallPolicy::default() };
    let denied = fixture.sh(&fixture.session(), script).await;
    assert_eq!(
        (denied.stdout.as_str(), &denied.outcome),
        ("f\n", &Outcome::Exited(0)),
        "{denied:?}"
    );
    assert!(!denied.violations.is_empty());
    assert!(!denied.operations.unwrap().totals.keys().any(|call| call.starts_with("unlink")));
}

/// Prints what it costs to create a file. Asserts only that it works.
async fn cost_of_logged_operations_is_printed(mut fixture: Fixture) {
    let script = "s=$(date +%s%N); i=0; while [ $i -lt 2000 ]; do : > f$i; i=$((i+1)); done; \
                  e=$(date +%s%N); echo $(((e - s) / 2000))";
    for is_logged in [false, true] {
        fixture.policy.logging.file_operations = Some(is_logged);
        let finished = fixture.sh(&fixture.session(), script).await;
        assert_eq!(finished.outcome, Outcome::Exited(0), "{finished:?}");
        let cost = finished.stdout.trim();
        println!("{:?}, logged {is_logged}: {cost} ns to create a file", fixture.kind);
    }
}

#[tokio::test]
async fn container_refuses_logging_by_field() {
    let Some(mut fixture) = Fixture::new(Kind::Runc).await else { return };
    fixture.policy.logging.signals = Some(true);
    let error = fixture.try_plan(&fixture.session()).unwrap_err();
    assert_eq!(error.field, "policy.logging.signals");
    assert!(error.to_string().contains("bwrap"), "{error}");
}

macro_rules! in_modes_that_log {
    ($($name:ident),+ $(,)?) => {
        in_mode!(bwrap = Bwrap: $($name),+);
        in_mode!(nsjail = Nsjail: $($name),+);
        in_mode!(native = Native: $($name),+);
    };
}

in_modes_that_log!(
    changes_of_files_are_logged,
    signals_are_logged,
    suspicious_patterns_are_found,
    flood_of_operations_is_bounded,
    logged_call_that_is_denied_stays_denied,
    cost_of_logged_operations_is_printed,
);
