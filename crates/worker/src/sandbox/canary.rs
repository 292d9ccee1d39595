//! Canary files: decoys that look like credentials, at places where no command has any business.
//! The files of a session are on the host, next to its workspace, and bound into its sandboxes. A
//! command that opens one gives a sign of an attempt to escape, which is seen by a watch on the
//! host.
//!
//! The watch names the session. What its runs of the moment answer for is decided by `run`.

use std::{
    collections::{BTreeSet, HashMap},
    fs::{self, DirBuilder},
    io,
    mem::MaybeUninit,
    os::{
        fd::OwnedFd,
        unix::fs::{DirBuilderExt, PermissionsExt},
    },
    path::{Path, PathBuf},
};

use codelia_policy::{Mount, Plan};
use codelia_types::{Mode, SessionId};
use parking_lot::Mutex;
use rustix::{
    fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags},
    io::Errno,
};
use tokio::io::{Interest, unix::AsyncFd};
use uuid::Uuid;

use crate::file_work::unless_exists;

/// The name of the directory next to the workspace.
const DIRECTORY: &str = "canaries";
/// Where the decoys are in a sandbox. Their last components are the names in the directory.
const PATHS: [&str; 2] = ["/root/.aws/credentials", "/root/.ssh/id_ed25519"];
/// Watches that are kept before those of sessions that are not held any more are removed.
const MIN_WATCHES: usize = 256;
/// Bytes of events that are read at once.
const BUFFER: usize = 4096;

/// The watches of all sessions with decoys.
#[derive(Debug)]
pub(crate) struct Canaries {
    inotify: AsyncFd<OwnedFd>,
    watches: Mutex<HashMap<i32, SessionId>>,
    /// Held while a sign is answered, so that the end of a run waits for what was seen of it.
    pub(crate) responding: tokio::sync::Mutex<()>,
}

/// The sessions that this worker holds.
pub(crate) trait HeldSessions {
    fn count(&self) -> usize;
    fn is_held(&self, id: SessionId) -> bool;
}

/// The directory with the decoys of a session.
pub(crate) fn directory(workspace: &Path) -> PathBuf {
    workspace.with_file_name(DIRECTORY)
}

/// Whether sandboxes of this mode can have decoys: the kernel of the host sees what they open.
pub(crate) fn has_canaries(mode: Mode) -> bool {
    matches!(mode, Mode::Bwrap | Mode::Nsjail | Mode::Native)
}

/// The plan with the decoys. They come first, so that what a policy opens covers them. `None` in
/// modes in which they cannot be watched.
pub(crate) fn with_canaries(mut plan: Plan) -> Option<Plan> {
    if !has_canaries(plan.mode) {
        return None;
    }
    let directory = directory(&plan.root);
    let mount = |path: &str| Mount::Bind {
        source: directory.join(file_name(path)),
        target: path.into(),
        writable: false,
    };
    plan.mounts.splice(0..0, PATHS.map(mount));
    Some(plan)
}

impl Canaries {
    /// Watches nothing yet.
    ///
    /// The deprecation is about types whose descriptor may change; this one keeps its own.
    #[allow(deprecated)]
    pub(crate) fn new() -> io::Result<Self> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        Ok(Self {
            inotify: AsyncFd::try_with_interest(inotify, Interest::READABLE)?,
            watches: Mutex::default(),
            responding: tokio::sync::Mutex::default(),
        })
    }

    /// Creates the decoys of a session, unless it has some, and watches them. Blocks.
    pub(crate) fn plant(
        &self,
        id: SessionId,
        workspace: &Path,
        sessions: &dyn HeldSessions,
    ) -> io::Result<()> {
        let directory = directory(workspace);
        create(&directory)?;
        let mut watches = self.watches.lock();
        if watches.len() >= MIN_WATCHES.max(2 * sessions.count()) {
            watches.retain(|watch, session| {
                let is_held = sessions.is_held(*session);
                if !is_held {
                    // Fails if the directory is removed, and the watch with it.
                    let _ = inotify::remove_watch(self.inotify.get_ref(), *watch);
                }
                is_held
            });
        }
        let watch = inotify::add_watch(
            self.inotify.get_ref(),
            &directory,
            WatchFlags::OPEN | WatchFlags::ACCESS,
        )?;
        watches.insert(watch, id);
        Ok(())
    }

    /// Waits until a decoy was opened.
    pub(crate) async fn readable(&self) -> io::Result<()> {
        self.inotify.readable().await?.clear_ready();
        Ok(())
    }

    /// The sessions and paths of the decoys that were opened since the last call. The kernel
    /// reports an open before it returns, so a command that has ended has no other.
    pub(crate) fn opened(&self) -> BTreeSet<(SessionId, String)> {
        let mut watches = self.watches.lock();
        let mut buffer = [const { MaybeUninit::uninit() }; BUFFER];
        let mut reader = Reader::new(self.inotify.get_ref(), &mut buffer);
        let mut opened = BTreeSet::new();
        loop {
            match reader.next() {
                Ok(event) if event.events().contains(ReadFlags::IGNORED) => {
                    watches.remove(&event.wd());
                }
                Ok(event) if event.events().contains(ReadFlags::QUEUE_OVERFLOW) => {
                    tracing::warn!("too many opened canary files at once, some were not seen");
                }
                Ok(event) => {
                    // Events about the directory itself have no name.
                    let name = event.file_name().and_then(|name| name.to_str().ok());
                    if let (Some(session), Some(name)) = (watches.get(&event.wd()), name) {
                        opened.insert((*session, name.to_owned()));
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return opened,
                Err(errno) => {
                    tracing::error!(%errno, "opened canary files not read");
                    return opened;
                }
            }
        }
    }
}

/// The path in a sandbox of the decoy with this name.
pub(crate) fn path(name: &str) -> &str {
    PATHS.into_iter().find(|path| file_name(path) == name).unwrap_or(name)
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Creates the files of a session, with content of its own. Everyone may read them who gets there,
/// and only the worker can write.
fn create(directory: &Path) -> io::Result<()> {
    unless_exists(DirBuilder::new().mode(0o711).create(directory))?;
    fs::set_permissions(directory, fs::Permissions::from_mode(0o711))?;
    for path in PATHS {
        let file = directory.join(file_name(path));
        if !file.try_exists()? {
            let part = directory.join(format!("{}.part", file_name(path)));
            fs::write(&part, content(path))?;
            fs::set_permissions(&part, fs::Permissions::from_mode(0o444))?;
            fs::rename(part, file)?;
        }
    }
    Ok(())
}

/// Credentials that a thief would look for. They open nothing.
fn content(path: &str) -> String {
    let random = || Uuid::new_v4().simple().to_string();
    if path.ends_with("credentials") {
        let key = random()[..16].to_uppercase();
        return format!(
            "[default]\naws_access_key_id = AKIA{key}\naws_secret_access_key = {}{}\n",
            random(),
            &random()[..8]
        );
    }
    let body: Vec<String> = (0..5).map(|_| format!("{}{}", random(), random())).collect();
    format!(
        "-----BEGIN OPENSSH PRIVATE KEY-----\n{}\n-----END OPENSSH PRIVATE KEY-----\n",
        body.join("\n")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    struct AllHeld;

    impl HeldSessions for AllHeld {
        fn count(&self) -> usize {
            0
        }

        fn is_held(&self, _: SessionId) -> bool {
            true
        }
    }

    #[tokio::test]
    async fn opened_decoys_are_seen_by_session() {
        let root = tempfile::tempdir().unwrap();
        let canaries = Canaries::new().unwrap();
        let plant = |name: &str| {
            let (id, workspace) = (SessionId::generate(), root.path().join(name).join("workspace"));
            fs::create_dir_all(&workspace).unwrap();
            canaries.plant(id, &workspace, &AllHeld).unwrap();
            (id, directory(&workspace))
        };
        let ((one, first), (_, second)) = (plant("one"), plant("two"));
        assert_eq!(canaries.opened(), BTreeSet::new(), "nobody opened one");
        fs::metadata(second.join("credentials")).unwrap();
        let texts =
            [&first, &second].map(|directory| fs::read_to_string(directory.join("credentials")));
        let [text, other] = texts.map(Result::unwrap);
        assert!(text != other && text.starts_with("[default]"), "{text} {other}");
        let opened = canaries.opened();
        assert_eq!(opened.len(), 2);
        assert!(opened.contains(&(one, "credentials".to_owned())), "{opened:?}");
        assert_eq!(canaries.opened(), BTreeSet::new());
        fs::remove_dir_all(root.path().join("one")).unwrap();
        canaries.opened();
        assert_eq!(canaries.watches.lock().len(), 1, "a removed session is forgotten");
    }
}
