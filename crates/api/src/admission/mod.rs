//! Admission: validates a request, merges it with its session and the installation's defaults, and
//! rejects modes that are not allowed or not available.

pub(crate) mod approval;

use std::{borrow::Cow, collections::BTreeMap, sync::Arc, time::Duration};

use codelia_policy::{
    FlagChoice, FlagRef, IsolationLevel, LimitsRequest, Plan, Policy, PolicyError, RunSpec, RunTool,
    SessionFlags,
};
use codelia_proto::v1;
use codelia_store::{SecretKey, SessionRef, SessionSpec, Store, Tool};
use codelia_types::{CommandSpec, Mode, NetworkMode, SecretEnv, TenantId, ToolId, TransactionMode};
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::{
    options::Options,
    resource_name,
    rules::{Rules, Start},
    status::{ApiError, ToolError},
    validate,
};

/// A validated request for a run. The serialized fields are its fingerprint.
#[derive(Debug, Serialize)]
pub(crate) struct RunRequest {
    #[serde(skip)]
    pub(crate) session: SessionRef,
    #[serde(skip)]
    pub(crate) idempotency_key: Option<String>,
    /// Part of the fingerprint only as a keyed hash.
    #[serde(skip)]
    pub(crate) secret_env: SecretEnv,
    pub(crate) command: CommandSpec,
    pub(crate) limits: LimitsRequest,
    pub(crate) mode: Option<Mode>,
    pub(crate) network: Option<NetworkMode>,
    pub(crate) policy: Policy,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) retries: i32,
    // Left out if absent, so that a retry of a request of an earlier version is recognized.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) queue_timeout: Option<Duration>,
    pub(crate) ends_with_caller: bool,
    /// The tool that the command is said to belong to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tool: Option<ToolId>,
    /// What that tool declares, once it was looked up.
    #[serde(skip)]
    pub(crate) declared: Option<Arc<Tool>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) transaction: Option<TransactionMode>,
}

impl RunRequest {
    /// Validates a request without looking anything up.
    pub(crate) fn parse(
        wire: v1::StartRunRequest,
        ends_with_caller: bool,
        rules: &Rules<'_>,
    ) -> Result<Self, ApiError> {
        let session = resource_name::session("parent", &wire.parent)?;
        let idempotency_key = validate::idempotency_key(wire.idempotency_key)?;
        let (command, secret_env) = validate::command(wire.command)?;
        Ok(Self {
            session,
            idempotency_key,
            secret_env,
            command,
            limits: validate::run_limits(wire.limits)?,
            mode: validate::mode(wire.mode)?,
            network: validate::network(wire.network)?,
            policy: validate::policy(wire.policy, &rules.ceilings)?,
            labels: validate::labels(wire.labels)?,
            retries: validate::retries(wire.retries)?,
            queue_timeout: validate::ttl(
                "queue_timeout",
                wire.queue_timeout,
                rules.options.timeouts.max_queue,
            )?,
            ends_with_caller,
            tool: validate::tool(&wire.tool)?,
            declared: None,
            transaction: validate::transaction(wire.transaction, wire.hold_timeout)?,
        })
    }

    /// The specification of the run: from the request, else the session, else the installation.
    pub(crate) fn to_spec(&self, session: &SessionSpec, rules: &Rules<'_>) -> Result<RunSpec, ApiError> {
        let tool = self.declared.as_deref();
        let mode = self.mode_in(session);
        check_allowed(mode, rules, session.flags.floor, self.approved_level())?;
        let upper = under_tenant(session, rules)?;
        let upper = match tool {
            Some(tool) => Cow::Owned(self.under_tool(tool, &upper, mode)?),
            None => upper,
        };
        let policy = admit_policy(&self.policy, &upper, mode)?;
        let inherited = default_network(mode, rules.options);
        // The default of an isolating session does not apply to a run in mode `logical`, either.
        let inherited = if mode == Mode::Logical { None } else { session.network.or(inherited) };
        let network = admit_network(self.network, inherited, &policy, mode, rules.options)?;
        let transaction = self.admit_transaction(mode, &policy)?;
        self.check_command(&policy)?;
        let caps = policy.caps();
        let requested_limits = self.limits.over(&session.requested_limits).over(&caps);
        let start = Start::of(&self.command, self.ends_with_caller);
        let (defaults, ceilings) = (rules.run_defaults(session, start, &caps), rules.ceilings_under(&caps));
        let mut limits = self.limits.resolve(&defaults, &ceilings)?;
        if requested_limits.cpu_time.is_none() {
            // A run may compute as long as it may take.
            limits.cpu_time = limits.cpu_time.max(limits.timeout).min(ceilings.0.cpu_time);
        }
        let level = [policy.isolation_level, session.flags.floor];
        Ok(RunSpec {
            tool: tool.map(|tool| run_tool(tool, level)),
            command: self.command.clone(),
            mode,
            network,
            limits,
            requested_limits,
            policy,
            ends_with_caller: self.ends_with_caller,
            transaction,
        })
    }

    /// What becomes of the changes of the run. Those of a transactional tool are applied together or dropped,
    /// also if the request does not say so.
    fn admit_transaction(&self, mode: Mode, policy: &Policy) -> Result<Option<TransactionMode>, ApiError> {
        let of_tool = self.declared.as_ref().is_some_and(|tool| tool.declaration.transactional);
        let transaction = self.transaction.or(of_tool.then_some(TransactionMode::Apply));
        if transaction.is_some() {
            let checked = Plan::check_transaction(mode, policy).map_err(ApiError::from);
            checked.map_err(|error| if self.transaction.is_none() { error.within("tool") } else { error })?;
        }
        Ok(transaction)
    }

    /// The mode: that of the request, else `logical` for a tool without isolation, else the session's.
    fn mode_in(&self, session: &SessionSpec) -> Mode {
        let without_isolation = self.approved_level() == Some(IsolationLevel::None);
        self.mode.unwrap_or(if without_isolation { Mode::Logical } else { session.mode })
    }

    /// The level that an operator approved for the tool of the run.
    pub(crate) fn approved_level(&self) -> Option<IsolationLevel> {
        self.declared.as_ref().filter(|tool| tool.approval.is_some()).map(|tool| tool.declaration.level())
    }

    /// The policy of the session, tightened by that of a tool which the run may use.
    fn under_tool(&self, tool: &Tool, upper: &Policy, mode: Mode) -> Result<Policy, ApiError> {
        let (id, level) = (tool.id.clone(), tool.declaration.level());
        if let Some(quarantine) = &tool.quarantine {
            return Err(ApiError::Tool(ToolError::Quarantined { id, reason: quarantine.reason.clone() }));
        }
        if !tool.is_approved() {
            return Err(ApiError::Tool(ToolError::NotApproved { id, version: tool.version, level }));
        }
        if !tool.declaration.matches(&self.command.argv) {
            return Err(ApiError::invalid(
                "tool",
                format!("the command does not belong to {id}: see its executables and command_pattern"),
            ));
        }
        // A tool that declares no level has the highest.
        let declared = Policy { isolation_level: Some(level), ..tool.declaration.policy.clone() };
        admit_policy(&declared, upper, mode).map_err(|error| error.within("tool"))
    }

    /// Checks the command and its variables against the policy.
    fn check_command(&self, policy: &Policy) -> Result<(), ApiError> {
        let environment = &policy.environment;
        for (field, refused) in [
            ("command.env", environment.first_refused(self.command.env.keys())),
            ("command.secret_env", environment.first_refused(&self.command.secret_env_names)),
        ] {
            let Some(name) = refused else { continue };
            return Err(ApiError::invalid(field, format!("the policy does not allow the variable {name}")));
        }
        // `ExplainPolicy` has no command.
        if self.command.argv.is_empty() {
            return Ok(());
        }
        let not_allowed =
            |error: PolicyError| ApiError::CommandNotAllowed { rule: error.field, message: error.message };
        policy.command.check(&self.command.argv).map_err(not_allowed)
    }

    /// The key for the request's secret variables; `None` if it has none.
    pub(crate) fn secret_key<'a>(&self, options: &'a Options) -> Result<Option<&'a SecretKey>, ApiError> {
        if self.secret_env.0.is_empty() {
            return Ok(None);
        }
        options.secret_key.as_ref().map(Some).ok_or(ApiError::NoSecretKey)
    }

    /// Distinguishes requests of a tenant with the same idempotency key.
    pub(crate) fn fingerprint(
        &self,
        tenant: &TenantId,
        secret_key: Option<&SecretKey>,
    ) -> Result<[u8; 32], ApiError> {
        match secret_key {
            None => fingerprint(self),
            Some(key) => {
                let secrets = key.fingerprint(tenant, &self.secret_env).map_err(ApiError::internal)?;
                fingerprint(&(self, secrets))
            }
        }
    }

    /// A request without a command, to explain the policy of a run.
    pub(crate) fn without_command(mode: Option<Mode>, policy: Policy) -> Self {
        Self {
            session: SessionRef::Alias(String::new()),
            idempotency_key: None,
            secret_env: SecretEnv::default(),
            command: CommandSpec::default(),
            limits: LimitsRequest::default(),
            mode,
            network: None,
            policy,
            labels: BTreeMap::new(),
            retries: 0,
            queue_timeout: None,
            ends_with_caller: false,
            tool: None,
            declared: None,
            transaction: None,
        }
    }
}

/// A validated request for a session. The serialized fields are its fingerprint.
#[derive(Debug, Default, Serialize)]
pub(crate) struct SessionRequest {
    #[serde(skip)]
    pub(crate) idempotency_key: Option<String>,
    pub(crate) alias: Option<String>,
    pub(crate) mode: Option<Mode>,
    pub(crate) limits: LimitsRequest,
    pub(crate) network: Option<NetworkMode>,
    pub(crate) policy: Policy,
    pub(crate) ttl: Option<Duration>,
    pub(crate) idle_ttl: Option<Duration>,
    pub(crate) allow_data_loss: bool,
    pub(crate) labels: BTreeMap<String, String>,
    // Left out if absent, as above.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) project: Option<String>,
}

impl SessionRequest {
    /// Validates a request without looking anything up.
    pub(crate) fn parse(wire: v1::CreateSessionRequest, rules: &Rules<'_>) -> Result<Self, ApiError> {
        let max_ttl = rules.options.max_session_ttl;
        Ok(Self {
            idempotency_key: validate::idempotency_key(wire.idempotency_key)?,
            alias: validate::alias(wire.alias)?,
            mode: validate::mode(wire.mode)?,
            limits: validate::limits(wire.limits)?,
            network: validate::network(wire.network)?,
            policy: validate::policy(wire.policy, &rules.ceilings)?,
            ttl: validate::ttl("ttl", wire.ttl, max_ttl)?,
            idle_ttl: validate::ttl("idle_ttl", wire.idle_ttl, max_ttl)?,
            allow_data_loss: wire.allow_data_loss,
            labels: validate::labels(wire.labels)?,
            project: validate::project("project", wire.project)?,
        })
    }

    /// The specification that the session's runs start from, without mode flags.
    pub(crate) fn to_spec(&self, rules: &Rules<'_>) -> Result<SessionSpec, ApiError> {
        self.to_flagged_spec(rules, &FlagChoice::default())
    }

    /// The specification that the session's runs start from: what flags decide is between the request
    /// and the installation's default.
    pub(crate) fn to_flagged_spec(
        &self,
        rules: &Rules<'_>,
        choice: &FlagChoice,
    ) -> Result<SessionSpec, ApiError> {
        let options = rules.options;
        let (mode, flag) = match (self.mode, &choice.mode) {
            (Some(mode), _) => (mode, None),
            (None, Some((mode, flag))) => (*mode, Some(flag.clone())),
            (None, None) => (options.default_mode, None),
        };
        let floor = choice.floor.as_ref().map(|(floor, _)| *floor);
        check_allowed(mode, rules, floor, None)?;
        let mut policy = admit_policy(&self.policy, rules.policy(), mode)?.with_defaults();
        let default = default_network(mode, options);
        admit_network(self.network, default, &policy, mode, options)?;
        if mode != Mode::Logical && self.network.is_some() {
            // Runs cannot have more than what the session requested.
            policy.network.mode = self.network;
        }
        let caps = policy.caps();
        let ceilings = rules.ceilings_under(&caps);
        Ok(SessionSpec {
            mode,
            limits: self.limits.resolve(&options.defaults.lowered_to(&ceilings.0), &ceilings)?,
            requested_limits: self.limits.over(&caps),
            network: self.network.or(default),
            scopes: rules.decided(&policy, self.project.clone()),
            policy,
            flags: SessionFlags { mode: flag, floor },
        })
    }

    /// The flag that refuses the session, if it would be admitted without flags.
    pub(crate) fn refused_by(
        &self,
        rules: &Rules<'_>,
        choice: &FlagChoice,
        error: &ApiError,
    ) -> Option<FlagRef> {
        self.to_spec(rules).ok()?;
        match (error, &choice.floor, &choice.mode) {
            (ApiError::BelowFloor { .. }, Some((_, flag)), _) => Some(flag.clone()),
            (_, _, Some((_, flag))) => Some(flag.clone()),
            (_, _, None) => None,
        }
    }
}

/// Merges a requested policy with the one above it. Fails if no host can enforce it in this mode.
pub(crate) fn admit_policy(requested: &Policy, upper: &Policy, mode: Mode) -> Result<Policy, ApiError> {
    requested.check_within(upper)?;
    let policy = upper.merge(requested);
    policy.network.check_size().map_err(PolicyError::from)?;
    policy.check_mode(mode)?;
    Plan::check(mode, None, &policy)?;
    Ok(policy)
}

/// The policy of a session under that of its tenant, which may have changed since.
fn under_tenant<'a>(spec: &'a SessionSpec, rules: &Rules<'_>) -> Result<Cow<'a, Policy>, ApiError> {
    let session = &spec.policy;
    let Some(own) = rules.tenant_policy(spec) else { return Ok(Cow::Borrowed(session)) };
    match (&own.container.profile, &session.container.profile) {
        (Some(now), Some(then)) if now != then => Err(ApiError::invalid(
            "policy.container.profile",
            format!("the session has {then:?} and its tenant may only use {now:?}; create another session"),
        )),
        _ => Ok(Cow::Owned(own.merge(session))),
    }
}

/// The network of a run that requests one, or else inherits one. `None` in mode `logical`, which has
/// the host's network, unless that was requested.
fn admit_network(
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
        let field = if wanted == Some(NetworkMode::Host) { "network" } else { "policy.network.mode" };
        return Err(ApiError::invalid(
            field,
            "host needs network.mode: host in the policy of the installation; use proxy, or ask an operator",
        ));
    }
    Ok(Some(network))
}

/// A hash of a request. Stable, because maps are ordered.
pub(crate) fn fingerprint(request: &impl Serialize) -> Result<[u8; 32], ApiError> {
    let bytes = serde_json::to_vec(request).map_err(ApiError::internal)?;
    Ok(Sha256::digest(bytes).into())
}

/// Mode `logical` cannot enforce a network mode, so the default does not apply to it. If the caller
/// requests `none` or `proxy`, it is rejected.
fn default_network(mode: Mode, options: &Options) -> Option<NetworkMode> {
    if mode == Mode::Logical { None } else { options.default_network }
}

/// The tool of a run. What a policy or a flag requires above its level is added.
fn run_tool(tool: &Tool, required: [Option<IsolationLevel>; 2]) -> RunTool {
    let declared = tool.declaration.level();
    let level = required.into_iter().flatten().fold(declared, IsolationLevel::max);
    RunTool { id: tool.id.clone(), version: tool.version, level }
}

/// Checks that the installation, the tenant's isolation floor and that of mode flags allow a mode. Below
/// the tenant's floor, each run may need an approval, unless an operator approved the level of its tool.
fn check_allowed(
    mode: Mode,
    rules: &Rules<'_>,
    flagged: Option<IsolationLevel>,
    of_tool: Option<IsolationLevel>,
) -> Result<(), ApiError> {
    if mode == Mode::Logical && !rules.options.allow_logical {
        return Err(ApiError::ModeNotAllowed { mode });
    }
    let lowest = [rules.ask_floor, of_tool].into_iter().flatten().fold(rules.floor, IsolationLevel::min);
    if IsolationLevel::of(mode) < flagged.map_or(lowest, |flagged| flagged.max(lowest)) {
        let floor = flagged.map_or(rules.floor, |flagged| flagged.max(rules.floor));
        return Err(ApiError::BelowFloor { mode, floor });
    }
    Ok(())
}

/// Rejects a mode that no live worker supports. Without any live worker, the run is queued.
pub(crate) async fn check_available(store: &Store, mode: Mode) -> Result<(), ApiError> {
    if store.worker_has_mode(mode).await? {
        return Ok(());
    }
    for other in Mode::ALL {
        if store.worker_has_mode(other).await? {
            return Err(ApiError::ModeUnavailable { mode });
        }
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests;
