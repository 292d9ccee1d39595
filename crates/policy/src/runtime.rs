//! What of the host's own programs and libraries a sandbox shows: which paths there are, as data.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Top-level directories that hold programs and libraries beside `/usr`.
const TOP: [&str; 6] = ["/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"];

/// Files of `/etc` that programs need and that tell nothing about the host's users or services.
const ETC: [&str; 12] = [
    "/etc/alternatives",
    "/etc/ca-certificates",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/nsswitch.conf",
    "/etc/pki",
    "/etc/protocols",
    "/etc/services",
    "/etc/ssl/certs",
];

/// The host's runtime, as far as a sandbox shows it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Runtime {
    /// Of `/bin`, `/lib` and their like: those that are links into `/usr`.
    pub links: Vec<PathBuf>,
    /// Of `/bin`, `/lib` and their like: those that are directories, where `/usr` is not merged.
    pub directories: Vec<PathBuf>,
    /// The harmless files and directories of `/etc` that are there.
    pub etc_files: Vec<PathBuf>,
    /// The homes of the host's users, where secrets are.
    pub homes: Vec<PathBuf>,
}

impl Runtime {
    /// The runtime of a host of which the two functions tell what is there.
    #[must_use]
    pub fn of(exists: impl Fn(&Path) -> bool, is_link: impl Fn(&Path) -> bool) -> Self {
        let there = |names: &[&str]| names.iter().map(PathBuf::from).filter(|path| exists(path)).collect();
        let top: Vec<PathBuf> = there(&TOP);
        let (links, directories) = top.into_iter().partition(|path| is_link(path));
        Self { links, directories, etc_files: there(&ETC), homes: Vec::new() }
    }

    /// Where a path leads inside, if it begins with one of the links.
    pub(crate) fn resolve(&self, path: &Path) -> PathBuf {
        match path.strip_prefix("/") {
            Ok(inside) if self.links.iter().any(|link| path.starts_with(link)) => {
                Path::new("/usr").join(inside)
            }
            _ => path.to_owned(),
        }
    }

    /// The runtime of a merged Debian, for tests and explanations.
    #[must_use]
    pub fn usual() -> Self {
        Self::of(|path| !path.ends_with("lib32") && !path.ends_with("libx32"), |_| true)
    }
}
