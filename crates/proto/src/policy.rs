//! Policies.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use codelia_policy::{
    CommandPolicy, ContainerPolicy, EnvironmentMode, EnvironmentPolicy, FilesystemMode, FilesystemPolicy,
    IsolationLevel, LayoutDirectory, LayoutPolicy, LoggingPolicy, NetworkPolicy, Policy, PolicyError,
    ProcessPolicy, ResourcePolicy, Source, SyscallMode, SyscallPolicy, VolumeMode, VolumeMount,
};

use crate::{
    duration_to_proto,
    error::{InvalidField, integer},
    time::read_duration,
    v1,
};

impl TryFrom<v1::Policy> for Policy {
    type Error = PolicyError;

    /// Converts a received policy. It may still be invalid: see [`Policy::validate`].
    fn try_from(wire: v1::Policy) -> Result<Self, PolicyError> {
        let level: v1::IsolationLevel = known("isolation_level", wire.isolation_level)?;
        Ok(Self {
            isolation_level: level.to_level(),
            filesystem: wire.filesystem.map(read_filesystem).transpose()?.unwrap_or_default(),
            layout: wire.layout.map(read_layout).transpose()?.unwrap_or_default(),
            container: wire
                .container
                .map(|wire| ContainerPolicy { profile: wire.profile })
                .unwrap_or_default(),
            process: wire.process.map(read_process).transpose()?.unwrap_or_default(),
            network: wire.network.map(read_network).transpose()?.unwrap_or_default(),
            resources: wire.resources.map(read_resources).transpose()?.unwrap_or_default(),
            syscalls: wire.syscalls.map(read_syscalls).transpose()?.unwrap_or_default(),
            environment: wire.environment.map(read_environment).transpose()?.unwrap_or_default(),
            command: wire.command.map(read_command).transpose()?.unwrap_or_default(),
            logging: wire
                .logging
                .map(|wire| LoggingPolicy { signals: wire.signals, file_operations: wire.file_operations })
                .unwrap_or_default(),
            delegate: wire.delegate,
        })
    }
}

fn read_filesystem(wire: v1::FilesystemPolicy) -> Result<FilesystemPolicy, PolicyError> {
    let mode = match known("filesystem.mode", wire.mode)? {
        v1::FilesystemMode::Unspecified => None,
        v1::FilesystemMode::Static => Some(FilesystemMode::Static),
        v1::FilesystemMode::Dynamic => Some(FilesystemMode::Dynamic),
    };
    Ok(FilesystemPolicy {
        mode,
        root_path: wire.root_path.map(PathBuf::from),
        read_only_paths: paths(wire.read_only_paths),
        read_write_paths: paths(wire.read_write_paths),
        overlay_paths: paths(wire.overlay_paths),
        denied_paths: wire.denied_paths.into_iter().map(PathBuf::from).collect(),
        max_file_bytes: amount("filesystem.max_file_bytes", wire.max_file_bytes)?,
        max_total_bytes: amount("filesystem.max_total_bytes", wire.max_total_bytes)?,
        max_inodes: amount("filesystem.max_inodes", wire.max_inodes)?,
        volumes: wire.volumes.map(read_volumes).transpose()?,
    })
}

fn read_layout(wire: v1::LayoutPolicy) -> Result<LayoutPolicy, PolicyError> {
    let directory = |(at, wire): (usize, v1::LayoutDirectory)| -> Result<_, PolicyError> {
        let max_bytes = amount(&format!("layout.directories[{at}].max_bytes"), wire.max_bytes)?;
        Ok(LayoutDirectory { path: wire.path.into(), max_bytes })
    };
    Ok(LayoutPolicy {
        read_only_workspace: wire.read_only_workspace,
        directories: wire
            .directories
            .into_iter()
            .enumerate()
            .map(directory)
            .collect::<Result<_, PolicyError>>()?,
        executable_paths: paths(wire.executable_paths),
    })
}

fn read_volumes(wire: v1::VolumeMountList) -> Result<Vec<VolumeMount>, PolicyError> {
    let read = |(at, one): (usize, v1::VolumeMount)| {
        let mode = match known(&format!("filesystem.volumes[{at}].mode"), one.mode)? {
            v1::VolumeMode::Unspecified | v1::VolumeMode::Copy => VolumeMode::Copy,
            v1::VolumeMode::ReadOnly => VolumeMode::ReadOnly,
            v1::VolumeMode::Exclusive => VolumeMode::Exclusive,
        };
        Ok(VolumeMount { name: one.name, path: one.path.into(), mode })
    };
    wire.values.into_iter().enumerate().map(read).collect()
}

fn write_volume(volume: &VolumeMount) -> v1::VolumeMount {
    let mode = match volume.mode {
        VolumeMode::Copy => v1::VolumeMode::Copy,
        VolumeMode::ReadOnly => v1::VolumeMode::ReadOnly,
        VolumeMode::Exclusive => v1::VolumeMode::Exclusive,
    };
    v1::VolumeMount { name: volume.name.clone(), path: text(&volume.path), mode: mode.into() }
}

fn read_process(wire: v1::ProcessPolicy) -> Result<ProcessPolicy, PolicyError> {
    Ok(ProcessPolicy {
        max_processes: amount("process.max_processes", wire.max_processes)?,
        allow_fork: wire.allow_fork,
        allow_exec: wire.allow_exec,
        allowed_executables: paths(wire.allowed_executables),
        debug: wire.debug,
    })
}

fn read_network(wire: v1::NetworkPolicy) -> Result<NetworkPolicy, PolicyError> {
    let bytes = |name: &str, value| amount(&format!("network.{name}"), value);
    Ok(NetworkPolicy {
        mode: known::<v1::NetworkMode>("network.mode", wire.mode)?.to_mode(),
        allowed_hosts: texts(wire.allowed_hosts),
        ask_hosts: texts(wire.ask_hosts),
        blocked_hosts: wire.blocked_hosts,
        allowed_ports: wire
            .allowed_ports
            .map(|list| amounts("network.allowed_ports", list.values))
            .transpose()?,
        max_connections: amount("network.max_connections", wire.max_connections)?,
        max_connections_per_second: amount(
            "network.max_connections_per_second",
            wire.max_connections_per_second,
        )?,
        max_sent_bytes: bytes("max_sent_bytes", wire.max_sent_bytes)?,
        max_received_bytes: bytes("max_received_bytes", wire.max_received_bytes)?,
        idle_timeout: time("network.idle_timeout", wire.idle_timeout)?,
        credentials: texts(wire.credentials),
        executables: paths(wire.executables),
    })
}

fn read_resources(wire: v1::ResourcePolicy) -> Result<ResourcePolicy, PolicyError> {
    let amount = |name: &str, value| amount(&format!("resources.{name}"), value);
    let time = |name: &str, value| time(&format!("resources.{name}"), value);
    Ok(ResourcePolicy {
        max_cpu_time: time("max_cpu_time", wire.max_cpu_time)?,
        max_cpu_millicores: amount("max_cpu_millicores", wire.max_cpu_millicores)?,
        max_wall_time: time("max_wall_time", wire.max_wall_time)?,
        max_memory_bytes: amount("max_memory_bytes", wire.max_memory_bytes)?,
        max_open_files: amount("max_open_files", wire.max_open_files)?,
        max_threads: amount("max_threads", wire.max_threads)?,
        max_output_bytes: amount("max_output_bytes", wire.max_output_bytes)?,
        max_tmp_bytes: amount("max_tmp_bytes", wire.max_tmp_bytes)?,
        max_read_bytes_per_second: amount("max_read_bytes_per_second", wire.max_read_bytes_per_second)?,
        max_write_bytes_per_second: amount("max_write_bytes_per_second", wire.max_write_bytes_per_second)?,
        max_reads_per_second: amount("max_reads_per_second", wire.max_reads_per_second)?,
        max_writes_per_second: amount("max_writes_per_second", wire.max_writes_per_second)?,
        cpus: wire.cpus.map(|list| amounts("resources.cpus", list.values)).transpose()?,
        release_interval: time("release_interval", wire.release_interval)?,
    })
}

fn read_syscalls(wire: v1::SyscallPolicy) -> Result<SyscallPolicy, PolicyError> {
    let mode = match known("syscalls.mode", wire.mode)? {
        v1::SyscallMode::Unspecified => None,
        v1::SyscallMode::Allow => Some(SyscallMode::Allow),
        v1::SyscallMode::Deny => Some(SyscallMode::Deny),
    };
    let violation_limit = amount("syscalls.violation_limit", wire.violation_limit)?;
    Ok(SyscallPolicy { mode, names: wire.names, violation_limit })
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

fn read_command(wire: v1::CommandPolicy) -> Result<CommandPolicy, PolicyError> {
    Ok(CommandPolicy {
        allowed_patterns: texts(wire.allowed_patterns),
        blocked_patterns: wire.blocked_patterns,
        max_length: amount("command.max_length", wire.max_length)?,
    })
}

/// Converts a signed amount of the wire; refuses a negative or a too large one.
fn amount<T, U>(field: &str, value: Option<T>) -> Result<Option<U>, PolicyError>
where
    T: Copy + std::fmt::Display,
    U: TryFrom<T>,
{
    value.map(|value| one_amount(field, value)).transpose()
}

/// Like [`amount`], for each value of a list.
fn amounts<U: TryFrom<i32>>(field: &str, values: Vec<i32>) -> Result<Vec<U>, PolicyError> {
    let one = |(at, value)| one_amount(&format!("{field}[{at}]"), value);
    values.into_iter().enumerate().map(one).collect()
}

fn one_amount<T, U>(field: &str, value: T) -> Result<U, PolicyError>
where
    T: Copy + std::fmt::Display,
    U: TryFrom<T>,
{
    integer(field, value).map_err(policy_error)
}

fn time(field: &str, wire: Option<prost_types::Duration>) -> Result<Option<Duration>, PolicyError> {
    wire.map(|wire| read_duration(field, &wire)).transpose().map_err(policy_error)
}

fn policy_error(error: InvalidField) -> PolicyError {
    PolicyError { field: error.field, message: error.message }
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
            Self::IsolationLevel0 => Some(IsolationLevel::None),
            Self::IsolationLevel1 => Some(IsolationLevel::Process),
            Self::IsolationLevel2 => Some(IsolationLevel::Full),
        }
    }
}

impl From<Option<IsolationLevel>> for v1::IsolationLevel {
    fn from(level: Option<IsolationLevel>) -> Self {
        match level {
            None => Self::Unspecified,
            Some(IsolationLevel::None) => Self::IsolationLevel0,
            Some(IsolationLevel::Process) => Self::IsolationLevel1,
            Some(IsolationLevel::Full) => Self::IsolationLevel2,
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
            layout: Some(write_layout(&policy.layout)),
            container: Some(v1::ContainerPolicy { profile: policy.container.profile.clone() }),
            process: Some(write_process(&policy.process)),
            network: Some(write_network(&policy.network)),
            resources: Some(write_resources(&policy.resources)),
            syscalls: Some(write_syscalls(&policy.syscalls)),
            environment: Some(write_environment(&policy.environment)),
            command: Some(write_command(&policy.command)),
            logging: Some(v1::LoggingPolicy {
                signals: policy.logging.signals,
                file_operations: policy.logging.file_operations,
            }),
            delegate: policy.delegate.clone(),
        }
    }
}

fn write_filesystem(policy: &FilesystemPolicy) -> v1::FilesystemPolicy {
    let mode = match policy.mode {
        None => v1::FilesystemMode::Unspecified,
        Some(FilesystemMode::Static) => v1::FilesystemMode::Static,
        Some(FilesystemMode::Dynamic) => v1::FilesystemMode::Dynamic,
    };
    v1::FilesystemPolicy {
        mode: mode.into(),
        root_path: policy.root_path.as_ref().map(text),
        read_only_paths: path_list(policy.read_only_paths.as_ref()),
        read_write_paths: path_list(policy.read_write_paths.as_ref()),
        overlay_paths: path_list(policy.overlay_paths.as_ref()),
        denied_paths: policy.denied_paths.iter().map(text).collect(),
        max_file_bytes: policy.max_file_bytes.map(u64::cast_signed),
        max_total_bytes: policy.max_total_bytes.map(u64::cast_signed),
        max_inodes: policy.max_inodes.map(u64::cast_signed),
        volumes: policy
            .volumes
            .as_ref()
            .map(|volumes| v1::VolumeMountList { values: volumes.iter().map(write_volume).collect() }),
    }
}

fn write_layout(policy: &LayoutPolicy) -> v1::LayoutPolicy {
    let directory = |one: &LayoutDirectory| v1::LayoutDirectory {
        path: text(&one.path),
        max_bytes: one.max_bytes.map(u64::cast_signed),
    };
    v1::LayoutPolicy {
        read_only_workspace: policy.read_only_workspace,
        directories: policy.directories.iter().map(directory).collect(),
        executable_paths: path_list(policy.executable_paths.as_ref()),
    }
}

fn write_process(policy: &ProcessPolicy) -> v1::ProcessPolicy {
    v1::ProcessPolicy {
        max_processes: policy.max_processes.map(u64::cast_signed),
        allow_fork: policy.allow_fork,
        allow_exec: policy.allow_exec,
        allowed_executables: path_list(policy.allowed_executables.as_ref()),
        debug: policy.debug,
    }
}

fn write_network(policy: &NetworkPolicy) -> v1::NetworkPolicy {
    let ports = |ports: &Vec<u16>| v1::PortList { values: ports.iter().copied().map(i32::from).collect() };
    v1::NetworkPolicy {
        mode: policy.mode.map_or(v1::NetworkMode::Unspecified, Into::into).into(),
        allowed_hosts: text_list(policy.allowed_hosts.as_ref()),
        ask_hosts: text_list(policy.ask_hosts.as_ref()),
        blocked_hosts: policy.blocked_hosts.clone(),
        allowed_ports: policy.allowed_ports.as_ref().map(ports),
        max_connections: policy.max_connections.map(u32::cast_signed),
        max_connections_per_second: policy.max_connections_per_second.map(u32::cast_signed),
        max_sent_bytes: policy.max_sent_bytes.map(u64::cast_signed),
        max_received_bytes: policy.max_received_bytes.map(u64::cast_signed),
        idle_timeout: policy.idle_timeout.map(duration_to_proto),
        credentials: text_list(policy.credentials.as_ref()),
        executables: path_list(policy.executables.as_ref()),
    }
}

fn write_resources(policy: &ResourcePolicy) -> v1::ResourcePolicy {
    let cpus = |cpus: &Vec<u32>| v1::CpuList { values: cpus.iter().copied().map(u32::cast_signed).collect() };
    v1::ResourcePolicy {
        max_cpu_time: policy.max_cpu_time.map(duration_to_proto),
        max_cpu_millicores: policy.max_cpu_millicores.map(u64::cast_signed),
        max_wall_time: policy.max_wall_time.map(duration_to_proto),
        max_memory_bytes: policy.max_memory_bytes.map(u64::cast_signed),
        max_open_files: policy.max_open_files.map(u64::cast_signed),
        max_threads: policy.max_threads.map(u64::cast_signed),
        max_output_bytes: policy.max_output_bytes.map(u64::cast_signed),
        max_tmp_bytes: policy.max_tmp_bytes.map(u64::cast_signed),
        max_read_bytes_per_second: policy.max_read_bytes_per_second.map(u64::cast_signed),
        max_write_bytes_per_second: policy.max_write_bytes_per_second.map(u64::cast_signed),
        max_reads_per_second: policy.max_reads_per_second.map(u64::cast_signed),
        max_writes_per_second: policy.max_writes_per_second.map(u64::cast_signed),
        cpus: policy.cpus.as_ref().map(cpus),
        release_interval: policy.release_interval.map(duration_to_proto),
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
        violation_limit: policy.violation_limit.map(u32::cast_signed),
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
        max_length: policy.max_length.map(u64::cast_signed),
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
            Source::Tenant => Self::Tenant,
            Source::Project => Self::Project,
            Source::User => Self::User,
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
filesystem: {mode: static, root_path: /workspace, read_only_paths: [/opt], read_write_paths: [], overlay_paths: [/srv], denied_paths: [/opt/a], max_file_bytes: 1, max_total_bytes: 23, max_inodes: 24, volumes: [{name: v, path: /v, mode: exclusive}]}
layout: {read_only_workspace: true, directories: [{path: a, max_bytes: 25}, {path: b/c}], executable_paths: [a]}
container: {profile: python}
process: {max_processes: 2, allow_fork: false, allow_exec: true, allowed_executables: [/bin/sh], debug: true}
network: {mode: proxy, allowed_hosts: ['*.example'], ask_hosts: ['*'], blocked_hosts: [b.example], allowed_ports: [443], max_connections: 3, max_connections_per_second: 19, max_sent_bytes: 20, max_received_bytes: 21, idle_timeout: 22s, credentials: [c], executables: [/bin/d]}
resources: {max_cpu_time: 4s, max_cpu_millicores: 5, max_wall_time: 6ms, max_memory_bytes: 7, max_open_files: 8, max_threads: 9, max_output_bytes: 10, max_tmp_bytes: 11, max_read_bytes_per_second: 14, max_write_bytes_per_second: 15, max_reads_per_second: 16, max_writes_per_second: 17, cpus: [0, 2], release_interval: 18ms}
syscalls: {mode: deny, names: [socket], violation_limit: 12}
environment: {mode: explicit, names: [A]}
command: {allowed_patterns: [a], blocked_patterns: [b], max_length: 13}
logging: {signals: true, file_operations: false}
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

    #[test]
    fn negative_amount_is_refused_by_field() {
        let negative = prost_types::Duration { seconds: -1, nanos: 0 };
        let resources = [
            (
                "resources.max_memory_bytes",
                v1::ResourcePolicy { max_memory_bytes: Some(-1), ..Default::default() },
            ),
            (
                "resources.max_cpu_time",
                v1::ResourcePolicy { max_cpu_time: Some(negative), ..Default::default() },
            ),
            (
                "resources.cpus[1]",
                v1::ResourcePolicy { cpus: Some(v1::CpuList { values: vec![0, -1] }), ..Default::default() },
            ),
        ];
        for (field, resources) in resources {
            let wire = v1::Policy { resources: Some(resources), ..Default::default() };
            assert_eq!(Policy::try_from(wire).unwrap_err().field, field);
        }
        let syscalls = v1::SyscallPolicy { violation_limit: Some(-1), ..Default::default() };
        let wire = v1::Policy { syscalls: Some(syscalls), ..Default::default() };
        assert_eq!(Policy::try_from(wire).unwrap_err().field, "syscalls.violation_limit");
    }

    /// The names of every enum are the same in documents and, with a prefix, in the protocol.
    #[test]
    fn level_has_one_name() {
        for level in IsolationLevel::ALL {
            let wire = v1::IsolationLevel::from(Some(level));
            assert_eq!(wire.as_str_name(), format!("ISOLATION_{level}"));
            assert_eq!(wire.to_level(), Some(level));
        }
    }
}
