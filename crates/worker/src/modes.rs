//! The modes this worker proved it can enforce, and the plans it makes for them.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use codelia_backends::{Backend, Prepared};
use codelia_policy::{Enforceable, Mode, Plan, Refusal, RunId, RunSpec, SessionId};

/// The backends that passed their probe.
#[derive(Debug)]
pub(crate) struct Modes {
    installed: BTreeMap<Mode, Installed>,
}

#[derive(Debug)]
struct Installed {
    backend: Arc<dyn Backend>,
    host: Enforceable,
}

impl Modes {
    /// Probes every backend; one that is not usable here is left out, with the reason in the log.
    pub(crate) async fn probe(backends: Vec<Arc<dyn Backend>>) -> Self {
        let mut installed = BTreeMap::new();
        for backend in backends {
            let found = backend.probe().await;
            for gap in &found.gaps {
                tracing::warn!(mode = %found.mode, missing = gap.missing, remedy = gap.remedy, "the host lacks something");
            }
            if found.usable {
                installed.insert(found.mode, Installed { backend, host: found.enforceable });
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
    ) -> Result<Plan, Refusal> {
        let installed = self.installed(spec.mode)?;
        match spec.mode {
            Mode::Logical => Plan::logical(sandbox, session, root, spec, installed.host)
                .map_err(|error| unenforceable(error.field, error.to_string())),
            Mode::Bwrap | Mode::Nsjail | Mode::Container => Err(unavailable(spec.mode)),
        }
    }

    /// Carries a plan out.
    pub(crate) async fn prepare(&self, plan: &Plan) -> Result<Box<dyn Prepared>, Refusal> {
        self.installed(plan.mode)?.backend.prepare(plan).await.map_err(refusal)
    }

    fn installed(&self, mode: Mode) -> Result<&Installed, Refusal> {
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

/// What the caller is told of a sandbox that could not be had.
pub(crate) fn refusal(error: codelia_backends::Error) -> Refusal {
    use codelia_backends::Error;
    match error {
        Error::Refused(refusal) => refusal,
        Error::Unenforceable { field } => unenforceable(field, error.to_string()),
        other => failed(&other),
    }
}

/// We failed: the detail is for the log, not for the caller.
pub(crate) fn failed(error: &(dyn std::error::Error + 'static)) -> Refusal {
    tracing::error!(error, "a sandbox failed");
    Refusal { reason: "SANDBOX_FAILED".to_owned(), message: "the sandbox could not be made".to_owned() }
}

fn unenforceable(field: &str, message: String) -> Refusal {
    tracing::info!(field, "the plan cannot be enforced");
    Refusal { reason: "UNENFORCEABLE".to_owned(), message }
}

fn unavailable(mode: Mode) -> Refusal {
    Refusal { reason: "MODE_UNAVAILABLE".to_owned(), message: format!("this worker has no mode {mode}") }
}

#[cfg(test)]
mod tests {
    use codelia_policy::{CommandSpec, Limits, LimitsRequest};

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
            asked: LimitsRequest::default(),
            policy: codelia_policy::Policy::default(),
            ends_with_caller: false,
        };
        let session = SessionId(uuid::Uuid::nil());
        Plan::logical(RunId::generate(), session, "/root".into(), &spec, Enforceable::default()).unwrap()
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
