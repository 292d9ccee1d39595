//! Creates the sandbox backends and chooses the default mode.

use std::{path::Path, sync::Arc};

use anyhow::{Result, bail};
use codelia_backends::{
    Backend, Capabilities, CgroupParent, ContainerOptions, Gap, HostOptions, Logical,
    LogicalOptions, NativeOptions, ToolOptions, bwrap, container, native, nsjail,
};
use codelia_types::Mode;
use codelia_worker::UidRange;

use crate::{
    config::{Config, LimitEnforcement, Profile},
    host,
};

/// Order of preference if no mode is configured. The one that needs no tool and starts fastest
/// comes first, the one that needs an image last. `logical` isolates nothing and must be chosen.
const PREFERENCE: [Mode; 4] = [Mode::Native, Mode::Bwrap, Mode::Nsjail, Mode::Container];

const NO_ISOLATION: &str = "; to run commands without isolation, use --mode logical";

/// Creates the backends that the configuration allows. `uids` are those of sandboxes.
pub(crate) fn create(config: &Config, uids: Option<UidRange>) -> Result<Vec<Arc<dyn Backend>>> {
    let init = match &config.sandbox.init {
        Some(path) => std::path::absolute(path)?,
        None => codelia_backends::find_init()?,
    };
    let sandbox_uids = uids.map(|range| range.base..=range.base.saturating_add(range.count - 1));
    let sandbox = &config.sandbox;
    let cgroup_parent = cgroup_parent(config);
    let host = HostOptions {
        init: init.clone(),
        cgroup_parent: cgroup_parent.clone(),
        engine_sockets: vec![sandbox.container_socket.clone()],
        watch_limits: config.watch_limits()?,
    };
    let native_options = NativeOptions { host: host.clone(), max_zygotes: sandbox.native_zygotes };
    let bwrap_options = ToolOptions { host, program: sandbox.bwrap.clone(), sandbox_uids };
    let nsjail_options = ToolOptions { program: sandbox.nsjail.clone(), ..bwrap_options.clone() };
    let mut backends: Vec<Arc<dyn Backend>> = vec![
        Arc::new(bwrap(bwrap_options)?),
        Arc::new(nsjail(nsjail_options)?),
        Arc::new(native(native_options)?),
        Arc::new(container(ContainerOptions {
            init: init.clone(),
            socket: sandbox.container_socket.clone(),
            runtime: sandbox.container_runtime.clone(),
            image: sandbox.container_image.clone(),
            profile_images: sandbox.container_images.clone(),
            control_dir: config.data_dir.join("run/containers"),
            worker: config.worker.id.as_ref().map_or_else(host::host_id, ToString::to_string),
        })?),
    ];
    if config.allow_logical() {
        backends.push(Arc::new(Logical::new(LogicalOptions { init, cgroup_parent })?));
    }
    Ok(backends)
}

/// Where this process creates control groups.
pub(crate) fn cgroup_parent(config: &Config) -> CgroupParent {
    CgroupParent { name: None, cpu_idle: config.sandbox.cpu_idle }
}

/// Whether this process can enforce the limits of runs.
pub(crate) fn can_enforce_limits(config: &Config) -> bool {
    codelia_backends::can_enforce_limits(&cgroup_parent(config))
}

/// The configuration of `up`: where nothing is configured and no cgroup can enforce limits, they
/// are watched. Isolation without exact limits is better than none.
pub(crate) fn watching_if_needed(config: &Config) -> Config {
    let mut config = config.clone();
    let is_unset = config.sandbox.limit_enforcement.is_none() && config.profile == Profile::Dev;
    if is_unset && !can_enforce_limits(&config) {
        config.sandbox.limit_enforcement = Some(LimitEnforcement::BestEffort);
    }
    config
}

/// Probes each backend on this host.
pub(crate) async fn probe(config: &Config, backends: &[Arc<dyn Backend>]) -> Vec<Capabilities> {
    let ancestor = || codelia_worker::untraversable_ancestor(&config.sandbox_root());
    let blocked = host::separates_users().then(ancestor).flatten();
    let mut all = Vec::new();
    for backend in backends {
        let mut capabilities = backend.probe().await;
        if let (Some(directory), true) = (&blocked, capabilities.mode != Mode::Logical) {
            capabilities.usable = false;
            capabilities.gaps.push(inaccessible(directory));
        }
        all.push(capabilities);
    }
    all
}

/// Session users cannot reach their files below `directory`.
fn inaccessible(directory: &Path) -> Gap {
    Gap {
        missing: format!("search permission on {} for session users", directory.display()),
        remedy: "choose another sandbox.root, or run chmod o+x on that directory".to_owned(),
    }
}

/// The default mode of an installation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ChosenMode {
    pub(crate) mode: Mode,
    /// Whether the configuration names it.
    pub(crate) is_configured: bool,
    /// The modes that would be preferred, and what they lack.
    pub(crate) passed_over: Vec<(Mode, String)>,
}

/// Returns the configured mode, which must be usable, or the most preferred usable one that
/// isolates. Modes that enforce limits come before those that only watch them.
pub(crate) fn choose_mode(config: &Config, probed: &[Capabilities]) -> Result<ChosenMode> {
    if let Some(mode) = config.sandbox.mode {
        require_usable(mode, probed)?;
        return Ok(ChosenMode { mode, is_configured: true, passed_over: Vec::new() });
    }
    let found = PREFERENCE.iter().filter_map(|mode| probed.iter().find(|one| one.mode == *mode));
    let preferred: Vec<&Capabilities> = found.collect();
    let usable = || preferred.iter().filter(|one| one.usable);
    match usable().find(|one| !one.watches_limits()).or_else(|| usable().next()) {
        Some(one) => {
            let better = preferred.iter().take_while(|other| other.mode != one.mode);
            let passed_over = better.map(|other| (other.mode, other.problem())).collect();
            Ok(ChosenMode { mode: one.mode, is_configured: false, passed_over })
        }
        None => {
            bail!("no isolating mode is usable on this host: {}{NO_ISOLATION}", problems(probed))
        }
    }
}

/// Returns the default mode of an API process, which cannot probe: its workers do.
pub(crate) fn configured_mode(config: &Config) -> Result<Mode> {
    let mode = config.sandbox.mode.unwrap_or(PREFERENCE[0]);
    if mode == Mode::Logical && !config.allow_logical() {
        bail!(
            "sandbox.mode: logical isolates nothing and is not allowed in profile prod (allow it with sandbox.allow_logical)"
        );
    }
    Ok(mode)
}

fn require_usable(mode: Mode, probed: &[Capabilities]) -> Result<()> {
    match probed.iter().find(|one| one.mode == mode) {
        None => bail!("sandbox.mode: {mode} is not available in this build or configuration"),
        Some(one) if one.usable => Ok(()),
        Some(one) => bail!("sandbox.mode: {mode} is not usable on this host: {}", one.problem()),
    }
}

fn problems(probed: &[Capabilities]) -> String {
    let isolating = probed.iter().filter(|one| one.mode != Mode::Logical);
    isolating.map(|one| format!("{}: {}", one.mode, one.problem())).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use codelia_backends::Gap;
    use codelia_policy::Enforceable;

    use super::*;
    use crate::config::tests::loaded;

    fn capabilities(mode: Mode, usable: bool) -> Capabilities {
        let gap = Gap { missing: "user namespaces".into(), remedy: "allow them".into() };
        let gaps = if usable { Vec::new() } else { vec![gap] };
        let enforceable =
            Enforceable { memory: true, cpu: true, pids: true, ..Enforceable::default() };
        Capabilities { mode, usable, enforceable, gaps }
    }

    fn config(variables: &[(&str, &str)]) -> Config {
        loaded(None, &[], variables).unwrap().config
    }

    #[test]
    fn preferred_mode_wins_and_logical_never() {
        let all = |native, bwrap, nsjail, container| {
            [
                capabilities(Mode::Logical, true),
                capabilities(Mode::Container, container),
                capabilities(Mode::Nsjail, nsjail),
                capabilities(Mode::Bwrap, bwrap),
                capabilities(Mode::Native, native),
            ]
        };
        let chosen = |probed: &[Capabilities]| choose_mode(&config(&[]), probed).unwrap().mode;
        assert_eq!(chosen(&all(true, true, true, true)), Mode::Native);
        assert_eq!(chosen(&all(false, true, true, true)), Mode::Bwrap);
        assert_eq!(chosen(&all(false, false, true, true)), Mode::Nsjail);
        assert_eq!(chosen(&all(false, false, false, true)), Mode::Container);
        let error =
            choose_mode(&config(&[]), &all(false, false, false, false)).unwrap_err().to_string();
        assert!(error.contains("user namespaces") && error.contains("--mode logical"), "{error}");
        let mut without_cgroups = all(true, true, true, true);
        without_cgroups[3].enforceable.memory = false;
        without_cgroups[4].enforceable.memory = false;
        assert_eq!(chosen(&without_cgroups), Mode::Nsjail, "exact limits are preferred");
        without_cgroups[1].usable = false;
        without_cgroups[2].usable = false;
        assert_eq!(chosen(&without_cgroups), Mode::Native);
    }

    #[test]
    fn passed_over_modes_are_named_with_remedy() {
        let probed = [capabilities(Mode::Native, false), capabilities(Mode::Bwrap, true)];
        let chosen = choose_mode(&config(&[]), &probed).unwrap();
        let problem = "user namespaces (allow them)".to_owned();
        let passed_over = vec![(Mode::Native, problem)];
        assert_eq!(chosen, ChosenMode { mode: Mode::Bwrap, is_configured: false, passed_over });
        let configured =
            choose_mode(&config(&[("CODELIA_SANDBOX_MODE", "bwrap")]), &probed).unwrap();
        assert!(configured.is_configured && configured.passed_over.is_empty());
    }

    #[test]
    fn prod_profile_refuses_best_effort() {
        let best_effort = ("CODELIA_SANDBOX_LIMIT_ENFORCEMENT", "best_effort");
        assert!(config(&[best_effort]).watch_limits().unwrap());
        assert!(!config(&[]).watch_limits().unwrap());
        let error = config(&[("CODELIA_PROFILE", "prod"), best_effort]).watch_limits().unwrap_err();
        assert!(error.to_string().contains("delegated cgroup"), "{error}");
    }

    #[test]
    fn unusable_configured_mode_is_refused() {
        let config = config(&[("CODELIA_SANDBOX_MODE", "bwrap")]);
        let probed = [capabilities(Mode::Logical, true), capabilities(Mode::Bwrap, false)];
        let error = choose_mode(&config, &probed).unwrap_err().to_string();
        assert!(error.contains("sandbox.mode") && error.contains("user namespaces"), "{error}");
        assert!(choose_mode(&config, &[capabilities(Mode::Logical, true)]).is_err());
    }

    #[test]
    fn prod_profile_refuses_logical_mode() {
        let prod = ("CODELIA_PROFILE", "prod");
        assert!(configured_mode(&config(&[prod, ("CODELIA_SANDBOX_MODE", "logical")])).is_err());
        assert_eq!(configured_mode(&config(&[prod])).unwrap(), Mode::Native);
        assert!(configured_mode(&config(&[prod, ("CODELIA_SANDBOX_MODE", "bwrap")])).is_ok());
        let allowed = ("CODELIA_SANDBOX_ALLOW_LOGICAL", "true");
        assert!(
            configured_mode(&config(&[prod, allowed, ("CODELIA_SANDBOX_MODE", "logical")])).is_ok()
        );
    }
}
