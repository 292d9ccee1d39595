//! The host's programs and libraries that a sandbox shows, as data.

use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Top-level directories with programs and libraries, in addition to `/usr`.
const TOP_LEVEL: [&str; 6] = ["/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"];

/// Paths of `/etc` that programs need and that reveal nothing about the host's users or services.
/// The list is short because each path costs every sandbox a mount.
const ETC: [&str; 11] = [
    "/etc/alternatives",
    "/etc/java",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/nsswitch.conf",
    "/etc/os-release",
    "/etc/pki",
    "/etc/protocols",
    "/etc/services",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
];

/// Names the host's resolvers.
const RESOLVER: &str = "/etc/resolv.conf";

/// Prefixes of such paths whose names end with a version.
const ETC_PREFIXES: [&str; 1] = ["/etc/java-"];

/// The kind of a host path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PathKind {
    /// A file or a directory.
    FileOrDirectory,
    /// A symlink with this target.
    Symlink(PathBuf),
}

/// The part of the host's file tree that every sandbox shows.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Runtime {
    /// Symlinks into `/usr` with their targets: `/bin`, `/lib` and similar, and some of `/etc`.
    pub links: Vec<(PathBuf, PathBuf)>,
    /// Files and directories outside `/usr` that are mounted read-only.
    pub shown: Vec<PathBuf>,
    /// The file that names the host's resolvers, for commands that share its network.
    #[serde(default)]
    pub resolver: Option<PathBuf>,
    /// Home directories of the host's users, which contain secrets.
    pub homes: Vec<PathBuf>,
}

impl Runtime {
    /// Detects the runtime of a host. `etc` lists the entries of its `/etc`; `look` returns what a
    /// path is, or `None` if it does not exist.
    #[must_use]
    pub fn detect(etc: &[PathBuf], look: impl Fn(&Path) -> Option<PathKind>) -> Self {
        let has_version = |path: &&PathBuf| {
            let text = path.to_string_lossy();
            ETC_PREFIXES.iter().any(|prefix| text.starts_with(prefix))
        };
        let known = TOP_LEVEL.iter().chain(&ETC).map(PathBuf::from);
        let resolver = Path::new(RESOLVER);
        let mut runtime =
            Self { resolver: look(resolver).map(|_| resolver.to_owned()), ..Self::default() };
        for path in known.chain(etc.iter().filter(has_version).cloned()) {
            match look(&path) {
                Some(PathKind::Symlink(to)) if destination(&path, &to).starts_with("/usr") => {
                    runtime.links.push((path, to));
                }
                Some(PathKind::Symlink(_) | PathKind::FileOrDirectory) => runtime.shown.push(path),
                None => {}
            }
        }
        runtime
    }

    /// The path with a leading symlink of the runtime resolved.
    pub(crate) fn resolve(&self, path: &Path) -> PathBuf {
        let through = |(link, to): &(PathBuf, PathBuf)| {
            let rest = path.strip_prefix(link).ok()?;
            // Chaining components adds no trailing slash if nothing follows the link.
            Some(destination(link, to).components().chain(rest.components()).collect())
        };
        self.links.iter().find_map(through).unwrap_or_else(|| path.to_owned())
    }

    /// The runtime of a Debian with a merged `/usr`, for tests and explanations.
    #[must_use]
    pub fn debian() -> Self {
        Self::detect(&[], |path| match path.strip_prefix("/").ok()?.to_str()? {
            "lib32" | "libx32" | "etc/java" | "etc/pki" => None,
            "etc/localtime" => Some(PathKind::Symlink("/usr/share/zoneinfo/Etc/UTC".into())),
            "etc/os-release" => Some(PathKind::Symlink("../usr/lib/os-release".into())),
            name if name.starts_with("etc/") => Some(PathKind::FileOrDirectory),
            name => Some(PathKind::Symlink(Path::new("usr").join(name))),
        })
    }
}

/// The path that a symlink points to, by its text alone.
fn destination(link: &Path, to: &Path) -> PathBuf {
    let mut resolved = PathBuf::new();
    for part in link.parent().unwrap_or(link).join(to).components() {
        match part {
            Component::ParentDir => drop(resolved.pop()),
            Component::CurDir => {}
            part => resolved.push(part),
        }
    }
    resolved
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symlinks_into_usr_are_kept() {
        let runtime = Runtime::detect(&["/etc/java-17".into(), "/etc/shadow".into()], |path| {
            match path.to_str()? {
                "/bin" => Some(PathKind::Symlink("usr/bin".into())),
                "/lib" => Some(PathKind::Symlink("/opt/lib".into())),
                "/etc/os-release" => Some(PathKind::Symlink("../usr/lib/os-release".into())),
                "/etc/localtime" => Some(PathKind::Symlink("../usr/../var/zone".into())),
                "/sbin" | "/etc/java-17" | "/etc/shadow" | "/etc/services" => {
                    Some(PathKind::FileOrDirectory)
                }
                _ => None,
            }
        });
        let links = [("/bin", "usr/bin"), ("/etc/os-release", "../usr/lib/os-release")];
        assert_eq!(runtime.links, links.map(|(link, to)| (link.into(), to.into())));
        let shown = ["/sbin", "/lib", "/etc/localtime", "/etc/services", "/etc/java-17"];
        assert_eq!(runtime.shown, shown.map(PathBuf::from));
    }

    #[test]
    fn path_through_symlink_is_resolved() {
        let runtime = Runtime::debian();
        for (path, resolved) in [
            ("/bin/sh", "/usr/bin/sh"),
            ("/bin", "/usr/bin"),
            ("/etc/os-release", "/usr/lib/os-release"),
            ("/binary", "/binary"),
            ("/etc/services", "/etc/services"),
        ] {
            assert_eq!(runtime.resolve(Path::new(path)), Path::new(resolved));
        }
    }
}
