//! Policies.

use std::path::{Path, PathBuf};

use codelia_policy::{
    CommandPolicy, ContainerPolicy, EnvironmentMode, EnvironmentPolicy, FilesystemMode, FilesystemPolicy,
    IsolationLevel, NetworkPolicy, Policy, PolicyError, ProcessPolicy, ResourcePolicy, Source, SyscallMode,
    SyscallPolicy,
};

use crate::v1;

impl TryFrom<v1::Policy> for Policy {
    type Error = PolicyError;

    /// Converts a received policy. It may still be invalid: see [`Policy::validate`].
    fn try_from(wire: v1::Policy) -> Result<Self, PolicyError> {
        let level: v1::IsolationLevel = known("isolation_level", wire.isolation_level)?;
        Ok(Self {
            isolation_level: level.to_level(),
            filesystem: wire.filesystem.map(read_filesystem).transpose()?.unwrap_or_default(),
            container: wire
                .container
                .map(|wire| ContainerPolicy { profile: wire.profile })
                .unwrap_or_default(),
            process: wire.process.map(read_process).unwrap_or_default(),
            network: wire.network.map(read_network).transpose()?.unwrap_or_default(),
            resources: wire.resources.map(read_resources).unwrap_or_default(),
            syscalls: wire.syscalls.map(read_syscalls).transpose()?.unwrap_or_default(),
            environment: wire.environment.map(read_environment).transpose()?.unwrap_or_default(),
            command: wire.command.map(read_command).unwrap_or_default(),
        })
    }
}

fn read_filesystem(wire: v1::FilesystemPolicy) -> Result<FilesystemPolicy, PolicyError> {
    let mode = match known("filesystem.mode", wire.mode)? {
        v1::FilesystemMode::Unspecified => None,
        v1::FilesystemMode::Static => Some(FilesystemMode::Static),
    };
    Ok(FilesystemPolicy {
        mode,
        root_path: wire.root_path.map(PathBuf::from),
        read_only_paths: paths(wire.read_only_paths),
        read_write_paths: paths(wire.read_write_paths),
        overlay_paths: paths(wire.overlay_paths),
        denied_paths: wire.denied_paths.into_iter().map(PathBuf::from).collect(),
        max_file_bytes: wire.max_file_bytes,
        max_total_bytes: wire.max_total_bytes,
    })
}

fn read_process(wire: v1::ProcessPolicy) -> ProcessPolicy {
    ProcessPolicy {
        max_processes: wire.max_processes,
        allow_fork: wire.allow_fork,
        allow_exec: wire.allow_exec,
        allowed_executables: paths(wire.allowed_executables),
        debug: wire.debug,
    }
}

fn read_network(wire: v1::NetworkPolicy) -> Result<NetworkPolicy, PolicyError> {
    let port = |(at, port): (usize, u32)| {
        u16::try_from(port).map_err(|_| PolicyError {
            field: format!("network.allowed_ports[{at}]"),
            message: "maximum is 65535".to_owned(),
        })
    };
    let ports = |list: v1::PortList| list.values.into_iter().enumerate().map(port).collect();
    Ok(NetworkPolicy {
        mode: known::<v1::NetworkMode>("network.mode", wire.mode)?.to_mode(),
        allowed_hosts: texts(wire.allowed_hosts),
        allowed_ports: wire.allowed_ports.map(ports).transpose()?,
        max_connections: wire.max_connections,
    })
}

fn read_resources(wire: v1::ResourcePolicy) -> ResourcePolicy {
    ResourcePolicy {
        max_cpu_ms: wire.max_cpu_ms,
        max_cpu_millis: wire.max_cpu_millis,
        max_wall_ms: wire.max_wall_ms,
        max_memory_bytes: wire.max_memory_bytes,
        max_open_files: wire.max_open_files,
        max_threads: wire.max_threads,
        max_output_bytes: wire.max_output_bytes,
        max_tmp_bytes: wire.max_tmp_bytes,
        max_read_bytes_per_second: wire.max_read_bytes_per_second,
        max_write_bytes_per_second: wire.max_write_bytes_per_second,
        max_reads_per_second: wire.max_reads_per_second,
        max_writes_per_second: wire.max_writes_per_second,
        cpus: wire.cpus.map(|list| list.values),
        release_interval_ms: wire.release_interval_ms,
    }
}

fn read_syscalls(wire: v1::SyscallPolicy) -> Result<SyscallPolicy, PolicyError> {
    let mode = match known("syscalls.mode", wire.mode)? {
        v1::SyscallMode::Unspecified => None,
        v1::SyscallMode::Allow => Some(SyscallMode::Allow),
        v1::SyscallMode::Deny => Some(SyscallMode::Deny),
    };
    Ok(SyscallPolicy { mode, names: wire.names, violation_limit: wire.violation_limit })
}

fn read_environment(wire: v1::EnvironmentPolicy) -> Result<EnvironmentPolicy, PolicyError> {
    let mode = match known("environment.mode", wire.mode)? {
        v1::EnvironmentMode::Unspecified => None,
        v1::EnvironmentMode::Clean => Some(EnvironmentMode::Clean),
        v1::EnvironmentMode::Explicit => Some(EnvironmentMode::Explicit),
        v1::EnvironmentMode::Inherit => Some(EnvironmentMode::Inherit),
    };
    Ok(EnvironmentPolicy { mode, names: texts(wire.names) })
}

fn read_command(wire: v1::CommandPolicy) -> CommandPolicy {
    CommandPolicy {
        allowed_patterns: texts(wire.allowed_patterns),
        blocked_patterns: wire.blocked_patterns,
        max_length: wire.max_length,
    }
}

fn known<E: TryFrom<i32>>(field: &str, value: i32) -> Result<E, PolicyError> {
    E::try_from(value)
        .map_err(|_| PolicyError { field: field.to_owned(), message: format!("unknown value {value}") })
}

fn texts(list: Option<v1::TextList>) -> Option<Vec<String>> {
    list.map(|list| list.values)
}

impl v1::IsolationLevel {
    /// The level, or `None` if it is unspecified.
    #[must_use]
    pub fn to_level(self) -> Option<IsolationLevel> {
        match self {
            Self::Unspecified => None,
            Self::None => Some(IsolationLevel::None),
            Self::Process => Some(IsolationLevel::Process),
            Self::Full => Some(IsolationLevel::Full),
        }
    }
}

impl From<Option<IsolationLevel>> for v1::IsolationLevel {
    fn from(level: Option<IsolationLevel>) -> Self {
        match level {
            None => Self::Unspecified,
            Some(IsolationLevel::None) => Self::None,
            Some(IsolationLevel::Process) => Self::Process,
            Some(IsolationLevel::Full) => Self::Full,
        }
    }
}

fn paths(list: Option<v1::TextList>) -> Option<Vec<PathBuf>> {
    list.map(|list| list.values.into_iter().map(PathBuf::from).collect())
}

impl From<&Policy> for v1::Policy {
    fn from(policy: &Policy) -> Self {
        Self {
            isolation_level: v1::IsolationLevel::from(policy.isolation_level).into(),
            filesystem: Some(write_filesystem(&policy.filesystem)),
            container: Some(v1::ContainerPolicy { profile: policy.container.profile.clone() }),
            process: Some(write_process(&policy.process)),
            network: Some(write_network(&policy.network)),
            resources: Some(write_resources(&policy.resources)),
            syscalls: Some(write_syscalls(&policy.syscalls)),
            environment: Some(write_environment(&policy.environment)),
            command: Some(write_command(&policy.command)),
        }
    }
}

fn write_filesystem(policy: &FilesystemPolicy) -> v1::FilesystemPolicy {
    let mode = match policy.mode {
        None => v1::FilesystemMode::Unspecified,
        Some(FilesystemMode::Static) => v1::FilesystemMode::Static,
    };
    v1::FilesystemPolicy {
        mode: mode.into(),
        root_path: policy.root_path.as_ref().map(text),
        read_only_paths: path_list(policy.read_only_paths.as_ref()),
        read_write_paths: path_list(policy.read_write_paths.as_ref()),
        overlay_paths: path_list(policy.overlay_paths.as_ref()),
        denied_paths: policy.denied_paths.iter().map(text).collect(),
        max_file_bytes: policy.max_file_bytes,
        max_total_bytes: policy.max_total_bytes,
    }
}

fn write_process(policy: &ProcessPolicy) -> v1::ProcessPolicy {
    v1::ProcessPolicy {
        max_processes: policy.max_processes,
        allow_fork: policy.allow_fork,
        allow_exec: policy.allow_exec,
        allowed_executables: path_list(policy.allowed_executables.as_ref()),
        debug: policy.debug,
    }
}

fn write_network(policy: &NetworkPolicy) -> v1::NetworkPolicy {
    let ports = |ports: &Vec<u16>| v1::PortList { values: ports.iter().copied().map(u32::from).collect() };
    v1::NetworkPolicy {
        mode: policy.mode.map_or(v1::NetworkMode::Unspecified, Into::into).into(),
        allowed_hosts: text_list(policy.allowed_hosts.as_ref()),
        allowed_ports: policy.allowed_ports.as_ref().map(ports),
        max_connections: policy.max_connections,
    }
}

fn write_resources(policy: &ResourcePolicy) -> v1::ResourcePolicy {
    v1::ResourcePolicy {
        max_cpu_ms: policy.max_cpu_ms,
        max_cpu_millis: policy.max_cpu_millis,
        max_wall_ms: policy.max_wall_ms,
        max_memory_bytes: policy.max_memory_bytes,
        max_open_files: policy.max_open_files,
        max_threads: policy.max_threads,
        max_output_bytes: policy.max_output_bytes,
        max_tmp_bytes: policy.max_tmp_bytes,
        max_read_bytes_per_second: policy.max_read_bytes_per_second,
        max_write_bytes_per_second: policy.max_write_bytes_per_second,
        max_reads_per_second: policy.max_reads_per_second,
        max_writes_per_second: policy.max_writes_per_second,
        cpus: policy.cpus.as_ref().map(|cpus| v1::CpuList { values: cpus.clone() }),
        release_interval_ms: policy.release_interval_ms,
    }
}

fn write_syscalls(policy: &SyscallPolicy) -> v1::SyscallPolicy {
    let mode = match policy.mode {
        None => v1::SyscallMode::Unspecified,
        Some(SyscallMode::Allow) => v1::SyscallMode::Allow,
        Some(SyscallMode::Deny) => v1::SyscallMode::Deny,
    };
    v1::SyscallPolicy {
        mode: mode.into(),
        names: policy.names.clone(),
        violation_limit: policy.violation_limit,
    }
}

fn write_environment(policy: &EnvironmentPolicy) -> v1::EnvironmentPolicy {
    let mode = match policy.mode {
        None => v1::EnvironmentMode::Unspecified,
        Some(EnvironmentMode::Clean) => v1::EnvironmentMode::Clean,
        Some(EnvironmentMode::Explicit) => v1::EnvironmentMode::Explicit,
        Some(EnvironmentMode::Inherit) => v1::EnvironmentMode::Inherit,
    };
    v1::EnvironmentPolicy { mode: mode.into(), names: text_list(policy.names.as_ref()) }
}

fn write_command(policy: &CommandPolicy) -> v1::CommandPolicy {
    v1::CommandPolicy {
        allowed_patterns: text_list(policy.allowed_patterns.as_ref()),
        blocked_patterns: policy.blocked_patterns.clone(),
        max_length: policy.max_length,
    }
}

fn text_list(list: Option<&Vec<String>>) -> Option<v1::TextList> {
    list.map(|values| v1::TextList { values: values.clone() })
}

fn path_list(list: Option<&Vec<PathBuf>>) -> Option<v1::TextList> {
    list.map(|paths| v1::TextList { values: paths.iter().map(text).collect() })
}

/// The paths of a policy are valid UTF-8, because they come from text.
fn text(path: impl AsRef<Path>) -> String {
    path.as_ref().to_string_lossy().into_owned()
}

impl From<Source> for v1::PolicySource {
    fn from(source: Source) -> Self {
        match source {
            Source::Default => Self::Default,
            Source::Session => Self::Session,
            Source::Run => Self::Run,
        }
    }
}

#[cfg(test)]
mod tests {
    use codelia_policy::Format;

    use super::*;

    const FULL: &str = "
isolation_level: LEVEL_2
filesystem: {mode: static, root_path: /workspace, read_only_paths: [/opt], read_write_paths: [], overlay_paths: [/srv], denied_paths: [/opt/a], max_file_bytes: 1}
container: {profile: python}
process: {max_processes: 2, allow_fork: false, allow_exec: true, allowed_executables: [/bin/sh], debug: true}
network: {mode: proxy, allowed_hosts: ['*.example'], allowed_ports: [443], max_connections: 3}
resources: {max_cpu_ms: 4, max_cpu_millis: 5, max_wall_ms: 6, max_memory_bytes: 7, max_open_files: 8, max_threads: 9, max_output_bytes: 10, max_tmp_bytes: 11, max_read_bytes_per_second: 14, max_write_bytes_per_second: 15, max_reads_per_second: 16, max_writes_per_second: 17, cpus: [0, 2], release_interval_ms: 18}
syscalls: {mode: deny, names: [socket], violation_limit: 12}
environment: {mode: explicit, names: [A]}
command: {allowed_patterns: [a], blocked_patterns: [b], max_length: 13}
";

    #[test]
    fn policy_round_trips() {
        for policy in [Policy::default(), Policy::parse(FULL, Format::Yaml).unwrap()] {
            assert_eq!(Policy::try_from(v1::Policy::from(&policy)), Ok(policy));
        }
    }

    #[test]
    fn invalid_wire_value_is_refused_by_field() {
        let wire = v1::Policy { isolation_level: 9, ..Default::default() };
        assert_eq!(Policy::try_from(wire).unwrap_err().field, "isolation_level");
        let ports = v1::PortList { values: vec![80, 70_000] };
        let network = v1::NetworkPolicy { allowed_ports: Some(ports), ..Default::default() };
        let wire = v1::Policy { network: Some(network), ..Default::default() };
        assert_eq!(Policy::try_from(wire).unwrap_err().field, "network.allowed_ports[1]");
    }
}
