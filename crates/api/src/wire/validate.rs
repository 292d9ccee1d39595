//! Validation of requests, field by field, before anything is stored. Pure.

use std::{
    collections::{BTreeMap, HashMap},
    path::{Component, Path},
    sync::Arc,
    time::Duration,
};

use codelia_policy::{Ceilings, Limit, LimitsRequest, Policy, Profile, Profiles};
use codelia_proto::{duration_from_proto, v1};
use codelia_store::Scope;
use codelia_types::{
    CommandSpec, Mode, NetworkMode, SecretEnv, TerminalSize, ToolId, TransactionMode, duration,
};
use prost::Message;
use time::OffsetDateTime;

use super::{
    resource_name::{self, TenantName},
    words,
};
use crate::error::ApiError;

const MAX_ARGS: usize = 10_000;
const MAX_ENV: usize = 1_000;
/// The kernel's limit for one argument or variable: 128 KiB with the closing NUL.
const MAX_STRING: usize = 128 * 1024 - 1;
/// Maximum bytes of all arguments and variables together.
const MAX_STRINGS: usize = 1024 * 1024;
const MAX_PATH: usize = 4095;
const MAX_LABELS: usize = 64;
const MAX_LABEL_KEY: usize = 63;
const MAX_LABEL_VALUE: usize = 255;
const MAX_IDEMPOTENCY_KEY: usize = 128;
const MAX_DISPLAY_NAME: usize = 63;
const MAX_REASON: usize = 1000;
const MAX_TERMINAL_SIDE: u16 = 1000;
const MAX_SIGNAL: i32 = 64;
const MAX_RETRIES: i32 = 10;
const MAX_STDIN: usize = 1024 * 1024;
/// Maximum bytes of a policy that is validated on the async runtime.
const MAX_INLINE_POLICY: usize = 4096;
/// The earliest second of a protobuf timestamp.
const YEAR_ONE: i64 = -62_135_596_800;

type Checked<T> = Result<T, ApiError>;

fn invalid<T>(field: &str, message: impl Into<String>) -> Checked<T> {
    Err(ApiError::invalid(field, message))
}

fn no_nul(field: &str, text: &str) -> Checked<()> {
    if text.contains('\0') { invalid(field, "must not contain NUL bytes") } else { Ok(()) }
}

fn at_most(field: &str, unit: &str, count: usize, max: usize) -> Checked<()> {
    if count > max { invalid(field, format!("maximum is {max} {unit}")) } else { Ok(()) }
}

/// Validates a command and its secret variables; the paths of its fields start with `command`.
pub(crate) fn command(wire: Option<v1::CommandSpec>) -> Checked<(CommandSpec, SecretEnv)> {
    let Some(wire) = wire else { return invalid("command", "required") };
    check_not_from_response(&wire)?;
    check_argv(&wire.argv)?;
    check_env("command.env", &wire.env)?;
    check_env("command.secret_env", &wire.secret_env)?;
    at_most(
        "command.secret_env",
        "variables with `env`",
        wire.env.len() + wire.secret_env.len(),
        MAX_ENV,
    )?;
    if let Some(name) = wire.secret_env.keys().find(|name| wire.env.contains_key(*name)) {
        return invalid(
            "command.secret_env",
            format!("{name} is also in `env`; set it in one of them"),
        );
    }
    let variables =
        wire.env.iter().chain(&wire.secret_env).map(|(name, value)| name.len() + value.len());
    let size = wire.argv.iter().map(String::len).chain(variables).sum();
    at_most("command", "bytes of arguments and environment together", size, MAX_STRINGS)?;
    check_working_directory(&wire.working_directory)?;
    let secret_env = SecretEnv(wire.secret_env.into_iter().collect());
    let command = CommandSpec {
        argv: wire.argv,
        env: wire.env.into_iter().collect(),
        working_directory: wire.working_directory,
        terminal: wire.terminal.map(|size| terminal("command.terminal", size)).transpose()?,
        stdin: wire.stdin,
        secret_env_names: secret_env.0.keys().cloned().collect(),
    };
    Ok((command, secret_env))
}

/// A command that the server returned lacks values or arguments: it must not be run by mistake.
fn check_not_from_response(wire: &v1::CommandSpec) -> Checked<()> {
    let set = [
        ("command.env_names", !wire.env_names.is_empty()),
        ("command.secret_env_names", !wire.secret_env_names.is_empty()),
        ("command.argv_truncated", wire.argv_truncated),
    ];
    match set.into_iter().find(|(_, is_set)| *is_set) {
        Some((field, _)) => {
            invalid(field, "only for responses; send the whole command and clear this field")
        }
        None => Ok(()),
    }
}

fn check_argv(argv: &[String]) -> Checked<()> {
    const FIELD: &str = "command.argv";
    if argv.first().is_none_or(String::is_empty) {
        return invalid(FIELD, "must name a program");
    }
    at_most(FIELD, "arguments", argv.len(), MAX_ARGS)?;
    argv.iter().try_for_each(|arg| {
        at_most(FIELD, "bytes per argument", arg.len(), MAX_STRING)?;
        no_nul(FIELD, arg)
    })
}

fn check_env(field: &str, env: &HashMap<String, String>) -> Checked<()> {
    at_most(field, "variables", env.len(), MAX_ENV)?;
    env.iter().try_for_each(|(name, value)| {
        if name.is_empty() || name.contains('=') {
            return invalid(field, "names must not be empty or contain `=`");
        }
        at_most(field, "bytes per variable", name.len() + 1 + value.len(), MAX_STRING)?;
        no_nul(field, name)?;
        no_nul(field, value)
    })
}

fn check_working_directory(path: &str) -> Checked<()> {
    const FIELD: &str = "command.working_directory";
    at_most(FIELD, "bytes", path.len(), MAX_PATH)?;
    no_nul(FIELD, path)?;
    let inside = Path::new(path)
        .components()
        .all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
    if inside {
        Ok(())
    } else {
        invalid(FIELD, "must be relative to the workspace and must not contain `..`")
    }
}

/// Validates the size of a terminal.
pub(crate) fn terminal(field: &str, wire: v1::Terminal) -> Checked<TerminalSize> {
    let side = |name: &str, value: i32| match u16::try_from(value) {
        Ok(value @ 1..=MAX_TERMINAL_SIDE) => Ok(value),
        _ => invalid(&format!("{field}.{name}"), format!("must be 1 to {MAX_TERMINAL_SIDE}")),
    };
    Ok(TerminalSize { columns: side("columns", wire.columns)?, rows: side("rows", wire.rows)? })
}

/// Validates the limits that are requested for a run. Those of the session's files are not a run's.
pub(crate) fn run_limits(wire: Option<v1::Limits>) -> Checked<LimitsRequest> {
    let limits = limits(wire)?;
    let of_session = [(Limit::DiskBytes, limits.disk_bytes), (Limit::Inodes, limits.inodes)];
    match of_session.into_iter().find(|(_, requested)| requested.is_some()) {
        Some((limit, _)) => Err(ApiError::invalid(
            limit.field(),
            "is a limit of the session; set it when the session is created",
        )),
        None => Ok(limits),
    }
}

/// Validates requested limits. Admission compares them with the ceilings.
pub(crate) fn limits(wire: Option<v1::Limits>) -> Checked<LimitsRequest> {
    let limits = LimitsRequest::try_from(&wire.unwrap_or_default());
    let limits =
        limits.or_else(|error| invalid(&format!("limits.{}", error.field), error.message))?;
    match limits.amounts().find(|(_, amount)| *amount == Some(0)) {
        Some((limit, _)) => invalid(limit.field(), "must be more than zero"),
        None => Ok(limits),
    }
}

/// Whether a policy is too large to be validated on the async runtime: it is long, or has patterns
/// to compile.
pub(crate) fn is_large_policy(wire: Option<&v1::Policy>) -> bool {
    let Some(wire) = wire else { return false };
    let has_patterns = wire.command.as_ref().is_some_and(|command| {
        command.allowed_patterns.is_some() || !command.blocked_patterns.is_empty()
    });
    has_patterns || wire.encoded_len() > MAX_INLINE_POLICY
}

/// Validates a policy; the paths of its fields start with `policy`.
pub(crate) fn policy(wire: Option<v1::Policy>, ceilings: &Ceilings) -> Checked<Policy> {
    let policy = Policy::try_from(wire.unwrap_or_default())?;
    policy.validate(ceilings)?;
    Ok(policy)
}

/// Validates a policy of a scope, which may delegate fields.
pub(crate) fn scope_policy(wire: Option<v1::Policy>, ceilings: &Ceilings) -> Checked<Policy> {
    let policy = Policy::try_from(wire.unwrap_or_default())?;
    policy.validate_scope(ceilings)?;
    Ok(policy)
}

/// Validates the name of a project; `None` if empty.
pub(crate) fn project(field: &str, text: String) -> Checked<Option<String>> {
    short_name(field, text)
}

/// Validates a name that a caller chooses; `None` if empty.
fn short_name(field: &str, text: String) -> Checked<Option<String>> {
    if text.is_empty() {
        return Ok(None);
    }
    if !resource_name::is_alias(&text) {
        return invalid(field, "must match `[a-z0-9-]{1,63}` and must not be `-` or a UUID");
    }
    Ok(Some(text))
}

/// The profile of this name; `None` without a name.
pub(crate) fn profile(name: &str, profiles: &Profiles) -> Checked<Option<Arc<Profile>>> {
    match profiles.get(name) {
        _ if name.is_empty() => Ok(None),
        Some(profile) => Ok(Some(profile.clone())),
        None => invalid("profile", format!("unknown; known are: {}", profiles.names())),
    }
}

fn duration(field: &str, wire: &prost_types::Duration) -> Checked<Duration> {
    match duration_from_proto(wire) {
        Ok(Duration::ZERO) => invalid(field, "must be more than zero"),
        Ok(duration) => Ok(duration),
        Err(_) => invalid(field, "must not be negative or malformed"),
    }
}

/// Validates a time to live or to wait: more than zero, at most `max`; `None` if unset.
pub(crate) fn ttl(
    field: &str,
    wire: Option<prost_types::Duration>,
    max: Duration,
) -> Checked<Option<Duration>> {
    let Some(wire) = wire else { return Ok(None) };
    let ttl = duration(field, &wire)?;
    if ttl > max {
        return invalid(field, format!("maximum is {}", duration::text(max)));
    }
    Ok(Some(ttl))
}

/// Validates an alias; `None` if empty.
pub(crate) fn alias(text: String) -> Checked<Option<String>> {
    short_name("alias", text)
}

/// Validates labels and sorts them.
pub(crate) fn labels(wire: HashMap<String, String>) -> Checked<BTreeMap<String, String>> {
    const FIELD: &str = "labels";
    at_most(FIELD, "entries", wire.len(), MAX_LABELS)?;
    for (key, value) in &wire {
        if key.is_empty() {
            return invalid(FIELD, "keys must not be empty");
        }
        at_most(FIELD, "bytes per key", key.len(), MAX_LABEL_KEY)?;
        at_most(FIELD, "bytes per value", value.len(), MAX_LABEL_VALUE)?;
        no_nul(FIELD, key)?;
        no_nul(FIELD, value)?;
    }
    Ok(wire.into_iter().collect())
}

/// Validates an idempotency key; `None` if empty.
pub(crate) fn idempotency_key(text: String) -> Checked<Option<String>> {
    at_most("idempotency_key", "bytes", text.len(), MAX_IDEMPOTENCY_KEY)?;
    no_nul("idempotency_key", &text)?;
    Ok((!text.is_empty()).then_some(text))
}

/// Validates the tool of a run, which belongs to the caller's tenant; `None` if empty.
pub(crate) fn tool(name: &str) -> Checked<Option<ToolId>> {
    if name.is_empty() {
        return Ok(None);
    }
    match resource_name::tool("tool", name)? {
        (TenantName::Own, id) => Ok(Some(id)),
        (TenantName::Id(_), _) => invalid("tool", "must have the form `tools/{tool}`"),
    }
}

/// Validates a display name.
pub(crate) fn display_name(text: String) -> Checked<String> {
    at_most("display_name", "bytes", text.len(), MAX_DISPLAY_NAME)?;
    no_nul("display_name", &text)?;
    Ok(text)
}

/// Validates the reason of an administrative decision.
pub(crate) fn reason(text: String) -> Checked<String> {
    if text.trim().is_empty() {
        return invalid("reason", "must not be empty: it is recorded with the decision");
    }
    at_most("reason", "bytes", text.len(), MAX_REASON)?;
    no_nul("reason", &text)?;
    Ok(text)
}

/// Validates a mode; `None` if unset.
pub(crate) fn mode(number: i32) -> Checked<Option<Mode>> {
    enum_value::<v1::SandboxMode>("mode", number).map(Into::into)
}

/// Validates a network mode; `None` if unset.
pub(crate) fn network(number: i32) -> Checked<Option<NetworkMode>> {
    enum_value::<v1::NetworkMode>("network", number).map(Into::into)
}

/// Validates a transaction mode; `None` if unset.
pub(crate) fn transaction(
    number: i32,
    hold_timeout: Option<prost_types::Duration>,
) -> Checked<Option<TransactionMode>> {
    let mode = enum_value::<v1::TransactionMode>("transaction", number)?;
    let timeout = ttl("hold_timeout", hold_timeout, TransactionMode::MAX_HOLD)?;
    if timeout.is_some() && mode != v1::TransactionMode::Hold {
        return invalid("hold_timeout", "only for TRANSACTION_MODE_HOLD; leave it unset");
    }
    Ok(mode.to_mode(timeout.unwrap_or(TransactionMode::DEFAULT_HOLD)))
}

/// Validates an enum value: unknown numbers are rejected, not ignored.
pub(crate) fn enum_value<E: TryFrom<i32>>(field: &str, number: i32) -> Checked<E> {
    E::try_from(number).or_else(|_| invalid(field, format!("unknown value {number}")))
}

/// Validates how often a run may be retried.
pub(crate) fn retries(count: i32) -> Checked<i32> {
    if (0..=MAX_RETRIES).contains(&count) {
        Ok(count)
    } else {
        invalid("retries", format!("must be 0 to {MAX_RETRIES}"))
    }
}

/// Validates the position to resume output from.
pub(crate) fn position(position: i64) -> Checked<i64> {
    if position >= 0 { Ok(position) } else { invalid("position", "must not be negative") }
}

/// Validates a signal number.
pub(crate) fn signal(number: i32) -> Checked<i32> {
    if (1..=MAX_SIGNAL).contains(&number) {
        Ok(number)
    } else {
        invalid("signal", format!("must be 1 to {MAX_SIGNAL}"))
    }
}

/// Validates the size of one message of standard input.
pub(crate) fn stdin(bytes: &[u8]) -> Checked<()> {
    at_most("stdin", "bytes", bytes.len(), MAX_STDIN)
}

/// Validates a timestamp; `None` if unset.
pub(crate) fn time(
    field: &str,
    wire: Option<prost_types::Timestamp>,
) -> Checked<Option<OffsetDateTime>> {
    let Some(wire) = wire else { return Ok(None) };
    let nanos = i128::from(wire.seconds) * 1_000_000_000 + i128::from(wire.nanos);
    let time = OffsetDateTime::from_unix_timestamp_nanos(nanos).ok();
    let in_range = wire.seconds >= YEAR_ONE && (0..1_000_000_000).contains(&wire.nanos);
    match time.filter(|_| in_range) {
        Some(time) => Ok(Some(time)),
        None => invalid(field, "not a valid timestamp"),
    }
}

/// Validates a quota; `None` if unset.
pub(crate) fn quota(field: &str, value: Option<i64>) -> Checked<Option<i64>> {
    match value {
        Some(value) if value <= 0 => invalid(field, "must be more than zero"),
        value => Ok(value),
    }
}

/// The scope with a number of the protocol.
pub(crate) fn scope(number: i32) -> Checked<Scope> {
    match words::parse("scopes", number)? {
        Some(scope) => Ok(scope),
        None => invalid("scopes", "must not contain SCOPE_UNSPECIFIED"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field<T>(result: Checked<T>) -> String {
        let error = result.err().expect("accepted");
        error
            .invalid_field()
            .unwrap_or_else(|| panic!("rejected for another reason: {error:?}"))
            .to_owned()
    }

    fn spec(argv: &[&str]) -> v1::CommandSpec {
        v1::CommandSpec { argv: argv.iter().map(|&arg| arg.into()).collect(), ..Default::default() }
    }

    fn with_env(env: impl IntoIterator<Item = (String, String)>) -> v1::CommandSpec {
        v1::CommandSpec { env: env.into_iter().collect(), ..spec(&["true"]) }
    }

    #[test]
    fn plain_command_is_accepted() {
        let wire = v1::CommandSpec {
            working_directory: "a/./b".into(),
            stdin: true,
            ..spec(&["sh", "-c", ""])
        };
        let (command, _) = command(Some(wire)).unwrap();
        assert_eq!(command.argv, ["sh", "-c", ""]);
        assert!(command.stdin);
    }

    #[test]
    fn secret_variables_are_checked_like_others() {
        let with = |env: &[(&str, &str)], secret: &[(&str, &str)]| {
            let map =
                |pairs: &[(&str, &str)]| pairs.iter().map(|&(k, v)| (k.into(), v.into())).collect();
            command(Some(v1::CommandSpec {
                env: map(env),
                secret_env: map(secret),
                ..spec(&["true"])
            }))
        };
        let (command, secrets) = with(&[("A", "1")], &[("C", "3"), ("B", "2")]).unwrap();
        assert_eq!(
            (command.env.len(), command.secret_env_names),
            (1, vec!["B".into(), "C".into()])
        );
        assert_eq!(secrets.0["B"], "2");
        for bad in
            [("", "x"), ("A=B", "x"), ("A\0", "x"), ("A", "\0"), ("A", &"x".repeat(MAX_STRING))]
        {
            assert_eq!(field(with(&[], &[bad])), "command.secret_env");
        }
        assert_eq!(field(with(&[("A", "1")], &[("A", "2")])), "command.secret_env");
        let (big, half) = ("x".repeat(MAX_STRINGS / 10), ["A", "B", "C", "D", "E"]);
        let plain = half.map(|name| (name, big.as_str()));
        let secret = ["F", "G", "H", "I", "J", "K"].map(|name| (name, big.as_str()));
        assert!(with(&plain, &[]).is_ok());
        assert_eq!(field(with(&plain, &secret)), "command");
    }

    #[test]
    fn command_of_a_response_is_rejected() {
        let bad = v1::CommandSpec { env_names: vec!["A".into()], ..spec(&["true"]) };
        assert_eq!(field(command(Some(bad))), "command.env_names");
        let bad = v1::CommandSpec { secret_env_names: vec!["A".into()], ..spec(&["true"]) };
        assert_eq!(field(command(Some(bad))), "command.secret_env_names");
        let bad = v1::CommandSpec { argv_truncated: true, ..spec(&["true"]) };
        assert_eq!(field(command(Some(bad))), "command.argv_truncated");
    }

    #[test]
    fn command_without_program_or_with_bad_arguments_is_rejected() {
        assert_eq!(field(command(None)), "command");
        let huge = "x".repeat(MAX_STRING + 1);
        for bad in [&[][..], &[""], &["a\0b"], &["true", "\0"], &["true", &huge]] {
            assert_eq!(field(command(Some(spec(bad)))), "command.argv");
        }
        let many = vec!["x"; MAX_ARGS + 1];
        assert_eq!(field(command(Some(spec(&many)))), "command.argv");
    }

    #[test]
    fn bad_environment_is_rejected() {
        for (name, value) in [("", "x"), ("A=B", "x"), ("A\0", "x"), ("A", "\0")] {
            assert_eq!(
                field(command(Some(with_env([(name.into(), value.into())])))),
                "command.env"
            );
        }
        let million = (0..1_000_000).map(|n| (format!("V{n}"), String::new()));
        assert_eq!(field(command(Some(with_env(million)))), "command.env");
    }

    #[test]
    fn oversized_command_is_rejected() {
        let big = "x".repeat(MAX_STRING);
        assert_eq!(field(command(Some(spec(&[big.as_str(); 9])))), "command");
    }

    #[test]
    fn working_directory_must_stay_in_workspace() {
        for bad in ["/", "/etc", "..", "a/../b", "a\0"] {
            let wire = v1::CommandSpec { working_directory: bad.into(), ..spec(&["true"]) };
            assert_eq!(field(command(Some(wire))), "command.working_directory", "{bad:?}");
        }
    }

    #[test]
    fn terminal_size_is_bounded() {
        for (columns, rows, expected) in [
            (0, 1, "command.terminal.columns"),
            (1001, 1, "command.terminal.columns"),
            (80, -1, "command.terminal.rows"),
        ] {
            let wire = v1::CommandSpec {
                terminal: Some(v1::Terminal { columns, rows }),
                ..spec(&["true"])
            };
            assert_eq!(field(command(Some(wire))), expected);
        }
        assert!(terminal("resize", v1::Terminal { columns: 1000, rows: 1 }).is_ok());
    }

    #[test]
    fn negative_limits_and_durations_are_rejected_by_field() {
        let negative = Some(prost_types::Duration { seconds: -1, nanos: 0 });
        assert_eq!(
            field(limits(Some(v1::Limits { timeout: negative, ..Default::default() }))),
            "limits.timeout"
        );
        let wire = v1::Limits { memory_bytes: Some(-1), ..Default::default() };
        assert_eq!(field(limits(Some(wire))), "limits.memory_bytes");
        assert_eq!(field(ttl("ttl", negative, Duration::MAX)), "ttl");
        let zero = Some(prost_types::Duration::default());
        assert_eq!(field(ttl("idle_ttl", zero, Duration::MAX)), "idle_ttl");
        let long = Some(prost_types::Duration { seconds: 11, nanos: 0 });
        assert_eq!(field(ttl("ttl", long, Duration::from_secs(10))), "ttl");
    }

    #[test]
    fn labels_are_bounded() {
        let one = |key: &str, value: &str| HashMap::from([(key.to_owned(), value.to_owned())]);
        for bad in [
            one("", "x"),
            one(&"k".repeat(64), ""),
            one("k", &"v".repeat(256)),
            one("k\0", ""),
            one("k", "\0"),
        ] {
            assert_eq!(field(labels(bad)), "labels");
        }
        assert_eq!(
            field(labels((0..65).map(|n| (n.to_string(), String::new())).collect())),
            "labels"
        );
        assert!(labels(one(&"k".repeat(63), &"v".repeat(255))).is_ok());
    }

    #[test]
    fn large_policy_is_recognized() {
        let denying = |count| {
            let denied_paths = vec!["/opt/secret".to_owned(); count];
            let filesystem = v1::FilesystemPolicy { denied_paths, ..Default::default() };
            v1::Policy { filesystem: Some(filesystem), ..Default::default() }
        };
        assert!(!is_large_policy(None) && !is_large_policy(Some(&denying(10))));
        assert!(is_large_policy(Some(&denying(1000))));
        let command =
            v1::CommandPolicy { blocked_patterns: vec!["a".to_owned()], ..Default::default() };
        assert!(is_large_policy(Some(&v1::Policy {
            command: Some(command),
            ..Default::default()
        })));
        let long = policy(Some(denying(100_000)), &Ceilings::default());
        assert_eq!(field(long), "policy.filesystem.denied_paths");
    }

    #[test]
    fn numbers_out_of_range_are_rejected_by_field() {
        assert_eq!(field(mode(99)), "mode");
        assert_eq!(field(network(-1)), "network");
        assert_eq!(field(retries(11)), "retries");
        assert_eq!(field(retries(-1)), "retries");
        assert_eq!(field(position(-1)), "position");
        assert_eq!(field(signal(0)), "signal");
        assert_eq!(field(signal(65)), "signal");
        assert_eq!(field(quota("quotas.sessions", Some(0))), "quotas.sessions");
        assert_eq!(field(stdin(&vec![0; MAX_STDIN + 1])), "stdin");
    }

    #[test]
    fn names_and_keys_are_bounded() {
        assert_eq!(field(alias("A".into())), "alias");
        assert_eq!(field(idempotency_key("k".repeat(129))), "idempotency_key");
        assert_eq!(field(idempotency_key("\0".into())), "idempotency_key");
        assert_eq!(field(display_name("n".repeat(64))), "display_name");
        assert_eq!(idempotency_key(String::new()), Ok(None));
    }

    #[test]
    fn timestamp_out_of_range_is_rejected() {
        let at = |seconds, nanos| Some(prost_types::Timestamp { seconds, nanos });
        assert_eq!(field(time("created_after", at(i64::MAX, 0))), "created_after");
        assert_eq!(field(time("created_after", at(YEAR_ONE - 1, 0))), "created_after");
        assert_eq!(field(time("created_after", at(0, -1))), "created_after");
        assert_eq!(time("created_after", at(1, 0)).unwrap().unwrap().unix_timestamp(), 1);
    }
}
