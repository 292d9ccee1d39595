//! Paths of secrets on a host. They stay hidden even if a policy opens a directory that contains
//! them.

use std::path::{Path, PathBuf};

use crate::PathTrie;

/// Secrets below the home directory of a user.
const USER_SECRETS: [&str; 22] = [
    ".ssh",
    ".gnupg",
    ".aws",
    ".azure",
    ".config/gcloud",
    ".kube",
    ".docker",
    ".config/containers",
    ".netrc",
    ".git-credentials",
    ".config/git/credentials",
    ".config/gh",
    ".npmrc",
    ".pypirc",
    ".cargo/credentials",
    ".cargo/credentials.toml",
    ".config/op",
    ".password-store",
    ".local/share/keyrings",
    ".mozilla",
    ".config/google-chrome",
    ".config/chromium",
];

/// Secrets of the host. Access to the socket of a container engine is access to the whole host.
const HOST_SECRETS: [&str; 7] = [
    "/etc/shadow",
    "/etc/gshadow",
    "/etc/sudoers",
    "/etc/sudoers.d",
    "/etc/ssh",
    "/etc/ssl/private",
    "/etc/kubernetes",
];

/// The same below `/run`, which has a second name. `user` holds the sockets of users: those of
/// rootless engines, of agents with keys, of the desktop.
const RUN_SECRETS: [&str; 10] = [
    "secrets",
    "user",
    "docker.sock",
    "docker",
    "cri-dockerd.sock",
    "containerd",
    "podman",
    "crio",
    "k3s",
    "buildkit",
];

/// The home directories that a passwd file lists.
pub fn home_dirs(passwd: &str) -> Vec<PathBuf> {
    let home = |line: &str| line.split(':').nth(5).map(PathBuf::from);
    let mut homes: Vec<_> = passwd.lines().filter_map(home).collect();
    homes.retain(|home| home.is_absolute() && home != Path::new("/"));
    homes.sort();
    homes.dedup();
    homes
}

/// The paths to hide if these paths are opened: the secrets below them, and opened paths that are
/// secrets or below one.
///
/// A policy cannot open a secret by naming it, because a caller's policy may name any path below
/// what the installation opens.
pub(crate) fn within(opened: &[PathBuf], homes: &[PathBuf]) -> Vec<PathBuf> {
    // Most policies open nothing, and each run has a plan.
    if opened.is_empty() {
        return Vec::new();
    }
    let user_secrets = homes.iter().flat_map(|home| USER_SECRETS.map(|name| home.join(name)));
    let run = ["/run", "/var/run"]
        .into_iter()
        .flat_map(|run| RUN_SECRETS.map(|name| Path::new(run).join(name)));
    let secrets: Vec<_> = user_secrets.chain(HOST_SECRETS.map(PathBuf::from)).chain(run).collect();
    let mounted: PathTrie<_> = opened.iter().collect();
    let secret: PathTrie<_> = secrets.iter().collect();
    let below = secrets.iter().filter(|secret| mounted.covers(secret));
    let mut hidden: Vec<_> =
        below.chain(opened.iter().filter(|path| secret.covers(path))).cloned().collect();
    hidden.sort();
    hidden.dedup();
    hidden
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(names: &[&str]) -> Vec<PathBuf> {
        names.iter().map(PathBuf::from).collect()
    }

    #[test]
    fn home_dirs_are_read_from_passwd() {
        let passwd = "root:x:0:0:root:/root:/bin/bash\nbin:x:2:2:bin:/:/bin/sh\n\nbad\nann:x:1:1::/home/ann:/bin/sh\nbob:x:3:3::/home/ann:\n";
        assert_eq!(home_dirs(passwd), paths(&["/home/ann", "/root"]));
    }

    #[test]
    fn secrets_below_opened_paths_are_hidden() {
        let found = within(&paths(&["/home"]), &paths(&["/home/ann", "/root"]));
        assert!(
            found.contains(&"/home/ann/.ssh".into())
                && found.contains(&"/home/ann/.config/gcloud".into())
        );
        assert!(found.iter().all(|path| path.starts_with("/home/ann")), "{found:?}");
    }

    #[test]
    fn engine_sockets_are_hidden_under_both_names() {
        let found = within(&paths(&["/run", "/var/run/user/1000/docker.sock"]), &[]);
        for hidden in
            ["/run/docker.sock", "/run/user", "/run/podman", "/var/run/user/1000/docker.sock"]
        {
            assert!(found.contains(&hidden.into()), "{hidden}: {found:?}");
        }
    }

    #[test]
    fn secret_opened_by_name_is_hidden() {
        let homes = paths(&["/home/ann"]);
        let found = within(&paths(&["/home/ann/.ssh/id", "/run/docker.sock", "/srv"]), &homes);
        assert_eq!(found, paths(&["/home/ann/.ssh/id", "/run/docker.sock"]));
        let found = within(&paths(&["/home/ann", "/home/ann/.ssh/id"]), &homes);
        assert!(found.contains(&"/home/ann/.ssh".into()), "{found:?}");
    }
}
