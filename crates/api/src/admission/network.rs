//! The network of a request under its policy and the installation.

use codelia_policy::{Plan, Policy};
use codelia_types::{Mode, NetworkMode};

use crate::{error::ApiError, options::Options};

/// The network of a run that requests one, or else inherits one. `None` in mode `logical`, which
/// has the host's network, unless that was requested.
pub(super) fn admit_network(
    requested: Option<NetworkMode>,
    inherited: Option<NetworkMode>,
    policy: &Policy,
    mode: Mode,
    options: &Options,
) -> Result<Option<NetworkMode>, ApiError> {
    if let (Some(requested), Some(most)) = (requested, policy.network.mode)
        && requested > most
    {
        return Err(ApiError::invalid(
            "network",
            format!(
                "the policy allows at most {most}, not {requested}; request {most}, or ask for another policy"
            ),
        ));
    }
    let wanted = requested.or(inherited);
    Plan::check(mode, wanted, policy)?;
    if mode == Mode::Logical {
        return Ok(wanted);
    }
    let network = policy.network.effective_mode(wanted);
    let installation = options.policy.network.mode;
    let names_host = [wanted, policy.network.mode].contains(&Some(NetworkMode::Host));
    if names_host && installation != Some(NetworkMode::Host) {
        let field =
            if wanted == Some(NetworkMode::Host) { "network" } else { "policy.network.mode" };
        return Err(ApiError::invalid(
            field,
            "host needs network.mode: host in the policy of the installation; use proxy, or ask an operator",
        ));
    }
    Ok(Some(network))
}

/// Mode `logical` cannot enforce a network mode, so the default does not apply to it. If the caller
/// requests `none` or `proxy`, it is rejected.
pub(super) fn default_network(mode: Mode, options: &Options) -> Option<NetworkMode> {
    if mode == Mode::Logical { None } else { options.default_network }
}
