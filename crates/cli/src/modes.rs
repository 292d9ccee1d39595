//! The modes of this program: which are usable on this host, and which one is the default.

use std::{ops::RangeInclusive, sync::Arc};

use anyhow::{Context, Result, bail};
use codelia_backends::{
    Backend, Capabilities, CgroupParent, ContainerOptions, Gap, Logical, LogicalOptions, ToolOptions, bwrap,
    container, nsjail,
};
use codelia_types::Mode;

use crate::{config::Config, options};

/// Which usable mode is taken if none is configured, best first: those that share the host's own
/// programs and start in milliseconds before the one that needs an image.
const PREFERRED: [Mode; 4] = [Mode::Bwrap, Mode::Nsjail, Mode::Container, Mode::Logical];

/// The backends this program has and the configuration admits.
pub(crate) fn backends(config: &Config) -> Result<Vec<Arc<dyn Backend>>> {
    let init = match &config.sandbox.init {
        Some(path) => std::path::absolute(path)?,
        None => codelia_backends::find_init().context("codelia-init")?,
    };
    let groups = CgroupParent { name: None, cpu_idle: config.sandbox.yields };
    let mut all: Vec<Arc<dyn Backend>> = vec![
        Arc::new(bwrap(ToolOptions {
            init: init.clone(),
            program: config.sandbox.bwrap.clone(),
            cgroup_parent: groups.clone(),
            sandbox_uids: users(config),
        })?),
        Arc::new(nsjail(ToolOptions {
            init: init.clone(),
            program: config.sandbox.nsjail.clone(),
            cgroup_parent: groups.clone(),
            sandbox_uids: users(config),
        })?),
        Arc::new(container(ContainerOptions {
            init: init.clone(),
            socket: config.sandbox.container_socket.clone(),
            runtime: config.sandbox.container_runtime.clone(),
            image: config.sandbox.container_image.clone(),
            profile_images: config.sandbox.container_images.clone(),
            control_dir: config.data_dir.join("run/containers"),
            worker: config.worker.id.clone().unwrap_or_else(options::host_name),
        })?),
    ];
    if config.allow_logical() {
        all.push(Arc::new(Logical::new(LogicalOptions { init, cgroup_parent: groups })?));
    }
    Ok(all)
}

/// Those that only sandboxes have.
fn users(config: &Config) -> Option<RangeInclusive<u32>> {
    options::uids(config).map(|range| range.base..=range.base.saturating_add(range.count - 1))
}

/// Tries each backend on this host.
pub(crate) async fn probe(config: &Config, backends: &[Arc<dyn Backend>]) -> Vec<Capabilities> {
    let blocked =
        options::uids(config).and_then(|_| codelia_worker::untraversable_ancestor(&config.sandbox_root()));
    let mut found = Vec::new();
    for backend in backends {
        let mut one = backend.probe().await;
        if let (Some(directory), true) = (&blocked, one.mode != Mode::Logical) {
            one.usable = false;
            one.gaps.push(impassable(directory));
        }
        found.push(one);
    }
    found
}

fn impassable(directory: &std::path::Path) -> Gap {
    Gap {
        missing: format!("a way for the users of sessions through {}", directory.display()),
        remedy: "choose another sandbox.root, or chmod o+x that directory".to_owned(),
    }
}

/// The configured mode, which must be usable; else the preferred one that is.
pub(crate) fn choose(config: &Config, found: &[Capabilities]) -> Result<Mode> {
    match config.sandbox.mode {
        Some(mode) => usable(mode, found),
        None => {
            let usable = |mode: &Mode| found.iter().any(|one| one.mode == *mode && serves_any_run(one));
            PREFERRED
                .into_iter()
                .find(usable)
                .with_context(|| format!("no mode is usable on this host: {}", gaps(found)))
        }
    }
}

/// The mode an api takes as default: it cannot probe, its workers did.
pub(crate) fn configured(config: &Config) -> Result<Mode> {
    let mode = config.sandbox.mode.unwrap_or(PREFERRED[0]);
    if mode == Mode::Logical && !config.allow_logical() {
        bail!(
            "sandbox.mode: logical isolates nothing and is not admitted in profile prod (sandbox.allow_logical)"
        );
    }
    Ok(mode)
}

fn usable(mode: Mode, found: &[Capabilities]) -> Result<Mode> {
    match found.iter().find(|one| one.mode == mode) {
        None => bail!("sandbox.mode: this program has no mode {mode}"),
        Some(one) if one.usable => Ok(mode),
        Some(one) => {
            bail!("sandbox.mode: {mode} is not usable on this host: {}", gaps(std::slice::from_ref(one)))
        }
    }
}

/// A mode that isolates keeps every limit or refuses the run: without groups it would refuse all.
fn serves_any_run(found: &Capabilities) -> bool {
    let can = found.enforceable;
    found.usable && (found.mode == Mode::Logical || (can.memory && can.cpu && can.pids))
}

fn gaps(found: &[Capabilities]) -> String {
    let gaps = found.iter().flat_map(|one| &one.gaps);
    gaps.map(|gap| format!("{} ({})", gap.missing, gap.remedy)).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use codelia_backends::Gap;
    use codelia_policy::Enforceable;

    use super::*;
    use crate::config::tests::loaded;

    fn found(mode: Mode, usable: bool) -> Capabilities {
        let gap = Gap { missing: "user namespaces".into(), remedy: "allow them".into() };
        let gaps = if usable { Vec::new() } else { vec![gap] };
        let enforceable = Enforceable { memory: true, cpu: true, pids: true, ..Enforceable::default() };
        Capabilities { mode, usable, enforceable, gaps }
    }

    fn config(variables: &[(&str, &str)]) -> Config {
        loaded(None, &[], variables).unwrap().config
    }

    #[test]
    fn the_preferred_usable_mode_is_taken_and_logical_last() {
        let all = |bwrap, nsjail, container| {
            let [bwrap, nsjail] = [found(Mode::Bwrap, bwrap), found(Mode::Nsjail, nsjail)];
            [found(Mode::Logical, true), found(Mode::Container, container), nsjail, bwrap]
        };
        let chosen = |found: &[Capabilities]| choose(&config(&[]), found).unwrap();
        assert_eq!(chosen(&all(true, true, true)), Mode::Bwrap);
        assert_eq!(chosen(&all(false, true, true)), Mode::Nsjail);
        assert_eq!(chosen(&all(false, false, true)), Mode::Container);
        assert_eq!(chosen(&all(false, false, false)), Mode::Logical);
        let mut groupless = all(true, false, false);
        groupless[3].enforceable.memory = false;
        assert_eq!(chosen(&groupless), Mode::Logical);
    }

    #[test]
    fn a_configured_mode_that_is_not_usable_is_refused_with_the_gap() {
        let config = config(&[("CODELIA_SANDBOX_MODE", "bwrap")]);
        let error = choose(&config, &[found(Mode::Logical, true), found(Mode::Bwrap, false)])
            .unwrap_err()
            .to_string();
        assert!(error.contains("sandbox.mode") && error.contains("user namespaces"), "{error}");
        assert!(choose(&config, &[found(Mode::Logical, true)]).is_err());
    }

    #[test]
    fn production_refuses_a_mode_that_isolates_nothing() {
        let prod = ("CODELIA_PROFILE", "prod");
        assert!(configured(&config(&[prod, ("CODELIA_SANDBOX_MODE", "logical")])).is_err());
        assert_eq!(configured(&config(&[prod])).unwrap(), Mode::Bwrap);
        assert!(configured(&config(&[prod, ("CODELIA_SANDBOX_MODE", "bwrap")])).is_ok());
        let allowed = ("CODELIA_SANDBOX_ALLOW_LOGICAL", "true");
        assert!(configured(&config(&[prod, allowed, ("CODELIA_SANDBOX_MODE", "logical")])).is_ok());
    }
}
