//! Compares the processor time that the cgroups of a sandbox cost: created and removed for each, or
//! reused where they can be. Run as root: `cargo run --release -p codelia-sys --example
//! cgroup_cost`.

// A measurement that cannot continue has failed.
#![allow(clippy::unwrap_used)]

use std::{fs, path::Path, thread, time::Duration};

use codelia_sys::cgroup::{CgroupParent, Group, Hierarchy, Limits};

const ROUNDS: usize = 3;
const GROUPS: u32 = 1000;
/// Kernel threads free what was removed after a while.
const SETTLE_TIME: Duration = Duration::from_secs(2);
/// Of the kernel's clock, the same on every Linux.
const MICROS_PER_TICK: u64 = 10_000;
const LIMITS: Limits =
    Limits { memory_bytes: Some(512 << 20), pids: Some(100), cpu_millicores: Some(2000) };

/// What a worker does for each sandbox.
fn use_group(hierarchy: &Hierarchy, number: u32) {
    let mut group = Group::create(hierarchy, &number.to_string(), LIMITS).unwrap();
    drop(group.join_fds().unwrap());
    group.usage().unwrap();
    group.remove().unwrap();
}

/// The parent of a process and its processor time in microseconds; `None` if it has ended.
fn parent_and_time(process: &Path) -> Option<(u64, u64)> {
    let stat = fs::read_to_string(process.join("stat")).ok()?;
    let fields: Vec<_> = stat.rsplit_once(") ")?.1.split(' ').collect();
    let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
    Some((number(1)?, (number(11)? + number(12)?) * MICROS_PER_TICK))
}

fn own_micros() -> u64 {
    parent_and_time(Path::new("/proc/self")).unwrap().1
}

/// Processor time of all kernel threads, which are the children of process 2.
fn kernel_micros() -> u64 {
    let all = fs::read_dir("/proc").unwrap().flatten();
    let all = all.filter_map(|entry| parent_and_time(&entry.path()));
    all.filter(|(parent, _)| *parent == 2).map(|(_, time)| time).sum()
}

fn measure(name: &str, hierarchy: &Hierarchy) {
    let (own, kernel) = (own_micros(), kernel_micros());
    (0..GROUPS).for_each(|number| use_group(hierarchy, number));
    let own = own_micros() - own;
    thread::sleep(SETTLE_TIME);
    // A kernel thread that ended took its time along.
    let kernel = kernel_micros().saturating_sub(kernel);
    let each = |micros: u64| micros / u64::from(GROUPS);
    println!("{name:8} {:4} µs, kernel threads {:4} µs", each(own), each(kernel));
}

fn main() {
    for _ in 0..ROUNDS {
        let hierarchy = Hierarchy::detect(&CgroupParent::default()).unwrap();
        measure("reused", &hierarchy);
        // From now on it keeps no cgroups.
        hierarchy.remove_parents();
        measure("created", &hierarchy);
    }
}
