//! The sandbox's own view of the host's runtime and of `/proc`. Files of the runtime get inodes of
//! their own, and everything is masked that tells about the host.

use std::{
    fs::{self, DirBuilder, File, Permissions},
    io::{self, Read},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
    },
    path::{Path, PathBuf},
};

use codelia_init::{
    ExpectedEnvironment, ExpectedMount, Failure, FileIdentity, Mask, PrivatePath, StagedMount,
    Step, View, ZYGOTE_FILES,
};
use codelia_sys::{
    Errno, mount,
    proc_self::{self, Mount},
    resolve_beneath::open_directory,
};

use crate::{
    failure::{at, at_io},
    layout,
};

/// The largest file of the runtime that is copied, and the space for all of them.
const MAX_FILE_BYTES: u64 = 4 << 20;
const MAX_BYTES: u64 = 16 << 20;

/// The kernel's settings. Some belong to a namespace and could be written.
const SETTINGS: &str = "/proc/sys";

/// Identifies the start of the host.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Where the tmpfs is attached: older kernels clone and overlay only what is attached. A mask
/// covers it at the end: to detach it would wait for a grace period of the kernel.
const STAGE: &str = "/proc/fs";

/// Names in the tmpfs: the second layer of overlays, and what covers masked paths.
const EMPTY: &str = "empty";
const HIDDEN_DIRECTORY: &str = "directory";
const HIDDEN_FILE: &str = "file";

/// The mounts that the view made.
pub(crate) type Made = Vec<(PathBuf, ExpectedMount)>;

/// Creates the view. Returns the mounts that it made.
pub(crate) fn create(view: &View, expected: &ExpectedEnvironment) -> Result<Made, Failure> {
    let unshare =
        if view.owns_mounts { mount::unshare_cgroups } else { mount::unshare_mounts_and_cgroups };
    unshare().map_err(at(Step::UnshareView))?;
    let mut mounts = Vec::new();
    let files = if view.owns_mounts {
        // The zygote has covered the runtime, and made its mounts read-only.
        Files::of_zygote().map_err(at(Step::UnshareView))?
    } else {
        change_tool_mounts(view, expected, &mut mounts)?
    };
    if let Some(layout) = &view.layout {
        layout::apply(layout).map_err(at(Step::LayOutWorkspace))?;
    }
    let settings = Path::new(SETTINGS);
    make_read_only(settings).map_err(at(Step::MaskPaths))?;
    mounts.push((settings.to_owned(), ExpectedMount::read_only(Some("proc"))));
    let boot_id = Mask { path: BOOT_ID.into(), is_directory: false };
    let shown_in_proc = expected.shown_in_proc.as_deref().unwrap_or_default();
    let hidden = hidden_in_proc(shown_in_proc).map_err(at_io(Step::MaskPaths))?;
    let masked = hidden.iter().chain([&boot_id]).chain(&view.masked);
    view.masked.iter().try_for_each(create_directory).map_err(at_io(Step::MaskPaths))?;
    for mask in masked {
        files.mask(mask).map_err(at(Step::MaskPaths))?;
        mounts.push((mask.path.clone(), ExpectedMount::read_only(Some("tmpfs"))));
    }
    Ok(mounts)
}

/// Makes the runtime private in the mounts of a tool.
fn change_tool_mounts(
    view: &View,
    expected: &ExpectedEnvironment,
    made: &mut Made,
) -> Result<Files, Failure> {
    let files = Files::create().map_err(at_io(Step::UnshareView))?;
    let table = proc_self::mounts().map_err(at(Step::PrivateRuntime))?;
    make_submounts_read_only(expected, &table).map_err(at(Step::MaskPaths))?;
    for private in &view.private {
        files.make_private(private, &table, made).map_err(at_io(Step::PrivateRuntime))?;
    }
    files.make_read_only().map_err(at(Step::MaskPaths))?;
    Ok(files)
}

/// Makes the host's mounts read-only that came with a read-only one: not every tool does.
fn make_submounts_read_only(expected: &ExpectedEnvironment, table: &[Mount]) -> Result<(), Errno> {
    let came_along = |mount: &&Mount| {
        let above = expected.mount_above(&mount.target);
        let is_read_only =
            above.is_some_and(|above| above.is_recursive && above.writable == Some(false));
        is_read_only && mount.writable && !expected.mounts.contains_key(&mount.target)
    };
    table.iter().filter(came_along).try_for_each(|mount| mount::make_path_read_only(&mount.target))
}

fn make_read_only(path: &Path) -> Result<(), Errno> {
    let tree = mount::clone_mount(path)?;
    mount::make_read_only(&tree)?;
    mount::attach(&tree, path)
}

/// Creates a directory to mask: the command could create it otherwise.
fn create_directory(mask: &Mask) -> io::Result<()> {
    if mask.is_directory { fs::create_dir_all(&mask.path) } else { Ok(()) }
}

/// Everything in `/proc` that is neither a process nor shown.
pub(crate) fn hidden_in_proc(shown: &[String]) -> io::Result<Vec<Mask>> {
    let mut hidden = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let name = entry.file_name();
        let is_process = name.as_encoded_bytes().iter().all(u8::is_ascii_digit);
        if !is_process && !shown.iter().any(|shown| name == shown.as_str()) {
            hidden.push(Mask { path: entry.path(), is_directory: entry.file_type()?.is_dir() });
        }
    }
    Ok(hidden)
}

fn is_below(mount: &Mount, path: &Path) -> bool {
    mount.target != path && mount.target.starts_with(path)
}

/// A private tmpfs with what the view needs.
pub(crate) struct Files {
    tmpfs: OwnedFd,
}

impl Files {
    /// Needs `/proc`.
    pub(crate) fn create() -> io::Result<Self> {
        let files = Self { tmpfs: mount::create_tmpfs(MAX_BYTES)? };
        mount::attach(&files.tmpfs, Path::new(STAGE))?;
        DirBuilder::new().mode(0o755).create(files.path(EMPTY))?;
        DirBuilder::new().mode(0o0).create(files.path(HIDDEN_DIRECTORY))?;
        File::options().write(true).create_new(true).mode(0o0).open(files.path(HIDDEN_FILE))?;
        Ok(files)
    }

    /// The files of a zygote, which all its sandboxes share: nothing of them can be opened.
    fn of_zygote() -> Result<Self, Errno> {
        Ok(Self { tmpfs: open_directory(Path::new(ZYGOTE_FILES))? })
    }

    pub(crate) fn make_read_only(&self) -> Result<(), Errno> {
        mount::make_read_only(&self.tmpfs)
    }

    /// A mount of all of them.
    pub(crate) fn clone_mount(&self) -> Result<OwnedFd, Errno> {
        mount::clone_beneath(&self.tmpfs, Path::new(""))
    }

    fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        Path::new("/proc/self/fd").join(self.tmpfs.as_raw_fd().to_string()).join(name)
    }

    /// Covers a path of the runtime, then attaches the mounts below it.
    fn make_private(
        &self,
        private: &PrivatePath,
        table: &[Mount],
        made: &mut Made,
    ) -> io::Result<()> {
        let metadata = fs::metadata(&private.path)?;
        if FileIdentity::from(&metadata) != private.identity {
            return Err(Errno::XDEV.into());
        }
        let is_unknown = |mount: &Mount| {
            is_below(mount, &private.path) && !private.host_mounts.contains(&mount.target)
        };
        if table.iter().any(is_unknown) {
            return Err(Errno::EXIST.into());
        }
        self.cover(&private.path, table, made)?;
        for StagedMount { staged, target, is_copied } in &private.below {
            let tree = if *is_copied { self.copy(staged)? } else { mount::clone_tree(staged)? };
            mount::attach(&tree, target)?;
        }
        Ok(())
    }

    /// Covers a directory with an overlay of it, a file with a copy. The kernel makes no overlay of
    /// a directory with mounts of the host below it: then its entries are covered one by one.
    pub(crate) fn cover(&self, path: &Path, table: &[Mount], made: &mut Made) -> io::Result<()> {
        let is_directory = fs::metadata(path)?.is_dir();
        if is_directory && table.iter().any(|mount| is_below(mount, path)) {
            return self.cover_entries(path, table, made);
        }
        let (tree, file_system) = if is_directory {
            (self.overlay(path)?, "overlay")
        } else {
            (self.copy(path)?, "tmpfs")
        };
        mount::attach(&tree, path)?;
        made.push((path.to_owned(), ExpectedMount::read_only(Some(file_system))));
        Ok(())
    }

    fn cover_entries(&self, directory: &Path, table: &[Mount], made: &mut Made) -> io::Result<()> {
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            // A link has no content that could be watched.
            if !entry.file_type()?.is_symlink() {
                self.cover(&entry.path(), table, made)?;
            }
        }
        Ok(())
    }

    fn overlay(&self, directory: &Path) -> io::Result<OwnedFd> {
        let empty = open_directory(&self.path(EMPTY))?;
        Ok(mount::create_read_only_overlay(&open_directory(directory)?, &empty)?)
    }

    /// Copies a file. Returns a mount of the copy.
    fn copy(&self, path: &Path) -> io::Result<OwnedFd> {
        let mut content = Vec::new();
        File::open(path)?.take(MAX_FILE_BYTES + 1).read_to_end(&mut content)?;
        if content.len() as u64 > MAX_FILE_BYTES {
            return Err(Errno::FBIG.into());
        }
        let name = path.to_string_lossy().replace('/', "%");
        fs::write(self.path(&name), content)?;
        fs::set_permissions(self.path(&name), Permissions::from_mode(0o444))?;
        let tree = mount::clone_beneath(&self.tmpfs, Path::new(&name))?;
        mount::make_read_only(&tree)?;
        Ok(tree)
    }

    fn mask(&self, mask: &Mask) -> Result<(), Errno> {
        let name = if mask.is_directory { HIDDEN_DIRECTORY } else { HIDDEN_FILE };
        mount::attach(&mount::clone_beneath(&self.tmpfs, Path::new(name))?, &mask.path)
    }
}
