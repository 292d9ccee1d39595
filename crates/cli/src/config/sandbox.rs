//! The section `sandbox`: api, worker and backends share it.

use std::{collections::BTreeMap, num::NonZeroU32, path::PathBuf, time::Duration};

use codelia_types::{
    ByteSize, Cores, Mode, NetworkMode, duration,
    option::{comma_map, positive},
};
use serde::{Deserialize, Deserializer, Serialize};

codelia_types::options! {
    /// Sandboxes and sessions.
    pub(crate) struct Sandbox {
        /// Mode of sessions that request none: `native`, `bwrap`, `nsjail`, `container` or
        /// `logical`. Default: the strongest usable mode.
        pub(crate) mode: Option<Mode> = None,
        /// Directory of the sessions. Default: `DATA_DIR/worker`.
        pub(crate) root: Option<PathBuf> = None,
        /// Lifetime of a session that requests none. The variable may be a number of seconds.
        #[serde(with = "duration")]
        pub(crate) ttl: Duration = Duration::from_secs(3600),
        /// Network of runs that request none: `none`, `proxy` or `host`. Default: none, unless a
        /// policy sets proxy.
        #[serde(deserialize_with = "network")]
        pub(crate) network: Option<NetworkMode> = None,
        /// Cores of a run that requests none.
        pub(crate) cpu_limit: Cores = Cores::ONE,
        /// Memory of a run that requests none. The variable may be a number of MiB.
        #[serde(deserialize_with = "positive")]
        pub(crate) memory_limit: ByteSize = ByteSize::mib(512),
        /// Policy file that applies to every command. Default: no host paths are exposed.
        pub(crate) policy: Option<PathBuf> = None,
        /// Directory with the operator's profiles. Default: only the profiles of Codelia.
        pub(crate) profiles_dir: Option<PathBuf> = None,
        /// Whether runs without isolation are allowed. Default: true; false in profile `prod`.
        pub(crate) allow_logical: Option<bool> = None,
        /// What becomes of limits that no cgroup can enforce: `strict` refuses the modes,
        /// `best_effort` watches them. Default: `strict`; `up` without cgroups: `best_effort`.
        pub(crate) limit_enforcement: Option<LimitEnforcement> = None,
        /// First user and group id of sessions, if the worker is root. Default: a free range from
        /// 2100000000 on for each root.
        pub(crate) uid_base: Option<NonZeroU32> = None,
        /// Number of ids, and so of sessions of one root.
        pub(crate) uid_count: NonZeroU32 = const { NonZeroU32::new(65536).unwrap() },
        /// Directory with the reservations of all session roots on this host.
        pub(crate) uid_registry: PathBuf = "/var/lib/codelia/uids".into(),
        /// Whether commands get only CPU time that nothing else uses (`cpu.idle`).
        pub(crate) cpu_idle: bool = false,
        /// Program of mode `bwrap`, by path or name.
        pub(crate) bwrap: PathBuf = "bwrap".into(),
        /// Program of mode `nsjail`, by path or name.
        pub(crate) nsjail: PathBuf = "nsjail".into(),
        /// Mode `native`: how many active sessions keep their namespaces for the next run.
        pub(crate) native_zygotes: usize = 64,
        /// Mode `container`: engine socket (Podman: `/run/podman/podman.sock`).
        pub(crate) container_socket: PathBuf = "/var/run/docker.sock".into(),
        /// Mode `container`: `runc`, `runsc` or `kata`. Default: the engine's.
        pub(crate) container_runtime: Option<String> = None,
        /// Mode `container`: image for runs without a profile.
        pub(crate) container_image: String = "codelia-base".to_owned(),
        /// Mode `container`: images by profile, `PROFILE=IMAGE` with commas between them.
        #[serde(with = "comma_map")]
        pub(crate) container_images: BTreeMap<String, String> = images(),
        /// Program that starts commands in sandboxes. Default: `codelia-init` next to `codelia`.
        pub(crate) init: Option<PathBuf> = None,
        /// How long a read waits for a decision.
        #[serde(with = "duration")]
        pub(crate) read_timeout: Duration = Duration::from_secs(120),
    }
}

fn images() -> BTreeMap<String, String> {
    ["node", "python", "rust"].map(|name| (name.to_owned(), format!("codelia-{name}"))).into()
}

/// The treatment of limits that no cgroup can enforce.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LimitEnforcement {
    /// Isolating modes are not usable.
    Strict,
    /// The worker watches them and ends commands that exceed them.
    BestEffort,
}

/// Parses a network mode. `disabled` and `enabled` are the words of requirement SVC-15 for `none`
/// and `proxy`.
fn network<'de, D: Deserializer<'de>>(from: D) -> Result<Option<NetworkMode>, D::Error> {
    let Some(text) = Option::<String>::deserialize(from)? else { return Ok(None) };
    match text.as_str() {
        "disabled" => Ok(Some(NetworkMode::None)),
        "enabled" => Ok(Some(NetworkMode::Proxy)),
        other => other.parse().map(Some).map_err(serde::de::Error::custom),
    }
}
