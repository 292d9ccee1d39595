//! Commands, outcomes, usage, receipts and violations.

use std::fmt;

use codelia_types::{
    CommandSpec, CountedViolation, LostReason, NearLimit, NetworkUsage, Outcome, Reason, Receipt, Refusal,
    TerminalSize, Usage, Violation,
};

use crate::{
    duration_to_proto,
    error::{InvalidField, integer, required},
    time::read_duration,
    v1,
};

/// Without the values of the environment.
impl fmt::Debug for v1::CommandSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CommandSpec")
            .field("argv", &self.argv)
            .field("env", &self.env.keys())
            .field("secret_env", &self.secret_env.keys())
            .finish_non_exhaustive()
    }
}

impl From<&CommandSpec> for v1::CommandSpec {
    fn from(command: &CommandSpec) -> Self {
        Self {
            argv: command.argv.clone(),
            env: command.env.clone().into_iter().collect(),
            working_directory: command.working_directory.clone(),
            terminal: command.terminal.map(Into::into),
            stdin: command.stdin,
            secret_env_names: command.secret_env_names.clone(),
            ..Self::default()
        }
    }
}

/// Converts the command of an internal message.
pub(crate) fn read_command(wire: v1::CommandSpec) -> Result<CommandSpec, InvalidField> {
    let terminal = |wire: v1::Terminal| -> Result<_, InvalidField> {
        Ok(TerminalSize {
            columns: integer("terminal.columns", wire.columns)?,
            rows: integer("terminal.rows", wire.rows)?,
        })
    };
    Ok(CommandSpec {
        argv: wire.argv,
        env: wire.env.into_iter().collect(),
        working_directory: wire.working_directory,
        terminal: wire.terminal.map(terminal).transpose()?,
        stdin: wire.stdin,
        secret_env_names: wire.secret_env_names,
    })
}

impl From<TerminalSize> for v1::Terminal {
    fn from(size: TerminalSize) -> Self {
        Self { columns: size.columns.into(), rows: size.rows.into() }
    }
}

impl From<&Outcome> for v1::Outcome {
    fn from(outcome: &Outcome) -> Self {
        use v1::outcome::Kind;
        let kind = match outcome {
            Outcome::Exited(code) => Kind::Exited(*code),
            Outcome::Signaled(signal) => Kind::Signaled(*signal),
            Outcome::TimedOut => Kind::TimedOut(v1::TimedOut {}),
            Outcome::Canceled => Kind::Canceled(v1::Canceled::default()),
            Outcome::Oom => Kind::Oom(v1::OutOfMemory {}),
            Outcome::Limit(resource) => Kind::Limit(v1::LimitExceeded { resource: resource.clone() }),
            Outcome::Violation(rule) => Kind::Violation(v1::PolicyViolation { rule: rule.clone() }),
            Outcome::Refused(refusal) => Kind::Refused(v1::Refused {
                reason: refusal.reason.to_string(),
                message: refusal.message.clone(),
            }),
            Outcome::Lost(reason) => Kind::Lost(v1::Lost { reason: reason.as_str().to_owned() }),
        };
        Self { kind: Some(kind) }
    }
}

impl From<&Usage> for v1::Usage {
    fn from(usage: &Usage) -> Self {
        Self {
            cpu_time: Some(duration_to_proto(usage.cpu_time)),
            peak_memory_bytes: usage.peak_memory_bytes.cast_signed(),
            wall_time: Some(duration_to_proto(usage.wall_time)),
            read_bytes: usage.read_bytes.cast_signed(),
            written_bytes: usage.written_bytes.cast_signed(),
            peak_processes: usage.peak_processes.cast_signed(),
            network: usage.network.as_ref().map(Into::into),
        }
    }
}

impl From<&NetworkUsage> for v1::NetworkUsage {
    fn from(network: &NetworkUsage) -> Self {
        Self {
            connections: network.connections.cast_signed(),
            refused: network.refused.cast_signed(),
            sent_bytes: network.sent_bytes.cast_signed(),
            received_bytes: network.received_bytes.cast_signed(),
            unreachable_attempts: network.unreachable_attempts.cast_signed(),
        }
    }
}

impl From<&CountedViolation> for v1::ViolationEvent {
    fn from(counted: &CountedViolation) -> Self {
        let violation = &counted.violation;
        Self {
            kind: violation.kind.clone(),
            syscall: violation.syscall.clone(),
            number: violation.nr,
            args: violation.args.to_vec(),
            count: counted.count.cast_signed(),
            path: violation.path.clone().unwrap_or_default(),
        }
    }
}

impl From<NearLimit> for v1::NearLimitEvent {
    fn from(NearLimit { resource, used, limit }: NearLimit) -> Self {
        Self { resource: resource.as_str().to_owned(), used: used.cast_signed(), limit: limit.cast_signed() }
    }
}

impl From<&Receipt> for v1::Receipt {
    fn from(receipt: &Receipt) -> Self {
        Self {
            processes: receipt.processes.cast_signed(),
            mounts: receipt.mounts.cast_signed(),
            cgroups: receipt.cgroups.cast_signed(),
            sockets: receipt.sockets.cast_signed(),
            directories: receipt.directories.cast_signed(),
        }
    }
}

/// Converts the outcome of an internal message.
pub(crate) fn read_outcome(wire: v1::Outcome) -> Result<Outcome, InvalidField> {
    use v1::outcome::Kind;
    Ok(match required("kind", wire.kind)? {
        Kind::Exited(code) => Outcome::Exited(code),
        Kind::Signaled(signal) => Outcome::Signaled(signal),
        Kind::TimedOut(v1::TimedOut {}) => Outcome::TimedOut,
        Kind::Canceled(v1::Canceled { .. }) => Outcome::Canceled,
        Kind::Oom(v1::OutOfMemory {}) => Outcome::Oom,
        Kind::Limit(v1::LimitExceeded { resource }) => Outcome::Limit(resource),
        Kind::Violation(v1::PolicyViolation { rule }) => Outcome::Violation(rule),
        Kind::Refused(v1::Refused { reason, message }) => {
            Outcome::Refused(Refusal { reason: Reason::parse(&reason), message })
        }
        Kind::Lost(v1::Lost { reason }) if reason.is_empty() => Outcome::Lost(LostReason::default()),
        Kind::Lost(v1::Lost { reason }) => Outcome::Lost(LostReason::parse(&reason)),
    })
}

/// Converts the usage of an internal message.
pub(crate) fn read_usage(wire: &v1::Usage) -> Result<Usage, InvalidField> {
    let time = |field: &str, wire: &Option<prost_types::Duration>| {
        read_duration(field, &required(field, wire.as_ref().copied())?)
    };
    Ok(Usage {
        cpu_time: time("cpu_time", &wire.cpu_time)?,
        peak_memory_bytes: integer("peak_memory_bytes", wire.peak_memory_bytes)?,
        wall_time: time("wall_time", &wire.wall_time)?,
        read_bytes: integer("read_bytes", wire.read_bytes)?,
        written_bytes: integer("written_bytes", wire.written_bytes)?,
        peak_processes: integer("peak_processes", wire.peak_processes)?,
        network: wire.network.as_ref().map(read_network).transpose()?,
    })
}

fn read_network(wire: &v1::NetworkUsage) -> Result<NetworkUsage, InvalidField> {
    Ok(NetworkUsage {
        connections: integer("network.connections", wire.connections)?,
        refused: integer("network.refused", wire.refused)?,
        sent_bytes: integer("network.sent_bytes", wire.sent_bytes)?,
        received_bytes: integer("network.received_bytes", wire.received_bytes)?,
        unreachable_attempts: integer("network.unreachable_attempts", wire.unreachable_attempts)?,
    })
}

/// Converts the receipt of an internal message.
pub(crate) fn read_receipt(wire: &v1::Receipt) -> Result<Receipt, InvalidField> {
    Ok(Receipt {
        processes: integer("processes", wire.processes)?,
        mounts: integer("mounts", wire.mounts)?,
        cgroups: integer("cgroups", wire.cgroups)?,
        sockets: integer("sockets", wire.sockets)?,
        directories: integer("directories", wire.directories)?,
    })
}

/// Converts a violation of an internal message.
pub(crate) fn read_violation(wire: v1::ViolationEvent) -> Result<CountedViolation, InvalidField> {
    let args = wire.args.try_into().map_err(|_| InvalidField::new("args", "must have 6 values"))?;
    let path = Some(wire.path).filter(|path| !path.is_empty());
    let violation = Violation { kind: wire.kind, syscall: wire.syscall, nr: wire.number, args, path };
    Ok(CountedViolation { violation, count: integer("count", wire.count)? })
}
