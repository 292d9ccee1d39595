//! Mode `bwrap`: namespaces and mounts through bubblewrap.

use std::{fs::File, io, path::Path};

use codelia_policy::{Mount, Plan, SANDBOX_IDS, VolumeMode};
use codelia_types::{Mode, NetworkMode};

use crate::{
    Backend, Error,
    isolation::{INIT, utf8},
    mounts::{overlay, view},
};

use super::{
    backend::{InheritedFiles, Tool, ToolMode, ToolOptions},
    orphans,
};

/// Creates the backend of mode `bwrap`.
///
/// # Errors
/// `/proc` cannot be read.
pub fn bwrap(options: ToolOptions) -> Result<impl Backend + 'static, Error> {
    ToolMode::backend(Bwrap, options)
}

#[derive(Debug)]
struct Bwrap;

impl Tool for Bwrap {
    const MODE: Mode = Mode::Bwrap;
    const COPIES_FILES: bool = true;

    /// Passes everything but the command through a descriptor: other users of the host can see the
    /// arguments of a process.
    fn arguments(
        &self,
        plan: &Plan,
        init: &Path,
        inherited: &mut InheritedFiles,
    ) -> Result<Vec<String>, Error> {
        let arguments = sandbox_arguments(plan, init, inherited)?;
        let list: Vec<u8> =
            arguments.iter().flat_map(|word| [word.as_bytes(), b"\0"].concat()).collect();
        let descriptor = inherited.add("arguments", &list)?;
        Ok(["--args", &descriptor, "--", INIT].map(str::to_owned).to_vec())
    }

    fn upkeep(&self, program: &Path, is_sandbox_uid: &dyn Fn(u32) -> bool) -> io::Result<usize> {
        orphans::kill(program, is_sandbox_uid)
    }

    fn remedy(&self, message: Option<&str>) -> &'static str {
        match message {
            None => "install bubblewrap (Debian and Ubuntu: apt-get install bubblewrap)",
            Some(text) if text.contains("namespace") => {
                "allow user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone; on \
                 Ubuntu kernel.apparmor_restrict_unprivileged_userns=0 or a profile for bwrap)"
            }
            Some(text) if text.contains("proc") => {
                "give the worker's container an unmasked /proc (Kubernetes: procMount: Unmasked)"
            }
            Some(text) if text.contains("Permission denied") => {
                "make the directories above codelia-init and the sessions traversable (mode 0711)"
            }
            Some(_) => "run bwrap manually to see what it lacks",
        }
    }
}

/// Options of every plan. `codelia-init` starts its own session first, creates the cgroup
/// namespace once it is in its cgroup, and drops its capabilities after it has locked the secure
/// bits, so that it cannot regain any.
const BASE_ARGUMENTS: [&str; 13] = [
    "--unshare-user",
    "--unshare-pid",
    "--unshare-ipc",
    "--unshare-uts",
    "--die-with-parent",
    "--as-pid-1",
    "--clearenv",
    "--cap-drop",
    "ALL",
    "--cap-add",
    "CAP_SETPCAP",
    "--cap-add",
    "CAP_SYS_ADMIN",
];

fn sandbox_arguments(
    plan: &Plan,
    init: &Path,
    inherited: &mut InheritedFiles,
) -> Result<Vec<String>, Error> {
    let mut list = Arguments { words: BASE_ARGUMENTS.map(str::to_owned).to_vec(), inherited };
    list.add(["--uid", &SANDBOX_IDS.uid.to_string(), "--gid", &SANDBOX_IDS.gid.to_string()]);
    match plan.network {
        NetworkMode::None => list.add(["--unshare-net"]),
        // codelia-init creates the namespace: bubblewrap's would belong to a user namespace above
        // the command's, in which nothing inside has a capability.
        NetworkMode::Proxy => list.add(["--cap-add", "CAP_NET_ADMIN"]),
        NetworkMode::Host => {}
    }
    if let Some(name) = &plan.hostname {
        list.add(["--hostname", name]);
    }
    list.add(["--ro-bind", utf8(init)?, INIT]);
    for (index, mount) in plan.mounts.iter().enumerate() {
        list.mount(mount, &view::place(plan, index))?;
    }
    // Remounting read-only does not change the mounts below.
    if plan.mounts.contains(&Mount::Dev) {
        list.add(["--remount-ro", "/dev"]);
    }
    list.add(["--remount-ro", "/", "--chdir", "/"]);
    Ok(list.words)
}

struct Arguments<'a> {
    words: Vec<String>,
    inherited: &'a mut InheritedFiles,
}

impl Arguments<'_> {
    fn add<const N: usize>(&mut self, words: [&str; N]) {
        self.words.extend(words.map(str::to_owned));
    }

    fn mount(&mut self, mount: &Mount, place: &Path) -> Result<(), Error> {
        match mount {
            Mount::Bind { source, writable, .. } => {
                let option = if *writable { "--bind" } else { "--ro-bind" };
                self.add([option, utf8(source)?, utf8(place)?]);
            }
            Mount::Runtime { path } => self.runtime(path, place)?,
            Mount::Overlay { layer, .. } | Mount::Transaction { layer, .. } => {
                self.add(["--bind", utf8(&overlay::mount_point(layer))?, utf8(place)?]);
            }
            Mount::Volume { layer, mode, .. } => {
                let option = if *mode == VolumeMode::ReadOnly { "--ro-bind" } else { "--bind" };
                self.add([option, utf8(&overlay::mount_point(layer))?, utf8(place)?]);
            }
            Mount::Tmpfs { target, size_bytes } => {
                let size = size_bytes.to_string();
                self.add(["--perms", "1777", "--size", &size, "--tmpfs", utf8(target)?]);
            }
            Mount::Proc => self.add(["--proc", "/proc"]),
            Mount::Dev => self.add(["--dev", "/dev"]),
            Mount::Symlink { target, to } => self.add(["--symlink", utf8(to)?, utf8(target)?]),
            // A copy in the root, which becomes read-only: faster than a mount for each file.
            Mount::File { text, .. } => {
                let descriptor = self.inherited.add("file", text.as_bytes())?;
                self.add(["--perms", "0444", "--file", &descriptor, utf8(place)?]);
            }
            // codelia-init masks them.
            Mount::Hidden { .. } => {}
        }
        Ok(())
    }

    /// Copies a file that everyone may read: faster than a mount, and no inode is shared.
    fn runtime(&mut self, path: &Path, place: &Path) -> Result<(), Error> {
        let file = File::open(path)?;
        let metadata = file.metadata()?;
        if metadata.is_file() && view::is_readable(&metadata) {
            let descriptor = self.inherited.add_open(file.into());
            self.add(["--perms", "0444", "--file", &descriptor, utf8(place)?]);
        } else {
            self.add(["--ro-bind", utf8(path)?, utf8(place)?]);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe;

    fn words(mounts: Vec<Mount>) -> Vec<String> {
        let mut plan =
            probe::isolated_plan(Mode::Bwrap, Path::new("/init"), Default::default(), None)
                .unwrap();
        plan.mounts = mounts;
        sandbox_arguments(&plan, Path::new("/init"), &mut InheritedFiles::default()).unwrap()
    }

    #[test]
    fn every_namespace_is_new() {
        let words = words(Vec::new());
        for kind in ["user", "pid", "net", "ipc", "uts"] {
            assert!(words.contains(&format!("--unshare-{kind}")), "{kind}");
        }
        let line = words.join(" ");
        for part in [
            "--die-with-parent",
            "--as-pid-1",
            "--cap-drop ALL",
            "--clearenv",
            "--uid 1000 --gid 1000",
        ] {
            assert!(line.contains(part), "{part}: {line}");
        }
    }

    #[test]
    fn only_proxy_has_the_capability_to_set_up_a_network() {
        let arguments = |network| {
            let mut plan =
                probe::isolated_plan(Mode::Bwrap, Path::new("/init"), Default::default(), None)
                    .unwrap();
            plan.network = network;
            sandbox_arguments(&plan, Path::new("/init"), &mut InheritedFiles::default())
                .unwrap()
                .join(" ")
        };
        for network in [NetworkMode::None, NetworkMode::Proxy, NetworkMode::Host] {
            let line = arguments(network);
            assert_eq!(line.contains("CAP_NET"), network == NetworkMode::Proxy, "{line}");
            assert_eq!(line.contains("--unshare-net"), network == NetworkMode::None, "{line}");
        }
    }

    #[test]
    fn mounts_keep_order_and_root_becomes_read_only_last() {
        let line = words(vec![
            Mount::Runtime { path: "/usr".into() },
            Mount::Symlink { target: "/bin".into(), to: "usr/bin".into() },
            Mount::Proc,
            Mount::Dev,
            Mount::Tmpfs { target: "/tmp".into(), size_bytes: 4096 },
            Mount::Bind { source: "/s".into(), target: "/workspace".into(), writable: true },
        ])
        .join(" ");
        let mounts = line.split_once("--ro-bind /init /.codelia-init ").unwrap().1;
        assert_eq!(
            mounts,
            "--ro-bind /usr /usr --symlink usr/bin /bin --proc /proc --dev /dev \
             --perms 1777 --size 4096 --tmpfs /tmp --bind /s /workspace \
             --remount-ro /dev --remount-ro / --chdir /"
        );
    }

    #[test]
    fn files_are_passed_as_descriptors() {
        let words = words(vec![
            Mount::File { target: "/etc/passwd".into(), text: "root".into() },
            Mount::Runtime { path: "/etc/passwd".into() },
        ]);
        let copies: Vec<_> = words.windows(3).filter(|words| words[0] == "--file").collect();
        assert_eq!(copies.len(), 2);
        for copy in copies {
            assert!(copy[1].parse::<u32>().is_ok());
            assert_eq!(copy[2], "/etc/passwd");
        }
    }
}
