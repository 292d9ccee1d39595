//! The file system of a container: converts a plan's mounts into what the engine takes.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::{Path, PathBuf},
};

use bollard::models::{
    Mount as EngineMount, MountBindOptions, MountBindOptionsPropagationEnum, MountType,
};
use codelia_policy::{Ids, Mount, Plan};

use super::{control_dir::ControlDir, engine::EngineKind, spec::EngineTarget};
use crate::{
    Error,
    isolation::{self, INIT, SHOWN_IN_PROC, utf8},
    mask::{MaskTarget, Masks},
};

/// Path of the control socket inside. It refuses connections once `codelia-init` has connected.
pub(super) const CONTROL_SOCKET: &str = "/.codelia-control";

/// Masked next to what is not shown of `/proc`: the identity of the host's start, and all of
/// `/sys`.
const MASKED: [&str; 2] = ["/proc/sys/kernel/random/boot_id", "/sys"];

/// Everything in `/proc` that is neither a process nor shown: the kernel of the containers is ours.
fn masked() -> Result<Vec<String>, Error> {
    let mut masked = MASKED.map(str::to_owned).to_vec();
    for entry in fs::read_dir("/proc")? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if !name.bytes().all(|byte| byte.is_ascii_digit())
            && !SHOWN_IN_PROC.contains(&name.as_str())
        {
            masked.push(format!("/proc/{name}"));
        }
    }
    Ok(masked)
}

/// The engine's view of the file system. The engine mounts by depth, in any order.
#[derive(Default)]
pub(super) struct Filesystem {
    pub(super) mounts: Vec<EngineMount>,
    pub(super) tmpfs: HashMap<String, String>,
    pub(super) masked: Vec<String>,
}

impl Filesystem {
    pub(super) fn new(
        plan: &Plan,
        masks: &Masks,
        EngineTarget { options, kind, .. }: EngineTarget<'_>,
        control_dir: &mut ControlDir,
    ) -> Result<Self, Error> {
        let init = control_dir.add_program(&options.init)?;
        let entries = [
            (INIT.into(), Entry::Bind { source: init, writable: false }),
            (CONTROL_SOCKET.into(), Entry::Bind { source: control_dir.socket(), writable: true }),
        ];
        let mut builder = FilesystemBuilder {
            plan,
            kind,
            engine_socket: &options.socket,
            control_dir,
            entries: entries.into(),
            masked: masked()?,
        };
        for (mount, mask) in masks.zip(&plan.mounts) {
            builder.add(mount, mask)?;
        }
        builder.build()
    }
}

/// A mount at one path.
enum Entry {
    Bind { source: PathBuf, writable: bool },
    Tmpfs { options: String },
}

struct FilesystemBuilder<'a> {
    plan: &'a Plan,
    kind: EngineKind,
    /// The engine's own socket, which no command may reach.
    engine_socket: &'a Path,
    control_dir: &'a mut ControlDir,
    /// By path. A later mount at the same path replaces the earlier one.
    entries: BTreeMap<PathBuf, Entry>,
    masked: Vec<String>,
}

impl FilesystemBuilder<'_> {
    fn add(&mut self, mount: &Mount, mask: &MaskTarget) -> Result<(), Error> {
        let entry = match mount {
            Mount::Bind { source, writable, .. } => {
                refuse_engine_socket(source, self.engine_socket)?;
                // Podman would create a missing source.
                if !source.exists() {
                    let message = format!("{} does not exist", source.display());
                    return Err(Error::Engine { step: "bind a host directory", message });
                }
                Entry::Bind { source: source.clone(), writable: *writable }
            }
            Mount::Tmpfs { size_bytes, .. } => {
                tmpfs(&format!("rw,exec,mode=1777,size={size_bytes}{}", self.owner_option()?))
            }
            Mount::File { text, .. } => self.file(text, 0o444)?,
            Mount::Hidden { target, even_if_absent } => {
                return self.mask(target, mask, *even_if_absent);
            }
            // The engine always mounts both.
            Mount::Proc | Mount::Dev => return Ok(()),
            Mount::Overlay { .. } => {
                return Err(Error::Unenforceable { field: "policy.filesystem.overlay_paths" });
            }
            Mount::Transaction { .. } => return Err(Error::Unenforceable { field: "transaction" }),
            Mount::Volume { .. } => {
                return Err(Error::Unenforceable { field: "policy.filesystem.volumes" });
            }
            Mount::Symlink { .. } | Mount::Runtime { .. } => {
                return Err(Error::Unenforceable { field: "mounts" });
            }
        };
        self.entries.insert(mount.target().to_owned(), entry);
        Ok(())
    }

    /// Sets the owner of a tmpfs, in case the runtime applies the mode of the image's directory.
    /// Podman does not have this option.
    fn owner_option(&self) -> Result<String, Error> {
        let Ids { uid, gid } = isolation::ids(self.plan)?;
        Ok(if self.kind == EngineKind::Docker {
            format!(",uid={uid},gid={gid}")
        } else {
            String::new()
        })
    }

    fn mask(
        &mut self,
        target: &Path,
        mask: &MaskTarget,
        even_if_absent: bool,
    ) -> Result<(), Error> {
        match mask {
            MaskTarget::Directory(path) => {
                self.entries.insert(path.clone(), tmpfs("ro,mode=0000,size=4096"));
            }
            MaskTarget::File(path) => {
                let empty = self.file("", 0)?;
                self.entries.insert(path.clone(), empty);
            }
            MaskTarget::Absent if !even_if_absent => {}
            // The path may exist in the image. The engine masks it there, but a runtime with its
            // own kernel ignores masked paths.
            MaskTarget::Absent if self.plan.has_own_kernel() => {
                return Err(Error::Unenforceable { field: "policy.filesystem.denied_paths" });
            }
            MaskTarget::Absent => self.masked.push(utf8(target)?.to_owned()),
        }
        Ok(())
    }

    fn file(&mut self, text: &str, mode: u32) -> Result<Entry, Error> {
        Ok(Entry::Bind { source: self.control_dir.add_file(text, mode)?, writable: false })
    }

    fn build(self) -> Result<Filesystem, Error> {
        // Podman would copy the covered directory's content into a tmpfs.
        let no_copy = if self.kind == EngineKind::Docker { "" } else { ",notmpcopyup" };
        let mut filesystem = Filesystem { masked: self.masked, ..Filesystem::default() };
        for (target, entry) in self.entries {
            let target = utf8(&target)?.to_owned();
            match entry {
                Entry::Bind { source, writable } => {
                    filesystem.mounts.push(bind_mount(&source, target, writable)?);
                }
                Entry::Tmpfs { options } => {
                    drop(filesystem.tmpfs.insert(target, options + no_copy))
                }
            }
        }
        Ok(filesystem)
    }
}

fn tmpfs(options: &str) -> Entry {
    Entry::Tmpfs { options: format!("nosuid,nodev,{options}") }
}

/// Not recursive: engines differ in whether submounts become read-only with their parent.
fn bind_mount(source: &Path, target: String, writable: bool) -> Result<EngineMount, Error> {
    Ok(EngineMount {
        typ: Some(MountType::BIND),
        source: Some(utf8(source)?.to_owned()),
        target: Some(target),
        read_only: Some(!writable),
        bind_options: Some(MountBindOptions {
            propagation: Some(MountBindOptionsPropagationEnum::PRIVATE),
            non_recursive: Some(true),
            ..MountBindOptions::default()
        }),
        ..EngineMount::default()
    })
}

/// Access to the engine's socket is root access to its host.
fn refuse_engine_socket(source: &Path, socket: &Path) -> Result<(), Error> {
    let [source, socket] =
        [source, socket].map(|path| path.canonicalize().unwrap_or(path.to_owned()));
    if socket.starts_with(&source) {
        return Err(Error::Unenforceable { field: "policy.filesystem" });
    }
    Ok(())
}
