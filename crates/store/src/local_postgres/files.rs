//! The files of a private server, and the user that it runs as.
//!
//! If this process is root, it owns the directory with the log and the authentication files. The
//! server's user owns only `data` and `run` in it, so it cannot plant a link where root opens a
//! file.

use std::{
    fs::{self, DirBuilder, File, OpenOptions, Permissions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown},
    path::{Path, PathBuf},
    process::Command,
};

use rustix::{
    fs::{Mode, OFlags, open},
    process::{getegid, geteuid},
};

use super::{LocalPostgresError, ROLE, file};

/// The user that owns the server's files where no other may.
const USER: &str = "postgres";
/// The id that stands for users which have none here. Many services run as it.
const NOBODY: u32 = 65534;

/// User and group id that the server runs as; `None` for those of this process.
pub(super) type ServerUser = Option<(u32, u32)>;

/// Chooses the user that the server runs as.
pub(super) fn server_user() -> Result<ServerUser, LocalPostgresError> {
    if !geteuid().is_root() {
        return Ok(None);
    }
    let path = Path::new("/etc/passwd");
    let passwd = fs::read_to_string(path).map_err(file("read", path))?;
    dedicated_user(&passwd).map(Some)
}

/// Returns the ids of the user `postgres`, which it must not share with another account.
fn dedicated_user(passwd: &str) -> Result<(u32, u32), LocalPostgresError> {
    let account = |line: &str| {
        let mut fields = line.split(':');
        let name = fields.next()?.to_owned();
        let mut ids = fields.skip(1).map_while(|id| id.parse::<u32>().ok());
        Some((name, ids.next()?, ids.next()?))
    };
    let accounts: Vec<_> = passwd.lines().filter_map(account).collect();
    let found = accounts.iter().find(|(name, ..)| name == USER);
    let &(_, uid, gid) = found.ok_or(LocalPostgresError::NoUser)?;
    let is_shared = accounts.iter().any(|(name, other, _)| name != USER && *other == uid);
    if is_shared || uid == 0 || uid == NOBODY {
        return Err(LocalPostgresError::SharedUser { uid });
    }
    Ok((uid, gid))
}

/// The paths of a server's files.
#[derive(Debug)]
pub(super) struct Files {
    dir: PathBuf,
    user: ServerUser,
}

impl Files {
    /// Creates the directories, or takes over those that exist, also from another user.
    pub(super) fn create(dir: &Path, user: ServerUser) -> Result<Self, LocalPostgresError> {
        DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(file("create", dir))?;
        if let Some((_, gid)) = user {
            let take_over = || {
                let opened = File::open(dir)?;
                fchown(&opened, Some(geteuid().as_raw()), Some(gid))?;
                opened.set_permissions(Permissions::from_mode(0o710))
            };
            take_over().map_err(file("take over", dir))?;
        }
        let files = Self { dir: dir.to_owned(), user };
        files.give_directory(&files.data())?;
        files.give_directory(&files.run())?;
        Ok(files)
    }

    /// The data directory.
    pub(super) fn data(&self) -> PathBuf {
        self.dir.join("data")
    }

    /// The directory of the socket.
    pub(super) fn run(&self) -> PathBuf {
        self.dir.join("run")
    }

    /// The file with the output of the server.
    pub(super) fn log(&self) -> PathBuf {
        self.dir.join("log")
    }

    /// Opens the log, but no link and no file of another user.
    pub(super) fn open_log(&self) -> Result<File, LocalPostgresError> {
        let path = self.log();
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        // A FIFO without a reader must not block.
        let log = match open(&path, flags | OFlags::NONBLOCK, Mode::RUSR | Mode::WUSR) {
            Ok(log) => File::from(log),
            Err(rustix::io::Errno::LOOP | rustix::io::Errno::NXIO) => {
                return Err(LocalPostgresError::ForeignFile(path));
            }
            Err(error) => return Err(file("open", &path)(error.into())),
        };
        let found = log.metadata().map_err(file("read", &path))?;
        if !found.is_file() || found.nlink() != 1 || found.uid() != geteuid().as_raw() {
            return Err(LocalPostgresError::ForeignFile(path));
        }
        Ok(log)
    }

    /// Writes who may connect: the user of this process, in the role that owns every database.
    /// Returns the paths of the host-based authentication file and of the map of user names.
    pub(super) fn write_authentication(&self) -> Result<[PathBuf; 2], LocalPostgresError> {
        let texts = [
            ("pg_hba.conf", format!("local all {ROLE} peer map={ROLE}\n")),
            ("pg_ident.conf", format!("{ROLE} \"{}\" {ROLE}\n", own_name()?)),
        ];
        let mut paths = [PathBuf::new(), PathBuf::new()];
        for (written, (name, text)) in paths.iter_mut().zip(texts) {
            let path = self.dir.join(name);
            self.replace(&path, &text).map_err(file("write", &path))?;
            *written = path;
        }
        Ok(paths)
    }

    fn replace(&self, path: &Path, text: &str) -> io::Result<()> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // Follows no link, because it creates the file.
        let mut new = OpenOptions::new().write(true).create_new(true).mode(0o640).open(path)?;
        fchown(&new, None, Some(self.user.map_or(getegid().as_raw(), |(_, gid)| gid)))?;
        new.write_all(text.as_bytes())
    }

    /// Creates a directory for the server's user.
    fn give_directory(&self, path: &Path) -> Result<(), LocalPostgresError> {
        match DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(file("create", path)(error));
            }
            _ => {}
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened =
            open(path, flags, Mode::empty()).map_err(|error| file("open", path)(error.into()))?;
        let Some((uid, gid)) = self.user else { return Ok(()) };
        let opened = File::from(opened);
        let owner = opened.metadata().map_err(file("read", path))?.uid();
        if owner == geteuid().as_raw() {
            return fchown(&opened, Some(uid), Some(gid)).map_err(file("chown", path));
        }
        if owner == uid {
            return Ok(());
        }
        Err(LocalPostgresError::WrongOwner { path: path.to_owned(), owner, expected: uid })
    }
}

/// The name of this process's user, as the server finds it for a connection.
fn own_name() -> Result<String, LocalPostgresError> {
    let program = Path::new("id");
    let output = Command::new(program).arg("-un").output().map_err(file("run", program))?;
    let name = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if !output.status.success() || name.is_empty() || name.contains(['"', '\n']) {
        return Err(LocalPostgresError::NoUserName);
    }
    Ok(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: &str = "root:x:0:0:root:/root:/bin/sh\n";
    const NOBODY_LINE: &str = "nobody:x:65534:65534:nobody:/:/bin/false\n";

    #[test]
    fn server_runs_as_dedicated_user_only() {
        let with = |line: &str| dedicated_user(&format!("{ROOT}{NOBODY_LINE}{line}"));
        assert_eq!(with("postgres:x:101:104::/:/bin/sh\n").unwrap(), (101, 104));
        assert!(
            matches!(with(""), Err(LocalPostgresError::NoUser)),
            "`nobody` is not used instead"
        );
        for shared in [
            "postgres:x:0:0::/:/bin/sh\n",
            "postgres:x:65534:65534::/:/bin/sh\n",
            "postgres:x:101:104::/:/bin/sh\nother:x:101:105::/:/bin/sh\n",
        ] {
            assert!(matches!(with(shared), Err(LocalPostgresError::SharedUser { .. })), "{shared}");
        }
    }
}
