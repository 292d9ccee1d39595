//! Cgroups, version 1 and 2 behind one type.
//!
//! A sandbox gets one cgroup in each hierarchy that it needs. Codelia changes only cgroups that it
//! created, except for `cgroup.subtree_control` of the parent in version 2.

mod controller;
mod cpuset;
mod delegation;
mod device;
mod group;
mod group_dir;
mod hierarchy;
mod name;
mod orphans;
mod pool;
mod reader;

pub use controller::Controller;
pub use device::{Device, DeviceLimits};
pub use group::{Group, Limits, Usage, join};
pub use hierarchy::{CgroupParent, Hierarchy};
pub use reader::{CurrentUsage, GroupReader};
