//! The mounts of a plan, in the order in which they are made.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{
    FilesystemPolicy, Ids, PathTrie, Policy, RunSpec, Runtime, SANDBOX_IDS, VolumeMode,
    VolumeMount, egress::RESOLVER_FILES, secrets,
};
use codelia_types::{Mode, NetworkMode, SessionId};

/// The path of the session's directory inside a sandbox.
pub const WORKSPACE: &str = "/workspace";

const HOSTS: &str = "127.0.0.1 localhost codelia\n::1 localhost\n";

/// One mount of a plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Mount {
    /// A host directory or file.
    Bind {
        /// On the host.
        source: PathBuf,
        /// Inside.
        target: PathBuf,
        /// Whether it is writable.
        writable: bool,
    },
    /// A directory or file of the host's runtime, read-only, whose inodes no other sandbox shares:
    /// watches and locks on it stay inside.
    Runtime {
        /// On the host and inside.
        path: PathBuf,
    },
    /// A host directory under a layer that takes all changes.
    Overlay {
        /// On the host.
        source: PathBuf,
        /// Inside.
        target: PathBuf,
        /// The directory on the host that keeps the session's changes. Its name encodes the source.
        layer: PathBuf,
    },
    /// The workspace under a layer that takes the changes of one transactional run.
    Transaction {
        /// The session's directory on the host.
        source: PathBuf,
        /// Inside.
        target: PathBuf,
        /// The directory on the host that takes the changes.
        layer: PathBuf,
    },
    /// A volume of the tenant.
    Volume {
        /// The directory of the volume on the host. Only its name, in a plan that is not complete.
        source: PathBuf,
        /// Inside.
        target: PathBuf,
        /// The directory on the host that keeps the session's changes, in mode `copy`. Its name is
        /// also that of the mount, in every mode.
        layer: PathBuf,
        /// Who may write to it.
        mode: VolumeMode,
    },
    /// A private, size-limited temporary file system.
    Tmpfs {
        /// Inside.
        target: PathBuf,
        /// Size in bytes.
        size_bytes: u64,
    },
    /// A private `/proc`.
    Proc,
    /// A minimal `/dev`.
    Dev,
    /// A symbolic link.
    Symlink {
        /// Path of the link, inside.
        target: PathBuf,
        /// The target of the link.
        to: PathBuf,
    },
    /// A small read-only file with fixed text.
    File {
        /// Inside.
        target: PathBuf,
        /// The text of the file.
        text: String,
    },
    /// A path that is hidden: nothing can be read or reached there.
    Hidden {
        /// Inside.
        target: PathBuf,
        /// Whether a path that does not exist is covered too, so that it cannot be created.
        even_if_absent: bool,
    },
}

/// The directory with a session's overlay changes, next to the session's directory.
#[must_use]
pub fn overlays_dir(root: &Path) -> PathBuf {
    let mut name = root.as_os_str().to_owned();
    name.push(OVERLAYS_SUFFIX);
    name.into()
}

/// The suffix of the overlay directory's name, after the name of the session's directory.
const OVERLAYS_SUFFIX: &str = ".overlays";

/// The directory with the changes of a session's transactional runs, next to the session's
/// directory.
#[must_use]
pub fn transactions_dir(root: &Path) -> PathBuf {
    let mut name = root.as_os_str().to_owned();
    name.push(".transactions");
    name.into()
}

/// Encodes a path as the name of one file.
pub(crate) fn overlay_name(path: &Path) -> String {
    path.to_string_lossy().replace('%', "%25").replace('/', "%2F")
}

/// Whether an overlay contains the directory of the sessions or is inside it. Only the worker may
/// access that directory.
pub(crate) fn overlays_touch_sessions(
    policy: &Policy,
    runtime: &Runtime,
    session: SessionId,
    root: &Path,
) -> bool {
    let is_own = |path: &Path| path.ends_with(session.to_string());
    let own = root.parent().filter(|parent| is_own(parent)).unwrap_or(root);
    let sessions = own.parent().filter(|parent| parent.parent().is_some()).unwrap_or(own);
    let overlaps = |path: PathBuf| path.starts_with(sessions) || sessions.starts_with(&path);
    policy.filesystem.overlay_paths.iter().flatten().any(|path| overlaps(runtime.resolve(path)))
}

/// All mounts. Later mounts cover earlier ones, so denied paths come last.
pub(crate) fn mounts(
    root: &Path,
    spec: &RunSpec,
    network: NetworkMode,
    runtime: &Runtime,
    ids: Ids,
) -> Vec<Mount> {
    let resolver = resolver_files(network, runtime, spec.mode);
    let mut mounts = match spec.mode {
        // A container has the runtime of its image and the user ids of the host.
        Mode::Container => identity_files(ids).to_vec(),
        _ => runtime_mounts(runtime, &resolver),
    };
    mounts.extend(resolver);
    mounts.extend([Mount::Proc, Mount::Dev]);
    let size_bytes = spec.limits.tmp_bytes;
    let private = ["/dev/shm", "/tmp", "/var/tmp", "/run"];
    mounts.extend(private.map(|target| Mount::Tmpfs { target: target.into(), size_bytes }));
    mounts.push(Mount::Bind { source: root.to_owned(), target: WORKSPACE.into(), writable: true });
    mounts.extend(policy_mounts(root, &spec.policy, runtime));
    mounts.extend(volume_mounts(root, &spec.policy.filesystem));
    mounts
}

/// The files with which programs find a resolver, if the network has one. An engine adds that of
/// the host itself.
fn resolver_files(network: NetworkMode, runtime: &Runtime, mode: Mode) -> Vec<Mount> {
    let file =
        |(target, text): (&str, &str)| Mount::File { target: target.into(), text: text.to_owned() };
    match network {
        NetworkMode::None => Vec::new(),
        NetworkMode::Proxy => RESOLVER_FILES.map(file).to_vec(),
        NetworkMode::Host if mode == Mode::Container => Vec::new(),
        NetworkMode::Host => {
            runtime.resolver.iter().map(|path| Mount::Runtime { path: path.clone() }).collect()
        }
    }
}

/// `replaced` takes the place of what the host has there.
fn runtime_mounts(runtime: &Runtime, replaced: &[Mount]) -> Vec<Mount> {
    let is_kept = |path: &Path| !replaced.iter().any(|mount| mount.target() == path);
    let shown = |path: &Path| Mount::Runtime { path: path.to_owned() };
    let mut mounts = vec![shown(Path::new("/usr"))];
    let link =
        |(link, to): &(PathBuf, PathBuf)| Mount::Symlink { target: link.clone(), to: to.clone() };
    mounts.extend(runtime.links.iter().filter(|(path, _)| is_kept(path)).map(link));
    mounts.extend(identity_files(SANDBOX_IDS));
    mounts.extend(runtime.shown.iter().filter(|path| is_kept(path)).map(|path| shown(path)));
    mounts
}

/// The files that name users and hosts inside. They list no user of the host; root has a name
/// because it owns files of the runtime.
fn identity_files(Ids { uid, gid }: Ids) -> [Mount; 4] {
    let users = format!(
        "root:x:0:0:root:/root:/usr/sbin/nologin
codelia:x:{uid}:{gid}:codelia:/workspace:/bin/sh
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
"
    );
    let groups = format!("root:x:0:\ncodelia:x:{gid}:\nnogroup:x:65534:\n");
    [
        ("/etc/passwd", users.as_str()),
        ("/etc/group", &groups),
        ("/etc/hosts", HOSTS),
        ("/etc/hostname", "codelia\n"),
    ]
    .map(|(target, text)| Mount::File { target: target.into(), text: text.to_owned() })
}

/// The host paths that the policy opens, then those that it hides. Paths below a denied path are
/// not opened.
fn policy_mounts(root: &Path, policy: &Policy, runtime: &Runtime) -> Vec<Mount> {
    let files = &policy.filesystem;
    let denied: Vec<_> = files.denied_paths.iter().map(|path| runtime.resolve(path)).collect();
    let closed: PathTrie<_> = denied.iter().collect();
    let open = |paths: &Option<Vec<PathBuf>>, mount: &dyn Fn(PathBuf) -> Mount| {
        let paths = paths.iter().flatten().map(|path| runtime.resolve(path));
        let allowed = paths.filter(|path| !closed.covers(path));
        allowed.map(mount).collect::<Vec<_>>()
    };
    let bind = |writable| {
        move |path: PathBuf| Mount::Bind { source: path.clone(), target: path, writable }
    };
    let layers = overlays_dir(root);
    let overlay = |path: PathBuf| Mount::Overlay {
        source: path.clone(),
        layer: layers.join(overlay_name(&path)),
        target: path,
    };
    let mut mounts = open(&files.read_only_paths, &bind(false));
    mounts.extend(open(&files.read_write_paths, &bind(true)));
    mounts.extend(open(&files.overlay_paths, &overlay));
    // Mount parents before children, or the parent would cover the child.
    mounts.sort_by_key(Mount::depth);
    let opened: Vec<_> = mounts.iter().map(|mount| mount.target().to_owned()).collect();
    let hidden = |target, even_if_absent| Mount::Hidden { target, even_if_absent };
    let secrets = secrets::within(&opened, &runtime.homes);
    mounts.extend(secrets.into_iter().map(|target| hidden(target, false)));
    mounts.extend(denied.into_iter().map(|target| hidden(target, true)));
    mounts
}

impl FilesystemPolicy {
    /// The volumes that a command sees.
    #[must_use]
    pub fn mounted_volumes(&self) -> &[VolumeMount] {
        self.volumes.as_deref().unwrap_or_default()
    }
}

/// The mounts of the volumes of a policy. Their sources are only names: see
/// [`Plan::with_volumes`](crate::Plan::with_volumes).
fn volume_mounts(root: &Path, files: &FilesystemPolicy) -> Vec<Mount> {
    let layers = overlays_dir(root);
    let mount = |one: &VolumeMount| Mount::Volume {
        source: one.name.as_str().into(),
        target: one.path.clone(),
        layer: layers.join(format!("volume {}", one.name)),
        mode: one.mode,
    };
    files.mounted_volumes().iter().map(mount).collect()
}

impl Mount {
    /// The path of the mount, inside.
    #[must_use]
    pub fn target(&self) -> &Path {
        match self {
            Self::Bind { target, .. }
            | Self::Tmpfs { target, .. }
            | Self::Overlay { target, .. }
            | Self::Transaction { target, .. }
            | Self::Volume { target, .. }
            | Self::Symlink { target, .. }
            | Self::File { target, .. }
            | Self::Hidden { target, .. } => target,
            Self::Runtime { path } => path,
            Self::Proc => Path::new("/proc"),
            Self::Dev => Path::new("/dev"),
        }
    }

    fn depth(&self) -> usize {
        self.target().components().count()
    }
}

impl fmt::Display for Mount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let target = self.target().display();
        match self {
            Self::Bind { source, writable, .. } => {
                let access = if *writable { "read-write" } else { "read-only" };
                write!(f, "{target} {access} from {}", source.display())
            }
            Self::Runtime { .. } => write!(f, "{target} read-only, private view of the host's"),
            Self::Overlay { source, .. } => {
                write!(
                    f,
                    "{target} read-write from {}, changes stay in the session",
                    source.display()
                )
            }
            Self::Transaction { source, .. } => {
                write!(
                    f,
                    "{target} read-write from {}, changes are applied or dropped",
                    source.display()
                )
            }
            Self::Volume { source, mode, .. } => {
                let name = source.file_name().unwrap_or_default();
                write!(f, "{target} volume {}, {mode}", name.display())
            }
            Self::Tmpfs { size_bytes, .. } => write!(f, "{target} private, {size_bytes} bytes"),
            Self::Proc => write!(f, "{target} private"),
            Self::Dev => write!(f, "{target} minimal"),
            Self::Symlink { to, .. } => write!(f, "{target} symlink to {}", to.display()),
            Self::File { .. } => write!(f, "{target} read-only, generated"),
            Self::Hidden { .. } => write!(f, "{target} hidden"),
        }
    }
}
