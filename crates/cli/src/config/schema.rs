//! The keys: those of no section, and the sections, which are the options of the crates that use
//! them, declared by [`codelia_types::options`].

use std::path::PathBuf;

use anyhow::{Result, bail};
use codelia_types::{Mode, option};
use serde::{Deserialize, Serialize};

use super::sandbox::{LimitEnforcement, Sandbox};

/// Declares the configuration: keys that belong to no section, then the sections.
macro_rules! config {
    (
        $($(#[doc = $comment:literal])+ $key:ident: $type:ty,)+
        ;
        $($section:ident: $options:ty,)+
    ) => {
        /// The effective configuration.
        #[derive(Debug, Clone, Default, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub(crate) struct Config {
            $($(#[doc = $comment])+ pub(crate) $key: $type,)+
            $(pub(crate) $section: $options,)+
        }

        impl Config {
            /// The keys of each section; first those of none.
            pub(super) const SECTIONS: &[(&str, &[option::Key])] = &[
                ("", &[$(option::Key {
                    name: stringify!($key),
                    kind: stringify!($type),
                    comment: concat!($($comment),+),
                }),+]),
                $((stringify!($section), <$options>::KEYS),)+
            ];
        }
    };
}

config! {
    /// Directory of everything that this process stores outside the database. Default:
    /// `/var/lib/codelia`; a user: `~/.local/state/codelia`.
    data_dir: PathBuf,
    /// Directory that lists the running `codelia up`s. Default: `/run/codelia/instances`; a user:
    /// `~/.local/state/codelia-instances`.
    instances_dir: Option<PathBuf>,
    /// Purpose of the installation, `dev` or `prod`: `prod` refuses what is only good for trying.
    profile: Profile,
    ;
    database: codelia_store::Options,
    output: codelia_store::OutputOptions,
    api: codelia_api::ApiOptions,
    metrics: codelia_telemetry::MetricsOptions,
    internal: codelia_server::InternalTls,
    worker: codelia_worker::WorkerOptions,
    sandbox: Sandbox,
    egress: codelia_egress::Options,
    limits: codelia_api::LimitOptions,
    approvals: codelia_api::ApprovalOptions,
    escape: codelia_policy::EscapeOptions,
    retention: codelia_store::Retention,
    secrets: codelia_store::SecretOptions,
    log: codelia_telemetry::LogOptions,
    otlp: codelia_telemetry::OtlpOptions,
    client: codelia_client::Options,
}

/// Purpose of the installation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Profile {
    #[default]
    Dev,
    Prod,
}

impl Config {
    /// Directory of the worker's sessions.
    pub(crate) fn sandbox_root(&self) -> PathBuf {
        self.sandbox.root.clone().unwrap_or_else(|| self.data_dir.join("worker"))
    }

    /// Whether runs without isolation are allowed.
    pub(crate) fn allow_logical(&self) -> bool {
        self.sandbox.allow_logical.unwrap_or(self.profile == Profile::Dev)
    }

    /// Whether limits that no cgroup can enforce are watched.
    pub(crate) fn watch_limits(&self) -> Result<bool> {
        let watch = self.sandbox.limit_enforcement == Some(LimitEnforcement::BestEffort);
        if watch && self.profile == Profile::Prod {
            bail!(
                "sandbox.limit_enforcement: best_effort is not allowed in profile prod ({})",
                codelia_policy::limits_remedy(Mode::Bwrap, true)
            );
        }
        Ok(watch)
    }
}
