//! Configuration. Precedence: flags, environment, file, defaults. Unknown keys and variables are
//! refused.
//!
//! A key is a field of [`Config`] or of a section: the options of the crate that uses it, declared
//! by [`codelia_types::options`].

mod keys;
mod load;
#[cfg(test)]
mod reference;
mod sandbox;
mod show;

use std::path::PathBuf;

use anyhow::{Result, bail};
use codelia_client::Settings;
use codelia_types::{Mode, option};
use figment::Figment;
use serde::{Deserialize, Serialize};

use self::sandbox::Sandbox;

#[cfg(test)]
pub(crate) use self::load::tests;
pub(crate) use self::{
    load::{load, state_home},
    sandbox::LimitEnforcement,
    show::show,
};

/// The effective configuration, with the source of each value.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) config: Config,
    figment: Figment,
}

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
            const SECTIONS: &[(&str, &[option::Key])] = &[
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

impl Loaded {
    /// Whether the key has a value other than its default.
    pub(crate) fn is_set(&self, path: &str) -> bool {
        self.figment.find_metadata(path).is_some_and(|metadata| metadata.name != load::DEFAULT)
    }

    /// What client commands need.
    pub(crate) fn client_settings(&self) -> Settings {
        let sources =
            Settings::KEYS.into_iter().filter_map(|path| Some((path, self.source(path)?)));
        Settings {
            data_dir: self.config.data_dir.clone(),
            options: self.config.client.clone(),
            sources: sources.collect(),
        }
    }

    /// The source of a value: `flag`, `env:NAME` or `file:PATH`; `None` if the key is not set.
    pub(crate) fn source(&self, path: &str) -> Option<String> {
        self.figment.find_metadata(path).filter(|_| self.is_set(path)).map(show::source)
    }
}
