//! The control groups of a mode: made for a plan, tried by the probe.

use codelia_policy::{Enforceable, IoLimits, Limit, Plan};
use codelia_sys::{
    cgroup::{self, CgroupParent, Controller, Device, DeviceLimits, Group, Hierarchy},
    process,
};
use codelia_types::RunId;

use crate::{Error, Gap};

/// Where a mode makes the groups of its sandboxes.
#[derive(Debug)]
pub(crate) struct Groups {
    hierarchy: Hierarchy,
}

impl Groups {
    /// Below this group in each hierarchy.
    pub(crate) fn detect(parent: &CgroupParent) -> Result<Self, Error> {
        Ok(Self { hierarchy: Hierarchy::detect(parent)? })
    }

    /// The group of a sandbox; `None` if its plan is held to no limit of a group.
    pub(crate) fn create(&self, plan: &Plan) -> Result<Option<Group>, Error> {
        let limits = limits(plan);
        if limits == cgroup::Limits::default() {
            return Ok(None);
        }
        let mut group = Group::create(&self.hierarchy, &plan.sandbox.to_string(), limits)?;
        match self.restrict(&mut group, plan) {
            Ok(()) => Ok(Some(group)),
            Err(error) => {
                group.remove()?;
                Err(error)
            }
        }
    }

    /// Holds a group to what only some plans ask for.
    fn restrict(&self, group: &mut Group, plan: &Plan) -> Result<(), Error> {
        let refuse = |field| {
            move |error: codelia_sys::Error| {
                tracing::info!(%error, field, "a control group cannot be held to it");
                Error::Unenforceable { field }
            }
        };
        if let Some(cpus) = &plan.cpus {
            group.limit_cpus(&self.hierarchy, cpus).map_err(refuse("policy.resources.cpus"))?;
        }
        if let Some(field) = plan.io.field() {
            let limits = Device::of(&plan.root).map(|device| device_limits(device, plan.io));
            let limited = limits.and_then(|limits| group.limit_device(&self.hierarchy, Some(limits)));
            limited.map_err(refuse(field))?;
        }
        Ok(())
    }

    /// Removes what all groups of this process share.
    pub(crate) fn leave(&self) {
        self.hierarchy.remove_parents();
    }

    /// Removes the groups that workers which were killed left empty.
    pub(crate) fn remove_orphans(&self) -> Result<usize, Error> {
        Ok(self.hierarchy.remove_orphans()?)
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
        let mut more = |controller| match self.try_more(controller) {
            Ok(()) => true,
            Err(error) => {
                gaps.push(gap_of_more(controller, &error));
                false
            }
        };
        let [reads, cpus] = [Controller::Io, Controller::Cpuset].map(&mut more);
        let writes = reads && self.hierarchy.limits_writes();
        if reads && !writes {
            gaps.push(Gap {
                missing: "limits of writing to devices, which the kernel does on nobody's account".to_owned(),
                remedy: "boot with control groups of version 2".to_owned(),
            });
        }
        Enforceable { memory, cpu, pids, reads, writes, cpus, ..Enforceable::default() }
    }

    /// The same for what only some groups are held to.
    fn try_more(&self, controller: Controller) -> Result<(), codelia_sys::Error> {
        let name = format!("probe-{}", RunId::generate());
        let mut group = Group::create(&self.hierarchy, &name, smallest_limit(Controller::Pids))?;
        let limited = match controller {
            Controller::Cpuset => group.limit_cpus(&self.hierarchy, &process::allowed_cpus()?),
            _ => group.limit_device(&self.hierarchy, None),
        };
        limited.and(group.remove())
    }

    fn try_controller(&self, controller: Controller) -> Result<(), codelia_sys::Error> {
        let name = format!("probe-{}", RunId::generate());
        Group::create(&self.hierarchy, &name, smallest_limit(controller))?.remove()
    }
}

/// The limits that the plan holds its command to, and only those.
fn limits(plan: &Plan) -> cgroup::Limits {
    let enforced = |limit, value| (!plan.unenforced.contains(&limit)).then_some(value);
    cgroup::Limits {
        memory_bytes: enforced(Limit::MemoryBytes, plan.limits.memory_bytes),
        // codelia-init counts too.
        pids: enforced(Limit::Pids, plan.limits.pids.saturating_add(1)),
        cpu_millis: enforced(Limit::CpuMillis, plan.limits.cpu_millis),
    }
}

fn smallest_limit(controller: Controller) -> cgroup::Limits {
    let limits = cgroup::Limits::default();
    match controller {
        Controller::Memory => cgroup::Limits { memory_bytes: Some(1 << 20), ..limits },
        Controller::Pids => cgroup::Limits { pids: Some(1), ..limits },
        Controller::Cpu => cgroup::Limits { cpu_millis: Some(1), ..limits },
        Controller::Cpuacct | Controller::Io | Controller::Cpuset => limits,
    }
}

fn device_limits(device: Device, io: IoLimits) -> DeviceLimits {
    DeviceLimits {
        device,
        read_bytes: io.read_bytes,
        write_bytes: io.write_bytes,
        reads: io.reads,
        writes: io.writes,
    }
}

fn gap_of_more(controller: Controller, error: &codelia_sys::Error) -> Gap {
    Gap {
        missing: format!("limits by the {} controller: {error}", controller.as_str()),
        remedy: format!("delegate {} to the worker's control group too", controller.as_str()),
    }
}

fn gap(controller: Controller, error: &codelia_sys::Error) -> Gap {
    Gap {
        missing: format!("limits by the {} controller: {error}", controller.as_str()),
        remedy: "give the worker a delegated control group without processes of its own".to_owned(),
    }
}
