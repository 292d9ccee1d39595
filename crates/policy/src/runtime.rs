//! What of the host's own programs and libraries a sandbox shows: which paths there are, as data.

use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Top-level directories that hold programs and libraries beside `/usr`.
const TOP: [&str; 6] = ["/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"];

/// What programs need of `/etc` and what tells nothing about the host's users or services. Few, since each costs every sandbox a
/// mount.
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

/// The same with a version in its name, which comes after this.
const ETC_BEGINNINGS: [&str; 1] = ["/etc/java-"];

/// What is at a path of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PathKind {
    /// A file or a directory.
    FileOrDirectory,
    /// A link to this.
    Symlink(PathBuf),
}

/// The host's runtime, as far as a sandbox shows it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Runtime {
    /// Links into `/usr`, with what they say: `/bin`, `/lib` and their like, and some of `/etc`.
    pub links: Vec<(PathBuf, PathBuf)>,
    /// Files and directories beside `/usr` that are shown as they are.
    pub shown: Vec<PathBuf>,
    /// The homes of the host's users, where secrets are.
    pub homes: Vec<PathBuf>,
}

impl Runtime {
    /// The runtime of a host with these entries of `/etc`, of which the function tells what is at a path.
    #[must_use]
    pub fn detect(etc: &[PathBuf], look: impl Fn(&Path) -> Option<PathKind>) -> Self {
        let has_version = |path: &&PathBuf| {
            let text = path.to_string_lossy();
            ETC_BEGINNINGS.iter().any(|beginning| text.starts_with(beginning))
        };
        let known = TOP.iter().chain(&ETC).map(PathBuf::from);
        let mut runtime = Self::default();
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

    /// Where a path leads inside, if it begins with one of the links.
    pub(crate) fn resolve(&self, path: &Path) -> PathBuf {
        let through = |(link, to): &(PathBuf, PathBuf)| {
            let rest = path.strip_prefix(link).ok()?;
            // Without anything after it there is no slash after it either.
            Some(destination(link, to).components().chain(rest.components()).collect())
        };
        self.links.iter().find_map(through).unwrap_or_else(|| path.to_owned())
    }

    /// The runtime of a merged Debian, for tests and explanations.
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

/// What a link leads to, by its text alone.
fn destination(link: &Path, to: &Path) -> PathBuf {
    let mut place = PathBuf::new();
    for part in link.parent().unwrap_or(link).join(to).components() {
        match part {
            Component::ParentDir => drop(place.pop()),
            Component::CurDir => {}
            part => place.push(part),
        }
    }
    place
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_into_usr_stay_links_and_others_are_shown_as_what_they_lead_to() {
        let runtime =
            Runtime::detect(&["/etc/java-17".into(), "/etc/shadow".into()], |path| match path.to_str()? {
                "/bin" => Some(PathKind::Symlink("usr/bin".into())),
                "/lib" => Some(PathKind::Symlink("/opt/lib".into())),
                "/etc/os-release" => Some(PathKind::Symlink("../usr/lib/os-release".into())),
                "/etc/localtime" => Some(PathKind::Symlink("../usr/../var/zone".into())),
                "/sbin" | "/etc/java-17" | "/etc/shadow" | "/etc/services" => Some(PathKind::FileOrDirectory),
                _ => None,
            });
        let links = [("/bin", "usr/bin"), ("/etc/os-release", "../usr/lib/os-release")];
        assert_eq!(runtime.links, links.map(|(link, to)| (link.into(), to.into())));
        let shown = ["/sbin", "/lib", "/etc/localtime", "/etc/services", "/etc/java-17"];
        assert_eq!(runtime.shown, shown.map(PathBuf::from));
    }

    #[test]
    fn a_path_through_a_link_is_found_where_it_leads() {
        let runtime = Runtime::debian();
        for (path, place) in [
            ("/bin/sh", "/usr/bin/sh"),
            ("/bin", "/usr/bin"),
            ("/etc/os-release", "/usr/lib/os-release"),
            ("/binary", "/binary"),
            ("/etc/services", "/etc/services"),
        ] {
            assert_eq!(runtime.resolve(Path::new(path)), Path::new(place));
        }
    }
}
