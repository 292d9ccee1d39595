//! Runs the limit cases on cgroup v2, in an emulated VM, so that any host can run them, and what
//! the worker does with the quotas of its disk. `scripts/vm` builds its kernel and root file
//! system.

use std::{
    env,
    fs::{self, File, Permissions},
    io::{self, BufRead, BufReader},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use crate::harness::{init_path, skip};

/// Much longer than the suite takes in the VM.
const TIMEOUT: Duration = Duration::from_secs(590);

/// Size of the VM's disk in bytes.
const DISK_BYTES: u64 = 512 << 20;

const EMULATOR: &str = "qemu-system-x86_64";

/// The line on the console after the suite has passed.
const PASSED: &str = "vm: the suite exited with 0";

/// Cases that run in the VM in every mode. The emulation is slow.
const LIMITS: [&str; 2] = ["memory_is_limited", "pids_limit_is_reported_as_outcome"];
const MODES: [&str; 4] = ["bwrap", "nsjail", "native", "logical"];

/// Other cases that run in the VM.
const OTHERS: [&str; 38] = [
    "limits::bwrap::cpu_time_limit_covers_all_processes",
    "limits::bwrap::cpu_rate_is_limited",
    "limits::bwrap::usage_is_reported",
    "limits::bwrap::fork_bomb_does_not_stop_neighbour",
    "limits::bwrap::threads_count_as_processes",
    "limits::bwrap::socket_buffers_count_as_memory",
    "near_limits::bwrap::memory_near_limit_is_reported",
    "near_limits::bwrap_alone::cached_files_are_not_near_the_limit",
    "near_limits::bwrap::running_command_shows_its_usage",
    "cpu_io::bwrap::command_runs_only_on_its_cpus",
    "cpu_io::nsjail::command_runs_only_on_its_cpus",
    "cpu_io::bwrap_alone::low_priority_command_yields_cpu_to_newer_ones",
    "cpu_io::bwrap_io::read_rate_is_limited",
    "cpu_io::bwrap_io::write_rate_is_limited",
    "cpu_io::nsjail_io::write_rate_is_limited",
    "cgroups::cgroup_parent_of_process_is_removed_with_it",
    "cleanup::bwrap::discarded_sandbox_leaves_nothing",
    "cleanup::nsjail::discarded_sandbox_leaves_nothing",
    "cgroups::worker_finds_cgroup_parent_by_itself",
    "cgroups::worker_alone_in_its_cgroup_moves_aside",
    "cgroups::worker_in_shared_cgroup_uses_parent",
    "cgroups::cgroup_parent_with_processes_is_a_gap",
    "cgroups::cgroup_limits_are_written_and_swap_is_off",
    "cgroups::cgroup_kills_fork_bomb_and_is_removed",
    "cgroups::only_cgroups_of_dead_owners_are_removed",
    "unprivileged::bwrap_suite_passes_for_unprivileged_user",
    "unprivileged::limits_are_watched_for_user_without_cgroup",
    "network::bwrap::sockets_serve_commands",
    "network::nsjail::sockets_serve_commands",
    "core_dumps::bwrap::crash_does_not_start_the_handler",
    "core_dumps::nsjail::crash_does_not_start_the_handler",
    "cleanup::native::discarded_sandbox_leaves_nothing",
    "unprivileged::native_suite_passes_for_unprivileged_user",
    "quotas::bwrap::project_quota_refuses_bytes_and_inodes",
    "quotas::bwrap::user_quota_refuses_bytes_and_inodes",
    "quotas::bwrap::command_cannot_leave_project",
    "quotas::nsjail::project_quota_refuses_bytes_and_inodes",
    "quotas::native::project_quota_refuses_bytes_and_inodes",
];

/// Unit tests of the worker that run in the VM.
const OF_WORKER: [&str; 3] = [
    "disk::quota_tests::project_quota_limits_sessions",
    "disk::quota_tests::user_quota_limits_sessions",
    "disk::quota_tests::session_that_could_leave_its_project_is_scanned",
];

/// Modules of its kernel, in the order in which they are loaded.
const MODULES: [&str; 3] = ["overlay.ko", "quota_tree.ko", "quota_v2.ko"];

/// Environment of the suite in the VM.
const SETTINGS: &str = "export CODELIA_INIT=/codelia/codelia-init CODELIA_NSJAIL=/codelia/nsjail
export CODELIA_TEST_CGROUP_PARENT=service/worker CODELIA_TEST_REQUIRE=bwrap,nsjail,native,cgroup,cgroup2,python,root,processors,core_pattern,quota
export CODELIA_TEST_USER_CASES='limits::bwrap::memory limits::bwrap::pids limits::bwrap::threads environment::bwrap::workspace_is'
export CODELIA_TEST_NATIVE_USER_CASES='limits::native::memory limits::native::pids cleanup::native::discarded'
export CODELIA_TEST_WATCHED_CASES='watched::bwrap::memory watched::bwrap::too watched::bwrap::cpu watched::bwrap::isolated watched::bwrap::strict'
";

/// The VM's core dump handler, for `core_dumps`.
const CORE_HANDLER: &str = "#!/bin/sh
cat >/dev/null
echo handled >/codelia/core-handled
";

fn cases() -> Vec<String> {
    let limits = MODES
        .iter()
        .flat_map(|mode| LIMITS.iter().map(move |case| format!("limits::{mode}::{case}")));
    limits.chain(OTHERS.map(str::to_owned)).collect()
}

/// Returns the directory with the kernel and root file system that `scripts/vm` builds.
fn vm_dir() -> Option<PathBuf> {
    let built = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("vm");
    let dir = env::var_os("CODELIA_TEST_VM").map_or(built, PathBuf::from);
    if !["kernel", "tree.cpio"].iter().chain(&MODULES).all(|name| dir.join(name).is_file()) {
        skip("vm", format!("{} has no VM: run scripts/vm", dir.display()));
        return None;
    }
    if Command::new(EMULATOR).arg("--version").output().is_err() {
        skip("vm", format!("{EMULATOR} is not installed"));
        return None;
    }
    Some(dir)
}

fn nsjail_path() -> PathBuf {
    let path = env::var_os("CODELIA_NSJAIL").map_or("/usr/bin/nsjail".into(), PathBuf::from);
    assert!(path.is_file(), "{} is missing: run scripts/nsjail", path.display());
    path
}

/// The unit tests of the worker, which a build of the workspace leaves next to this suite.
fn worker_tests() -> io::Result<PathBuf> {
    let suite = env::current_exe()?;
    let mut newest = None;
    for entry in fs::read_dir(suite.parent().unwrap())? {
        let (path, metadata) = (entry.as_ref().unwrap().path(), entry?.metadata()?);
        let name = path.file_name().unwrap().to_string_lossy();
        if name.starts_with("codelia_worker-") && path.extension().is_none() {
            newest = newest.max(Some((metadata.modified()?, path.clone())));
        }
    }
    let missing = "codelia-worker's tests are not built: run `cargo test --workspace --no-run`";
    newest.map(|(_, path)| path).ok_or_else(|| io::Error::other(missing))
}

/// Stages the suite, the programs it starts, and their libraries.
fn stage(vm: &Path, dir: &Path) -> io::Result<()> {
    let libraries = dir.join("usr/lib/x86_64-linux-gnu");
    fs::create_dir_all(dir.join("codelia"))?;
    fs::create_dir_all(&libraries)?;
    for (program, name) in [
        (env::current_exe()?, "suite"),
        (worker_tests()?, "worker-suite"),
        (init_path(), "codelia-init"),
        (nsjail_path(), "nsjail"),
    ] {
        fs::copy(&program, dir.join("codelia").join(name))?;
        for library in libraries_of(&program)? {
            fs::copy(&library, libraries.join(library.file_name().unwrap()))?;
        }
    }
    for module in MODULES {
        fs::copy(vm.join(module), dir.join("codelia").join(module))?;
    }
    fs::write(dir.join("codelia/settings"), SETTINGS)?;
    fs::write(dir.join("codelia/cases"), cases().join("\n"))?;
    fs::write(dir.join("codelia/worker-cases"), OF_WORKER.join("\n"))?;
    for (name, text) in [("init", include_str!("vm.sh")), ("codelia/core-handler", CORE_HANDLER)] {
        fs::write(dir.join(name), text)?;
        fs::set_permissions(dir.join(name), Permissions::from_mode(0o755))?;
    }
    Ok(())
}

fn libraries_of(program: &Path) -> io::Result<Vec<PathBuf>> {
    let listed = Command::new("ldd").arg(program).output()?;
    let words = String::from_utf8_lossy(&listed.stdout).into_owned();
    Ok(words.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from).collect())
}

/// Writes an initramfs: the VM's root file system followed by the staged files.
fn archive(vm: &Path, staged: &Path, path: &Path) -> io::Result<()> {
    let mut file = File::create(path)?;
    io::copy(&mut File::open(vm.join("tree.cpio"))?, &mut file)?;
    let packed = Command::new("sh")
        .args(["-c", "find . | cpio --quiet -o -H newc -R 0:0"])
        .current_dir(staged)
        .stdout(file)
        .status()?;
    assert!(packed.success(), "cpio: {packed}");
    Ok(())
}

/// Formats a disk for session files, with quotas. A file system in memory has no I/O rates.
fn format_disk(path: &Path) -> io::Result<()> {
    File::create(path)?.set_len(DISK_BYTES)?;
    let quotas = ["-O", "quota,project", "-E", "quotatype=usrquota:prjquota"];
    let made = Command::new("mkfs.ext4").args(["-q", "-F"]).args(quotas).arg(path).status()?;
    assert!(made.success(), "mkfs.ext4: {made}");
    Ok(())
}

/// An emulator process. Dropping it kills it.
struct Emulator(Child);

impl Emulator {
    fn boot(vm: &Path, archive: &Path, disk: &Path) -> io::Result<Self> {
        let child = Command::new(EMULATOR)
            .args([
                "-nodefaults",
                "-no-user-config",
                "-nographic",
                "-no-reboot",
                "-serial",
                "stdio",
            ])
            // Emulating newer vector instructions takes half as much time again.
            .args(["-accel", "tcg,thread=multi", "-cpu", "Nehalem"])
            .args(["-smp", "2", "-m", "1536", "-net", "none"])
            // The kernel panics if its timer seems to stand still, which it may on a busy host.
            .args(["-append", "console=ttyS0 loglevel=1 panic=-1 mitigations=off no_timer_check"])
            .arg("-kernel")
            .arg(vm.join("kernel"))
            .arg("-initrd")
            .arg(archive)
            .args(["-device", "nvme,drive=disk,serial=disk", "-drive"])
            .arg(format!("id=disk,if=none,format=raw,cache=unsafe,file={}", disk.display()))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        Ok(Self(child))
    }

    /// Prints the console until the VM is off, and returns all of it.
    fn console(&mut self) -> String {
        let (sender, receiver) = mpsc::sync_channel(1024);
        let stdout = BufReader::new(self.0.stdout.take().unwrap());
        thread::spawn(move || {
            for line in stdout.split(b'\n').map_while(Result::ok) {
                if sender.send(String::from_utf8_lossy(&line).trim_end().to_owned()).is_err() {
                    return;
                }
            }
        });
        let (booted, mut console) = (Instant::now(), String::new());
        let deadline = booted + TIMEOUT;
        loop {
            match receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    println!("{:>4} s  {line}", booted.elapsed().as_secs());
                    console = console + &line + "\n";
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => return console,
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    panic!("the VM did not shut down within {TIMEOUT:?}")
                }
            }
        }
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn limits_hold_on_cgroup_v2_host() {
    let Some(vm) = vm_dir() else { return };
    let dir = tempfile::tempdir().unwrap();
    let [staged, initramfs, disk] = ["tree", "initramfs", "disk"].map(|name| dir.path().join(name));
    stage(&vm, &staged).unwrap();
    archive(&vm, &staged, &initramfs).unwrap();
    format_disk(&disk).unwrap();
    let console = Emulator::boot(&vm, &initramfs, &disk).unwrap().console();
    // The kernel may print on the same line.
    assert!(
        console.lines().any(|line| line.starts_with(PASSED)),
        "the suite did not pass in the VM"
    );
    for case in cases().into_iter().chain(OF_WORKER.map(str::to_owned)) {
        let passed = format!("test {case} ... ok");
        assert!(console.lines().any(|line| line == passed), "{case} did not pass in the VM");
    }
}
