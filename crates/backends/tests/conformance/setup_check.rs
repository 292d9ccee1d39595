//! `codelia-init` refuses a sandbox that differs from the plan, before any command starts.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    sync::Arc,
};

use codelia_backends::{Error, ToolOptions, bwrap};
use codelia_init::Step;

use crate::harness::{Fixture, Kind, group_parent, init_path};

/// Prepares a sandbox with a bubblewrap that gets extra options. Returns the step that failed.
async fn failed_step(fixture: &mut Fixture, options: &str) -> Option<Step> {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("bwrap");
    let script = format!("#!/bin/sh\nlist=$2\nshift 2\nexec bwrap --args \"$list\" {options} \"$@\"\n");
    fs::write(&program, script).unwrap();
    for path in [dir.path(), &program] {
        fs::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
    }
    let groups = group_parent();
    fixture.backend = Arc::new(
        bwrap(ToolOptions {
            init: init_path(),
            program,
            cgroup_parent: groups,
            sandbox_uids: None,
            engine_sockets: Vec::new(),
        })
        .unwrap(),
    );
    let session = fixture.session();
    match fixture.backend.prepare(&fixture.plan(&session)).await {
        Ok(prepared) => {
            assert!(prepared.discard().await.is_clean());
            None
        }
        Err(Error::InitFailed(failure)) => Some(failure.step),
        Err(error) => panic!("{options}: {error}"),
    }
}

#[tokio::test]
async fn sandbox_that_deviates_from_plan_is_refused() {
    let Some(mut fixture) = Fixture::new(Kind::Bwrap).await else { return };
    for (options, expected) in [
        // The control: an unchanged bubblewrap.
        ("", None),
        ("--share-net", Some(Step::CheckNamespaces)),
        ("--remount-ro /tmp", Some(Step::CheckMounts)),
        ("--bind /usr /usr", Some(Step::CheckMounts)),
        ("--hostname another", Some(Step::CheckHostname)),
        ("--uid 7", Some(Step::CheckIds)),
    ] {
        assert_eq!(failed_step(&mut fixture, options).await, expected, "{options}");
    }
}
