//! Options of the API server.

use std::{fs, io, path::Path, time::Duration};

use anyhow::{Context, Result, bail};
use codelia_api::Webhook;
use codelia_client::policy_file;
use codelia_policy::{Ceilings, Format, Policy, Profile, Profiles};
use codelia_types::{Mode, NetworkMode};

use crate::{
    config::{Config, Profile as InstallationProfile},
    host::open_files,
};

/// Maximum lifetime of a session.
const MAX_SESSION_TTL: Duration = Duration::from_secs(24 * 3600);

/// Options of the API server. `mode` is the mode of sessions that request none.
pub(crate) fn api(config: &Config, mode: Mode) -> Result<codelia_api::Options> {
    config.retention.check()?;
    let sandbox = &config.sandbox;
    let limits =
        config.limits.of_runs(sandbox.memory_limit, sandbox.cpu_limit, &config.approvals)?;
    let policy = installation_policy(config, &limits.ceilings)?;
    Ok(codelia_api::Options {
        tls: config.api.tls(config.profile == InstallationProfile::Prod)?,
        api: config.api.clone(),
        internal_tls: config.internal.clone().files()?,
        default_network: default_network(config, &policy)?,
        policy,
        profiles: profiles(config, &limits.ceilings)?,
        limits,
        default_mode: mode,
        session_ttl: sandbox.ttl,
        max_session_ttl: MAX_SESSION_TTL.max(sandbox.ttl),
        allow_logical: config.allow_logical(),
        unisolated_tenant: None,
        shutdown_grace: config.worker.drain_grace(),
        secret_key: config.secrets.key()?,
        open_files: open_files(),
        access_log: config.log.access,
        escape: config.escape.clone(),
        webhook: Webhook::read(&config.escape)?,
        retention: config.retention,
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
    let policy = policy_file::read(file).context("sandbox.policy")?;
    policy.validate(ceilings).with_context(|| format!("sandbox.policy: {}", file.display()))?;
    Ok(policy.as_installation())
}

/// The profiles of Codelia and those of the operator: one file for each, whose name is the
/// profile's.
fn profiles(config: &Config, ceilings: &Ceilings) -> Result<Profiles> {
    let mut profiles = Profiles::built_in().context("profiles")?;
    let Some(directory) = &config.sandbox.profiles_dir else { return Ok(profiles) };
    let unreadable = || format!("sandbox.profiles_dir: {}", directory.display());
    let entries = fs::read_dir(directory).with_context(unreadable)?;
    let mut files: Vec<_> = entries
        .map(|entry| Ok(entry?.path()))
        .collect::<io::Result<_>>()
        .with_context(unreadable)?;
    files.sort();
    for file in files {
        add_profile(&mut profiles, &file, ceilings)
            .with_context(|| format!("sandbox.profiles_dir: {}", file.display()))?;
    }
    Ok(profiles)
}

fn add_profile(profiles: &mut Profiles, file: &Path, ceilings: &Ceilings) -> Result<()> {
    let name =
        file.file_stem().and_then(|name| name.to_str()).context("its name is not valid text")?;
    let text = policy_file::read_text(file)?;
    Ok(profiles.insert(name, Profile::parse(&text, Format::from_path(file)?, ceilings)?)?)
}
