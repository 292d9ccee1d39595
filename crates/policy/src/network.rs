//! The network mode of a run, what needs an approval, and a guess whether a command needs a
//! network.

use codelia_types::NetworkMode;

use crate::{FIELDS, Field, NetworkPolicy, Policy};

/// A network that a person must approve before a run may have its network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NetworkApproval {
    /// Mode `proxy`, which the operator did not decide on.
    Proxy,
    /// Mode `host`.
    Host,
}

impl NetworkApproval {
    /// The approval that a run with this network needs, in an installation with this policy and
    /// default network.
    ///
    /// Mode `proxy` needs none if the operator decided on it. Mode `host` always needs one.
    #[must_use]
    pub fn needed(
        installation: &NetworkPolicy,
        default: Option<NetworkMode>,
        network: NetworkMode,
    ) -> Option<Self> {
        let decided = installation.mode.max(default) >= Some(NetworkMode::Proxy);
        match network {
            NetworkMode::None => None,
            NetworkMode::Proxy => (!decided).then_some(Self::Proxy),
            NetworkMode::Host => Some(Self::Host),
        }
    }
}

impl NetworkPolicy {
    /// The network of a run: the tightest of what it requests and of the mode of this policy.
    /// Without a request, a policy's `proxy` takes effect; its `host` only permits that mode.
    #[must_use]
    pub fn effective_mode(&self, requested: Option<NetworkMode>) -> NetworkMode {
        match (requested, self.mode) {
            (Some(requested), Some(mode)) => requested.min(mode),
            (Some(requested), None) => requested,
            (None, Some(NetworkMode::Proxy)) => NetworkMode::Proxy,
            (None, _) => NetworkMode::None,
        }
    }
}

impl Policy {
    /// The first field that only the egress proxy can enforce.
    pub(crate) fn proxy_field(&self) -> Option<&'static Field> {
        FIELDS.iter().find(|field| {
            let value = field.value(self);
            match field.path {
                "network.mode" | "network.executables" => false,
                "network.credentials" => value.entries() > 0,
                path => path.starts_with("network.") && value.is_set(),
            }
        })
    }
}

/// Programs that usually need a network: with one of these words after them, or always.
const NETWORK_PROGRAMS: [(&str, &[&str]); 18] = [
    ("curl", &[]),
    ("wget", &[]),
    ("ssh", &[]),
    ("scp", &[]),
    ("git", &["clone", "fetch", "pull", "push", "ls-remote"]),
    ("pip", &["install", "download"]),
    ("pip3", &["install", "download"]),
    ("uv", &["sync", "add", "install"]),
    ("poetry", &["install", "add", "update"]),
    ("npm", &["install", "i", "ci", "add", "update"]),
    ("pnpm", &["install", "add", "update"]),
    ("yarn", &["install", "add"]),
    ("cargo", &["install", "fetch", "update", "add"]),
    ("go", &["get", "install", "mod"]),
    ("gem", &["install"]),
    ("bundle", &["install"]),
    ("apt", &["install", "update"]),
    ("apt-get", &["install", "update"]),
];

/// Whether a command looks as if it needed a network.
///
/// A guess that only helps to word messages. It never allows or refuses anything: a command can use
/// a network without looking like it.
#[must_use]
pub fn predicts_network(argv: &[String]) -> bool {
    // The arguments too, because shells get their commands as one.
    let is_separator = |c: char| c.is_whitespace() || ";&|()'\"`$".contains(c);
    let mut words =
        argv.iter().flat_map(|word| word.split(is_separator)).filter(|word| !word.is_empty());
    while let Some(word) = words.next() {
        let program = word.rsplit('/').next().unwrap_or(word);
        let Some((_, verbs)) = NETWORK_PROGRAMS.iter().find(|(name, _)| *name == program) else {
            continue;
        };
        if verbs.is_empty() || words.clone().take(4).any(|next| verbs.contains(&next)) {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use NetworkMode::{Host, None as Off, Proxy};

    fn policy(mode: Option<NetworkMode>) -> NetworkPolicy {
        NetworkPolicy { mode, ..NetworkPolicy::default() }
    }

    #[test]
    fn tightest_mode_is_effective() {
        for (requested, mode, effective) in [
            (None, None, Off),
            (None, Some(Off), Off),
            (None, Some(Proxy), Proxy),
            (None, Some(Host), Off),
            (Some(Off), None, Off),
            (Some(Off), Some(Host), Off),
            (Some(Proxy), None, Proxy),
            (Some(Proxy), Some(Off), Off),
            (Some(Proxy), Some(Proxy), Proxy),
            (Some(Proxy), Some(Host), Proxy),
            (Some(Host), None, Host),
            (Some(Host), Some(Off), Off),
            (Some(Host), Some(Proxy), Proxy),
            (Some(Host), Some(Host), Host),
        ] {
            assert_eq!(policy(mode).effective_mode(requested), effective, "{requested:?} {mode:?}");
        }
    }

    #[test]
    fn operator_decides_on_proxy_but_not_alone_on_host() {
        let needed =
            |mode, default, network| NetworkApproval::needed(&policy(mode), default, network);
        for mode in [None, Some(Off), Some(Proxy), Some(Host)] {
            for default in [None, Some(Off), Some(Proxy), Some(Host)] {
                assert_eq!(needed(mode, default, Off), None);
                assert_eq!(needed(mode, default, Host), Some(NetworkApproval::Host));
                let decided = mode >= Some(Proxy) || default >= Some(Proxy);
                assert_eq!(needed(mode, default, Proxy).is_none(), decided, "{mode:?} {default:?}");
            }
        }
    }

    #[test]
    fn network_need_is_guessed_from_command() {
        let guess = |argv: &[&str]| {
            predicts_network(&argv.iter().map(|&s| s.to_owned()).collect::<Vec<_>>())
        };
        for argv in [
            &["curl", "https://example.com"][..],
            &["/usr/bin/git", "clone", "https://example.com/a"],
            &["git", "-C", "a", "fetch"],
            &["python3", "-m", "pip", "install", "requests"],
            &["sh", "-c", "cd a && npm ci"],
            &["bash", "-c", "x=$(curl -s https://example.com)"],
        ] {
            assert!(guess(argv), "{argv:?}");
        }
        for argv in
            [&[][..], &["true"], &["git", "status"], &["cargo", "test"], &["echo", "network"]]
        {
            assert!(!guess(argv), "{argv:?}");
        }
    }
}
