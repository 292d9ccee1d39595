//! Commands, outcomes, usage, receipts and violations.

use std::fmt;

use codelia_types::{
    CommandSpec, CountedViolation, NearLimit, NetworkUsage, Outcome, Receipt, TerminalSize, Usage,
};

use crate::{duration_to_proto, internal::v1::StartRunRequest, v1};

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

/// Without the specification and the secret variables.
impl fmt::Debug for StartRunRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StartRunRequest")
            .field("run_id", &self.run_id)
            .field("session_id", &self.session_id)
            .field("tenant_id", &self.tenant_id)
            .field("incarnation", &self.incarnation)
            .field("lease_epoch", &self.lease_epoch)
            .field("attempt", &self.attempt)
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
            Outcome::Limit(resource) => {
                Kind::Limit(v1::LimitExceeded { resource: resource.clone() })
            }
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
        Self {
            resource: resource.as_str().to_owned(),
            used: used.cast_signed(),
            limit: limit.cast_signed(),
        }
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use codelia_types::{LostReason, Reason, Refusal, Violation};
    use v1::outcome::Kind;

    use super::*;

    #[test]
    fn each_outcome_has_its_kind() {
        let refusal = Refusal { reason: Reason::SandboxFailed, message: "no".to_owned() };
        let refused = v1::Refused { reason: "SANDBOX_FAILED".into(), message: "no".into() };
        let lost = v1::Lost { reason: "worker_lost".into() };
        let kinds = [
            (Outcome::Exited(-1), Kind::Exited(-1)),
            (Outcome::Signaled(9), Kind::Signaled(9)),
            (Outcome::TimedOut, Kind::TimedOut(v1::TimedOut {})),
            (Outcome::Canceled, Kind::Canceled(v1::Canceled::default())),
            (Outcome::Oom, Kind::Oom(v1::OutOfMemory {})),
            (
                Outcome::Limit("pids".into()),
                Kind::Limit(v1::LimitExceeded { resource: "pids".into() }),
            ),
            (
                Outcome::Violation("x".into()),
                Kind::Violation(v1::PolicyViolation { rule: "x".into() }),
            ),
            (Outcome::Refused(refusal), Kind::Refused(refused)),
            (Outcome::Lost(LostReason::WorkerLost), Kind::Lost(lost)),
        ];
        assert_eq!(kinds.len(), Outcome::KINDS.len());
        for (outcome, kind) in kinds {
            assert_eq!(v1::Outcome::from(&outcome).kind, Some(kind));
        }
    }

    #[test]
    fn amounts_are_sent_in_their_fields() {
        let network = NetworkUsage {
            connections: 1,
            refused: 2,
            sent_bytes: 3,
            received_bytes: 4,
            unreachable_attempts: 5,
        };
        let usage = Usage {
            cpu_time: Duration::from_nanos(1_000_000_006),
            peak_memory_bytes: 7,
            wall_time: Duration::from_secs(8),
            read_bytes: 9,
            written_bytes: 10,
            peak_processes: 11,
            network: Some(network),
        };
        let sent = v1::Usage::from(&usage);
        assert_eq!(sent.cpu_time, Some(prost_types::Duration { seconds: 1, nanos: 6 }));
        assert_eq!(sent.wall_time, Some(prost_types::Duration { seconds: 8, nanos: 0 }));
        assert_eq!((sent.peak_memory_bytes, sent.read_bytes, sent.written_bytes), (7, 9, 10));
        assert_eq!(sent.peak_processes, 11);
        let sent = sent.network.unwrap();
        assert_eq!((sent.connections, sent.refused, sent.sent_bytes), (1, 2, 3));
        assert_eq!((sent.received_bytes, sent.unreachable_attempts), (4, 5));

        let receipt = Receipt { processes: 1, mounts: 2, cgroups: 3, sockets: 4, directories: 5 };
        let v1::Receipt { processes, mounts, cgroups, sockets, directories } = (&receipt).into();
        assert_eq!([processes, mounts, cgroups, sockets, directories], [1, 2, 3, 4, 5]);

        let violation = Violation {
            kind: "SYSCALL_BLOCKED".into(),
            syscall: "socket".into(),
            nr: 41,
            args: [1, 2, 3, 4, 5, u64::MAX],
            path: None,
        };
        let sent = v1::ViolationEvent::from(&CountedViolation { violation, count: 6 });
        assert_eq!((sent.number, sent.count, sent.path.as_str()), (41, 6, ""));
        assert_eq!(sent.args, [1, 2, 3, 4, 5, u64::MAX]);
    }
}
