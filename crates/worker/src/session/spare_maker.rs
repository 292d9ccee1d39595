//! Refills the spare sandbox of a session.

use std::sync::Arc;

use codelia_policy::{Plan, PlanTarget};
use codelia_telemetry::{Permit, task};
use codelia_types::{NetworkMode, RunId, SessionId};

use crate::core::Core;

/// Makes sure that a session's next run finds a prepared sandbox.
pub(crate) fn refill(core: &Arc<Core>, session: SessionId) {
    // Runs that wait for a slot come first.
    if core.drain.is_draining() || core.slots.lock().waiting() > 0 {
        return;
    }
    let Some((tenant, spec)) = core.sessions.default_run_spec(session) else { return };
    // Each run looks its volumes up.
    if !spec.policy.filesystem.mounted_volumes().is_empty() {
        return;
    }
    let Some(ids) = core.sessions.ids(session) else { return };
    let target =
        PlanTarget { sandbox: RunId::generate(), session, root: core.root.session(session) };
    if !spec.policy.is_large() {
        // If the plan is refused, the session gets no spare and its next run reports the reason.
        if let Ok(plan) = core.backends.plan(target, &spec, ids) {
            add(core, session, plan, None);
        }
        return;
    }
    let core = core.clone();
    task::background("plan spare", async move {
        if let Ok((plan, permit)) = core.backends.plan_for(&tenant, target, &spec, ids).await {
            add(&core, session, plan, permit);
        }
    });
}

fn add(core: &Core, session: SessionId, plan: Plan, permit: Option<Permit>) {
    let backends = core.backends.clone();
    let mut descriptors = None;
    if plan.network == NetworkMode::Proxy {
        core.egress.warm();
        descriptors = core.egress.try_reserve();
        if descriptors.is_none() {
            return;
        }
    }
    core.sessions.add_spare(session, plan, descriptors, |plan| async move {
        let _permit = permit;
        backends.prepare(&plan).await.map_err(|denial| denial.refusal)
    });
}
