//! Validation of the parts about processes: programs, resources, containers, system calls and
//! environment variables.

use std::{collections::HashSet, ops::RangeInclusive, time::Duration};

use codelia_types::is_label;

use super::{
    error::{PolicyError, check_range, fail, fail_at},
    field::check_path,
};
use crate::{
    ContainerPolicy, EnvironmentMode, EnvironmentPolicy, ProcessPolicy, ResourcePolicy,
    SyscallMode, SyscallPolicy, syscalls,
};

/// The shortest and the longest time that output may be held back.
const INTERVALS: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(60);
/// The largest rate that the API can express.
const MAX_RATE: u64 = i64::MAX.unsigned_abs();
/// The largest number that a kernel gives a processor.
const MAX_CPU: u32 = 8191;
/// The maximum of `syscalls.violation_limit`.
const MAX_VIOLATIONS: u32 = 1000;

impl ContainerPolicy {
    pub(super) fn validate(&self) -> Result<(), PolicyError> {
        match &self.profile {
            Some(name) if !is_label(name) => {
                fail("container.profile", "must match [a-z0-9-]{1,63}")
            }
            _ => Ok(()),
        }
    }
}

impl ResourcePolicy {
    pub(super) fn validate(&self) -> Result<(), PolicyError> {
        let rates = [
            ("resources.max_read_bytes_per_second", self.max_read_bytes_per_second),
            ("resources.max_write_bytes_per_second", self.max_write_bytes_per_second),
            ("resources.max_reads_per_second", self.max_reads_per_second),
            ("resources.max_writes_per_second", self.max_writes_per_second),
        ];
        for (field, rate) in rates {
            check_range(field, rate, &(1..=MAX_RATE))?;
        }
        if self.release_interval.is_some_and(|interval| !INTERVALS.contains(&interval)) {
            return fail("resources.release_interval", "must be from 1ms to 1m");
        }
        let Some(cpus) = &self.cpus else { return Ok(()) };
        if cpus.is_empty() {
            return fail("resources.cpus", "is empty; omit it to allow all processors");
        }
        let too_high = cpus.iter().position(|cpu| *cpu > MAX_CPU);
        fail_at("resources.cpus", too_high, format!("maximum is {MAX_CPU}"))
    }
}

impl ProcessPolicy {
    pub(super) fn validate(&self) -> Result<(), PolicyError> {
        const FIELD: &str = "process.allowed_executables";
        let Some(programs) = &self.allowed_executables else { return Ok(()) };
        if programs.is_empty() {
            return fail(FIELD, "is empty; omit it to allow all programs");
        }
        for (at, program) in programs.iter().enumerate() {
            check_path(&format!("{FIELD}[{at}]"), program)?;
        }
        Ok(())
    }
}

impl SyscallPolicy {
    pub(super) fn validate(&self, debug: bool) -> Result<(), PolicyError> {
        if self.mode.is_none() && !self.names.is_empty() {
            return fail("syscalls.names", "needs syscalls.mode: allow or deny");
        }
        let limits = 1..=MAX_VIOLATIONS;
        check_range("syscalls.violation_limit", self.violation_limit, &limits)?;
        for (at, name) in self.names.iter().enumerate() {
            self.check_name(&format!("syscalls.names[{at}]"), name, debug)?;
        }
        Ok(())
    }

    fn check_name(&self, field: &str, name: &str, debug: bool) -> Result<(), PolicyError> {
        if !syscalls::is_known(name) {
            return fail(field, format!("{name:?} is not a known system call"));
        }
        if self.mode == Some(SyscallMode::Deny) || syscalls::is_allowed(name, debug) {
            return Ok(());
        }
        if syscalls::is_allowed(name, true) {
            return fail(field, format!("{name} needs process.debug: true"));
        }
        fail(field, format!("{name} cannot be allowed by any policy"))
    }
}

impl EnvironmentPolicy {
    pub(super) fn validate(&self) -> Result<(), PolicyError> {
        if self.mode == Some(EnvironmentMode::Inherit) {
            return fail(
                "environment.mode",
                "inherit is not allowed: commands never get the worker's environment",
            );
        }
        let names = self.names.as_deref().unwrap_or_default();
        if self.names.is_some() && self.mode != Some(EnvironmentMode::Explicit) {
            return fail("environment.names", "needs environment.mode: explicit");
        }
        let is_invalid = |name: &String| name.is_empty() || name.contains(['=', '\0']);
        let invalid = names.iter().position(is_invalid);
        fail_at("environment.names", invalid, "is not a valid variable name")
    }

    /// The first of these variables that a run may not set.
    pub fn first_refused<'a>(
        &self,
        names: impl IntoIterator<Item = &'a String>,
    ) -> Option<&'a String> {
        if self.mode != Some(EnvironmentMode::Explicit) {
            return None;
        }
        let allowed: HashSet<_> = self.names.iter().flatten().collect();
        names.into_iter().find(|name| !allowed.contains(name))
    }
}
