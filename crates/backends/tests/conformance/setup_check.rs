//! `codelia-init` refuses a sandbox that differs from the plan, before any command starts.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    sync::Arc,
};

use codelia_backends::{Error, HostOptions, ToolOptions, bwrap};
use codelia_init::Step;

use crate::harness::{Fixture, Kind, group_parent, init_path};

/// Prepares a sandbox with a bubblewrap that gets fewer arguments, or more. Returns the step that
/// failed.
async fn failed_step(fixture: &mut Fixture, without: &str, options: &str) -> Option<Step> {
    let dir = tempfile::tempdir().unwrap();
    let (program, list) = (dir.path().join("bwrap"), dir.path().join("list"));
    let pattern = format!("^({})$", without.replace(' ', "|"));
    let script = format!(
        "#!/bin/bash\ngrep -zvE -e '{pattern}' /proc/self/fd/$2 > {list}\nshift 2\n\
         exec {{changed}}< {list}\nexec bwrap --args $changed {options} \"$@\"\n",
        list = list.display()
    );
    fs::write(&program, script).unwrap();
    for (path, mode) in [(dir.path(), 0o777), (&program, 0o755)] {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }
    let groups = group_parent();
    let host = HostOptions {
        init: init_path(),
        cgroup_parent: groups,
        engine_sockets: Vec::new(),
        watch_limits: false,
    };
    fixture.backend = Arc::new(bwrap(ToolOptions { host, program, sandbox_uids: None }).unwrap());
    let session = fixture.session();
    match fixture.backend.prepare(&fixture.plan(&session)).await {
        Ok(prepared) => {
            assert!(prepared.discard().await.is_clean());
            None
        }
        Err(Error::InitFailed(failure)) => Some(failure.step),
        Err(error) => panic!("without {without}, with {options}: {error}"),
    }
}

#[tokio::test]
async fn sandbox_that_deviates_from_plan_is_refused() {
    let Some(mut fixture) = Fixture::new(Kind::Bwrap).await else { return };
    for (without, options, expected) in [
        ("none", "", None),
        ("--unshare-ipc", "", Some(Step::CheckNamespaces)),
        ("--unshare-uts --hostname codelia", "", Some(Step::CheckNamespaces)),
        ("none", "--share-net", Some(Step::CheckNamespaces)),
        ("none", "--remount-ro /tmp", Some(Step::CheckMounts)),
        ("none", "--ro-bind /etc /tmp", Some(Step::CheckMounts)),
        ("none", "--bind /tmp /workspace", Some(Step::CheckMounts)),
        ("none", "--tmpfs /dev/shm/more", Some(Step::CheckMounts)),
        ("none", "--tmpfs /workspace/more", Some(Step::CheckMounts)),
        ("none", "--dev-bind /dev /dev", Some(Step::CheckMounts)),
        ("none", "--ro-bind /etc /usr", Some(Step::PrivateRuntime)),
        ("none", "--ro-bind /etc /usr/share", Some(Step::PrivateRuntime)),
        ("none", "--hostname another", Some(Step::CheckHostname)),
        ("none", "--uid 7", Some(Step::CheckIds)),
        ("none", "--cap-drop CAP_SETPCAP", Some(Step::LockSecureBits)),
        ("none", "--cap-drop CAP_SYS_ADMIN", Some(Step::UnshareView)),
    ] {
        let failed = failed_step(&mut fixture, without, options).await;
        assert_eq!(failed, expected, "without {without}, with {options}");
    }
}
