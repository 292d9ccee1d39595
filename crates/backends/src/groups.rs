//! The control groups of a mode: made for a plan, tried by the probe.

use std::path::Path;

use codelia_policy::{Enforceable, Plan, RunId};
use codelia_sys::cgroup::{self, Controller, Group, Hierarchy};

use crate::{Error, Gap};

/// How the names of all our groups begin.
pub(crate) const PREFIX: &str = "codelia-";

/// Where a mode makes the groups of its sandboxes.
#[derive(Debug)]
pub(crate) struct Groups {
    hierarchy: Hierarchy,
}

impl Groups {
    /// Below this group in each hierarchy, else below the worker's own.
    pub(crate) fn detect(parent: Option<&str>) -> Result<Self, Error> {
        Ok(Self { hierarchy: Hierarchy::detect(parent.map(Path::new))? })
    }

    /// The group of a sandbox; `None` if its plan is held to no limit of a group.
    pub(crate) fn create(&self, plan: &Plan) -> Result<Option<Group>, Error> {
        let limits = limits(plan);
        if limits == cgroup::Limits::default() {
            return Ok(None);
        }
        Ok(Some(Group::create(&self.hierarchy, &format!("{PREFIX}{}", plan.sandbox), limits)?))
    }

    /// Which controllers can limit, found by limiting an empty group.
    pub(crate) fn probe(&self, gaps: &mut Vec<Gap>) -> Enforceable {
        let mut can = |controller| match self.try_controller(controller) {
            Ok(()) => true,
            Err(error) => {
                gaps.push(gap(controller, &error));
                false
            }
        };
        let [memory, pids, cpu] = Controller::LIMITING.map(&mut can);
        Enforceable { memory, cpu, pids, ..Enforceable::default() }
    }

    fn try_controller(&self, controller: Controller) -> Result<(), codelia_sys::Error> {
        let name = format!("{PREFIX}probe-{}", RunId::generate());
        Group::create(&self.hierarchy, &name, smallest_limit(controller))?.remove()
    }
}

/// The limits that the plan holds its command to, and only those.
fn limits(plan: &Plan) -> cgroup::Limits {
    let enforced = |field: &str, value| (!plan.unenforced.iter().any(|name| name == field)).then_some(value);
    cgroup::Limits {
        memory_bytes: enforced("limits.memory_bytes", plan.limits.memory_bytes),
        // codelia-init counts too.
        pids: enforced("limits.pids", plan.limits.pids.saturating_add(1)),
        cpu_millis: enforced("limits.cpu_millis", plan.limits.cpu_millis),
    }
}

fn smallest_limit(controller: Controller) -> cgroup::Limits {
    let limits = cgroup::Limits::default();
    match controller {
        Controller::Memory => cgroup::Limits { memory_bytes: Some(1 << 20), ..limits },
        Controller::Pids => cgroup::Limits { pids: Some(1), ..limits },
        Controller::Cpu => cgroup::Limits { cpu_millis: Some(1), ..limits },
        Controller::CpuTime => limits,
    }
}

fn gap(controller: Controller, error: &codelia_sys::Error) -> Gap {
    Gap {
        missing: format!("limits by the {} controller: {error}", controller.as_str()),
        remedy: "give the worker a delegated control group without processes of its own".to_owned(),
    }
}
