//! A denied path has other names: links, paths through `/proc`, second mounts of the host.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::PathBuf,
    process::Command,
};

use codelia_sys::process;
use codelia_types::Outcome;
use tempfile::TempDir;

use crate::harness::{Fixture, in_every_mode, in_mode, skip};

/// A host directory with secrets, and other names for it.
struct Aliased {
    dir: TempDir,
    /// A mount point of the same directory; `None` if nothing can be mounted.
    mounted: Option<PathBuf>,
}

impl Aliased {
    fn new(fixture: &Fixture) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let mut aliased = Self { dir, mounted: None };
        for name in ["real/closed", "second/mount"] {
            fs::create_dir_all(aliased.dir.path().join(name)).unwrap();
        }
        let real = aliased.real();
        fs::write(real.join("secret"), "secret\n").unwrap();
        fs::write(real.join("closed/inner"), "secret\n").unwrap();
        symlink("secret", real.join("to-secret")).unwrap();
        symlink("closed", real.join("to-closed")).unwrap();
        symlink(&real, aliased.linked()).unwrap();
        // An engine may be in another mount namespace.
        let can_mount = process::own_uid() == 0 && !fixture.kind.is_container();
        if can_mount {
            let point = aliased.second().join("mount");
            let mount = Command::new("mount").arg("--bind").arg(&real).arg(&point).status();
            assert!(mount.unwrap().success());
            aliased.mounted = Some(point);
        }
        aliased
    }

    fn real(&self) -> PathBuf {
        self.dir.path().join("real")
    }

    fn linked(&self) -> PathBuf {
        self.dir.path().join("linked")
    }

    fn second(&self) -> PathBuf {
        self.dir.path().join("second")
    }

    /// Every name of the secrets.
    fn names(&self) -> Vec<String> {
        let through_proc = format!("/proc/self/root{}", self.real().display());
        let mut places = vec![self.real(), self.linked(), PathBuf::from(through_proc)];
        places.extend(self.mounted.clone());
        let names = ["secret", "to-secret", "closed/inner", "to-closed/inner", "closed/../secret"];
        let join = |place: &PathBuf| names.map(|name| place.join(name).display().to_string());
        places.iter().flat_map(join).collect()
    }
}

impl Drop for Aliased {
    fn drop(&mut self) {
        if let Some(point) = &self.mounted {
            let unmount = Command::new("umount").arg("--lazy").arg(point).status();
            assert!(unmount.unwrap().success());
        }
    }
}

/// Returns the names through which a command reads a secret.
async fn reached(fixture: &Fixture, names: &[String]) -> Vec<String> {
    let script =
        format!("for p in {}; do grep -qs secret $p && echo $p; done; true", names.join(" "));
    let finished = fixture.sh(&fixture.session(), &script).await;
    assert_eq!(finished.outcome, Outcome::Exited(0), "{finished:?}");
    finished.stdout.lines().map(str::to_owned).collect()
}

async fn denied_path_is_unreachable_through_aliases(mut fixture: Fixture) {
    let aliased = Aliased::new(&fixture);
    let names = aliased.names();
    let opened = vec![aliased.real(), aliased.linked(), aliased.second()];
    fixture.policy.filesystem.read_only_paths = Some(opened);
    assert_eq!(reached(&fixture, &names).await, names, "the control: all are names of a secret");
    fixture.policy.filesystem.denied_paths =
        vec![aliased.real().join("secret"), aliased.real().join("closed")];
    assert_eq!(reached(&fixture, &names).await, Vec::<String>::new());
}

async fn denied_path_is_unreachable_through_overlay(mut fixture: Fixture) {
    let aliased = Aliased::new(&fixture);
    let Some(place) = aliased.mounted.clone().filter(|_| fixture.host.enforceable.overlays) else {
        return skip("root", "only root can mount a directory twice");
    };
    let names: Vec<_> = ["secret", "to-secret", "closed/inner", "to-closed/inner"]
        .map(|name| place.join(name).display().to_string())
        .to_vec();
    fixture.policy.filesystem.overlay_paths = Some(vec![place]);
    assert_eq!(reached(&fixture, &names).await, names, "the control: all are names of a secret");
    fixture.policy.filesystem.denied_paths =
        vec![aliased.real().join("secret"), aliased.real().join("closed")];
    assert_eq!(reached(&fixture, &names).await, Vec::<String>::new());
}

in_every_mode!(denied_path_is_unreachable_through_aliases);
in_mode!(bwrap_overlay = Bwrap: denied_path_is_unreachable_through_overlay);
in_mode!(nsjail_overlay = Nsjail: denied_path_is_unreachable_through_overlay);
in_mode!(native_overlay = Native: denied_path_is_unreachable_through_overlay);
