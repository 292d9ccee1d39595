//! The running `codelia up`s of this user: a directory with a file for each, which holds the path
//! of its data directory. A file counts only while the data directory has an owner.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs::{DirBuilder, File},
    io::{ErrorKind, Read},
    os::unix::{
        ffi::{OsStrExt, OsStringExt},
        fs::{DirBuilderExt, MetadataExt},
    },
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use rustix::process::{Pid, geteuid};

use super::data_dir;
use crate::config::{Config, state_home};

const ROOT_DIRECTORY: &str = "/run/codelia/instances";
const MAX_PATH_BYTES: u64 = 4096;

/// The file of a running `up`. Dropping this removes it.
#[derive(Debug)]
pub(crate) struct Registration(PathBuf);

impl Drop for Registration {
    fn drop(&mut self) {
        // A file that stays does no harm: its data directory has no owner.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Registers this process as the owner of a data directory.
pub(crate) fn register(config: &Config, data_dir: &Path) -> Result<Registration> {
    let directory = directory(config).context("instances_dir is not set, and neither is HOME")?;
    let hash = codelia_api::hash_secret(&data_dir.to_string_lossy());
    let path = directory.join(hex::encode(&hash[..8]));
    let write = || {
        DirBuilder::new().recursive(true).mode(0o700).create(&directory)?;
        std::fs::write(&path, data_dir.as_os_str().as_bytes())
    };
    write().with_context(|| format!("cannot write {}", path.display()))?;
    Ok(Registration(path))
}

/// Returns the data directory and process of each running `up`, sorted by directory.
pub(crate) fn running(config: &Config) -> Result<BTreeMap<PathBuf, Pid>> {
    // One in the default directory counts even if it could not register.
    let mut candidates = vec![config.data_dir.clone()];
    if let Some(directory) = directory(config) {
        candidates.extend(
            registered(&directory)
                .with_context(|| format!("cannot read {}", directory.display()))?,
        );
    }
    let mut running = BTreeMap::new();
    for data_dir in candidates {
        if let Some(pid) = data_dir::owner_pid(&data_dir)? {
            running.insert(data_dir, pid);
        }
    }
    Ok(running)
}

/// The data directories in the files of this user.
fn registered(directory: &Path) -> std::io::Result<Vec<PathBuf>> {
    let entries = match directory.read_dir() {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut found = Vec::new();
    for entry in entries {
        match read(&entry?.path()) {
            Ok(data_dir) => found.extend(data_dir),
            // An `up` that has just stopped removed it.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

/// Reads a file; `None` if it belongs to another user, whose word must not stop a process.
fn read(path: &Path) -> std::io::Result<Option<PathBuf>> {
    let file = File::open(path)?;
    if file.metadata()?.uid() != geteuid().as_raw() {
        return Ok(None);
    }
    let mut bytes = Vec::new();
    file.take(MAX_PATH_BYTES).read_to_end(&mut bytes)?;
    Ok(Some(OsString::from_vec(bytes).into()))
}

fn directory(config: &Config) -> Option<PathBuf> {
    if config.instances_dir.is_some() {
        return config.instances_dir.clone();
    }
    if geteuid().is_root() {
        return Some(ROOT_DIRECTORY.into());
    }
    state_home().map(|state| state.join("codelia-instances"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{commands::up::data_dir::DataDir, config::tests::loaded};

    #[test]
    fn only_owned_directories_count_as_running() {
        let temp = tempfile::tempdir().unwrap();
        let registry = temp.path().join("instances");
        let mut config = loaded(None, &[], &[]).unwrap().config;
        config.instances_dir = Some(registry.clone());
        config.data_dir = temp.path().join("default");
        assert!(running(&config).unwrap().is_empty());
        let open = |name: &str| DataDir::open(&temp.path().join(name)).unwrap();
        let one = open("one");
        let two = open("two");
        let registrations = [&one, &two].map(|dir| register(&config, &dir.path).unwrap());
        let paths = |running: BTreeMap<PathBuf, Pid>| running.into_keys().collect::<Vec<_>>();
        let both = [one.path.clone(), two.path.clone()];
        assert_eq!(paths(running(&config).unwrap()), both);
        // The file of a killed `up` stays.
        drop(one);
        assert_eq!(paths(running(&config).unwrap()), both[1..]);
        drop(registrations);
        assert_eq!(registry.read_dir().unwrap().count(), 0);
        let default = DataDir::open(&config.data_dir).unwrap();
        assert_eq!(paths(running(&config).unwrap()), std::slice::from_ref(&default.path));
    }
}
