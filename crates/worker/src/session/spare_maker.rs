//! Refills the spare sandbox of a session.

use std::sync::Arc;

use codelia_policy::{Plan, PlanTarget};
use codelia_telemetry::{Permit, task};
use codelia_types::{NetworkMode, RunId, SessionId};

use crate::{core::Core, egress::Egress, slots::SlotQueue};

/// Prepares sandboxes for the next runs of sessions.
#[derive(Debug)]
pub(crate) struct SpareMaker {
    pub(crate) core: Arc<Core>,
    pub(crate) slots: Arc<SlotQueue>,
    pub(crate) egress: Arc<Egress>,
}

impl SpareMaker {
    /// Makes sure that a session's next run finds a prepared sandbox.
    pub(crate) fn refill(self: &Arc<Self>, session: SessionId) {
        // Runs that wait for a slot come first.
        if self.core.drain.is_draining() || self.slots.lock().waiting() > 0 {
            return;
        }
        let Some((tenant, spec)) = self.core.sessions.default_run_spec(session) else { return };
        // Each run looks its volumes up.
        if !spec.policy.filesystem.mounted_volumes().is_empty() {
            return;
        }
        let Some(ids) = self.core.sessions.ids(session) else { return };
        let target = PlanTarget {
            sandbox: RunId::generate(),
            session,
            root: self.core.root.session(session),
        };
        if !spec.policy.is_large() {
            // If the plan is refused, the session gets no spare and its next run reports the
            // reason.
            if let Ok(plan) = self.core.backends.plan(target, &spec, ids) {
                self.add(session, plan, None);
            }
            return;
        }
        let maker = self.clone();
        task::background("plan spare", async move {
            if let Ok((plan, permit)) =
                maker.core.backends.plan_for(&tenant, target, &spec, ids).await
            {
                maker.add(session, plan, permit);
            }
        });
    }

    fn add(&self, session: SessionId, plan: Plan, permit: Option<Permit>) {
        let backends = self.core.backends.clone();
        let mut descriptors = None;
        if plan.network == NetworkMode::Proxy {
            self.egress.warm();
            descriptors = self.egress.try_reserve();
            if descriptors.is_none() {
                return;
            }
        }
        self.core.sessions.add_spare(session, plan, descriptors, |plan| async move {
            let _permit = permit;
            backends.prepare(&plan).await.map_err(|denial| denial.refusal)
        });
    }
}
