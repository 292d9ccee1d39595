//! Flags as messages.

use codelia_policy::{FlagGuard, FlagNumbers, FlagRule};
use codelia_proto::{duration_to_proto, timestamp_to_proto, v1};
use codelia_store::Flag;

use crate::wire::words::Word;

pub(super) fn flag(flag: Flag) -> v1::Flag {
    v1::Flag {
        name: format!("flags/{}", flag.id),
        flag_id: flag.id.into(),
        revision: flag.revision,
        rule: flag.rule.map(rule),
        action: flag.action.number(),
        reason: flag.reason,
        key_id: flag.key.map(|key| key.to_string()).unwrap_or_default(),
        create_time: Some(timestamp_to_proto(flag.created_at)),
        origin_revision: flag.origin,
        numbers: Some(numbers(&flag.numbers)),
    }
}

fn rule(rule: FlagRule) -> v1::FlagRule {
    v1::FlagRule {
        tenant: rule.tenant.map(|tenant| format!("tenants/{tenant}")).unwrap_or_default(),
        labels: rule.labels.into_iter().collect(),
        percent: Some(rule.percent.into()),
        mode: rule.mode.map_or(v1::SandboxMode::Unspecified, Into::into).into(),
        floor: v1::IsolationLevel::from(rule.floor).into(),
        guard: rule.guard.map(guard),
    }
}

fn guard(guard: FlagGuard) -> v1::FlagGuard {
    v1::FlagGuard {
        max_refused_percent: guard.max_refused_percent.map(Into::into),
        max_failed_percent: guard.max_failed_percent.map(Into::into),
        max_setup_p95: guard.max_setup_p95.map(duration_to_proto),
        min_count: i32::try_from(guard.min_count).unwrap_or(i32::MAX),
    }
}

fn numbers(numbers: &FlagNumbers) -> v1::FlagNumbers {
    v1::FlagNumbers {
        sessions: numbers.sessions.cast_signed(),
        refused_sessions: numbers.refused_sessions.cast_signed(),
        runs: numbers.runs.cast_signed(),
        refused_runs: numbers.refused_runs.cast_signed(),
        failed_runs: numbers.failed_runs.cast_signed(),
        setup_p95: numbers.setup_p95().map(duration_to_proto),
    }
}
