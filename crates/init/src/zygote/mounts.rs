//! The mounts of a zygote, and those that each of its sandboxes makes on top of them.

use std::{
    fs::{self, DirBuilder, File, Permissions},
    io::{self, Write},
    os::{
        fd::OwnedFd,
        unix::fs::{DirBuilderExt, PermissionsExt, symlink},
    },
    path::{Path, PathBuf},
};

use codelia_init::{HOST_PROC, OwnMount, STAGING_DIR, ZYGOTE_FILES, Zygote, ZygoteMount};
use codelia_sys::{
    fd, mount,
    proc_self::{self, Mount},
};

use crate::view::{Files, Made};

/// The space for copies of files.
const MAX_ROOT_BYTES: u64 = 64 << 20;
/// The space for the names in `/dev`.
const MAX_DEV_BYTES: u64 = 1 << 20;

const PROC: &str = "/proc";
const DEV: &str = "/dev";
const TERMINALS: &str = "/dev/pts";

/// Links in `/dev`.
const DEV_LINKS: [(&str, &str); 6] = [
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("core", "/proc/kcore"),
    ("ptmx", "pts/ptmx"),
];

/// Things that a mount needs of the host, which is out of reach once the root has changed.
enum Source {
    Tree(OwnedFd),
    File(File),
    Devices(Vec<OwnedFd>),
    Nothing,
}

/// Makes all mounts of a zygote and changes the root. Returns the mounts that cover the runtime.
pub(super) fn create(zygote: &Zygote) -> io::Result<Made> {
    let mut sources = zygote.mounts.iter().map(open).collect::<io::Result<Vec<_>>>()?;
    let table = proc_self::mounts()?;
    let host_proc = mount::clone_tree(complete_proc(&table))?;
    mount::restrict_tree(&host_proc, true)?;
    let files = Files::create()?;
    // Last: other mounts show what is below the covers.
    let made = open_runtime(&zygote.mounts, &table, &files, &mut sources)?;
    files.make_read_only()?;
    let files = files.clone_mount()?;
    mount::change_root(&mount::create_tmpfs(MAX_ROOT_BYTES)?)?;
    attach(&host_proc, Path::new(HOST_PROC))?;
    attach(&files, Path::new(ZYGOTE_FILES))?;
    for (one, source) in zygote.mounts.iter().zip(sources) {
        make(one, source)?;
    }
    create_mount_points(&zygote.own_mounts)?;
    if zygote.mounts.iter().any(|one| matches!(one, ZygoteMount::Dev { .. })) {
        mount::make_path_read_only(Path::new(DEV))?;
    }
    mount::make_path_read_only(Path::new("/"))?;
    Ok(made)
}

/// A `/proc` of which nothing is masked: the kernel mounts a new one only where such a one is
/// visible. In a container whose own is masked, the operator mounts another one elsewhere.
fn complete_proc(table: &[Mount]) -> &Path {
    let is_complete = |proc: &&Mount| {
        let is_below =
            |other: &Mount| other.target != proc.target && other.target.starts_with(&proc.target);
        // Not a part of one.
        let is_whole = || fs::symlink_metadata(proc.target.join("self")).is_ok();
        proc.file_system == "proc" && proc.writable && !table.iter().any(is_below) && is_whole()
    };
    table.iter().find(is_complete).map_or(Path::new(PROC), |proc| &proc.target)
}

/// Covers the directories of the runtime where they are, in the zygote's mount namespace, and opens
/// them.
fn open_runtime(
    mounts: &[ZygoteMount],
    table: &[Mount],
    files: &Files,
    sources: &mut [Source],
) -> io::Result<Made> {
    let mut made = Made::new();
    for (one, source) in mounts.iter().zip(sources) {
        if let ZygoteMount::Runtime { path } = one {
            files.cover(path, table, &mut made)?;
            let tree = mount::clone_tree(path)?;
            mount::restrict_tree(&tree, false)?;
            *source = Source::Tree(tree);
        }
    }
    Ok(made)
}

fn open(one: &ZygoteMount) -> io::Result<Source> {
    Ok(match one {
        ZygoteMount::Bind { source, writable, .. } => {
            let tree = mount::clone_tree(source)?;
            mount::restrict_tree(&tree, *writable)?;
            Source::Tree(tree)
        }
        ZygoteMount::Copy { source, .. } => Source::File(File::open(source)?),
        ZygoteMount::Dev { devices } => {
            let open = |name: &String| -> io::Result<OwnedFd> {
                let device = mount::clone_mount(&Path::new(DEV).join(name))?;
                mount::restrict_device(&device)?;
                Ok(device)
            };
            Source::Devices(devices.iter().map(open).collect::<io::Result<_>>()?)
        }
        ZygoteMount::Runtime { .. } | ZygoteMount::File { .. } | ZygoteMount::Symlink { .. } => {
            Source::Nothing
        }
    })
}

fn make(one: &ZygoteMount, source: Source) -> io::Result<()> {
    match (one, source) {
        (
            ZygoteMount::Bind { target, .. } | ZygoteMount::Runtime { path: target },
            Source::Tree(tree),
        ) => attach(&tree, target),
        (ZygoteMount::Copy { target, .. }, Source::File(mut file)) => {
            write_file(target, |copy| io::copy(&mut file, copy).map(drop))
        }
        (ZygoteMount::File { target, text }, _) => {
            write_file(target, |file| file.write_all(text.as_bytes()))
        }
        (ZygoteMount::Symlink { target, to }, _) => make_link(target, to),
        (ZygoteMount::Dev { devices: names }, Source::Devices(devices)) => {
            make_dev(names, &devices)
        }
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}

fn make_dev(names: &[String], devices: &[OwnedFd]) -> io::Result<()> {
    let dev = Path::new(DEV);
    make_directories(dev)?;
    mount::attach(&mount::create_tmpfs(MAX_DEV_BYTES)?, dev)?;
    for (name, device) in names.iter().zip(devices) {
        attach(device, &dev.join(name))?;
    }
    for (name, to) in DEV_LINKS {
        symlink(to, dev.join(name))?;
    }
    make_directories(Path::new(TERMINALS))
}

/// Creates the places of mounts that the sandboxes make, where the zygote can.
fn create_mount_points(own: &[OwnMount]) -> io::Result<()> {
    let mut made: Vec<PathBuf> = Vec::new();
    for one in own {
        let target = target_of(one);
        if !made.iter().any(|above| target.starts_with(above))
            && !matches!(one, OwnMount::Symlink { .. })
        {
            let is_directory = match one {
                OwnMount::Staged { staged, .. } => fs::metadata(staged)?.is_dir(),
                _ => true,
            };
            make_mount_point(target, is_directory)?;
        }
        made.push(target.to_owned());
    }
    // The mask needs a directory too.
    make_directories(Path::new(STAGING_DIR))
}

/// Makes the mounts of one sandbox, in its mount namespace.
pub(super) fn create_own(own: &[OwnMount]) -> io::Result<()> {
    own.iter().try_for_each(|one| match one {
        OwnMount::Proc => attach(&mount::create_proc()?, Path::new(PROC)),
        OwnMount::Terminals { max } => attach(&mount::create_devpts(*max)?, Path::new(TERMINALS)),
        OwnMount::Tmpfs { target, size_bytes } => {
            attach(&mount::create_shared_tmpfs(*size_bytes)?, target)
        }
        OwnMount::Staged { staged, target } => attach(&mount::clone_tree(staged)?, target),
        OwnMount::Symlink { target, to } => make_link(target, to),
    })
}

fn target_of(one: &OwnMount) -> &Path {
    match one {
        OwnMount::Proc => Path::new(PROC),
        OwnMount::Terminals { .. } => Path::new(TERMINALS),
        OwnMount::Tmpfs { target, .. }
        | OwnMount::Staged { target, .. }
        | OwnMount::Symlink { target, .. } => target,
    }
}

/// Attaches a mount, at a new mount point if there is none.
fn attach(tree: &OwnedFd, target: &Path) -> io::Result<()> {
    make_mount_point(target, fd::is_directory(tree)?)?;
    Ok(mount::attach(tree, target)?)
}

fn make_mount_point(path: &Path, is_directory: bool) -> io::Result<()> {
    if fs::symlink_metadata(path).is_ok() {
        return Ok(());
    }
    if is_directory {
        return make_directories(path);
    }
    write_file(path, |_| Ok(()))
}

fn make_directories(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o755).create(path)
}

fn make_parents(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), make_directories)
}

fn make_link(path: &Path, to: &Path) -> io::Result<()> {
    make_parents(path)?;
    symlink(to, path)
}

/// Writes a file that everyone may read. A later one replaces an earlier one.
fn write_file(path: &Path, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    make_parents(path)?;
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = File::options().write(true).create_new(true).open(path)?;
    write(&mut file)?;
    file.set_permissions(Permissions::from_mode(0o444))
}
