//! The control groups of a mode: created for a plan, tried by the probe.

use codelia_policy::{Enforceable, IoLimits, Limit, Plan};
use codelia_sys::{
    cgroup::{self, CgroupParent, Controller, Device, DeviceLimits, Group, Hierarchy},
    process,
};
use codelia_types::RunId;

use crate::{Error, Gap, probe};

/// Where a mode creates the control groups of its sandboxes.
#[derive(Debug)]
pub(crate) struct Cgroups {
    hierarchy: Hierarchy,
}

impl Cgroups {
    /// Detects the hierarchies of this host. Groups are created below `parent` in each.
    pub(crate) fn detect(parent: &CgroupParent) -> Result<Self, Error> {
        Ok(Self { hierarchy: Hierarchy::detect(parent)? })
    }

    /// Creates the group of a sandbox. `None` if the plan enforces no limit that needs a group.
    pub(crate) fn create(&self, plan: &Plan) -> Result<Option<Group>, Error> {
        let limits = limits(plan);
        if limits == cgroup::Limits::default() {
            return Ok(None);
        }
        let mut group = Group::create(&self.hierarchy, &plan.sandbox.to_string(), limits)?;
        match self.apply_optional_limits(&mut group, plan) {
            Ok(()) => Ok(Some(group)),
            Err(error) => {
                group.remove()?;
                Err(error)
            }
        }
    }

    /// Applies the limits that only some plans have: CPU affinity and device I/O.
    fn apply_optional_limits(&self, group: &mut Group, plan: &Plan) -> Result<(), Error> {
        let unenforceable = |field| {
            move |error: codelia_sys::Error| {
                tracing::info!(%error, field, "control group limit not applied");
                Error::Unenforceable { field }
            }
        };
        if let Some(cpus) = &plan.cpus {
            group
                .limit_cpus(&self.hierarchy, cpus)
                .map_err(unenforceable("policy.resources.cpus"))?;
        }
        if let Some(field) = plan.io.field() {
            let limits = Device::with_file(&plan.root).map(|device| device_limits(device, plan.io));
            let limited =
                limits.and_then(|limits| group.limit_device(&self.hierarchy, Some(limits)));
            limited.map_err(unenforceable(field))?;
        }
        Ok(())
    }

    /// Removes the parent groups that all sandboxes of this process share.
    pub(crate) fn shutdown(&self) {
        self.hierarchy.remove_parents();
    }

    /// Removes the empty groups of killed workers.
    pub(crate) fn remove_orphans(&self) -> Result<usize, Error> {
        Ok(self.hierarchy.remove_orphans()?)
    }

    /// Tries each controller on an empty group. `remedy` is for limits of runs that cannot be
    /// enforced.
    pub(crate) fn probe(&self, remedy: &str, gaps: &mut Vec<Gap>) -> Enforceable {
        let tried = Controller::LIMITING.map(|controller| self.try_limit(controller));
        gaps.extend(limits_gap(&tried, remedy));
        let [memory, pids, cpu] = tried.map(|tried| tried.is_ok());
        if !(memory && pids && cpu) {
            return Enforceable { memory, cpu, pids, ..Enforceable::default() };
        }
        let [reads, cpus] = [Controller::Io, Controller::Cpuset].map(|controller| {
            let tried = self.try_optional_limit(controller);
            probe::is_possible(tried.map_err(Error::from), gaps, |error| {
                let name = controller.as_str();
                Gap::new(
                    format!("limits of the {name} controller: {error}"),
                    format!("also delegate {name} to the worker's control group"),
                )
            })
        });
        let writes = reads && self.hierarchy.limits_writes();
        if reads && !writes {
            gaps.push(Gap::new(
                "write-rate limits (need cgroup v2)",
                "boot with cgroup v2 (systemd.unified_cgroup_hierarchy=1)",
            ));
        }
        Enforceable { memory, cpu, pids, reads, writes, cpus, ..Enforceable::default() }
    }

    fn try_limit(&self, controller: Controller) -> Result<(), codelia_sys::Error> {
        let name = format!("probe-{}", RunId::generate());
        Group::create(&self.hierarchy, &name, smallest_limit(controller))?.remove()
    }

    fn try_optional_limit(&self, controller: Controller) -> Result<(), codelia_sys::Error> {
        let name = format!("probe-{}", RunId::generate());
        let mut group = Group::create(&self.hierarchy, &name, smallest_limit(Controller::Pids))?;
        let limited = match controller {
            Controller::Cpuset => group.limit_cpus(&self.hierarchy, &process::allowed_cpus()?),
            _ => group.limit_device(&self.hierarchy, None),
        };
        limited.and(group.remove())
    }
}

/// Whether this process can create control groups that enforce the limits of runs.
#[must_use]
pub fn can_enforce_limits(parent: &CgroupParent) -> bool {
    Cgroups::detect(parent).is_ok_and(|cgroups| cgroups.probe("", &mut Vec::new()).limits())
}

/// The limits of a plan that a group enforces.
fn limits(plan: &Plan) -> cgroup::Limits {
    let enforced = |limit, value| {
        let is_enforced = !plan.unenforced.contains(&limit) && !plan.watched.contains(&limit);
        is_enforced.then_some(value)
    };
    cgroup::Limits {
        memory_bytes: enforced(Limit::MemoryBytes, plan.limits.memory_bytes),
        // codelia-init counts too.
        pids: enforced(Limit::Pids, plan.limits.pids.saturating_add(1)),
        cpu_millicores: enforced(Limit::CpuMillicores, plan.limits.cpu_millicores),
    }
}

fn smallest_limit(controller: Controller) -> cgroup::Limits {
    let limits = cgroup::Limits::default();
    match controller {
        Controller::Memory => cgroup::Limits { memory_bytes: Some(1 << 20), ..limits },
        Controller::Pids => cgroup::Limits { pids: Some(1), ..limits },
        Controller::Cpu => cgroup::Limits { cpu_millicores: Some(1), ..limits },
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

/// One gap for all limits of runs that cannot be enforced. `tried` is in the order of
/// [`Controller::LIMITING`].
fn limits_gap(tried: &[Result<(), codelia_sys::Error>; 3], remedy: &str) -> Option<Gap> {
    let limits = [Limit::MemoryBytes, Limit::Pids, Limit::CpuMillicores];
    let failed =
        limits.iter().zip(tried).filter_map(|(limit, tried)| Some((*limit, tried.as_ref().err()?)));
    let (fields, errors): (Vec<_>, Vec<_>) =
        failed.map(|(limit, error)| (limit.field(), error)).unzip();
    let error = errors.first()?;
    Some(Gap::new(format!("cgroups that enforce {}: {error}", fields.join(", ")), remedy))
}
