//! The backends that passed their probe on this host, and the plans made for them.

use std::{borrow::Cow, collections::BTreeMap, fs, path::PathBuf, sync::Arc};

use codelia_backends::{Backend, Prepared};
use codelia_policy::{
    HostInfo, Ids, Limit, Plan, PlanError, PlanTarget, RunSpec, RunTool, home_dirs,
};
use codelia_store::{ToolWithdrawn, Withdrawn};
use codelia_telemetry::{DiskCause, DiskEffect, Permit, TenantPool, metrics};
use codelia_types::{Mode, NetworkMode, Reason, Refusal, SessionId, TenantId};
use tokio::task::spawn_blocking;

use super::canary::{self, Canaries};
use crate::{disk::DiskFull, egress::TrustStore, error::Error};

/// How many sandboxes with a large policy may wait for their plan, for each tenant. Slots bound
/// them too.
const MAX_WAITING: usize = 16 * 1024;

/// The usable backends, by mode.
#[derive(Debug)]
pub(crate) struct Backends {
    installed: BTreeMap<Mode, Installed>,
    /// Why the other modes are not usable here.
    problems: BTreeMap<Mode, String>,
    /// Makes large plans and sandboxes, few at a time for each tenant.
    large: Arc<TenantPool>,
    /// For sandboxes whose requests get credentials.
    trust: Option<TrustStore>,
    /// The decoys of sessions, if they have some.
    canaries: Option<Arc<Canaries>>,
}

#[derive(Debug)]
struct Installed {
    backend: Arc<dyn Backend>,
    host: HostInfo,
    watches_limits: bool,
}

/// Why a run gets no sandbox.
#[derive(Debug)]
pub(crate) struct Denial {
    /// Reason and message for the caller.
    pub(crate) refusal: Refusal,
    /// The field of the request or policy at fault.
    pub(crate) field: Option<&'static str>,
}

impl Denial {
    /// A denial because of a field.
    pub(crate) fn at(field: &'static str, reason: Reason, message: String) -> Self {
        Self { refusal: Refusal { reason, message }, field: Some(field) }
    }
}

impl From<Refusal> for Denial {
    fn from(refusal: Refusal) -> Self {
        Self { refusal, field: None }
    }
}

impl Backends {
    /// Probes every backend. Leaves out those that are not usable here and logs why. Isolating
    /// backends are left out too if the users of sessions cannot pass through `untraversable`.
    pub(crate) async fn probe(
        backends: Vec<Arc<dyn Backend>>,
        untraversable: Option<PathBuf>,
    ) -> Self {
        let runtime = codelia_backends::host_runtime();
        let mut installed = BTreeMap::new();
        let mut problems = BTreeMap::new();
        for backend in backends {
            let found = backend.probe().await;
            for gap in &found.gaps {
                tracing::warn!(mode = %found.mode, missing = gap.missing, remedy = gap.remedy, "host lacks a requirement");
            }
            if let (Some(directory), true) = (&untraversable, found.mode != Mode::Logical) {
                let problem =
                    format!("sessions cannot pass through {} (chmod o+x it)", directory.display());
                tracing::warn!(mode = %found.mode, problem, "mode disabled");
                problems.insert(found.mode, problem);
            } else if found.usable {
                let watches_limits = found.watches_limits();
                let host = HostInfo { enforceable: found.enforceable, runtime: runtime.clone() };
                installed.insert(found.mode, Installed { backend, host, watches_limits });
            } else {
                problems.insert(found.mode, found.problem());
            }
        }
        Self {
            installed,
            problems,
            large: TenantPool::new(MAX_WAITING),
            trust: None,
            canaries: None,
        }
    }

    pub(crate) fn with_trust(self, trust: Option<TrustStore>) -> Self {
        Self { trust, ..self }
    }

    pub(crate) fn with_canaries(self, canaries: Option<Arc<Canaries>>) -> Self {
        Self { canaries, ..self }
    }

    /// The decoys of sessions, if they have some.
    pub(crate) fn canaries(&self) -> Option<&Arc<Canaries>> {
        self.canaries.as_ref()
    }

    pub(crate) fn modes(&self) -> Vec<Mode> {
        self.installed.keys().copied().collect()
    }

    /// The modes in which limits are only watched.
    pub(crate) fn watched_modes(&self) -> Vec<Mode> {
        let watched = self.installed.iter().filter(|(_, installed)| installed.watches_limits);
        watched.map(|(mode, _)| *mode).collect()
    }

    /// Fails if a mode is not usable here.
    pub(crate) fn require(&self, mode: Mode) -> Result<(), Error> {
        if self.installed.contains_key(&mode) {
            return Ok(());
        }
        let problem = self.problems.get(&mode).map_or("it is not allowed here", String::as_str);
        Err(Error::Mode { mode, problem: problem.to_owned() })
    }

    /// The plan for a run, or why there is none.
    pub(crate) fn plan(
        &self,
        target: PlanTarget,
        spec: &RunSpec,
        ids: Ids,
    ) -> Result<Plan, Denial> {
        let host = &with_homes(&self.installed(spec.mode)?.host, spec)?;
        let plan = match spec.mode {
            Mode::Logical => Plan::logical(target, spec, host.enforceable),
            Mode::Bwrap | Mode::Nsjail | Mode::Native | Mode::Container => {
                Plan::isolated(target, spec, host, ids)
            }
        };
        let plan =
            plan.map_err(|error: PlanError| unenforceable(error.field, error.to_string()))?;
        self.with_decoys(self.with_authorities(plan)?)
    }

    /// The plan with decoys, if this worker has them.
    fn with_decoys(&self, plan: Plan) -> Result<Plan, Denial> {
        if self.canaries.is_none() {
            return Ok(plan);
        }
        let mode = plan.mode;
        canary::with_canaries(plan).ok_or_else(|| {
            let message = format!(
                "escape.canary_files: not available in mode {mode}; use native, bwrap or nsjail, or ask an operator to switch \
                 it off"
            );
            unenforceable("escape.canary_files", message)
        })
    }

    /// The plan with a trust store, if the requests of its sandbox get credentials.
    fn with_authorities(&self, mut plan: Plan) -> Result<Plan, Denial> {
        if plan.egress.as_ref().is_none_or(|rules| rules.credentials.is_empty()) {
            return Ok(plan);
        }
        let refuse = |message: String| unenforceable("policy.network.credentials", message);
        let trust = self.trust.as_ref();
        let trust = trust.ok_or_else(|| {
            refuse("this worker has no credentials (set egress.credentials_file)".to_owned())
        })?;
        trust.add_to(&mut plan).map_err(|error| refuse(error.to_string()))?;
        Ok(plan)
    }

    /// The same off the async runtime if the policy is large. Then it comes with a permit of the
    /// tenant, to be held until the sandbox is prepared.
    pub(crate) async fn plan_for(
        self: &Arc<Self>,
        tenant: &TenantId,
        target: PlanTarget,
        spec: &RunSpec,
        ids: Ids,
    ) -> Result<(Plan, Option<Permit>), Denial> {
        if !spec.policy.is_large() {
            return Ok((self.plan(target, spec, ids)?, None));
        }
        let permit = self.large.acquire(tenant.as_str()).await.map_err(|busy| failed(&busy))?;
        let backends = self.clone();
        let spec = spec.clone();
        let plan = spawn_blocking(move || backends.plan(target, &spec, ids));
        Ok((plan.await.map_err(|error| failed(&error))??, Some(permit)))
    }

    /// Prepares a sandbox for a plan.
    pub(crate) async fn prepare(&self, plan: &Plan) -> Result<Box<dyn Prepared>, Denial> {
        self.installed(plan.mode)?.backend.prepare(plan).await.map_err(denial)
    }

    /// Removes what sandboxes of killed workers left on this host.
    pub(crate) async fn sweep(&self) {
        for Installed { backend, .. } in self.installed.values() {
            match backend.upkeep().await {
                Ok(0) => {}
                Ok(removed) => {
                    tracing::info!(mode = %backend.mode(), removed, "removed leftovers of killed workers");
                }
                Err(error) => {
                    tracing::warn!(mode = %backend.mode(), %error, "cannot look for leftovers of killed workers");
                }
            }
        }
    }

    /// Removes what is kept for the next run of a session.
    pub(crate) fn forget_session(&self, session: SessionId) {
        self.installed.values().for_each(|installed| installed.backend.forget_session(session));
    }

    /// Removes what the sandboxes of this worker shared.
    pub(crate) fn shut_down(&self) {
        self.installed.values().for_each(|installed| installed.backend.shutdown());
    }

    fn installed(&self, mode: Mode) -> Result<&Installed, Denial> {
        self.installed.get(&mode).ok_or_else(|| unavailable(mode))
    }
}

/// Whether a sandbox prepared for one plan serves another: equal except for the name, the limits
/// that the worker itself enforces and the rules that the egress proxy does.
pub(crate) fn serves(prepared: &Plan, wanted: &Plan) -> bool {
    let mut prepared = prepared.clone();
    prepared.sandbox = wanted.sandbox;
    prepared.limits.timeout = wanted.limits.timeout;
    prepared.limits.output_bytes = wanted.limits.output_bytes;
    prepared.limits.disk_bytes = wanted.limits.disk_bytes;
    prepared.limits.inodes = wanted.limits.inodes;
    if prepared.egress.is_some() && wanted.egress.is_some() {
        prepared.egress.clone_from(&wanted.egress);
    }
    prepared == *wanted
}

/// A policy that opens host paths must not open home directories. They are read each time, since
/// users of the host change while a worker runs.
fn with_homes<'a>(host: &'a HostInfo, spec: &RunSpec) -> Result<Cow<'a, HostInfo>, Denial> {
    let files = &spec.policy.filesystem;
    if [&files.read_only_paths, &files.read_write_paths, &files.overlay_paths]
        .iter()
        .all(|paths| paths.as_ref().is_none_or(Vec::is_empty))
    {
        return Ok(Cow::Borrowed(host));
    }
    let passwd = fs::read_to_string("/etc/passwd").map_err(|error| failed(&error))?;
    let mut host = host.clone();
    host.runtime.homes = home_dirs(&passwd);
    Ok(Cow::Owned(host))
}

/// The denial for a backend's error.
pub(crate) fn denial(error: codelia_backends::Error) -> Denial {
    use codelia_backends::Error;
    match error {
        Error::Refused(refusal) => refusal.into(),
        Error::Unenforceable { field } => unenforceable(field, error.to_string()),
        Error::Overlay(_) => unenforceable("policy.filesystem.overlay_paths", error.to_string()),
        other => failed(&other).into(),
    }
}

/// A failure of the worker: the log has the detail, the caller does not.
pub(crate) fn failed(error: &(dyn std::error::Error + 'static)) -> Refusal {
    tracing::error!(error, "cannot create sandbox");
    Refusal {
        reason: Reason::SandboxFailed,
        message: "the sandbox could not be created".to_owned(),
    }
}

/// A plan that this host cannot enforce, because of a field.
pub(crate) fn unenforceable(field: &'static str, message: String) -> Denial {
    tracing::info!(field, "plan cannot be enforced on this host");
    Denial::at(field, Reason::Unenforceable, message)
}

/// Denial of a run whose network or mode an operator withdrew while the run waited.
pub(crate) fn not_permitted(spec: &RunSpec, withdrawn: Withdrawn) -> Denial {
    let (field, message) = match withdrawn {
        Withdrawn::Network(most) => {
            let network = spec.network.unwrap_or(NetworkMode::None);
            (
                "network",
                format!(
                    "network {network} is not permitted any more: choose {most}, or ask an operator"
                ),
            )
        }
        Withdrawn::Isolation(least) => {
            let mode = spec.mode;
            (
                "mode",
                format!(
                    "mode {mode} is not permitted any more: choose one with {least}, or ask an operator"
                ),
            )
        }
    };
    Denial::at(field, Reason::ApprovalNotPermitted, message)
}

/// Denial of a run whose tool was withdrawn while it waited.
pub(crate) fn tool_withdrawn(tool: &RunTool, why: ToolWithdrawn) -> Denial {
    let id = &tool.id;
    let (reason, message) = match why {
        ToolWithdrawn::Quarantined(reason) => (
            Reason::ToolQuarantined,
            format!(
                "tool {id} was quarantined: {reason}; an administrator releases it with `codelia tools release {id}`"
            ),
        ),
        ToolWithdrawn::Changed => (
            Reason::ToolChanged,
            format!("tool {id} was changed or deleted while the run waited; start it again"),
        ),
        ToolWithdrawn::NotApproved => (
            Reason::ToolNotApproved,
            format!("an operator withdrew the approval of tool {id} while the run waited"),
        ),
    };
    Denial::at("tool", reason, message)
}

/// Secret variables that the worker cannot decrypt.
pub(crate) fn no_secrets(why: &str) -> Denial {
    let message = format!("cannot decrypt the secret variables: {why}");
    Denial::at("command.secret_env", Reason::SecretsUnavailable, message)
}

/// A session that uses far more than its limit. Only file calls can make room.
pub(crate) fn session_full(full: DiskFull) -> Denial {
    metrics().disk.limited(DiskCause::Session, DiskEffect::RunRefused);
    let DiskFull { limit, used, max } = full;
    let unit = if limit == Limit::Inodes { "files" } else { "bytes" };
    let message = format!(
        "the session uses {used} of {max} {unit}, too much for any run; remove files with `codelia rm`, or close it"
    );
    Denial::at(limit.field(), Reason::SessionDiskFull, message)
}

fn unavailable(mode: Mode) -> Denial {
    let message = format!("mode {mode} is not available on this worker");
    Denial::at("mode", Reason::ModeUnavailable, message)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use codelia_policy::{EgressRules, Enforceable, Limits, LimitsRequest, NetworkPolicy};
    use codelia_types::{CommandSpec, NetworkMode, RunId, SessionId};

    use super::*;

    fn plan(limits: Limits) -> Plan {
        let spec = RunSpec {
            command: CommandSpec::new(["true"]),
            mode: Mode::Logical,
            network: None,
            limits,
            requested_limits: LimitsRequest::default(),
            policy: codelia_policy::Policy::default(),
            ends_with_caller: false,
            tool: None,
            transaction: None,
        };
        let session = SessionId(uuid::Uuid::nil());
        Plan::logical(
            PlanTarget { sandbox: RunId::generate(), session, root: "/root".into() },
            &spec,
            Enforceable::default(),
        )
        .unwrap()
    }

    #[test]
    fn sandbox_serves_other_name_timeout_and_output_limit() {
        let prepared = plan(Limits::default());
        let other =
            Limits { timeout: Duration::from_secs(1), output_bytes: 1, ..Limits::default() };
        assert!(serves(&prepared, &plan(other)));
    }

    #[test]
    fn sandbox_serves_other_rules_but_not_without_proxy() {
        let base = plan(Limits::default());
        let with = |hosts: &[&str]| {
            let allowed_hosts = Some(hosts.iter().map(|host| (*host).to_owned()).collect());
            let policy = NetworkPolicy { allowed_hosts, ..NetworkPolicy::default() };
            let egress = Some(EgressRules::from_policy(&policy));
            Plan { network: NetworkMode::Proxy, egress, ..base.clone() }
        };
        assert!(serves(&with(&[]), &with(&["example.com"])));
        assert!(!serves(&with(&[]), &base) && !serves(&base, &with(&[])));
    }

    #[test]
    fn sandbox_does_not_serve_other_limits_or_root() {
        let prepared = plan(Limits::default());
        assert!(!serves(&prepared, &plan(Limits { pids: 7, ..Limits::default() })));
        assert!(!serves(&prepared, &Plan { root: "/other".into(), ..plan(Limits::default()) }));
    }
}
