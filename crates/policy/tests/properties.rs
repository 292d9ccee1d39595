//! Properties of every policy: parsing never panics, merging only tightens and is associative, and
//! a plan grants nothing that its policy does not.

#![allow(clippy::unwrap_used, reason = "test code")]

use std::{path::PathBuf, time::Duration};

use codelia_policy::{
    Ceilings, CommandPolicy, ContainerPolicy, EgressDecision, EgressRules, EnvironmentMode,
    EnvironmentPolicy, Field, FilesystemMode, FilesystemPolicy, Format, HostInfo, Ids,
    IsolationLevel, LayoutDirectory, LayoutPolicy, Limits, LoggingPolicy, Mount, NetworkPolicy,
    Plan, PlanTarget, Policy, ProcessPolicy, ResourcePolicy, RunSpec, Scopes, SyscallMode,
    SyscallPolicy, SyscallRules, VolumeMode, VolumeMount, syscalls,
};
use codelia_types::{CommandSpec, Mode, NetworkMode, RunId, SessionId};
use proptest::{option::of, prelude::*, sample::select};

const FORMATS: [Format; 3] = [Format::Json, Format::Yaml, Format::Toml];

fn paths() -> impl Strategy<Value = Vec<PathBuf>> {
    let path =
        select(vec!["/opt", "/opt/a", "/opt/a/b", "/srv", "/srv/c", "/usr/share/doc", "/etc/ssl"]);
    prop::collection::vec(path.prop_map(PathBuf::from), 0..4)
}

fn words(words: &'static [&'static str]) -> impl Strategy<Value = Vec<String>> {
    prop::collection::vec(select(words).prop_map(str::to_owned), 0..4)
}

fn filesystem() -> impl Strategy<Value = FilesystemPolicy> {
    let sizes = (of(1..5u64), of(1..5u64), of(1..5u64));
    let volumes = of(prop::collection::vec(volume(), 0..3));
    (of(any::<bool>()), of(paths()), of(paths()), of(paths()), paths(), sizes, volumes).prop_map(
        |(
            is_static,
            read_only_paths,
            read_write_paths,
            overlay_paths,
            denied_paths,
            sizes,
            volumes,
        )| {
            FilesystemPolicy {
                mode: is_static
                    .map(|it| if it { FilesystemMode::Static } else { FilesystemMode::Dynamic }),
                read_only_paths,
                read_write_paths,
                overlay_paths,
                denied_paths,
                max_file_bytes: sizes.0,
                max_total_bytes: sizes.1,
                max_inodes: sizes.2,
                volumes,
            }
        },
    )
}

fn volume() -> impl Strategy<Value = VolumeMount> {
    let mode = select(vec![VolumeMode::ReadOnly, VolumeMode::Copy, VolumeMode::Exclusive]);
    (select(vec!["a", "b"]), mode).prop_map(|(name, mode)| VolumeMount {
        name: name.to_owned(),
        path: PathBuf::from("/cache").join(name),
        mode,
    })
}

fn process() -> impl Strategy<Value = ProcessPolicy> {
    (of(1..5u64), of(any::<bool>()), of(any::<bool>()), of(paths()), of(any::<bool>())).prop_map(
        |(max_processes, allow_fork, allow_exec, allowed_executables, debug)| ProcessPolicy {
            max_processes,
            allow_fork,
            allow_exec,
            allowed_executables,
            debug,
        },
    )
}

/// Few labels, so that the patterns of two policies overlap.
const HOST_PATTERNS: &[&str] = &[
    "a.example",
    "*.example",
    "*.a.example",
    "b.a.example",
    "*",
    "ab*.example",
    "*bc.example",
    "*.a*.example",
    "b.*.example",
    "set:crates",
    "crates.io",
    "192.0.2.1",
];
const HOSTS: &[&str] = &[
    "a.example",
    "b.a.example",
    "c.b.a.example",
    "b.c.example",
    "example",
    "abc.example",
    "abbc.example",
    "ab.example",
    "x.ab.example",
    "crates.io",
    "static.crates.io",
    "other.org",
    "192.0.2.1",
    "192.0.2.2",
];

fn network() -> impl Strategy<Value = NetworkPolicy> {
    let mode = select(NetworkMode::ALL.to_vec());
    let hosts = || words(HOST_PATTERNS);
    let limits = (of(1..4u32), of(1..4u32), of(1..4u64), of(1..4u64), of(1..4u64));
    let lists = (of(hosts()), of(hosts()), hosts(), of(prop::collection::vec(1..4u16, 0..3)));
    (of(mode), lists, limits, of(words(&["a", "b"]))).prop_map(
        |(mode, lists, limits, credentials)| NetworkPolicy {
            mode,
            allowed_hosts: lists.0,
            ask_hosts: lists.1,
            blocked_hosts: lists.2,
            allowed_ports: lists.3,
            max_connections: limits.0,
            max_connections_per_second: limits.1,
            max_sent_bytes: limits.2,
            max_received_bytes: limits.3,
            idle_timeout: limits.4.map(Duration::from_secs),
            credentials,
            executables: None,
        },
    )
}

/// What a policy permits a host, least first. A policy without a list of hosts leaves it to others.
fn permission(policy: &NetworkPolicy, host: &str) -> u8 {
    let mut rules = EgressRules::from_policy(policy);
    rules.allowed_ports = vec![1];
    if policy.allowed_hosts.is_none() && policy.ask_hosts.is_none() {
        rules.allowed_hosts = HOSTS.iter().map(|&host| host.to_owned()).collect();
    }
    match rules.decide(host, 1) {
        EgressDecision::Allow(_) => 2,
        EgressDecision::Ask(_) => 1,
        EgressDecision::Blocked(_)
        | EgressDecision::HostNotAllowed
        | EgressDecision::PortNotAllowed => 0,
    }
}

fn resources() -> impl Strategy<Value = ResourcePolicy> {
    let cpus = of(prop::collection::vec(0..3u32, 1..3));
    (of(1..5u64), of(1..5u64), of(1..5u64), of(1..5u64), cpus).prop_map(
        |(cpu, memory, files, threads, cpus)| ResourcePolicy {
            max_cpu_time: cpu.map(Duration::from_secs),
            max_cpu_millicores: memory,
            max_wall_time: files.map(Duration::from_secs),
            max_memory_bytes: memory,
            max_open_files: files,
            max_threads: threads,
            max_output_bytes: cpu,
            max_tmp_bytes: threads,
            max_read_bytes_per_second: cpu,
            max_write_bytes_per_second: memory,
            max_reads_per_second: files,
            max_writes_per_second: threads,
            cpus,
            release_interval: cpu.map(Duration::from_secs),
        },
    )
}

fn syscall_policy() -> impl Strategy<Value = SyscallPolicy> {
    let mode = select(vec![SyscallMode::Allow, SyscallMode::Deny]);
    (of(mode), words(&["read", "write", "socket", "clone", "ptrace"]), of(1..5u32)).prop_map(
        |(mode, names, violation_limit)| {
            let names = if mode.is_some() { names } else { Vec::new() };
            SyscallPolicy { mode, names, violation_limit }
        },
    )
}

fn environment_and_command() -> impl Strategy<Value = (EnvironmentPolicy, CommandPolicy)> {
    let mode = select(vec![EnvironmentMode::Clean, EnvironmentMode::Explicit]);
    let patterns = words(&["^a", "^b", "c$"]);
    (of(mode), of(words(&["A", "B"])), of(patterns), words(&["x", "y"]), of(1..9u64)).prop_map(
        |(mode, names, allowed_patterns, blocked_patterns, max_length)| {
            let command = CommandPolicy { allowed_patterns, blocked_patterns, max_length };
            (EnvironmentPolicy { mode, names }, command)
        },
    )
}

fn logging() -> impl Strategy<Value = LoggingPolicy> {
    (of(any::<bool>()), of(any::<bool>()))
        .prop_map(|(signals, file_operations)| LoggingPolicy { signals, file_operations })
}

fn layout() -> impl Strategy<Value = LayoutPolicy> {
    let path = || select(vec!["a", "a/b", "a-b", "c"]).prop_map(PathBuf::from);
    let directory =
        (path(), of(1..4_u64)).prop_map(|(path, max_bytes)| LayoutDirectory { path, max_bytes });
    let directories = prop::collection::vec(directory, 0..3).prop_map(|mut directories| {
        directories.sort();
        directories.dedup_by(|a, b| a.path == b.path);
        directories
    });
    (of(any::<bool>()), directories, of(prop::collection::vec(path(), 0..3))).prop_map(
        |(read_only_workspace, directories, executable_paths)| LayoutPolicy {
            read_only_workspace,
            directories,
            executable_paths,
        },
    )
}

/// Boxed: several of them at once would not fit on the stack of a test.
fn policies() -> BoxedStrategy<Policy> {
    let level =
        of(select(vec![IsolationLevel::None, IsolationLevel::Process, IsolationLevel::Full]));
    let rest = (environment_and_command(), logging(), layout());
    (level, filesystem(), process(), network(), resources(), syscall_policy(), rest)
        .prop_map(
            |(
                isolation_level,
                filesystem,
                process,
                network,
                resources,
                syscalls,
                (pair, logging, layout),
            )| {
                let (environment, command) = pair;
                Policy {
                    isolation_level,
                    filesystem,
                    layout,
                    container: ContainerPolicy::default(),
                    process,
                    network,
                    resources,
                    syscalls,
                    environment,
                    command,
                    logging,
                    delegate: Vec::new(),
                }
            },
        )
        .boxed()
}

/// Policies of the three scopes, on the heap: their strategies are too large for a stack.
fn scope_policies() -> impl Strategy<Value = Vec<Option<Policy>>> {
    prop::collection::vec(of(policies().boxed()), 3)
}

fn delegable() -> Vec<&'static str> {
    Field::delegable().map(|field| field.path).collect()
}

fn scoped(policies: &[Option<Policy>]) -> Scopes<'_> {
    let of = |scope: usize| policies.get(scope).and_then(Option::as_ref);
    Scopes { organisation: of(0), project: of(1), user: of(2) }
}

fn spec(policy: Policy) -> RunSpec {
    RunSpec {
        limits: Limits::default().within(&policy.caps()),
        policy,
        ..RunSpec::new(CommandSpec::new(["true"]), Mode::Bwrap)
    }
}

fn plan(policy: &Policy) -> Option<Plan> {
    let target = PlanTarget {
        sandbox: RunId::generate(),
        session: SessionId::generate(),
        root: "/session".into(),
    };
    let ids = Ids { uid: 1, gid: 1 };
    Plan::isolated(target, &spec(policy.clone()), &HostInfo::fully_capable(), ids).ok()
}

fn allowed(plan: &Plan) -> &[String] {
    match &plan.security.as_ref().unwrap().syscalls {
        SyscallRules::Allow(names) => names,
        SyscallRules::Deny(_) => panic!("expected an allow-list"),
    }
}

/// The binds that a policy opens: all after the workspace's.
fn opened(plan: &Plan) -> Vec<(&PathBuf, bool)> {
    let workspace = plan.mounts.iter().position(|mount| mount.target() == plan.workspace).unwrap();
    let binds = plan.mounts[workspace + 1..].iter().filter_map(|mount| match mount {
        Mount::Bind { target, writable, .. } => Some((target, *writable)),
        _ => None,
    });
    binds.collect()
}

/// Checks that a plan with the policy `merged` grants nothing that one with `upper` does not.
fn is_tighter(upper: &Policy, merged: &Policy) -> Result<(), TestCaseError> {
    let (Some(wide), Some(narrow)) = (plan(upper), plan(merged)) else { return Ok(()) };
    for (path, writable) in opened(&narrow) {
        let covered =
            opened(&wide).iter().any(|(upper, w)| path.starts_with(upper) && *w >= writable);
        prop_assert!(covered, "{path:?} is not open above");
    }
    for mount in &wide.mounts {
        let Mount::Hidden { target, even_if_absent } = mount else { continue };
        // A secret is hidden only if a path around or below it is open.
        let seen = opened(&narrow)
            .iter()
            .any(|(path, _)| target.starts_with(path) || path.starts_with(target));
        let hidden = narrow.mounts.iter().any(|other| match other {
            Mount::Hidden { target: other, .. } => {
                target.starts_with(other) || other.starts_with(target)
            }
            _ => false,
        });
        prop_assert!(hidden || (!even_if_absent && !seen), "{mount:?} is visible");
    }
    prop_assert!(allowed(&narrow).iter().all(|name| allowed(&wide).contains(name)));
    prop_assert_eq!(&narrow.limits.within(&upper.caps()), &narrow.limits);
    let slower = |a: Option<u64>, b: Option<u64>| b.is_none_or(|b| a.is_some_and(|a| a <= b));
    prop_assert!(
        slower(narrow.io.read_bytes, wide.io.read_bytes)
            && slower(narrow.io.writes, wide.io.writes)
    );
    prop_assert!(
        wide.cpus.iter().flatten().count() == 0
            || narrow.cpus.iter().flatten().all(|cpu| wide
                .cpus
                .iter()
                .flatten()
                .any(|own| own == cpu))
    );
    if let Some(wide) = &wide.layout {
        let narrow = narrow.layout.as_ref().unwrap();
        prop_assert!(narrow.writable <= wide.writable && narrow.executable <= wide.executable);
        let is_open = |path: &PathBuf| {
            wide.mounts.iter().any(|own| own.writable && path.starts_with(&own.path))
        };
        let mut writable = narrow.mounts.iter().filter(|mount| mount.writable);
        prop_assert!(wide.writable || writable.all(|mount| is_open(&mount.path)));
    }
    if let Some(mode) = upper.network.mode {
        prop_assert!(narrow.network <= wide.network.max(mode));
    }
    let (wide, narrow) = (wide.security.unwrap(), narrow.security.unwrap());
    prop_assert!(
        narrow.fork <= wide.fork && narrow.exec <= wide.exec && narrow.debug <= wide.debug
    );
    prop_assert!(narrow.violation_limit <= wide.violation_limit);
    if let Some(programs) = wide.executables {
        let fewer = narrow.executables.unwrap();
        prop_assert!(fewer.iter().all(|program| programs.contains(program)));
    }
    Ok(())
}

proptest! {
    #[test]
    fn parsing_any_text_never_panics(text in any::<String>()) {
        for format in FORMATS {
            if let Ok(policy) = Policy::parse(&text, format) {
                let _ = policy.validate(&Ceilings::default());
            }
        }
    }

    #[test]
    fn parsing_broken_document_never_panics(policy in policies(), cut in 0..400usize, noise in any::<char>()) {
        for format in FORMATS {
            let mut text: Vec<char> = policy.write(format).unwrap().chars().collect();
            let cut = cut.min(text.len());
            text.insert(cut, noise);
            for text in [text.iter().collect::<String>(), text[..cut].iter().collect()] {
                if let Ok(policy) = Policy::parse(&text, format) {
                    let _ = policy.validate(&Ceilings::default());
                }
            }
        }
    }

    #[test]
    fn written_policy_parses_back(policy in policies()) {
        for format in FORMATS {
            prop_assert_eq!(&Policy::parse(&policy.write(format).unwrap(), format).unwrap(), &policy);
        }
    }

    #[test]
    fn merging_is_associative(a in policies(), b in policies(), c in policies()) {
        prop_assert_eq!(a.merge(&b).merge(&c), a.merge(&b.merge(&c)));
    }

    #[test]
    fn merging_is_idempotent(a in policies()) {
        let once = a.merge(&Policy::default());
        prop_assert_eq!(&once.merge(&a), &once);
        prop_assert_eq!(&Policy::default().merge(&a), &once);
    }

    #[test]
    fn merging_only_tightens(a in policies(), b in policies()) {
        let upper = a.with_defaults();
        is_tighter(&upper, &upper.merge(&b))?;
    }

    #[test]
    fn tenant_policy_never_widens(installation in policies(), mut tenant in policies(), session in policies()) {
        let installation = installation.as_installation();
        // What is refused in the policy of a tenant, because its default is less.
        let above = installation.clone().with_defaults();
        tenant.process.debug = tenant.process.debug.min(above.process.debug);
        tenant.syscalls.violation_limit = tenant.syscalls.violation_limit.min(above.syscalls.violation_limit);
        let most = installation.network.mode.unwrap_or(NetworkMode::None);
        tenant.network.mode = tenant.network.mode.map(|mode| mode.min(most));
        let (without, with) = (installation.merge(&session), installation.merge(&tenant).merge(&session));
        is_tighter(&without.clone().with_defaults(), &with.clone().with_defaults())?;
        // A session that was created before the policy of its tenant is restricted in the same way.
        let later = tenant.merge(&installation.merge(&session).with_defaults());
        is_tighter(&installation.merge(&session).with_defaults(), &later)?;
        for requested in [NetworkMode::None, NetworkMode::Proxy, NetworkMode::Host].map(Some) {
            let network = |policy: &Policy| policy.network.effective_mode(requested);
            prop_assert!(network(&with) <= network(&without));
        }
        for host in HOSTS {
            let without = permission(&installation.merge(&session).network, host);
            let with = permission(&installation.merge(&tenant).merge(&session).network, host);
            prop_assert!(with <= without, "{}: {:?} instead of {:?}", host, with, without);
        }
    }

    #[test]
    fn scopes_without_delegation_only_tighten(installation in policies().boxed(), scopes in scope_policies()) {
        let installation = installation.with_defaults();
        let effective = scoped(&scopes).effective(&installation);
        let merged = scopes.iter().flatten().fold(installation.merge(&Policy::default()), |upper, lower| upper.merge(lower));
        prop_assert_eq!(&effective, &merged);
        let mut above = installation.merge(&Policy::default());
        for count in 1..=3 {
            let mut some = scopes.clone();
            some[count..].fill(None);
            let below = scoped(&some).effective(&installation);
            is_tighter(&above, &below)?;
            above = below;
        }
    }

    #[test]
    fn delegation_widens_only_delegated_fields(
        installation in policies().boxed(),
        scopes in scope_policies(),
        delegated in prop::collection::vec(select(delegable()), 0..4),
        to_user in prop::collection::vec(select(delegable()), 0..2),
    ) {
        let installation = installation.with_defaults();
        let mut delegating = scopes.clone();
        for (scope, fields) in [(0, &delegated), (1, &to_user)] {
            if let Some(policy) = &mut delegating[scope] {
                policy.delegate = fields.iter().map(|&field| field.to_owned()).collect();
            }
        }
        let strict = scoped(&scopes).effective(&installation);
        let effective = scoped(&delegating).effective(&installation);
        // Never beyond the installation.
        is_tighter(&installation, &effective)?;
        // Never tighter than without delegation, and equal in every other field.
        let (before, after) = (strict.set_fields(), effective.set_fields());
        for field in before.keys().chain(after.keys()) {
            let is_delegated = delegated.contains(&field.as_str()) || to_user.contains(&field.as_str());
            prop_assert!(is_delegated || before.get(field) == after.get(field), "{field} changed");
        }
        // What a project delegates stays within its organisation, unless that delegates the field.
        if delegated.is_empty() {
            let organisation = scoped(&[scopes[0].clone(), None, None]).effective(&installation);
            is_tighter(&organisation, &effective)?;
        }
    }

    #[test]
    fn delegation_gives_what_the_lower_scope_sets(memory in 1..9u64, more in 1..99u64, most in 1..99u64) {
        let with = |memory| {
            let resources = ResourcePolicy { max_memory_bytes: Some(memory), ..ResourcePolicy::default() };
            Policy { resources, ..Policy::default() }
        };
        let mut organisation = with(memory);
        organisation.delegate = vec!["resources.max_memory_bytes".to_owned()];
        let effective = scoped(&[Some(organisation), Some(with(more)), None]).effective(&with(most));
        prop_assert_eq!(effective.resources.max_memory_bytes, Some(more.min(most)));
    }

    #[test]
    fn merged_host_permission_is_lesser_of_both(a in network(), b in network()) {
        let policy = |network: &NetworkPolicy| Policy { network: network.clone(), ..Policy::default() };
        let merged = policy(&a).merge(&policy(&b)).network;
        for host in HOSTS {
            let expected = permission(&a, host).min(permission(&b, host));
            prop_assert_eq!(permission(&merged, host), expected, "{}: {:?}", host, merged);
        }
    }

    #[test]
    fn merged_egress_is_within_both(a in network(), b in network()) {
        let policy = |network: &NetworkPolicy| Policy { network: network.clone(), ..Policy::default() };
        let merged = policy(&a).as_installation().merge(&policy(&b));
        let (upper, merged) = (policy(&a).as_installation(), EgressRules::from_policy(&merged.network));
        let above = EgressRules::from_policy(&upper.network);
        prop_assert!(merged.credentials.iter().all(|name| above.credentials.contains(name)));
        let bounded = |limit: Option<u64>, above: Option<u64>| above.is_none_or(|above| limit <= Some(above));
        prop_assert!(bounded(merged.limits.sent_bytes, above.limits.sent_bytes));
        prop_assert!(bounded(merged.limits.received_bytes, above.limits.received_bytes));
        prop_assert!(a.max_connections.is_none_or(|max| merged.limits.connections <= max));
        prop_assert!(a.max_connections_per_second.is_none_or(|max| merged.limits.connections_per_second <= max));
        prop_assert!(a.idle_timeout.is_none_or(|max| merged.limits.idle_timeout <= max));
        prop_assert!(a.allowed_ports.is_none_or(|ports| merged.allowed_ports.iter().all(|port| ports.contains(port))));
    }

    #[test]
    fn plan_grants_only_what_policy_allows(policy in policies()) {
        let Some(plan) = plan(&policy) else { return Ok(()) };
        let files = &policy.filesystem;
        let listed = |list: &Option<Vec<PathBuf>>, path| list.iter().flatten().any(|listed| listed == path);
        for (path, writable) in opened(&plan) {
            let list = if writable { &files.read_write_paths } else { &files.read_only_paths };
            prop_assert!(listed(list, path), "{path:?} is not listed");
            prop_assert!(!files.denied_paths.iter().any(|denied| path.starts_with(denied)));
        }
        for mount in &plan.mounts {
            let Mount::Overlay { source, target, .. } = mount else { continue };
            prop_assert!(source == target && listed(&files.overlay_paths, target), "{target:?} is not listed");
            prop_assert!(!files.denied_paths.iter().any(|denied| target.starts_with(denied)));
        }
        for denied in &files.denied_paths {
            let hidden = plan.mounts.iter().rposition(|mount| *mount == Mount::Hidden { target: denied.clone(), even_if_absent: true });
            let last_bind = plan.mounts.iter().rposition(|mount| matches!(mount, Mount::Bind { .. }));
            prop_assert!(hidden > last_bind, "{denied:?} could be uncovered");
        }
        prop_assert!(plan.network == NetworkMode::None || policy.network.mode == Some(plan.network));
        prop_assert!(plan.network != NetworkMode::Host, "nobody requested it");
        prop_assert_eq!(plan.egress.is_some(), plan.network == NetworkMode::Proxy);
        prop_assert!(plan.unenforced.is_empty());
        let debug = policy.process.debug.unwrap_or(false);
        prop_assert!(allowed(&plan).iter().all(|name| syscalls::is_allowed(name, debug)));
    }

    #[test]
    fn what_no_host_can_enforce_has_no_plan(policy in policies()) {
        let mut by_program = policy.clone();
        by_program.network.executables = Some(vec!["/usr/bin/git".into()]);
        prop_assert!(plan(&by_program).is_none());
        if policy.isolation_level == Some(IsolationLevel::None) {
            prop_assert!(plan(&policy).is_none());
        }
    }
}
