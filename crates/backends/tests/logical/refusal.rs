//! Commands that cannot be executed.

use codelia_backends::{Backend, Error, Logical, LogicalOptions};
use std::os::unix::fs::symlink;

use crate::harness::{Place, command, groups_of};

#[tokio::test]
async fn a_program_that_is_not_there_is_refused() {
    let place = Place::new().await;
    for absent in ["codelia-no-such-program", "/no/such/program", "./absent", ""] {
        assert_eq!(place.refusal(&command(&[absent])).await, "EXECUTABLE_NOT_FOUND", "{absent:?}");
    }
}

#[tokio::test]
async fn a_program_that_may_not_be_executed_is_refused() {
    let place = Place::new().await;
    std::fs::write(place.root.path().join("plain"), "text").unwrap();
    for forbidden in ["./plain", "/tmp"] {
        assert_eq!(place.refusal(&command(&[forbidden])).await, "EXECUTABLE_NOT_PERMITTED");
    }
}

#[tokio::test]
async fn another_failure_names_its_step_and_errno() {
    let place = Place::new().await;
    let path = place.root.path().join("garbage");
    std::fs::write(&path, "text").unwrap();
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    match place.launch(&command(&["./garbage"])).await {
        Err(Error::Refused(refusal)) => {
            assert_eq!(refusal.reason, "LAUNCH_FAILED");
            assert!(
                refusal.message.contains("Execute") && refusal.message.contains("os error 8"),
                "{refusal:?}"
            );
        }
        _ => panic!("launched"),
    }
}

#[tokio::test]
async fn a_working_directory_outside_the_root_is_refused() {
    let place = Place::new().await;
    std::fs::create_dir(place.root.path().join("in")).unwrap();
    std::fs::write(place.root.path().join("file"), "").unwrap();
    symlink("/", place.root.path().join("out")).unwrap();
    for outside in ["..", "in/../..", "/", "/tmp", "out", "out/tmp", "absent", "file"] {
        let mut command = command(&["true"]);
        command.working_directory = outside.to_owned();
        assert_eq!(place.refusal(&command).await, "WORKING_DIRECTORY_INVALID", "{outside}");
    }
}

#[tokio::test]
async fn a_root_that_is_not_there_is_an_error() {
    let place = Place::new().await;
    let mut plan = place.plan();
    plan.root = place.root.path().join("absent");
    assert!(matches!(place.backend.prepare(&plan).await.unwrap_err(), Error::Root { .. }));
}

#[tokio::test]
async fn without_codelia_init_the_mode_is_not_usable_and_nothing_is_left() {
    let options = LogicalOptions { init: "/no/such/codelia-init".into(), groups: Default::default() };
    let backend = Logical::new(options).unwrap();
    assert!(!backend.probe().await.usable);
    let place = Place::new().await;
    let plan = place.plan();
    let error = backend.prepare(&plan).await.unwrap_err();
    assert!(matches!(error, Error::InitStart { .. }), "{error}");
    assert!(groups_of(plan.sandbox).is_empty());
}
