//! Where the secrets of a host are: hidden even where a policy opens what is around them.

use std::path::{Path, PathBuf};

/// Below the home of a user.
const OF_USERS: [&str; 22] = [
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

/// Of the host itself; whoever can speak to an engine of containers owns the host.
const OF_HOST: [&str; 13] = [
    "/etc/shadow",
    "/etc/gshadow",
    "/etc/sudoers",
    "/etc/sudoers.d",
    "/etc/ssh",
    "/etc/ssl/private",
    "/etc/kubernetes",
    "/run/secrets",
    "/run/docker.sock",
    "/var/run/docker.sock",
    "/run/containerd",
    "/run/podman",
    "/run/crio",
];

/// The homes that a passwd file names.
pub fn home_dirs(passwd: &str) -> Vec<PathBuf> {
    let home = |line: &str| line.split(':').nth(5).map(PathBuf::from);
    let mut homes: Vec<_> = passwd.lines().filter_map(home).collect();
    homes.retain(|home| home.is_absolute() && home != Path::new("/"));
    homes.sort();
    homes.dedup();
    homes
}

/// What must be hidden where these paths are opened: the secrets in them, and those among them. No policy opens
/// a secret by naming it, since a caller's policy may name whatever lies in what the installation opens.
pub(crate) fn within(opened: &[PathBuf], homes: &[PathBuf]) -> Vec<PathBuf> {
    let of_users = homes.iter().flat_map(|home| OF_USERS.map(|name| home.join(name)));
    of_users.chain(OF_HOST.map(PathBuf::from)).flat_map(|secret| hidden(opened, &secret)).collect()
}

fn hidden(opened: &[PathBuf], secret: &Path) -> Vec<PathBuf> {
    let inside = opened.iter().filter(|path| path.starts_with(secret)).cloned();
    if opened.iter().any(|path| secret.starts_with(path)) {
        return vec![secret.to_owned()];
    }
    inside.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(names: &[&str]) -> Vec<PathBuf> {
        names.iter().map(PathBuf::from).collect()
    }

    #[test]
    fn homes_are_found_in_a_passwd_file() {
        let passwd = "root:x:0:0:root:/root:/bin/bash\nbin:x:2:2:bin:/:/bin/sh\n\nbad\nann:x:1:1::/home/ann:/bin/sh\nbob:x:3:3::/home/ann:\n";
        assert_eq!(home_dirs(passwd), paths(&["/home/ann", "/root"]));
    }

    #[test]
    fn secrets_in_what_is_opened_are_named_and_others_are_not() {
        let found = within(&paths(&["/home"]), &paths(&["/home/ann", "/root"]));
        assert!(
            found.contains(&"/home/ann/.ssh".into()) && found.contains(&"/home/ann/.config/gcloud".into())
        );
        assert!(found.iter().all(|path| path.starts_with("/home/ann")), "{found:?}");
    }

    #[test]
    fn a_secret_that_is_opened_by_its_name_or_a_part_of_it_is_hidden_too() {
        let homes = paths(&["/home/ann"]);
        let found = within(&paths(&["/home/ann/.ssh/id", "/run/docker.sock", "/srv"]), &homes);
        assert_eq!(found, paths(&["/home/ann/.ssh/id", "/run/docker.sock"]));
        let found = within(&paths(&["/home/ann", "/home/ann/.ssh/id"]), &homes);
        assert!(found.contains(&"/home/ann/.ssh".into()), "{found:?}");
    }
}
