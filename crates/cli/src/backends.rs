//! Creates the sandbox backends and chooses the default mode.

use std::{path::Path, sync::Arc};

use anyhow::{Context, Result, bail};
use codelia_backends::{
    Backend, Capabilities, CgroupParent, ContainerOptions, Gap, Logical, LogicalOptions, ToolOptions, bwrap,
    container, nsjail,
};
use codelia_types::Mode;
use codelia_worker::UidRange;

use crate::{config::Config, options};

/// Order of preference if no mode is configured. Modes that use the host's programs and start in
/// milliseconds come before the one that needs an image.
const PREFERENCE: [Mode; 4] = [Mode::Bwrap, Mode::Nsjail, Mode::Container, Mode::Logical];

/// Creates the backends that the configuration allows. `uids` are those of sandboxes.
pub(crate) fn create(config: &Config, uids: Option<UidRange>) -> Result<Vec<Arc<dyn Backend>>> {
    let init = match &config.sandbox.init {
        Some(path) => std::path::absolute(path)?,
        None => codelia_backends::find_init()?,
    };
    let sandbox_uids = uids.map(|range| range.base..=range.base.saturating_add(range.count - 1));
    let cgroup_parent = CgroupParent { name: None, cpu_idle: config.sandbox.cpu_idle };
    let mut backends: Vec<Arc<dyn Backend>> = vec![
        Arc::new(bwrap(ToolOptions {
            init: init.clone(),
            program: config.sandbox.bwrap.clone(),
            cgroup_parent: cgroup_parent.clone(),
            sandbox_uids: sandbox_uids.clone(),
            engine_sockets: vec![config.sandbox.container_socket.clone()],
        })?),
        Arc::new(nsjail(ToolOptions {
            init: init.clone(),
            program: config.sandbox.nsjail.clone(),
            cgroup_parent: cgroup_parent.clone(),
            sandbox_uids,
            engine_sockets: vec![config.sandbox.container_socket.clone()],
        })?),
        Arc::new(container(ContainerOptions {
            init: init.clone(),
            socket: config.sandbox.container_socket.clone(),
            runtime: config.sandbox.container_runtime.clone(),
            image: config.sandbox.container_image.clone(),
            profile_images: config.sandbox.container_images.clone(),
            control_dir: config.data_dir.join("run/containers"),
            worker: config.worker.id.clone().unwrap_or_else(options::host_id),
        })?),
    ];
    if config.allow_logical() {
        backends.push(Arc::new(Logical::new(LogicalOptions { init, cgroup_parent })?));
    }
    Ok(backends)
}

/// Probes each backend on this host.
pub(crate) async fn probe(config: &Config, backends: &[Arc<dyn Backend>]) -> Vec<Capabilities> {
    let ancestor = || codelia_worker::untraversable_ancestor(&config.sandbox_root());
    let blocked = options::separates_users().then(ancestor).flatten();
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

/// Returns the configured mode, which must be usable, or the most preferred usable one.
pub(crate) fn choose_mode(config: &Config, probed: &[Capabilities]) -> Result<Mode> {
    match config.sandbox.mode {
        Some(mode) => require_usable(mode, probed),
        None => {
            let usable = |mode: &Mode| probed.iter().any(|one| one.mode == *mode && is_suitable(one));
            PREFERENCE
                .into_iter()
                .find(usable)
                .with_context(|| format!("no sandbox mode is usable on this host: {}", gaps(probed)))
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

fn require_usable(mode: Mode, probed: &[Capabilities]) -> Result<Mode> {
    match probed.iter().find(|one| one.mode == mode) {
        None => bail!("sandbox.mode: {mode} is not available in this build or configuration"),
        Some(one) if one.usable => Ok(mode),
        Some(one) => {
            bail!("sandbox.mode: {mode} is not usable on this host: {}", gaps(std::slice::from_ref(one)))
        }
    }
}

/// Whether a mode can be the default. An isolating mode that cannot enforce the limits would refuse
/// every run.
fn is_suitable(capabilities: &Capabilities) -> bool {
    let can = capabilities.enforceable;
    capabilities.usable && (capabilities.mode == Mode::Logical || (can.memory && can.cpu && can.pids))
}

fn gaps(probed: &[Capabilities]) -> String {
    let gaps = probed.iter().flat_map(|one| &one.gaps);
    gaps.map(|gap| format!("{} ({})", gap.missing, gap.remedy)).collect::<Vec<_>>().join("; ")
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
        let enforceable = Enforceable { memory: true, cpu: true, pids: true, ..Enforceable::default() };
        Capabilities { mode, usable, enforceable, gaps }
    }

    fn config(variables: &[(&str, &str)]) -> Config {
        loaded(None, &[], variables).unwrap().config
    }

    #[test]
    fn preferred_usable_mode_wins_logical_last() {
        let all = |bwrap, nsjail, container| {
            [
                capabilities(Mode::Logical, true),
                capabilities(Mode::Container, container),
                capabilities(Mode::Nsjail, nsjail),
                capabilities(Mode::Bwrap, bwrap),
            ]
        };
        let chosen = |probed: &[Capabilities]| choose_mode(&config(&[]), probed).unwrap();
        assert_eq!(chosen(&all(true, true, true)), Mode::Bwrap);
        assert_eq!(chosen(&all(false, true, true)), Mode::Nsjail);
        assert_eq!(chosen(&all(false, false, true)), Mode::Container);
        assert_eq!(chosen(&all(false, false, false)), Mode::Logical);
        let mut without_cgroups = all(true, false, false);
        without_cgroups[3].enforceable.memory = false;
        assert_eq!(chosen(&without_cgroups), Mode::Logical);
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
        assert_eq!(configured_mode(&config(&[prod])).unwrap(), Mode::Bwrap);
        assert!(configured_mode(&config(&[prod, ("CODELIA_SANDBOX_MODE", "bwrap")])).is_ok());
        let allowed = ("CODELIA_SANDBOX_ALLOW_LOGICAL", "true");
        assert!(configured_mode(&config(&[prod, allowed, ("CODELIA_SANDBOX_MODE", "logical")])).is_ok());
    }
}
