//! The mounts of a plan: what a sandbox shows, in the order in which it is put there.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{Ids, Policy, RunSpec, Runtime, secrets};
use codelia_types::Mode;

/// Where the session's directory is inside a sandbox.
pub const WORKSPACE: &str = "/workspace";

/// Who the command is inside, where it has user ids of its own.
pub const SANDBOX_IDS: Ids = Ids { uid: 1000, gid: 1000 };

const HOSTS: &str = "127.0.0.1 localhost codelia\n::1 localhost\n";

/// One mount of a plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Mount {
    /// A directory or file of the host.
    Bind {
        /// On the host.
        source: PathBuf,
        /// Inside.
        target: PathBuf,
        /// Whether it may be written.
        writable: bool,
    },
    /// A directory of the host under a layer that takes all changes.
    Overlay {
        /// On the host.
        source: PathBuf,
        /// Inside.
        target: PathBuf,
        /// Where the session's changes are kept on the host; the last part is a name for the source.
        layer: PathBuf,
    },
    /// A private, size-limited temporary file system.
    Tmpfs {
        /// Inside.
        target: PathBuf,
        /// Its size.
        size_bytes: u64,
    },
    /// The sandbox's own `/proc`.
    Proc,
    /// A minimal `/dev`.
    Dev,
    /// A symbolic link.
    Symlink {
        /// The link, inside.
        target: PathBuf,
        /// Where it leads.
        to: PathBuf,
    },
    /// A small read-only file of our own.
    File {
        /// Inside.
        target: PathBuf,
        /// What it says.
        text: String,
    },
    /// A place where nothing can be read or reached.
    Hidden {
        /// Inside.
        target: PathBuf,
        /// Whether it is covered before anything is there, so that nothing can be made there either.
        even_if_absent: bool,
    },
}

/// Where the changes of a session in overlays are kept, beside its directory.
#[must_use]
pub fn overlays_dir(root: &Path) -> PathBuf {
    let mut name = root.as_os_str().to_owned();
    name.push(OVERLAYS_SUFFIX);
    name.into()
}

/// How the name of a session's directory goes on in that of its overlays.
pub const OVERLAYS_SUFFIX: &str = ".overlays";

/// A path as the name of one file.
pub(crate) fn overlay_name(path: &Path) -> String {
    path.to_string_lossy().replace('%', "%25").replace('/', "%2F")
}

/// Whether an overlay would show where sessions are, or lies there: their directories are the worker's own.
pub(crate) fn overlays_hold(policy: &Policy, runtime: &Runtime, root: &Path) -> bool {
    let sessions = root.parent().filter(|parent| parent.parent().is_some()).unwrap_or(root);
    let touches = |path: PathBuf| path.starts_with(sessions) || sessions.starts_with(&path);
    policy.filesystem.overlay_paths.iter().flatten().any(|path| touches(runtime.resolve(path)))
}

/// The mounts in their order: later ones cover earlier ones, so what is denied comes last.
pub(crate) fn mounts(root: &Path, spec: &RunSpec, runtime: &Runtime, ids: Ids) -> Vec<Mount> {
    let mut mounts = match spec.mode {
        // A container has the runtime of its image, and the user ids of the host.
        Mode::Container => own_files(ids).to_vec(),
        _ => runtime_mounts(runtime),
    };
    mounts.extend([Mount::Proc, Mount::Dev]);
    let size_bytes = spec.limits.tmp_bytes;
    let private = ["/dev/shm", "/tmp", "/var/tmp", "/run"];
    mounts.extend(private.map(|target| Mount::Tmpfs { target: target.into(), size_bytes }));
    mounts.push(Mount::Bind { source: root.to_owned(), target: WORKSPACE.into(), writable: true });
    mounts.extend(policy_mounts(root, &spec.policy, runtime));
    mounts
}

fn runtime_mounts(runtime: &Runtime) -> Vec<Mount> {
    let mut mounts = vec![read_only(Path::new("/usr"))];
    let link = |(link, to): &(PathBuf, PathBuf)| Mount::Symlink { target: link.clone(), to: to.clone() };
    mounts.extend(runtime.links.iter().map(link));
    mounts.extend(own_files(SANDBOX_IDS));
    mounts.extend(runtime.shown.iter().map(|path| read_only(path)));
    mounts
}

/// Who there is inside: no user of the host. Root has a name too, for what it owns in the runtime.
fn own_files(Ids { uid, gid }: Ids) -> [Mount; 4] {
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

/// What the policy opens of the host, then what it denies. What lies under a denied path is not
/// opened at all.
fn policy_mounts(root: &Path, policy: &Policy, runtime: &Runtime) -> Vec<Mount> {
    let files = &policy.filesystem;
    let denied: Vec<_> = files.denied_paths.iter().map(|path| runtime.resolve(path)).collect();
    let open = |paths: &Option<Vec<PathBuf>>, how: &dyn Fn(PathBuf) -> Mount| {
        let paths = paths.iter().flatten().map(|path| runtime.resolve(path));
        let allowed = paths.filter(|path| !denied.iter().any(|no| path.starts_with(no)));
        allowed.map(how).collect::<Vec<_>>()
    };
    let bind = |writable| move |path: PathBuf| Mount::Bind { source: path.clone(), target: path, writable };
    let layers = overlays_dir(root);
    let overlay = |path: PathBuf| Mount::Overlay {
        source: path.clone(),
        layer: layers.join(overlay_name(&path)),
        target: path,
    };
    let mut mounts = open(&files.read_only_paths, &bind(false));
    mounts.extend(open(&files.read_write_paths, &bind(true)));
    mounts.extend(open(&files.overlay_paths, &overlay));
    // A path below another one must be mounted after it, or it would be covered.
    mounts.sort_by_key(Mount::depth);
    let opened: Vec<_> = mounts.iter().map(|mount| mount.target().to_owned()).collect();
    let hidden = |target, even_if_absent| Mount::Hidden { target, even_if_absent };
    let secrets = secrets::within(&opened, &runtime.homes);
    mounts.extend(secrets.into_iter().map(|target| hidden(target, false)));
    mounts.extend(denied.into_iter().map(|target| hidden(target, true)));
    mounts
}

fn read_only(path: &Path) -> Mount {
    Mount::Bind { source: path.to_owned(), target: path.to_owned(), writable: false }
}

impl Mount {
    /// Where it is, inside.
    #[must_use]
    pub fn target(&self) -> &Path {
        match self {
            Self::Bind { target, .. }
            | Self::Tmpfs { target, .. }
            | Self::Overlay { target, .. }
            | Self::Symlink { target, .. }
            | Self::File { target, .. }
            | Self::Hidden { target, .. } => target,
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
                let how = if *writable { "read-write" } else { "read-only" };
                write!(f, "{target} {how} from {}", source.display())
            }
            Self::Overlay { source, .. } => {
                write!(f, "{target} read-write from {}, changes are the session's own", source.display())
            }
            Self::Tmpfs { size_bytes, .. } => write!(f, "{target} private, {size_bytes} bytes"),
            Self::Proc => write!(f, "{target} of its own processes"),
            Self::Dev => write!(f, "{target} minimal"),
            Self::Symlink { to, .. } => write!(f, "{target} link to {}", to.display()),
            Self::File { .. } => write!(f, "{target} read-only, made for it"),
            Self::Hidden { .. } => write!(f, "{target} hidden"),
        }
    }
}
