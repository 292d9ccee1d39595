//! Runs in mode `bwrap`: the whole worker with the real tool.

use std::{
    fs::Permissions,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::PathBuf,
    sync::Arc,
};

use codelia_backends::{Backend, HostOptions, ToolOptions, bwrap};
use codelia_policy::RunSpec;
use codelia_proto::v1::run_event::Kind as Event;
use codelia_store::{EventKind, Run, SessionRef};
use codelia_tests::{available, eventually, is_root, recorded_events};
use codelia_types::{Mode, Outcome, Reason, Receipt, SessionId};

use crate::fixture::{Fixture, Settings, shell};

/// Returns a worker with mode `bwrap`, or `None` if that does not work here.
async fn isolating() -> Option<Fixture> {
    let Some(init) = std::env::var_os("CODELIA_INIT").map(PathBuf::from) else {
        available("bwrap", Some("CODELIA_INIT is not set to the path of codelia-init"));
        return None;
    };
    let host = HostOptions {
        init,
        cgroup_parent: Default::default(),
        engine_sockets: Vec::new(),
        watch_limits: false,
    };
    let backend = bwrap(ToolOptions { host, program: "bwrap".into(), sandbox_uids: None }).unwrap();
    let found = backend.probe().await;
    let missing = (!found.usable).then(|| format!("mode bwrap: {:?}", found.gaps));
    if !available("bwrap", missing.as_deref()) {
        return None;
    }
    Some(Fixture::with(Settings::default(), vec![Arc::new(backend)]).await)
}

fn isolated(script: &str) -> RunSpec {
    RunSpec { mode: Mode::Bwrap, ..shell(script) }
}

async fn run(fixture: &Fixture, session: SessionId, spec: &RunSpec) -> (Run, String) {
    let run = fixture.start(session, spec).await;
    let row = fixture.ended(run).await;
    let result = row.result().unwrap();
    assert_eq!(
        result.receipt,
        Some(Receipt::default()),
        "the sandbox left something: {:?}",
        result.outcome
    );
    (row, String::from_utf8(fixture.output(run).await).unwrap())
}

#[tokio::test]
async fn sessions_have_own_users_and_are_isolated() {
    let Some(fixture) = isolating().await else { return };
    let (mine, theirs) = (fixture.held_session().await, fixture.held_session().await);
    let (row, _) = run(&fixture, theirs, &isolated("echo secret > file; chmod 666 file")).await;
    assert_eq!(row.outcome(), Some(&Outcome::Exited(0)));
    let file = fixture.directory(theirs).join("file");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "secret\n", "the file is on the host");

    let attack = format!(
        "exec 2>&1; cat {0}; (echo changed > {0}); ls /workspace; id -u; pwd",
        file.display()
    );
    let (row, output) = run(&fixture, mine, &isolated(&attack)).await;
    assert_eq!(row.outcome(), Some(&Outcome::Exited(0)));
    assert!(!output.contains("secret") && output.ends_with("1000\n/workspace\n"), "{output}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "secret\n");
    let owner = |session| std::fs::metadata(fixture.directory(session)).unwrap().uid();
    assert_eq!(owner(mine) != owner(theirs), is_root(), "as root, each session has its own user");
    fixture.end().await;
}

#[tokio::test]
async fn overlay_changes_live_as_long_as_session() {
    let Some(fixture) = isolating().await else { return };
    let host = tempfile::tempdir().unwrap();
    std::fs::set_permissions(host.path(), Permissions::from_mode(0o755)).unwrap();
    std::fs::write(host.path().join("file"), "of the host\n").unwrap();
    let session = fixture.held_session().await;
    let overlaid = |script: &str| {
        let mut spec = isolated(&format!("cd {}; {script}", host.path().display()));
        spec.policy.filesystem.overlay_paths = Some(vec![host.path().to_owned()]);
        spec
    };
    let (row, output) =
        run(&fixture, session, &overlaid("cat file; echo changed > file; rm -f x")).await;
    assert_eq!((row.outcome(), output.as_str()), (Some(&Outcome::Exited(0)), "of the host\n"));
    let (_, output) = run(&fixture, session, &overlaid("cat file")).await;
    assert_eq!(output, "changed\n");
    assert_eq!(std::fs::read_to_string(host.path().join("file")).unwrap(), "of the host\n");
    let layers = codelia_policy::overlays_dir(&fixture.directory(session));
    assert!(layers.is_dir());
    fixture.store.session_close(&fixture.tenant, &SessionRef::Id(session)).await.unwrap();
    eventually("the layers are removed", || async { (!layers.exists()).then_some(()) }).await;
    fixture.end().await;
}

#[tokio::test]
async fn blocked_call_is_streamed_stored_and_audited() {
    let Some(fixture) = isolating().await else { return };
    let session = fixture.held_session().await;
    let script = "unshare --user true && echo escaped; echo continued; read line";
    let mut spec = isolated(script);
    spec.command.stdin = true;
    let run = fixture.start(session, &spec).await;
    let mut watcher = fixture.attach(run, false).await;
    let violation = loop {
        if let Some(Event::Violation(violation)) = watcher.event().await {
            break violation;
        }
    };
    assert_eq!(
        (violation.kind.as_str(), violation.syscall.as_str()),
        ("SYSCALL_BLOCKED", "unshare")
    );
    assert_eq!(violation.args.len(), 6);
    watcher
        .send(codelia_proto::internal::v1::attach_run_request::Kind::Stdin(b"\n".to_vec()))
        .await;
    let row = fixture.ended(run).await;
    assert_eq!(row.outcome(), Some(&Outcome::Exited(0)));
    let output = String::from_utf8(fixture.output(run).await).unwrap();
    assert!(output.contains("continued") && !output.contains("escaped"), "{output}");
    let violations = &row.result().unwrap().violations;
    assert_eq!((violations.total, violations.seen.len()), (1, 1));
    let events = recorded_events(&fixture.store, &fixture.tenant, Some(EventKind::SyscallBlocked))
        .await
        .unwrap();
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].subject.run, Some(run));
    assert_eq!(events[0].body.detail["syscall"], "unshare");
    fixture.end().await;
}

#[tokio::test]
async fn memory_limit_is_its_own_outcome() {
    let Some(fixture) = isolating().await else { return };
    let session = fixture.held_session().await;
    let mut spec = isolated("exec tail /dev/zero");
    spec.limits.memory_bytes = 32 << 20;
    let (row, _) = run(&fixture, session, &spec).await;
    assert_eq!(row.outcome(), Some(&Outcome::Oom));
    fixture.end().await;
}

#[tokio::test]
async fn sandbox_is_prepared_for_next_run() {
    let Some(fixture) = isolating().await else { return };
    let session = fixture.held_session().await;
    let prepared = || async {
        let (row, output) = run(&fixture, session, &isolated("echo hello")).await;
        assert_eq!((row.outcome(), output.as_str()), (Some(&Outcome::Exited(0)), "hello\n"));
        row.result().filter(|result| result.prepared).map(drop)
    };
    eventually("a run gets a prepared sandbox", prepared).await;
    fixture.end().await;
}

#[tokio::test]
async fn unenforceable_field_is_refused_and_audited() {
    let Some(fixture) = isolating().await else { return };
    let session = fixture.held_session().await;
    let mut spec = isolated("true");
    spec.policy.network.executables = Some(vec!["/usr/bin/curl".into()]);
    let id = fixture.start(session, &spec).await;
    let row = fixture.ended(id).await;
    let Some(Outcome::Refused(refusal)) = row.outcome() else { panic!("{:?}", row.end) };
    assert_eq!(refusal.reason, Reason::Unenforceable);
    let events = recorded_events(&fixture.store, &fixture.tenant, Some(EventKind::RunRefused))
        .await
        .unwrap();
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].body.field.as_deref(), Some("policy.network.executables"));
    fixture.end().await;
}
