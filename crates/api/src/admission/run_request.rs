//! A request for a run: what it says, and the specification that it becomes.

use std::{borrow::Cow, collections::BTreeMap, sync::Arc, time::Duration};

use codelia_policy::{IsolationLevel, LimitsRequest, Plan, Policy, PolicyError, RunSpec};
use codelia_proto::v1;
use codelia_store::{SecretKey, SessionRef, SessionSpec, Tool};
use codelia_types::{
    CommandSpec, Mode, NetworkMode, Reason, SecretEnv, TenantId, ToolId, TransactionMode,
};
use serde::Serialize;

use super::{
    fingerprint::fingerprint,
    mode::check_allowed,
    network::{admit_network, default_network},
    policy::{admit_policy, under_tenant},
    rules::{Rules, Start},
    tool::{of_tool, run_tool, tool_quarantined},
};
use crate::{
    error::ApiError,
    options::Options,
    volumes,
    wire::{resource_name, validate},
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
                rules.options.limits.timeouts.max_queue,
            )?,
            ends_with_caller,
            tool: validate::tool(&wire.tool)?,
            declared: None,
            transaction: validate::transaction(wire.transaction, wire.hold_timeout)?,
        })
    }

    /// The specification of the run: from the request, else the session, else the installation.
    pub(crate) fn to_spec(
        &self,
        session: &SessionSpec,
        rules: &Rules<'_>,
    ) -> Result<RunSpec, ApiError> {
        let tool = self.declared.as_deref();
        let mode = self.mode_in(session);
        check_allowed(mode, rules, session.flags.floor, self.approved_level())?;
        let upper = under_tenant(session, rules)?;
        let upper = match tool {
            Some(tool) => Cow::Owned(self.under_tool(tool, &upper, mode)?),
            None => upper,
        };
        let policy = admit_policy(&self.policy, &upper, mode)?;
        let policy = volumes::within_session(policy, &self.policy, &session.policy)?;
        let inherited = default_network(mode, rules.options);
        // The default of an isolating session does not apply to a run in mode `logical`, either.
        let inherited = if mode == Mode::Logical { None } else { session.network.or(inherited) };
        let network = admit_network(self.network, inherited, &policy, mode, rules.options)?;
        let transaction = self.admit_transaction(mode, &policy)?;
        self.check_command(&policy)?;
        let caps = policy.caps();
        let requested_limits = self.limits.over(&session.requested_limits).over(&caps);
        let start = Start::from_command(&self.command, self.ends_with_caller);
        let defaults = rules.run_defaults(session, start, &caps);
        let ceilings = rules.ceilings_under(&caps);
        let mut limits = self.limits.resolve(&defaults, &ceilings)?;
        if requested_limits.cpu_time.is_none() {
            // A run may compute as long as it may take.
            limits.cpu_time = limits.cpu_time.max(limits.timeout).min(ceilings.0.cpu_time);
        }
        let level = [policy.isolation_level, session.flags.floor];
        Ok(RunSpec {
            tool: tool.map(|tool| run_tool(tool, level)),
            command: self.command_in(session, &policy),
            mode,
            network,
            limits,
            requested_limits,
            policy,
            ends_with_caller: self.ends_with_caller,
            transaction,
        })
    }

    /// The command with the variables of the session's profile.
    fn command_in(&self, session: &SessionSpec, policy: &Policy) -> CommandSpec {
        let mut command = self.command.clone();
        if let Some(profile) = &session.profile {
            profile.add_env(&mut command.env, &command.secret_env_names, &policy.environment);
        }
        command
    }

    /// What becomes of the changes of the run. Those of a transactional tool are applied together
    /// or dropped, also if the request does not say so.
    fn admit_transaction(
        &self,
        mode: Mode,
        policy: &Policy,
    ) -> Result<Option<TransactionMode>, ApiError> {
        let of_tool = self.declared.as_ref().is_some_and(|tool| tool.declaration.transactional);
        let transaction = self.transaction.or(of_tool.then_some(TransactionMode::Apply));
        if transaction.is_some() {
            let checked = Plan::check_transaction(mode, policy).map_err(ApiError::from);
            checked.map_err(|error| {
                if self.transaction.is_none() { error.within("tool") } else { error }
            })?;
        }
        Ok(transaction)
    }

    /// The mode: that of the request, else `logical` for a tool without isolation, else the
    /// session's.
    fn mode_in(&self, session: &SessionSpec) -> Mode {
        let without_isolation = self.approved_level() == Some(IsolationLevel::None);
        self.mode.unwrap_or(if without_isolation { Mode::Logical } else { session.mode })
    }

    /// The level that an operator approved for the tool of the run.
    pub(crate) fn approved_level(&self) -> Option<IsolationLevel> {
        self.declared
            .as_ref()
            .filter(|tool| tool.approval.is_some())
            .map(|tool| tool.declaration.level())
    }

    /// The policy of the session, tightened by that of a tool which the run may use.
    fn under_tool(&self, tool: &Tool, upper: &Policy, mode: Mode) -> Result<Policy, ApiError> {
        let id = tool.id.clone();
        let level = tool.declaration.level();
        if let Some(quarantine) = &tool.quarantine {
            return Err(tool_quarantined(&id, &quarantine.reason));
        }
        if !tool.is_approved() {
            let message = format!(
                "tool: {id} declares {level}, and no operator approved version {}; declare LEVEL_2, or ask an \
                 operator (codelia tools approve)",
                tool.version
            );
            return Err(of_tool(Reason::ToolNotApproved, message, &id));
        }
        if !tool.declaration.matches(&self.command.argv) {
            return Err(ApiError::invalid(
                "tool",
                format!(
                    "the command does not belong to {id}: see its executables and command_pattern"
                ),
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
            return Err(ApiError::invalid(
                field,
                format!("the policy does not allow the variable {name}"),
            ));
        }
        // `ExplainPolicy` has no command.
        if self.command.argv.is_empty() {
            return Ok(());
        }
        policy.command.check(&self.command.argv).map_err(|PolicyError { field, message }| {
            let rule = format!("policy.{field}");
            let error = ApiError::new(Reason::CommandNotAllowed, format!("{rule}: {message}"));
            error.with("field", "command.argv").with("rule", rule)
        })
    }

    /// The key for the request's secret variables; `None` if it has none.
    pub(crate) fn secret_key<'a>(
        &self,
        options: &'a Options,
    ) -> Result<Option<&'a SecretKey>, ApiError> {
        if self.secret_env.0.is_empty() {
            return Ok(None);
        }
        options.secret_key.as_ref().map(Some).ok_or_else(|| {
            let message = "command.secret_env: this installation has no key for secrets; ask an operator to \
                           set `secrets.key_file` for every api and worker";
            ApiError::new(Reason::SecretsUnavailable, message).with("field", "command.secret_env")
        })
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
                let secrets =
                    key.fingerprint(tenant, &self.secret_env).map_err(ApiError::internal)?;
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
