//! The modes this worker proved it can enforce, and the plans it makes for them.

use std::{borrow::Cow, collections::BTreeMap, fs, path::PathBuf, sync::Arc};

use codelia_backends::{Backend, Prepared};
use codelia_policy::{HostInfo, Ids, Plan, PlanError, PlanTarget, RunSpec, home_dirs};
use codelia_types::{Mode, Reason, Refusal, RunId, SessionId};

/// The backends that passed their probe.
#[derive(Debug)]
pub(crate) struct Modes {
    installed: BTreeMap<Mode, Installed>,
}

#[derive(Debug)]
struct Installed {
    backend: Arc<dyn Backend>,
    host: HostInfo,
}

/// Why a run has no sandbox.
#[derive(Debug)]
pub(crate) struct Denial {
    /// What the caller is told.
    pub(crate) refusal: Refusal,
    /// The field of the request or policy at fault.
    pub(crate) field: Option<&'static str>,
}

impl From<Refusal> for Denial {
    fn from(refusal: Refusal) -> Self {
        Self { refusal, field: None }
    }
}

impl Modes {
    /// Probes every backend; one that is not usable here is left out, with the reason in the log.
    /// So are those that isolate if the users of sessions cannot pass through `blocked`.
    pub(crate) async fn probe(backends: Vec<Arc<dyn Backend>>, blocked: Option<PathBuf>) -> Self {
        let runtime = codelia_backends::host_runtime();
        let mut installed = BTreeMap::new();
        for backend in backends {
            let found = backend.probe().await;
            for gap in &found.gaps {
                tracing::warn!(mode = %found.mode, missing = gap.missing, remedy = gap.remedy, "the host lacks something");
            }
            if let (Some(directory), true) = (&blocked, found.mode != Mode::Logical) {
                tracing::warn!(mode = %found.mode, directory = %directory.display(), "sessions cannot pass through a directory above them");
                continue;
            }
            if found.usable {
                let host = HostInfo { enforceable: found.enforceable, runtime: runtime.clone() };
                installed.insert(found.mode, Installed { backend, host });
            }
        }
        Self { installed }
    }

    pub(crate) fn names(&self) -> Vec<Mode> {
        self.installed.keys().copied().collect()
    }

    /// The plan for a run, or why there can be none.
    pub(crate) fn plan(
        &self,
        sandbox: RunId,
        session: SessionId,
        root: PathBuf,
        spec: &RunSpec,
        ids: Ids,
    ) -> Result<Plan, Denial> {
        let host = &with_homes(&self.installed(spec.mode)?.host, spec)?;
        let plan = match spec.mode {
            Mode::Logical => Plan::logical(PlanTarget { sandbox, session, root }, spec, host.enforceable),
            Mode::Bwrap | Mode::Nsjail | Mode::Container => {
                Plan::isolated(PlanTarget { sandbox, session, root }, spec, host, ids)
            }
        };
        plan.map_err(|error: PlanError| unenforceable(error.field, error.to_string()))
    }

    /// Carries a plan out.
    pub(crate) async fn prepare(&self, plan: &Plan) -> Result<Box<dyn Prepared>, Denial> {
        self.installed(plan.mode)?.backend.prepare(plan).await.map_err(denial)
    }

    /// Removes what sandboxes of workers that were killed left on this host.
    pub(crate) async fn sweep(&self) {
        for Installed { backend, .. } in self.installed.values() {
            match backend.sweep().await {
                Ok(0) => {}
                Ok(removed) => tracing::info!(mode = %backend.mode(), removed, "leftovers of killed workers"),
                Err(error) => {
                    tracing::warn!(mode = %backend.mode(), %error, "leftovers cannot be looked for")
                }
            }
        }
    }

    /// Takes away what the sandboxes of this worker shared.
    pub(crate) fn leave(&self) {
        self.installed.values().for_each(|installed| installed.backend.shutdown());
    }

    fn installed(&self, mode: Mode) -> Result<&Installed, Denial> {
        self.installed.get(&mode).ok_or_else(|| unavailable(mode))
    }
}

/// Whether a sandbox made for one plan serves the other: the same but for its name, and for the
/// limits that the worker itself enforces.
pub(crate) fn serves(made: &Plan, wanted: &Plan) -> bool {
    let mut made = made.clone();
    made.sandbox = wanted.sandbox;
    made.limits.timeout = wanted.limits.timeout;
    made.limits.output_bytes = wanted.limits.output_bytes;
    made == *wanted
}

/// A policy that opens paths of the host may open somebody's home: who lives here is asked each time, since
/// people come and go while a worker stays.
fn with_homes<'a>(host: &'a HostInfo, spec: &RunSpec) -> Result<Cow<'a, HostInfo>, Denial> {
    let files = &spec.policy.filesystem;
    if [&files.read_only_paths, &files.read_write_paths, &files.overlay_paths]
        .iter()
        .all(|paths| paths.is_none())
    {
        return Ok(Cow::Borrowed(host));
    }
    let passwd = fs::read_to_string("/etc/passwd").map_err(|error| failed(&error))?;
    let mut host = host.clone();
    host.runtime.homes = home_dirs(&passwd);
    Ok(Cow::Owned(host))
}

/// What is said of a sandbox that could not be had.
pub(crate) fn denial(error: codelia_backends::Error) -> Denial {
    use codelia_backends::Error;
    match error {
        Error::Refused(refusal) => refusal.into(),
        Error::Unenforceable { field } => unenforceable(field, error.to_string()),
        Error::Overlay(_) => unenforceable("policy.filesystem.overlay_paths", error.to_string()),
        other => failed(&other).into(),
    }
}

/// We failed: the detail is for the log, not for the caller.
pub(crate) fn failed(error: &(dyn std::error::Error + 'static)) -> Refusal {
    tracing::error!(error, "a sandbox failed");
    Refusal { reason: Reason::SandboxFailed, message: "the sandbox could not be made".to_owned() }
}

fn unenforceable(field: &'static str, message: String) -> Denial {
    tracing::info!(field, "the plan cannot be enforced");
    let refusal = Refusal { reason: Reason::Unenforceable, message };
    Denial { refusal, field: Some(field) }
}

fn unavailable(mode: Mode) -> Denial {
    let message = format!("this worker has no mode {mode}");
    let refusal = Refusal { reason: Reason::ModeUnavailable, message };
    Denial { refusal, field: Some("mode") }
}

#[cfg(test)]
mod tests {
    use codelia_policy::{Enforceable, Limits, LimitsRequest};
    use codelia_types::CommandSpec;

    use super::*;

    fn plan(limits: Limits) -> Plan {
        let spec = RunSpec {
            command: CommandSpec {
                argv: vec!["true".into()],
                env: BTreeMap::new(),
                working_directory: String::new(),
                terminal: None,
                stdin: false,
            },
            mode: Mode::Logical,
            network: None,
            limits,
            requested_limits: LimitsRequest::default(),
            policy: codelia_policy::Policy::default(),
            ends_with_caller: false,
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
    fn a_sandbox_serves_a_run_that_differs_in_name_timeout_and_output_limit() {
        let made = plan(Limits::default());
        let other =
            Limits { timeout: std::time::Duration::from_secs(1), output_bytes: 1, ..Limits::default() };
        assert!(serves(&made, &plan(other)));
    }

    #[test]
    fn a_sandbox_does_not_serve_a_run_with_other_limits_or_another_root() {
        let made = plan(Limits::default());
        assert!(!serves(&made, &plan(Limits { pids: 7, ..Limits::default() })));
        assert!(!serves(&made, &Plan { root: "/other".into(), ..plan(Limits::default()) }));
    }
}
