//! Runs the suite of mode `bwrap` as an unprivileged user with a delegated control group.

use std::{
    fs::{self, Permissions},
    os::unix::fs::{PermissionsExt, chown},
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    harness::{init_path, is_root, skip},
    programs::stage_toolchain,
};

/// A user that no other test uses.
const USER: u32 = 399_999;

/// A control group in each hierarchy that belongs to the user, with a leaf for its processes.
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

    /// Returns the shell commands that join the groups.
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
                    println!("cannot remove {}: {error}", dir.display());
                }
            }
        }
    }
}

/// Copies a program to where every user may execute it.
fn copy(from: &Path, dir: &Path) -> PathBuf {
    let path = dir.join(from.file_name().unwrap());
    fs::copy(from, &path).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
    path
}

/// Returns the filter for the cases: all, or fewer in the slow VM.
fn cases() -> String {
    std::env::var("CODELIA_TEST_USER_CASES").unwrap_or("bwrap::".to_owned())
}

/// Returns what `CODELIA_TEST_REQUIRE` lists, except root, which the user does not have.
fn required_without_root() -> String {
    let required = std::env::var("CODELIA_TEST_REQUIRE").unwrap_or_default();
    let names = required.split(',').map(str::trim).filter(|name| !["root", "user"].contains(name));
    names.collect::<Vec<_>>().join(",")
}

#[test]
fn bwrap_suite_passes_for_unprivileged_user() {
    if !is_root("only root can start the suite as another user") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    let suite = copy(&std::env::current_exe().unwrap(), dir.path());
    let init = copy(&init_path(), dir.path());
    let path = std::env::var("PATH").unwrap();
    let path = match stage_toolchain(dir.path()) {
        Ok(toolchain) => format!("{}/bin:{path}", toolchain.display()),
        Err(reason) => {
            skip("cargo", reason);
            path
        }
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
        .env("CODELIA_TEST_REQUIRE", required_without_root())
        .env("TMPDIR", "/tmp")
        .env("PATH", path)
        .current_dir("/tmp")
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{stdout}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(stdout.contains("test result: ok") && !stdout.contains(" 0 passed"), "{stdout}");
}
