//! Every value of the internal protocol survives the way from Rust to the wire and back.

#![allow(clippy::unwrap_used, reason = "test code")]

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use codelia_policy::{
    CommandPolicy, ContainerPolicy, EnvironmentMode, EnvironmentPolicy, FilesystemMode, FilesystemPolicy,
    IsolationLevel, LayoutDirectory, LayoutPolicy, Limits, LimitsRequest, LoggingPolicy, NetworkPolicy,
    Policy, ProcessPolicy, ResourcePolicy, RunSpec, RunTool, SyscallMode, SyscallPolicy, VolumeMode,
    VolumeMount,
};
use codelia_proto::{InvalidField, internal::v1 as internal, v1};
use codelia_types::{
    Change, ChangeKind, ChangedFile, Changes, ChangesState, CommandSpec, CountedViolation, EndedRun,
    LostReason, Mode, NetworkMode, NetworkUsage, Outcome, Reason, Receipt, Refusal, RunResult, TerminalSize,
    TransactionMode, Usage, Violation, Violations,
};
use proptest::{
    array::uniform6,
    collection::{btree_map, vec},
    option::of,
    prelude::*,
    sample::select,
};
use prost::Message;
use time::OffsetDateTime;

/// Amounts that the wire can carry: it has `int64`.
fn amount() -> impl Strategy<Value = u64> + Clone {
    prop_oneof![Just(0), Just(i64::MAX.unsigned_abs()), 0..=i64::MAX.unsigned_abs()]
}

/// Counts that the wire can carry: it has `int32`.
fn count() -> impl Strategy<Value = u32> + Clone {
    0..=i32::MAX.unsigned_abs()
}

fn duration() -> impl Strategy<Value = Duration> + Clone {
    (0..315_576_000_000_u64, 0..1_000_000_000_u32).prop_map(|(seconds, nanos)| Duration::new(seconds, nanos))
}

/// Times between the years 1969 and 2200, with nanoseconds.
fn timestamp() -> impl Strategy<Value = OffsetDateTime> {
    (-10_000_000_000_000_000..7_000_000_000_000_000_000_i128)
        .prop_map(|nanos| OffsetDateTime::from_unix_timestamp_nanos(nanos).unwrap())
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
        of(Just(PathBuf::from("/workspace"))),
        (of(paths()), of(paths()), of(paths()), paths()),
        (of(amount()), of(amount()), of(amount())),
        of(vec(volume(), 0..4)),
    )
        .prop_map(|(mode, root_path, paths, (file, total, inodes), volumes)| {
            let (read_only, read_write, overlay, denied) = paths;
            FilesystemPolicy {
                mode,
                root_path,
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
    let environment =
        (of(select(modes)), of(texts())).prop_map(|(mode, names)| EnvironmentPolicy { mode, names });
    let command =
        (of(texts()), texts(), of(amount())).prop_map(|(allowed_patterns, blocked_patterns, max_length)| {
            CommandPolicy { allowed_patterns, blocked_patterns, max_length }
        });
    (syscalls, environment, command)
}

fn layout() -> impl Strategy<Value = LayoutPolicy> {
    let directory = (any::<String>(), of(amount()))
        .prop_map(|(path, max_bytes)| LayoutDirectory { path: path.into(), max_bytes });
    let directories = prop::collection::vec(directory, 0..3);
    (of(any::<bool>()), directories, of(texts())).prop_map(|(read_only_workspace, directories, paths)| {
        let executable_paths = paths.map(|paths| paths.into_iter().map(Into::into).collect());
        LayoutPolicy { read_only_workspace, directories, executable_paths }
    })
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

fn outcome() -> impl Strategy<Value = Outcome> {
    let reason = select(Reason::ALL.iter().copied().chain([Reason::Unknown]).collect::<Vec<_>>());
    prop_oneof![
        any::<i32>().prop_map(Outcome::Exited),
        any::<i32>().prop_map(Outcome::Signaled),
        Just(Outcome::TimedOut),
        Just(Outcome::Canceled),
        Just(Outcome::Oom),
        any::<String>().prop_map(Outcome::Limit),
        any::<String>().prop_map(Outcome::Violation),
        (reason, any::<String>()).prop_map(|(reason, message)| Outcome::Refused(Refusal { reason, message })),
        select(LostReason::ALL.to_vec()).prop_map(Outcome::Lost),
    ]
}

fn usage() -> impl Strategy<Value = Usage> {
    let network = proptest::option::of(network_usage());
    (duration(), amount(), duration(), amount(), amount(), amount(), network).prop_map(
        |(cpu_time, peak_memory_bytes, wall_time, read_bytes, written_bytes, peak_processes, network)| {
            Usage {
                cpu_time,
                peak_memory_bytes,
                wall_time,
                read_bytes,
                written_bytes,
                peak_processes,
                network,
            }
        },
    )
}

fn network_usage() -> impl Strategy<Value = NetworkUsage> {
    (amount(), amount(), amount(), amount(), amount()).prop_map(
        |(connections, refused, sent_bytes, received_bytes, unreachable_attempts)| NetworkUsage {
            connections,
            refused,
            sent_bytes,
            received_bytes,
            unreachable_attempts,
        },
    )
}

fn receipt() -> impl Strategy<Value = Receipt> {
    (count(), count(), count(), count(), count()).prop_map(
        |(processes, mounts, cgroups, sockets, directories)| Receipt {
            processes,
            mounts,
            cgroups,
            sockets,
            directories,
        },
    )
}

fn violations() -> impl Strategy<Value = Violations> {
    let path = || proptest::option::of("[a-z/]+");
    let violation =
        (any::<String>(), any::<String>(), any::<i32>(), uniform6(any::<u64>()), amount(), path()).prop_map(
            |(kind, syscall, nr, args, count, path)| CountedViolation {
                violation: Violation { kind, syscall, nr, args, path },
                count,
            },
        );
    (vec(violation, 0..4), amount()).prop_map(|(seen, total)| Violations { seen, total })
}

fn changes() -> impl Strategy<Value = Changes> {
    let kinds = select(vec![ChangeKind::Added, ChangeKind::Changed, ChangeKind::Removed]);
    let files =
        vec![ChangedFile::Regular, ChangedFile::Directory, ChangedFile::Symlink, ChangedFile::Special];
    let change = (kinds, select(files), amount(), any::<String>())
        .prop_map(|(kind, file, size, path)| Change { kind, file, size, path });
    let state = select(vec![ChangesState::Applied, ChangesState::Dropped, ChangesState::Held]);
    (state, amount(), amount(), amount(), vec(change, 0..4)).prop_map(
        |(state, added, changed, removed, entries)| Changes { state, added, changed, removed, entries },
    )
}

fn result() -> impl Strategy<Value = RunResult> {
    let output = (any::<i64>(), any::<bool>(), any::<i64>());
    (
        outcome(),
        usage(),
        receipt(),
        any::<String>(),
        of(duration()),
        any::<bool>(),
        (texts(), texts()),
        output,
        (violations(), of(changes())),
    )
        .prop_map(
            |(
                outcome,
                usage,
                receipt,
                sandbox_root,
                setup_time,
                prepared,
                (unenforced, watched),
                output,
                (violations, changes),
            )| {
                RunResult {
                    outcome,
                    usage,
                    receipt,
                    sandbox_root,
                    setup_time,
                    prepared,
                    unenforced,
                    watched,
                    output_bytes: output.0,
                    output_truncated: output.1,
                    output_total: output.2,
                    violations,
                    changes,
                }
            },
        )
}

fn ended() -> impl Strategy<Value = EndedRun> {
    (result(), any::<i32>(), of(timestamp()), timestamp(), of("[a-z ]{1,9}")).prop_map(
        |(result, attempt, started_at, ended_at, cancel_reason)| EndedRun {
            result,
            attempt,
            started_at,
            ended_at,
            cancel_reason,
        },
    )
}

/// The message after it was encoded and decoded.
fn sent<M: Message + Default>(message: &M) -> M {
    M::decode(message.encode_to_vec().as_slice()).unwrap()
}

proptest! {
    #[test]
    fn run_spec_round_trips(spec in spec()) {
        prop_assert_eq!(RunSpec::try_from(sent(&internal::RunSpec::from(&spec))), Ok(spec));
    }

    #[test]
    fn ended_run_round_trips(ended in ended()) {
        prop_assert_eq!(EndedRun::try_from(sent(&internal::EndedRun::from(&ended))), Ok(ended));
    }
}

fn sample_spec() -> RunSpec {
    RunSpec {
        command: CommandSpec::new(["true"]),
        mode: Mode::Bwrap,
        network: None,
        limits: Limits::default(),
        requested_limits: LimitsRequest::default(),
        policy: Policy::default(),
        ends_with_caller: false,
        tool: None,
        transaction: None,
    }
}

fn sample_ended() -> EndedRun {
    EndedRun {
        result: RunResult {
            outcome: Outcome::Exited(0),
            usage: Usage::default(),
            receipt: Receipt::default(),
            sandbox_root: "/s".into(),
            setup_time: None,
            prepared: false,
            unenforced: Vec::new(),
            watched: Vec::new(),
            output_bytes: 0,
            output_truncated: false,
            output_total: 0,
            violations: Violations::default(),
            changes: None,
        },
        attempt: 1,
        started_at: None,
        ended_at: OffsetDateTime::UNIX_EPOCH,
        cancel_reason: None,
    }
}

fn spec_error(change: impl Fn(&mut internal::RunSpec)) -> InvalidField {
    let mut wire = internal::RunSpec::from(&sample_spec());
    change(&mut wire);
    RunSpec::try_from(wire).unwrap_err()
}

fn ended_error(change: impl Fn(&mut internal::RunResult)) -> InvalidField {
    let mut wire = internal::EndedRun::from(&sample_ended());
    change(wire.result.as_mut().unwrap());
    EndedRun::try_from(wire).unwrap_err()
}

#[test]
fn malformed_spec_is_refused_by_field() {
    type Change = fn(&mut internal::RunSpec);
    let changes: [(&str, Change); 10] = [
        ("command", |spec| spec.command = None),
        ("command.terminal.rows", |spec| {
            spec.command.as_mut().unwrap().terminal = Some(v1::Terminal { columns: 80, rows: -1 });
        }),
        ("mode", |spec| spec.mode = 0),
        ("mode", |spec| spec.mode = 99),
        ("network", |spec| spec.network = 99),
        ("limits", |spec| spec.limits = None),
        ("limits.pids", |spec| spec.limits.as_mut().unwrap().pids = None),
        ("requested_limits.timeout", |spec| {
            let timeout = prost_types::Duration { seconds: 0, nanos: -1 };
            spec.requested_limits.as_mut().unwrap().timeout = Some(timeout);
        }),
        ("policy", |spec| spec.policy = None),
        ("policy.isolation_level", |spec| spec.policy.as_mut().unwrap().isolation_level = 99),
    ];
    for (field, change) in changes {
        assert_eq!(spec_error(change).field, field);
    }
    assert_eq!(spec_error(|spec| spec.mode = 99).to_string(), "mode: unknown value 99");
}

#[test]
fn malformed_result_is_refused_by_field() {
    type Change = fn(&mut internal::RunResult);
    let changes: [(&str, Change); 6] = [
        ("result.outcome", |result| result.outcome = None),
        ("result.outcome.kind", |result| result.outcome = Some(v1::Outcome { kind: None })),
        ("result.usage.cpu_time", |result| result.usage.as_mut().unwrap().cpu_time = None),
        ("result.receipt.mounts", |result| result.receipt.as_mut().unwrap().mounts = -1),
        ("result.setup_time", |result| {
            result.setup_time = Some(prost_types::Duration { seconds: -1, nanos: 0 });
        }),
        ("result.violations[0].args", |result| result.violations = vec![v1::ViolationEvent::default()]),
    ];
    for (field, change) in changes {
        assert_eq!(ended_error(change).field, field);
    }
}

#[test]
fn absent_message_is_refused_by_field() {
    let wire = internal::EndedRun { result: None, ..internal::EndedRun::from(&sample_ended()) };
    assert_eq!(EndedRun::try_from(wire).unwrap_err().field, "result");
    let wire = internal::EndedRun { end_time: None, ..internal::EndedRun::from(&sample_ended()) };
    assert_eq!(EndedRun::try_from(wire).unwrap_err().field, "end_time");
}

#[test]
fn amount_above_wire_range_is_refused() {
    let mut spec = sample_spec();
    spec.limits.memory_bytes = u64::MAX;
    let error = RunSpec::try_from(internal::RunSpec::from(&spec)).unwrap_err();
    assert_eq!(error.field, "limits.memory_bytes");

    let mut spec = sample_spec();
    spec.limits.timeout = Duration::MAX;
    assert_eq!(RunSpec::try_from(internal::RunSpec::from(&spec)).unwrap_err().field, "limits.timeout");

    let mut ended = sample_ended();
    ended.result.usage.read_bytes = i64::MAX.unsigned_abs() + 1;
    let error = EndedRun::try_from(internal::EndedRun::from(&ended)).unwrap_err();
    assert_eq!(error.field, "result.usage.read_bytes");
}

#[test]
fn unknown_reason_word_is_accepted() {
    let mut wire = internal::EndedRun::from(&sample_ended());
    let refused = v1::Refused { reason: "FROM_THE_FUTURE".into(), message: "later".into() };
    let kind = Some(v1::outcome::Kind::Refused(refused));
    wire.result.as_mut().unwrap().outcome = Some(v1::Outcome { kind });
    let refusal = Refusal { reason: Reason::Unknown, message: "later".into() };
    assert_eq!(EndedRun::try_from(wire).unwrap().result.outcome, Outcome::Refused(refusal));
}

#[test]
fn environment_order_does_not_matter() {
    let env = BTreeMap::from([("A".to_owned(), "1".to_owned()), ("B".to_owned(), "2".to_owned())]);
    let mut spec = sample_spec();
    spec.command.env = env.clone();
    let read = RunSpec::try_from(internal::RunSpec::from(&spec)).unwrap();
    assert_eq!(read.command.env, env);
}
