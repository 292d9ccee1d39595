//! Specifications, policies and limits survive the way from Rust to the wire and back.

#![allow(clippy::unwrap_used, reason = "test code")]

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use codelia_policy::{
    CommandPolicy, ContainerPolicy, EnvironmentMode, EnvironmentPolicy, FilesystemMode,
    FilesystemPolicy, IsolationLevel, LayoutDirectory, LayoutPolicy, Limits, LimitsRequest,
    LoggingPolicy, NetworkPolicy, Policy, ProcessPolicy, ResourcePolicy, RunSpec, RunTool,
    SyscallMode, SyscallPolicy, VolumeMode, VolumeMount,
};
use codelia_proto::v1;
use codelia_types::{CommandSpec, Mode, NetworkMode, TerminalSize, TransactionMode};
use proptest::{
    collection::{btree_map, vec},
    option::of,
    prelude::*,
    sample::select,
};
use prost::Message;

/// Amounts that the wire can carry: it has `int64`.
fn amount() -> impl Strategy<Value = u64> + Clone {
    prop_oneof![Just(0), Just(i64::MAX.unsigned_abs()), 0..=i64::MAX.unsigned_abs()]
}

/// Counts that the wire can carry: it has `int32`.
fn count() -> impl Strategy<Value = u32> + Clone {
    0..=i32::MAX.unsigned_abs()
}

/// Durations of more than zero: no policy has another.
fn duration() -> impl Strategy<Value = Duration> + Clone {
    (0..315_576_000_000_u64, 0..1_000_000_000_u32)
        .prop_map(|(seconds, nanos)| Duration::new(seconds, nanos).max(Duration::from_nanos(1)))
}

fn texts() -> impl Strategy<Value = Vec<String>> {
    vec(any::<String>(), 0..4)
}

fn paths() -> impl Strategy<Value = Vec<PathBuf>> {
    vec("/[a-zé/]{0,12}".prop_map(PathBuf::from), 0..4)
}

fn limits() -> impl Strategy<Value = Limits> {
    (duration(), duration(), [(); 9].map(|()| amount())).prop_map(
        |(
            timeout,
            cpu_time,
            [
                memory_bytes,
                cpu_millicores,
                pids,
                open_files,
                output_bytes,
                file_bytes,
                tmp_bytes,
                disk_bytes,
                inodes,
            ],
        )| {
            Limits {
                timeout,
                memory_bytes,
                cpu_millicores,
                pids,
                open_files,
                output_bytes,
                cpu_time,
                file_bytes,
                tmp_bytes,
                disk_bytes,
                inodes,
            }
        },
    )
}

fn requested_limits() -> impl Strategy<Value = LimitsRequest> {
    let amount = || of(amount());
    (of(duration()), of(duration()), [(); 9].map(|()| amount())).prop_map(
        |(
            timeout,
            cpu_time,
            [
                memory_bytes,
                cpu_millicores,
                pids,
                open_files,
                output_bytes,
                file_bytes,
                tmp_bytes,
                disk_bytes,
                inodes,
            ],
        )| {
            LimitsRequest {
                timeout,
                memory_bytes,
                cpu_millicores,
                pids,
                open_files,
                output_bytes,
                cpu_time,
                file_bytes,
                tmp_bytes,
                disk_bytes,
                inodes,
            }
        },
    )
}

fn command() -> impl Strategy<Value = CommandSpec> {
    let env = btree_map(any::<String>(), any::<String>(), 0..4);
    let terminal = of((any::<u16>(), any::<u16>()));
    (texts(), env, any::<String>(), terminal, any::<bool>(), texts()).prop_map(
        |(argv, env, working_directory, terminal, stdin, secret_env_names)| CommandSpec {
            argv,
            env,
            working_directory,
            terminal: terminal.map(|(columns, rows)| TerminalSize { columns, rows }),
            stdin,
            secret_env_names,
        },
    )
}

fn filesystem() -> impl Strategy<Value = FilesystemPolicy> {
    (
        of(prop_oneof![Just(FilesystemMode::Static), Just(FilesystemMode::Dynamic)]),
        (of(paths()), of(paths()), of(paths()), paths()),
        (of(amount()), of(amount()), of(amount())),
        of(vec(volume(), 0..4)),
    )
        .prop_map(|(mode, paths, (file, total, inodes), volumes)| {
            let (read_only, read_write, overlay, denied) = paths;
            FilesystemPolicy {
                mode,
                read_only_paths: read_only,
                read_write_paths: read_write,
                overlay_paths: overlay,
                denied_paths: denied,
                max_file_bytes: file,
                max_total_bytes: total,
                max_inodes: inodes,
                volumes,
            }
        })
}

fn volume() -> impl Strategy<Value = VolumeMount> {
    let mode = select(vec![VolumeMode::ReadOnly, VolumeMode::Copy, VolumeMode::Exclusive]);
    (any::<String>(), any::<String>(), mode).prop_map(|(name, path, mode)| VolumeMount {
        name,
        path: path.into(),
        mode,
    })
}

fn process() -> impl Strategy<Value = ProcessPolicy> {
    (of(amount()), of(any::<bool>()), of(any::<bool>()), of(paths()), of(any::<bool>())).prop_map(
        |(max_processes, allow_fork, allow_exec, allowed_executables, debug)| ProcessPolicy {
            max_processes,
            allow_fork,
            allow_exec,
            allowed_executables,
            debug,
        },
    )
}

fn network_mode() -> impl Strategy<Value = NetworkMode> {
    select(NetworkMode::ALL.to_vec())
}

fn network() -> impl Strategy<Value = NetworkPolicy> {
    let lists = (of(texts()), of(texts()), texts(), of(texts()), of(paths()));
    let limits = (of(count()), of(count()), of(amount()), of(amount()), of(duration()));
    (of(network_mode()), lists, of(vec(any::<u16>(), 0..4)), limits).prop_map(
        |(
            mode,
            (allowed_hosts, ask_hosts, blocked_hosts, credentials, executables),
            allowed_ports,
            limits,
        )| {
            NetworkPolicy {
                mode,
                allowed_hosts,
                ask_hosts,
                blocked_hosts,
                allowed_ports,
                max_connections: limits.0,
                max_connections_per_second: limits.1,
                max_sent_bytes: limits.2,
                max_received_bytes: limits.3,
                idle_timeout: limits.4,
                credentials,
                executables,
            }
        },
    )
}

fn resources() -> impl Strategy<Value = ResourcePolicy> {
    (vec(of(amount()), 10), vec(of(duration()), 3), of(vec(count(), 0..4))).prop_map(
        |(amounts, times, cpus)| ResourcePolicy {
            max_cpu_time: times[0],
            max_cpu_millicores: amounts[9],
            max_wall_time: times[1],
            max_memory_bytes: amounts[0],
            max_open_files: amounts[1],
            max_threads: amounts[2],
            max_output_bytes: amounts[3],
            max_tmp_bytes: amounts[4],
            max_read_bytes_per_second: amounts[5],
            max_write_bytes_per_second: amounts[6],
            max_reads_per_second: amounts[7],
            max_writes_per_second: amounts[8],
            cpus,
            release_interval: times[2],
        },
    )
}

fn calls() -> impl Strategy<Value = (SyscallPolicy, EnvironmentPolicy, CommandPolicy)> {
    let syscalls = (of(select(vec![SyscallMode::Allow, SyscallMode::Deny])), texts(), of(count()))
        .prop_map(|(mode, names, violation_limit)| SyscallPolicy { mode, names, violation_limit });
    let modes = vec![EnvironmentMode::Inherit, EnvironmentMode::Clean, EnvironmentMode::Explicit];
    let environment = (of(select(modes)), of(texts()))
        .prop_map(|(mode, names)| EnvironmentPolicy { mode, names });
    let command = (of(texts()), texts(), of(amount())).prop_map(
        |(allowed_patterns, blocked_patterns, max_length)| CommandPolicy {
            allowed_patterns,
            blocked_patterns,
            max_length,
        },
    );
    (syscalls, environment, command)
}

fn layout() -> impl Strategy<Value = LayoutPolicy> {
    let directory = (any::<String>(), of(amount()))
        .prop_map(|(path, max_bytes)| LayoutDirectory { path: path.into(), max_bytes });
    let directories = prop::collection::vec(directory, 0..3);
    (of(any::<bool>()), directories, of(texts())).prop_map(
        |(read_only_workspace, directories, paths)| {
            let executable_paths = paths.map(|paths| paths.into_iter().map(Into::into).collect());
            LayoutPolicy { read_only_workspace, directories, executable_paths }
        },
    )
}

fn policy() -> impl Strategy<Value = Policy> {
    let level = of(select(IsolationLevel::ALL.to_vec()));
    let container = of(any::<String>()).prop_map(|profile| ContainerPolicy { profile });
    let delegate = prop::collection::vec(any::<String>(), 0..3);
    let logging = (of(any::<bool>()), of(any::<bool>()))
        .prop_map(|(signals, file_operations)| LoggingPolicy { signals, file_operations });
    let rest = (logging, delegate, layout());
    (level, filesystem(), container, process(), network(), resources(), calls(), rest).prop_map(
        |(
            isolation_level,
            filesystem,
            container,
            process,
            network,
            resources,
            calls,
            (logging, delegate, layout),
        )| {
            let (syscalls, environment, command) = calls;
            Policy {
                isolation_level,
                filesystem,
                layout,
                container,
                process,
                network,
                resources,
                syscalls,
                environment,
                command,
                logging,
                delegate,
            }
        },
    )
}

fn tool() -> impl Strategy<Value = RunTool> {
    ("[a-z0-9-]{1,63}", any::<i64>(), select(IsolationLevel::ALL.to_vec()))
        .prop_map(|(id, version, level)| RunTool { id: id.parse().unwrap(), version, level })
}

fn spec() -> impl Strategy<Value = RunSpec> {
    (
        command(),
        select(Mode::ALL.to_vec()),
        of(network_mode()),
        limits(),
        requested_limits(),
        policy(),
        any::<bool>(),
        of(tool()),
        of(select(vec![
            TransactionMode::Apply,
            TransactionMode::Preview,
            TransactionMode::Hold { timeout: Duration::from_millis(1500) },
        ])),
    )
        .prop_map(
            |(
                command,
                mode,
                network,
                limits,
                requested_limits,
                policy,
                ends_with_caller,
                tool,
                transaction,
            )| {
                RunSpec {
                    command,
                    mode,
                    network,
                    limits,
                    requested_limits,
                    policy,
                    ends_with_caller,
                    tool,
                    transaction,
                }
            },
        )
}

/// The message after it was encoded and decoded.
fn sent<M: Message + Default>(message: &M) -> M {
    M::decode(message.encode_to_vec().as_slice()).unwrap()
}

proptest! {
    /// The store keeps this document, and an api pushes it to a worker.
    #[test]
    fn run_spec_round_trips(spec in spec()) {
        let document = serde_json::to_vec(&spec).unwrap();
        prop_assert_eq!(serde_json::from_slice::<RunSpec>(&document).unwrap(), spec);
    }

    #[test]
    fn policy_and_limits_round_trip(spec in spec()) {
        let policy = sent(&v1::Policy::from(&spec.policy));
        prop_assert_eq!(Policy::try_from(policy).unwrap(), spec.policy);
        let limits = sent(&v1::Limits::from(&spec.requested_limits));
        prop_assert_eq!(LimitsRequest::try_from(&limits), Ok(spec.requested_limits));
    }
}

#[test]
fn malformed_limits_are_refused_by_field() {
    let timeout = prost_types::Duration { seconds: 0, nanos: -1 };
    let limits = v1::Limits { timeout: Some(timeout), ..v1::Limits::default() };
    assert_eq!(LimitsRequest::try_from(&limits).unwrap_err().field, "timeout");
    let limits = v1::Limits { pids: Some(-1), ..v1::Limits::default() };
    assert_eq!(LimitsRequest::try_from(&limits).unwrap_err().field, "pids");
}

#[test]
fn malformed_policy_is_refused_by_field() {
    let policy = v1::Policy { isolation_level: 99, ..v1::Policy::default() };
    let error = Policy::try_from(policy).unwrap_err();
    assert_eq!(
        (error.field.as_str(), error.message.as_str()),
        ("isolation_level", "unknown value 99")
    );
}

#[test]
fn amount_above_wire_range_is_refused() {
    let request = LimitsRequest { memory_bytes: Some(u64::MAX), ..LimitsRequest::default() };
    assert_eq!(
        LimitsRequest::try_from(&v1::Limits::from(&request)).unwrap_err().field,
        "memory_bytes"
    );
    let request = LimitsRequest { timeout: Some(Duration::MAX), ..LimitsRequest::default() };
    assert_eq!(LimitsRequest::try_from(&v1::Limits::from(&request)).unwrap_err().field, "timeout");
}

#[test]
fn environment_order_does_not_matter() {
    let env = BTreeMap::from([("A".to_owned(), "1".to_owned()), ("B".to_owned(), "2".to_owned())]);
    let mut command = CommandSpec::new(["true"]);
    command.env = env.clone();
    let sent = sent(&v1::CommandSpec::from(&command));
    assert_eq!(sent.env.into_iter().collect::<BTreeMap<_, _>>(), env);
}
