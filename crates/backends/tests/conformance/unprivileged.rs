//! The whole suite of mode `bwrap` once more, as an ordinary user with a delegated control group.

use std::{
    fs::{self, Permissions},
    os::unix::fs::{PermissionsExt, chown},
    path::{Path, PathBuf},
    process::Command,
};

use codelia_sys::process;

use crate::{harness::init_path, programs::stage_toolchain};

/// Nobody else is this one.
const USER: u32 = 399_999;

/// A control group in each hierarchy that belongs to the user, with one below for its first processes.
struct Delegation {
    name: String,
    groups: Vec<PathBuf>,
}

impl Delegation {
    fn new() -> Self {
        let name = format!("codelia-user-{}", std::process::id());
        let version_1 =
            ["memory", "pids", "cpu", "cpuacct"].map(|name| Path::new("/sys/fs/cgroup").join(name));
        let parents = if version_1[0].exists() { version_1.to_vec() } else { vec!["/sys/fs/cgroup".into()] };
        let groups: Vec<_> = parents.iter().map(|parent| parent.join(&name)).collect();
        for group in &groups {
            for dir in [group.clone(), group.join("first")] {
                fs::create_dir_all(&dir).unwrap();
                chown(&dir, Some(USER), Some(USER)).unwrap();
                for file in ["cgroup.procs", "tasks", "cgroup.subtree_control"] {
                    let _ = chown(dir.join(file), Some(USER), Some(USER));
                }
            }
        }
        Self { name, groups }
    }

    /// A shell's words that put it into the group.
    fn enter(&self) -> String {
        let entries =
            self.groups.iter().map(|group| format!("echo $$ > {}/first/cgroup.procs", group.display()));
        entries.collect::<Vec<_>>().join(" && ")
    }
}

impl Drop for Delegation {
    fn drop(&mut self) {
        for group in &self.groups {
            for dir in [group.join("first"), group.clone()] {
                if let Err(error) = fs::remove_dir(&dir) {
                    println!("{} is left: {error}", dir.display());
                }
            }
        }
    }
}

/// What everybody may execute, wherever the build is.
fn copy(from: &Path, into: &Path) -> PathBuf {
    let path = into.join(from.file_name().unwrap());
    fs::copy(from, &path).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
    path
}

/// All of them, but for a machine that is slow.
fn cases() -> String {
    std::env::var("CODELIA_TEST_USER_CASES").unwrap_or("bwrap::".to_owned())
}

#[test]
fn bwrap_suite_passes_for_unprivileged_user() {
    if process::own_uid() != 0 {
        println!("skipped: is run by root as an ordinary user, or is already one");
        return;
    }
    let fixture = tempfile::tempdir().unwrap();
    fs::set_permissions(fixture.path(), Permissions::from_mode(0o755)).unwrap();
    let suite = copy(&std::env::current_exe().unwrap(), fixture.path());
    let init = copy(&init_path(), fixture.path());
    let path = std::env::var("PATH").unwrap();
    let path = match stage_toolchain(fixture.path()) {
        Ok(toolchain) => format!("{}/bin:{path}", toolchain.display()),
        Err(_) => path,
    };
    let delegation = Delegation::new();
    let script = format!(
        "{} && exec setpriv --reuid {USER} --regid {USER} --clear-groups {} {} --test-threads 1",
        delegation.enter(),
        suite.display(),
        cases()
    );
    let output = Command::new("sh")
        .args(["-c", &script])
        .env("CODELIA_INIT", init)
        .env("CODELIA_TEST_CGROUP_PARENT", &delegation.name)
        .env("TMPDIR", "/tmp")
        .env("PATH", path)
        .current_dir("/tmp")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("test result: ok") && !said.contains(" 0 passed"), "{said}");
}
