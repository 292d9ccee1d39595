//! Commands that cannot start.

use codelia_backends::{Backend, Error, Logical, LogicalOptions};
use codelia_types::Reason;
use std::os::unix::fs::symlink;

use crate::harness::{Fixture, command, groups_of};

#[tokio::test]
async fn missing_program_is_refused() {
    let fixture = Fixture::new().await;
    for absent in ["codelia-no-such-program", "/no/such/program", "./absent", ""] {
        assert_eq!(
            fixture.refusal(&command(&[absent])).await,
            "EXECUTABLE_NOT_FOUND",
            "{absent:?}"
        );
    }
}

#[tokio::test]
async fn non_executable_program_is_refused() {
    let fixture = Fixture::new().await;
    std::fs::write(fixture.root.path().join("plain"), "text").unwrap();
    for forbidden in ["./plain", "/tmp"] {
        assert_eq!(fixture.refusal(&command(&[forbidden])).await, "EXECUTABLE_NOT_PERMITTED");
    }
}

#[tokio::test]
async fn launch_failure_names_step_and_errno() {
    let fixture = Fixture::new().await;
    let path = fixture.root.path().join("loop");
    // A script that is its own interpreter.
    std::fs::write(&path, format!("#!{}\n", path.display())).unwrap();
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    match fixture.launch(&command(&["./loop"])).await {
        Err(Error::Refused(refusal)) => {
            assert_eq!(refusal.reason, Reason::LaunchFailed);
            assert!(
                refusal.message.contains("Execute") && refusal.message.contains("os error 40"),
                "{refusal:?}"
            );
        }
        _ => panic!("launched"),
    }
}

#[tokio::test]
async fn working_directory_outside_root_is_refused() {
    let fixture = Fixture::new().await;
    std::fs::create_dir(fixture.root.path().join("in")).unwrap();
    std::fs::write(fixture.root.path().join("file"), "").unwrap();
    symlink("/", fixture.root.path().join("out")).unwrap();
    for outside in ["..", "in/../..", "/", "/tmp", "out", "out/tmp", "absent", "file"] {
        let mut command = command(&["true"]);
        command.working_directory = outside.to_owned();
        assert_eq!(fixture.refusal(&command).await, "WORKING_DIRECTORY_INVALID", "{outside}");
    }
}

#[tokio::test]
async fn missing_root_is_an_error() {
    let fixture = Fixture::new().await;
    let mut plan = fixture.plan();
    plan.root = fixture.root.path().join("absent");
    assert!(matches!(fixture.backend.prepare(&plan).await.unwrap_err(), Error::Root { .. }));
}

#[tokio::test]
async fn mode_is_unusable_without_init() {
    let options =
        LogicalOptions { init: "/no/such/codelia-init".into(), cgroup_parent: Default::default() };
    let backend = Logical::new(options).unwrap();
    assert!(!backend.probe().await.usable);
    let fixture = Fixture::new().await;
    let plan = fixture.plan();
    let error = backend.prepare(&plan).await.unwrap_err();
    assert!(matches!(error, Error::InitStart { .. }), "{error}");
    assert!(groups_of(plan.sandbox).is_empty());
}
