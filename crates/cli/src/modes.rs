//! The modes of this program: which are usable on this host, and which one is the default.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use codelia_backends::{Backend, Capabilities, Logical, LogicalOptions};
use codelia_policy::Mode;

use crate::config::Config;

/// The backends this program has and the configuration admits.
pub(crate) fn backends(config: &Config) -> Result<Vec<Arc<dyn Backend>>> {
    if !config.allow_logical() {
        bail!(
            "mode logical is not admitted in profile prod, and this program has no other (sandbox.allow_logical)"
        );
    }
    let init = match &config.sandbox.init {
        Some(path) => path.clone(),
        None => codelia_backends::find_init().context("codelia-init")?,
    };
    let logical = Logical::new(LogicalOptions { init, cgroup_parent: None })?;
    Ok(vec![Arc::new(logical)])
}

/// Tries each backend on this host.
pub(crate) async fn probe(backends: &[Arc<dyn Backend>]) -> Vec<Capabilities> {
    let mut found = Vec::new();
    for backend in backends {
        found.push(backend.probe().await);
    }
    found
}

/// The configured mode, which must be usable; else the strongest that is.
pub(crate) fn choose(config: &Config, found: &[Capabilities]) -> Result<Mode> {
    match config.sandbox.mode {
        Some(mode) => usable(mode, found),
        None => {
            let strongest = found.iter().filter(|one| one.usable).map(|one| one.mode).max();
            strongest.with_context(|| format!("no mode is usable on this host: {}", gaps(found)))
        }
    }
}

/// The mode an api takes as default: it cannot probe, its workers did.
pub(crate) fn configured(config: &Config) -> Result<Mode> {
    let mode = config.sandbox.mode.unwrap_or(Mode::Logical);
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

fn gaps(found: &[Capabilities]) -> String {
    let gaps = found.iter().flat_map(|one| &one.gaps);
    gaps.map(|gap| format!("{} ({})", gap.missing, gap.remedy)).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use codelia_backends::Gap;

    use super::*;
    use crate::config::tests::loaded;

    fn found(mode: Mode, usable: bool) -> Capabilities {
        let gap = Gap { missing: "user namespaces".into(), remedy: "allow them".into() };
        let gaps = if usable { Vec::new() } else { vec![gap] };
        Capabilities { mode, usable, enforceable: Default::default(), gaps }
    }

    fn config(variables: &[(&str, &str)]) -> Config {
        loaded(None, &[], variables).unwrap().config
    }

    #[test]
    fn the_strongest_usable_mode_is_taken() {
        let found = [found(Mode::Bwrap, true), found(Mode::Logical, true), found(Mode::Nsjail, false)];
        assert_eq!(choose(&config(&[]), &found).unwrap(), Mode::Bwrap);
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
        assert!(configured(&config(&[prod])).is_err());
        assert!(configured(&config(&[prod, ("CODELIA_SANDBOX_MODE", "bwrap")])).is_ok());
        assert!(configured(&config(&[prod, ("CODELIA_SANDBOX_ALLOW_LOGICAL", "true")])).is_ok());
    }
}
