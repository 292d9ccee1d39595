//! Policies.

use std::path::{Path, PathBuf};

use codelia_policy::{
    CommandPolicy, ContainerPolicy, EnvironmentPolicy, FilesystemPolicy, LayoutDirectory,
    LayoutPolicy, LoggingPolicy, NetworkPolicy, Policy, PolicyError, ProcessPolicy, ResourcePolicy,
    SyscallPolicy, VolumeMode, VolumeMount,
};

use crate::{
    error::{InvalidField, integer},
    v1,
    wire::Wire,
};

macro_rules! conversions {
    ($(
        $(#[$group_doc:meta])+
        $group:ident: $Group:ident {$(
            $(#[$attribute:meta])+
            $field:ident: $type:ty, $merge:ident, $is_delegable:ident, $default:expr;
        )+}
    )+) => {
        fn read(wire: v1::Policy) -> Result<Policy, InvalidField> {
            Ok(Policy {
                isolation_level: Wire::from_wire("isolation_level", wire.isolation_level)?,
                $($group: {
                    let group = wire.$group.unwrap_or_default();
                    $Group {$(
                        $field: Wire::from_wire(
                            concat!(stringify!($group), ".", stringify!($field)),
                            group.$field,
                        )?,
                    )+}
                },)+
                delegate: wire.delegate,
            })
        }

        impl From<&Policy> for v1::Policy {
            fn from(policy: &Policy) -> Self {
                Self {
                    isolation_level: policy.isolation_level.to_wire(),
                    $($group: Some(v1::$Group {
                        $($field: policy.$group.$field.to_wire(),)+
                    }),)+
                    delegate: policy.delegate.clone(),
                }
            }
        }
    };
}

codelia_policy::policy_table!(conversions);

impl TryFrom<v1::Policy> for Policy {
    type Error = PolicyError;

    /// Converts a received policy. It may still be invalid: see [`Policy::validate`].
    fn try_from(wire: v1::Policy) -> Result<Self, PolicyError> {
        read(wire).map_err(|error| PolicyError { field: error.field, message: error.message })
    }
}

/// Values that are the same in both.
macro_rules! same {
    ($($type:ty),+) => {$(
        impl Wire<$type> for $type {
            fn from_wire(_: &str, wire: $type) -> Result<Self, InvalidField> {
                Ok(wire)
            }

            fn to_wire(&self) -> $type {
                self.clone()
            }
        }
    )+};
}

same!(Option<bool>, Option<String>, Vec<String>);

impl Wire<Vec<String>> for Vec<PathBuf> {
    fn from_wire(_: &str, wire: Vec<String>) -> Result<Self, InvalidField> {
        Ok(wire.into_iter().map(PathBuf::from).collect())
    }

    fn to_wire(&self) -> Vec<String> {
        self.iter().map(|path| text(path)).collect()
    }
}

/// Lists that a message holds, because an absent list differs from an empty one.
macro_rules! lists {
    ($($type:ty: $message:ident;)+) => {$(
        impl Wire<Option<v1::$message>> for Option<$type> {
            fn from_wire(field: &str, wire: Option<v1::$message>) -> Result<Self, InvalidField> {
                wire.map(|list| Wire::from_wire(field, list.values)).transpose()
            }

            fn to_wire(&self) -> Option<v1::$message> {
                self.as_ref().map(|list| v1::$message { values: list.to_wire() })
            }
        }
    )+};
}

lists! {
    Vec<String>: TextList;
    Vec<PathBuf>: TextList;
    Vec<u16>: PortList;
    Vec<u32>: CpuList;
    Vec<VolumeMount>: VolumeMountList;
}

impl Wire<Vec<i32>> for Vec<u16> {
    fn from_wire(field: &str, wire: Vec<i32>) -> Result<Self, InvalidField> {
        each(field, wire, integer)
    }

    fn to_wire(&self) -> Vec<i32> {
        self.iter().copied().map(i32::from).collect()
    }
}

impl Wire<Vec<i32>> for Vec<u32> {
    fn from_wire(field: &str, wire: Vec<i32>) -> Result<Self, InvalidField> {
        each(field, wire, integer)
    }

    fn to_wire(&self) -> Vec<i32> {
        self.iter().copied().map(u32::cast_signed).collect()
    }
}

impl Wire<Vec<v1::LayoutDirectory>> for Vec<LayoutDirectory> {
    fn from_wire(field: &str, wire: Vec<v1::LayoutDirectory>) -> Result<Self, InvalidField> {
        each(field, wire, |field, wire| {
            let max_bytes = Wire::from_wire(&format!("{field}.max_bytes"), wire.max_bytes)?;
            Ok(LayoutDirectory { path: wire.path.into(), max_bytes })
        })
    }

    fn to_wire(&self) -> Vec<v1::LayoutDirectory> {
        let directory = |one: &LayoutDirectory| v1::LayoutDirectory {
            path: text(&one.path),
            max_bytes: one.max_bytes.to_wire(),
        };
        self.iter().map(directory).collect()
    }
}

impl Wire<Vec<v1::VolumeMount>> for Vec<VolumeMount> {
    fn from_wire(field: &str, wire: Vec<v1::VolumeMount>) -> Result<Self, InvalidField> {
        each(field, wire, |field, wire| {
            let mode = Option::<VolumeMode>::from_wire(&format!("{field}.mode"), wire.mode)?;
            let mode = mode.unwrap_or_default();
            Ok(VolumeMount { name: wire.name, path: wire.path.into(), mode })
        })
    }

    fn to_wire(&self) -> Vec<v1::VolumeMount> {
        let volume = |one: &VolumeMount| {
            let mode = v1::VolumeMode::from(one.mode).into();
            v1::VolumeMount { name: one.name.clone(), path: text(&one.path), mode }
        };
        self.iter().map(volume).collect()
    }
}

/// Converts each entry of a list. An error names the entry by its index.
fn each<W, T>(
    field: &str,
    wire: Vec<W>,
    convert: impl Fn(&str, W) -> Result<T, InvalidField>,
) -> Result<Vec<T>, InvalidField> {
    let entries = wire.into_iter().enumerate();
    entries.map(|(at, entry)| convert(&format!("{field}[{at}]"), entry)).collect()
}

/// The paths of a policy are valid UTF-8, because they come from text.
fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use codelia_policy::{FIELDS, Format, IsolationLevel};
    use prost::Message as _;
    use prost_types::FileDescriptorSet;

    use super::*;

    const FULL: &str = "
isolation_level: LEVEL_2
filesystem: {mode: static, read_only_paths: [/opt], read_write_paths: [], overlay_paths: [/srv], denied_paths: [/opt/a], max_file_bytes: 1, max_total_bytes: 23, max_inodes: 24, volumes: [{name: v, path: /v, mode: exclusive}]}
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
                v1::ResourcePolicy {
                    cpus: Some(v1::CpuList { values: vec![0, -1] }),
                    ..Default::default()
                },
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

    /// The paths of all fields of the message and of the messages in it.
    fn message_fields() -> BTreeSet<String> {
        let files = FileDescriptorSet::decode(crate::PUBLIC_DESCRIPTORS).unwrap().file;
        let messages: Vec<_> = files.into_iter().flat_map(|file| file.message_type).collect();
        let fields =
            |message: &str| &messages.iter().find(|one| one.name() == message).unwrap().field;
        let mut paths = BTreeSet::new();
        for field in fields("Policy") {
            let message = field.type_name().trim_start_matches(".codelia.v1.");
            if message.ends_with("Policy") {
                let inner = fields(message).iter();
                paths.extend(inner.map(|inner| format!("{}.{}", field.name(), inner.name())));
            } else {
                paths.insert(field.name().to_owned());
            }
        }
        paths
    }

    #[test]
    fn every_field_of_the_message_is_in_the_table() {
        let table = FIELDS.iter().map(|field| field.path).chain(["delegate"]);
        assert_eq!(message_fields(), table.map(str::to_owned).collect());
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
