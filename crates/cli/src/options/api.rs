//! Options of the API server.

use std::{fs, io, path::Path, time::Duration};

use anyhow::{Context, Result, anyhow, bail};
use codelia_policy::{Ceilings, Format, Policy, Profile, Profiles};
use codelia_types::{Mode, NetworkMode};

use super::{
    ServiceDefaults, connections, escape,
    limits::{RunLimits, run_limits},
    retention::retention,
    secrets::secret_key,
    shutdown_grace, tls,
};
use crate::{commands::policy, config::Config};

/// Maximum lifetime of a session.
const MAX_SESSION_TTL: Duration = Duration::from_secs(24 * 3600);

/// Options of the API server. `mode` is the mode of sessions that request none.
pub(crate) fn api(config: &Config, mode: Mode, defaults: ServiceDefaults) -> Result<codelia_api::Options> {
    let RunLimits { defaults: limits, ceilings, timeouts } = run_limits(config)?;
    let policy = installation_policy(config, &ceilings)?;
    let profiles = profiles(config, &ceilings)?;
    Ok(codelia_api::Options {
        listen: config.api.listen,
        tls: tls::public(config)?,
        internal_tls: tls::internal(config)?,
        default_network: default_network(config, &policy)?,
        policy,
        profiles,
        ceilings,
        timeouts,
        defaults: limits,
        default_mode: mode,
        session_ttl: config.session_ttl(),
        max_session_ttl: MAX_SESSION_TTL.max(config.session_ttl()),
        allow_logical: config.allow_logical(),
        unisolated_tenant: None,
        placement: config.api.placement.parse().map_err(|error| anyhow!("api.placement: {error}"))?,
        shutdown_grace: shutdown_grace(config, defaults),
        secret_key: secret_key(config)?,
        connections: connections::api(config),
        calls: connections::calls(config),
        cors_origins: config.api.cors_origins.parse().context("api.cors_origins")?,
        access_log: config.log.access,
        escape: escape::responses(config)?,
        webhook: escape::webhook(config)?,
        retention: retention(config)?,
    })
}

/// Network of runs that request none. Mode `host` needs the installation's policy, too.
fn default_network(config: &Config, policy: &Policy) -> Result<Option<NetworkMode>> {
    let network = config.sandbox.network;
    if network == Some(NetworkMode::Host) && policy.network.mode != Some(NetworkMode::Host) {
        bail!("sandbox.network: host needs sandbox.policy with network.mode: host (or use proxy)");
    }
    Ok(network)
}

/// Policy that applies to every command.
fn installation_policy(config: &Config, ceilings: &Ceilings) -> Result<Policy> {
    let Some(file) = &config.sandbox.policy else { return Ok(Policy::installation()) };
    let policy = policy::read(file).context("sandbox.policy")?;
    policy.validate(ceilings).with_context(|| format!("sandbox.policy: {}", file.display()))?;
    Ok(policy.as_installation())
}

/// The profiles of Codelia and those of the operator: one file for each, whose name is the profile's.
fn profiles(config: &Config, ceilings: &Ceilings) -> Result<Profiles> {
    let mut profiles = Profiles::built_in().context("profiles")?;
    let Some(directory) = &config.sandbox.profiles_dir else { return Ok(profiles) };
    let unreadable = || format!("sandbox.profiles_dir: {}", directory.display());
    let entries = fs::read_dir(directory).with_context(unreadable)?;
    let mut files: Vec<_> =
        entries.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>().with_context(unreadable)?;
    files.sort();
    for file in files {
        add_profile(&mut profiles, &file, ceilings)
            .with_context(|| format!("sandbox.profiles_dir: {}", file.display()))?;
    }
    Ok(profiles)
}

fn add_profile(profiles: &mut Profiles, file: &Path, ceilings: &Ceilings) -> Result<()> {
    let name = file.file_stem().and_then(|name| name.to_str()).context("its name is not valid text")?;
    let text = policy::read_text(file)?;
    Ok(profiles.insert(name, Profile::parse(&text, Format::of(file)?, ceilings)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        backends,
        options::{MIB, SEPARATE, tests::config, worker},
    };

    fn api_of(variables: &[(&str, &str)]) -> codelia_api::Options {
        let config = config(variables);
        api(&config, backends::configured_mode(&config).unwrap(), SEPARATE).unwrap()
    }

    #[test]
    fn sandbox_variables_set_the_options() {
        let variables = [
            ("CODELIA_SANDBOX_MODE", "bwrap"),
            ("CODELIA_SANDBOX_ROOT", "/srv/sessions"),
            ("CODELIA_SANDBOX_TTL_SECONDS", "77"),
            ("CODELIA_SANDBOX_NETWORK", "disabled"),
            ("CODELIA_SANDBOX_CPU_LIMIT", "1.5"),
            ("CODELIA_SANDBOX_MEMORY_LIMIT_MB", "64"),
        ];
        let api = api_of(&variables);
        assert_eq!(api.default_mode, Mode::Bwrap);
        assert_eq!(api.session_ttl, Duration::from_secs(77));
        assert_eq!(api.default_network, Some(NetworkMode::None));
        assert_eq!((api.defaults.cpu_millicores, api.defaults.memory_bytes), (1500, 64 * MIB));
        let worker = worker(&config(&variables), "w", Path::new("/run/w.sock"), None, SEPARATE).unwrap();
        assert_eq!(worker.root, Path::new("/srv/sessions"));
    }

    #[test]
    fn network_variable_sets_the_default_network() {
        assert_eq!(api_of(&[]).default_network, None);
        for (value, expected) in [
            ("none", NetworkMode::None),
            ("disabled", NetworkMode::None),
            ("proxy", NetworkMode::Proxy),
            ("enabled", NetworkMode::Proxy),
        ] {
            let api = api_of(&[("CODELIA_SANDBOX_NETWORK", value)]);
            assert_eq!(api.default_network, Some(expected), "{value}");
        }
    }

    #[test]
    fn default_network_host_needs_the_policy() {
        let policy = tempfile::Builder::new().suffix(".yaml").tempfile().unwrap();
        let path = policy.path().to_str().unwrap();
        let variables = [("CODELIA_SANDBOX_NETWORK", "host"), ("CODELIA_SANDBOX_POLICY", path)];
        let refused = api(&config(&variables), Mode::Bwrap, SEPARATE).unwrap_err().to_string();
        assert!(refused.contains("sandbox.network"), "{refused}");
        std::fs::write(path, "network: {mode: host}").unwrap();
        assert_eq!(api_of(&variables).default_network, Some(NetworkMode::Host));
    }

    #[test]
    fn bad_profile_is_refused_by_file_and_field() {
        let directory = tempfile::tempdir().unwrap();
        let variables = [("CODELIA_SANDBOX_PROFILES_DIR", directory.path().to_str().unwrap())];
        let file = directory.path().join("docs.yaml");
        fs::write(&file, "description: Documents\npolicy: {layout: {read_only_workspace: true}}").unwrap();
        let profiles = api_of(&variables).profiles;
        assert_eq!(profiles.names(), "cargo, docs, node, python, shell");
        fs::write(&file, "description: Documents\nlimits: {pids: 0}").unwrap();
        let refused = format!("{:#}", api(&config(&variables), Mode::Bwrap, SEPARATE).unwrap_err());
        assert!(refused.contains("docs.yaml") && refused.contains("limits.pids"), "{refused}");
        fs::write(directory.path().join("notes.txt"), "").unwrap();
        fs::remove_file(file).unwrap();
        assert!(api(&config(&variables), Mode::Bwrap, SEPARATE).is_err());
    }

    #[test]
    fn long_default_ttl_raises_the_maximum() {
        let api = api_of(&[("CODELIA_SANDBOX_TTL_SECONDS", "999999")]);
        assert_eq!(api.max_session_ttl, Duration::from_secs(999_999));
    }
}
