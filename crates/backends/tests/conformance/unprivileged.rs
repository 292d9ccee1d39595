//! Runs the suites of the modes `bwrap` and `native` as an unprivileged user, with and without a
//! delegated control group.

use std::{
    fs::{self, Permissions},
    io,
    os::unix::fs::{PermissionsExt, chown},
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use codelia_sys::cgroup::{CgroupParent, Hierarchy};
use tempfile::TempDir;

use crate::{
    harness::{init_path, is_root, skip},
    programs::stage_toolchain,
    reads::OUTSIDE_TMP,
    watched::UNDELEGATED,
};

/// Users that no other test uses. The suite finds its processes by their user, and both suites may
/// run at the same time.
const BWRAP_USERS: Users = Users { delegated: 399_999, undelegated: 399_998 };
const NATIVE_USERS: Users = Users { delegated: 399_997, undelegated: 399_996 };

/// How long the last processes of a suite may take to exit, and the delay between two checks.
const TIMEOUT: Duration = Duration::from_secs(20);
const RETRY_DELAY: Duration = Duration::from_millis(10);

struct Users {
    delegated: u32,
    undelegated: u32,
}

/// A control group in each hierarchy that belongs to the user, with a leaf for its processes.
struct Delegation {
    name: String,
    groups: Vec<PathBuf>,
}

impl Delegation {
    fn new(user: u32) -> Self {
        let name = format!("codelia-user-{user}-{}", std::process::id());
        let version_1 =
            ["memory", "pids", "cpu", "cpuacct"].map(|name| Path::new("/sys/fs/cgroup").join(name));
        let parents =
            if version_1[0].exists() { version_1.to_vec() } else { vec!["/sys/fs/cgroup".into()] };
        let groups: Vec<_> = parents.iter().map(|parent| parent.join(&name)).collect();
        for group in &groups {
            for dir in [group.clone(), group.join("first")] {
                fs::create_dir_all(&dir).unwrap();
                chown(&dir, Some(user), Some(user)).unwrap();
                for file in ["cgroup.procs", "tasks", "cgroup.subtree_control"] {
                    let _ = chown(dir.join(file), Some(user), Some(user));
                }
            }
        }
        Self { name, groups }
    }

    /// Returns the shell commands that join the groups.
    fn enter(&self) -> String {
        let entries = self
            .groups
            .iter()
            .map(|group| format!("echo $$ > {}/first/cgroup.procs", group.display()));
        entries.collect::<Vec<_>>().join(" && ")
    }
}

impl Delegation {
    /// Fails while a process is in the groups. What killed cases left is removed as the next worker
    /// would.
    fn remove(&self) -> io::Result<()> {
        let parent = CgroupParent { name: Some(self.name.clone()), cpu_idle: false };
        Hierarchy::detect(&parent)
            .and_then(|hierarchy| hierarchy.remove_orphans())
            .map_err(io::Error::other)?;
        let dirs = self.groups.iter().flat_map(|group| [group.join("first"), group.clone()]);
        dirs.filter(|dir| dir.exists()).try_for_each(fs::remove_dir)
    }
}

/// Zygotes end after the suite that they belong to.
impl Drop for Delegation {
    fn drop(&mut self) {
        let begin = Instant::now();
        while let Err(error) = self.remove() {
            if begin.elapsed() > TIMEOUT {
                let message = format!("control groups {} not removed: {error}", self.name);
                assert!(thread::panicking(), "{message}");
                return eprintln!("{message}");
            }
            thread::sleep(RETRY_DELAY);
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
fn cases(variable: &str, all: &str) -> String {
    std::env::var(variable).unwrap_or(all.to_owned())
}

/// Returns what `CODELIA_TEST_REQUIRE` lists, except root, which the user does not have.
fn required_without_root() -> String {
    let required = std::env::var("CODELIA_TEST_REQUIRE").unwrap_or_default();
    let names = required.split(',').map(str::trim).filter(|name| !["root", "user"].contains(name));
    names.collect::<Vec<_>>().join(",")
}

/// The suite and `codelia-init` where the user may execute them.
struct Staged {
    dir: TempDir,
    suite: PathBuf,
    init: PathBuf,
}

impl Staged {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
        let suite = copy(&std::env::current_exe().unwrap(), dir.path());
        let init = copy(&init_path(), dir.path());
        Self { dir, suite, init }
    }

    /// A shell that runs `before` as root and then these cases as the user.
    fn command(&self, before: &str, user: u32, cases: &str) -> Command {
        let suite = self.suite.display();
        let script = format!(
            "{before} && exec setpriv --reuid {user} --regid {user} --clear-groups {suite} {cases} --test-threads 1"
        );
        let mut command = Command::new("sh");
        command.args(["-c", &script]).env("CODELIA_INIT", &self.init);
        command
            .env("CODELIA_TEST_REQUIRE", required_without_root())
            .env("TMPDIR", "/tmp")
            .current_dir("/tmp");
        command
    }
}

fn passes(mut command: Command) {
    let output = command.output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{stdout}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(stdout.contains("test result: ok") && !stdout.contains(" 0 passed"), "{stdout}");
}

#[test]
fn bwrap_suite_passes_for_unprivileged_user() {
    suite_passes(BWRAP_USERS.delegated, "CODELIA_TEST_USER_CASES", "bwrap::");
}

#[test]
fn native_suite_passes_for_unprivileged_user() {
    suite_passes(NATIVE_USERS.delegated, "CODELIA_TEST_NATIVE_USER_CASES", "native::");
}

fn suite_passes(user: u32, variable: &str, all: &str) {
    if !is_root("only root can start the suite as another user") {
        return;
    }
    let staged = Staged::new();
    let path = std::env::var("PATH").unwrap();
    let path = match stage_toolchain(staged.dir.path()) {
        Ok(toolchain) => format!("{}/bin:{path}", toolchain.display()),
        Err(reason) => {
            skip("cargo", reason);
            path
        }
    };
    let delegation = Delegation::new(user);
    let cases = cases(variable, all);
    let mut command = staged.command(&delegation.enter(), user, &cases);
    let outside = tempfile::tempdir_in("/srv").unwrap();
    chown(outside.path(), Some(user), Some(user)).unwrap();
    fs::set_permissions(outside.path(), Permissions::from_mode(0o755)).unwrap();
    command.env("CODELIA_TEST_CGROUP_PARENT", &delegation.name).env("PATH", path);
    command.env(OUTSIDE_TMP, outside.path());
    passes(command);
}

#[test]
fn limits_are_watched_for_user_without_cgroup() {
    limits_are_watched(BWRAP_USERS.undelegated, "CODELIA_TEST_WATCHED_CASES", "watched::bwrap::");
}

#[test]
fn limits_are_watched_in_native_without_cgroup() {
    limits_are_watched(
        NATIVE_USERS.undelegated,
        "CODELIA_TEST_NATIVE_WATCHED_CASES",
        "watched::native::",
    );
}

fn limits_are_watched(user: u32, variable: &str, all: &str) {
    if !is_root("only root can start the suite as another user") {
        return;
    }
    let cases = cases(variable, all);
    let staged = Staged::new();
    let mut command = staged.command("true", user, &cases);
    command.env_remove("CODELIA_TEST_CGROUP_PARENT").env(UNDELEGATED, "1");
    passes(command);
}
