//! Mode `bwrap`: namespaces and mounts through bubblewrap.

use std::{io, ops::RangeInclusive, path::Path};

use codelia_policy::{Mount, Plan, SANDBOX_IDS};
use codelia_types::Mode;

use crate::{
    Backend, Error, probe,
    tool::mask::{self, Hidden},
    tool::orphans,
    tool::overlay,
    tool::tool_backend::{INIT, Inherited, Tool, ToolBackend, ToolOptions, ToolPaths},
};

/// Mode `bwrap`.
///
/// # Errors
/// `/proc` cannot be read.
pub fn bwrap(options: ToolOptions) -> Result<impl Backend + 'static, Error> {
    ToolBackend::new(Bwrap { sandbox_uids: options.sandbox_uids.clone() }, options)
}

#[derive(Debug)]
struct Bwrap {
    sandbox_uids: Option<RangeInclusive<u32>>,
}

impl Tool for Bwrap {
    const MODE: Mode = Mode::Bwrap;

    /// All but the command itself goes through a descriptor: other users of the host see the
    /// arguments of a process.
    fn arguments(
        &self,
        plan: &Plan,
        host: &ToolPaths,
        inherited: &mut Inherited,
    ) -> Result<Vec<String>, Error> {
        let arguments = sandbox(plan, &host.init, inherited)?;
        let list: Vec<u8> = arguments.iter().flat_map(|word| [word.as_bytes(), b"\0"].concat()).collect();
        let list = inherited.add("arguments", &list)?;
        Ok(["--args", &list, "--", INIT].map(str::to_owned).to_vec())
    }

    fn sweep(&self, host: &ToolPaths) -> io::Result<usize> {
        let is_ours =
            |uid| self.sandbox_uids.as_ref().is_some_and(|uids| uids.contains(&uid)) || probe::is_nobody(uid);
        orphans::kill(&host.program, is_ours)
    }

    fn remedy(&self, complaint: &str) -> String {
        match complaint {
            "" => "install bubblewrap (Debian and Ubuntu: apt-get install bubblewrap)",
            text if text.contains("namespace") => {
                "allow user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone; on \
                 Ubuntu kernel.apparmor_restrict_unprivileged_userns=0 or a profile for bwrap)"
            }
            text if text.contains("proc") => {
                "give the worker's container an unmasked /proc (Kubernetes: procMount: Unmasked)"
            }
            text if text.contains("Permission denied") => {
                "let sandboxes pass through the directories above codelia-init and the sessions (mode 0711)"
            }
            _ => "run bwrap by hand to see what it lacks",
        }
        .to_owned()
    }
}

/// Always, for every plan. `codelia-init` begins a session of its own before it does anything, and
/// gives up the one capability it gets once it has locked the way back to any.
const NAMESPACES: [&str; 14] = [
    "--unshare-user",
    "--unshare-pid",
    "--unshare-net",
    "--unshare-ipc",
    "--unshare-uts",
    "--unshare-cgroup",
    "--die-with-parent",
    "--as-pid-1",
    "--clearenv",
    "--cap-drop",
    "ALL",
    "--cap-add",
    "CAP_SETPCAP",
    "--uid",
];

fn sandbox(plan: &Plan, init: &Path, inherited: &mut Inherited) -> Result<Vec<String>, Error> {
    let mut list = Arguments { words: NAMESPACES.map(str::to_owned).to_vec(), inherited };
    list.add([&SANDBOX_IDS.uid.to_string(), "--gid", &SANDBOX_IDS.gid.to_string()]);
    if let Some(name) = &plan.hostname {
        list.add(["--hostname", name]);
    }
    list.add(["--ro-bind", text(init)?, INIT]);
    for (index, mount) in plan.mounts.iter().enumerate() {
        list.mount(mount, &plan.mounts[..index])?;
    }
    // Mounts below these stay as they are.
    if plan.mounts.contains(&Mount::Dev) {
        list.add(["--remount-ro", "/dev"]);
    }
    list.add(["--remount-ro", "/", "--chdir", "/"]);
    Ok(list.words)
}

struct Arguments<'a> {
    words: Vec<String>,
    inherited: &'a mut Inherited,
}

impl Arguments<'_> {
    fn add<const N: usize>(&mut self, words: [&str; N]) {
        self.words.extend(words.map(str::to_owned));
    }

    fn mount(&mut self, mount: &Mount, made: &[Mount]) -> Result<(), Error> {
        match mount {
            Mount::Bind { source, target, writable } => {
                let how = if *writable { "--bind" } else { "--ro-bind" };
                self.add([how, text(source)?, text(target)?]);
            }
            Mount::Overlay { target, layer, .. } => {
                self.add(["--bind", text(&overlay::place(layer))?, text(target)?]);
            }
            Mount::Tmpfs { target, size_bytes } => {
                self.add(["--perms", "1777", "--size", &size_bytes.to_string(), "--tmpfs", text(target)?]);
            }
            Mount::Proc => self.add(["--proc", "/proc"]),
            Mount::Dev => self.add(["--dev", "/dev"]),
            Mount::Symlink { target, to } => self.add(["--symlink", text(to)?, text(target)?]),
            // A copy in the root, which becomes read-only: a mount for each would take longer.
            Mount::File { target, text: content } => self.file("--file", "0444", target, content)?,
            Mount::Hidden { target, even_if_absent } => match mask::find(made, target, *even_if_absent)? {
                Hidden::Directory(place) => {
                    let place = text(&place)?;
                    self.add(["--perms", "0000", "--tmpfs", place, "--remount-ro", place]);
                }
                Hidden::File(place) => self.file("--ro-bind-data", "0000", &place, "")?,
                Hidden::Nothing => {}
            },
        }
        Ok(())
    }

    fn file(&mut self, how: &str, permissions: &str, target: &Path, content: &str) -> Result<(), Error> {
        let descriptor = self.inherited.add("file", content.as_bytes())?;
        self.add(["--perms", permissions, how, &descriptor, text(target)?]);
        Ok(())
    }
}

fn text(path: &Path) -> Result<&str, Error> {
    path.to_str().ok_or(Error::Unenforceable { field: "mounts" })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(mounts: Vec<Mount>) -> Vec<String> {
        let mut plan = probe::isolated(Mode::Bwrap, Default::default(), None).unwrap();
        plan.mounts = mounts;
        sandbox(&plan, Path::new("/init"), &mut Inherited::default()).unwrap()
    }

    #[test]
    fn every_namespace_is_new_whatever_the_plan() {
        let words = words(Vec::new());
        for kind in ["user", "pid", "net", "ipc", "uts", "cgroup"] {
            assert!(words.contains(&format!("--unshare-{kind}")), "{kind}");
        }
        let line = words.join(" ");
        for part in
            ["--die-with-parent", "--as-pid-1", "--cap-drop ALL", "--clearenv", "--uid 1000 --gid 1000"]
        {
            assert!(line.contains(part), "{part}: {line}");
        }
    }

    #[test]
    fn mounts_are_made_in_the_order_of_the_plan_and_the_root_closes_last() {
        let line = words(vec![
            Mount::Bind { source: "/usr".into(), target: "/usr".into(), writable: false },
            Mount::Symlink { target: "/bin".into(), to: "usr/bin".into() },
            Mount::Proc,
            Mount::Dev,
            Mount::Tmpfs { target: "/tmp".into(), size_bytes: 4096 },
            Mount::Bind { source: "/s".into(), target: "/workspace".into(), writable: true },
            Mount::Hidden { target: "/workspace/secret".into(), even_if_absent: true },
        ])
        .join(" ");
        let mounts = line.split_once("--ro-bind /init /.codelia-init ").unwrap().1;
        assert_eq!(
            mounts,
            "--ro-bind /usr /usr --symlink usr/bin /bin --proc /proc --dev /dev \
             --perms 1777 --size 4096 --tmpfs /tmp --bind /s /workspace \
             --perms 0000 --tmpfs /workspace/secret --remount-ro /workspace/secret \
             --remount-ro /dev --remount-ro / --chdir /"
        );
    }

    #[test]
    fn files_are_handed_over_as_descriptors() {
        let words = words(vec![Mount::File { target: "/etc/passwd".into(), text: "root".into() }]);
        let at = words.iter().position(|word| word == "--file").unwrap();
        assert!(words[at + 1].parse::<u32>().is_ok());
        assert_eq!(words[at + 2], "/etc/passwd");
    }
}
