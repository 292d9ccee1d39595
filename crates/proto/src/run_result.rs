//! The result of a run, as a worker reports it to an api.

use codelia_types::{EndedRun, RunResult, Violations};

use crate::{
    changes::read_changes,
    duration_to_proto,
    error::{InvalidField, integer, required},
    internal::v1 as internal,
    run::{read_outcome, read_receipt, read_usage, read_violation},
    time::{read_duration, read_timestamp},
    timestamp_to_proto,
};

impl From<&RunResult> for internal::RunResult {
    fn from(result: &RunResult) -> Self {
        Self {
            outcome: Some((&result.outcome).into()),
            usage: Some((&result.usage).into()),
            receipt: Some((&result.receipt).into()),
            sandbox_root: result.sandbox_root.clone(),
            setup_time: result.setup_time.map(duration_to_proto),
            prepared: result.prepared,
            unenforced: result.unenforced.clone(),
            watched: result.watched.clone(),
            output_bytes: result.output_bytes,
            output_truncated: result.output_truncated,
            output_total_bytes: result.output_total,
            violations: result.violations.seen.iter().map(Into::into).collect(),
            violation_count: result.violations.total.cast_signed(),
            changes: result.changes.as_ref().map(Into::into),
        }
    }
}

impl TryFrom<internal::RunResult> for RunResult {
    type Error = InvalidField;

    fn try_from(wire: internal::RunResult) -> Result<Self, InvalidField> {
        let outcome = read_outcome(required("outcome", wire.outcome)?);
        let usage = read_usage(&required("usage", wire.usage)?);
        let receipt = read_receipt(&required("receipt", wire.receipt)?);
        let setup_time = wire.setup_time.map(|time| read_duration("setup_time", &time)).transpose()?;
        let violation =
            |(at, wire)| read_violation(wire).map_err(|error| error.within(&format!("violations[{at}]")));
        let seen = wire.violations.into_iter().enumerate().map(violation).collect::<Result<_, _>>()?;
        let changes = wire.changes.map(read_changes).transpose();
        Ok(Self {
            outcome: outcome.map_err(|error| error.within("outcome"))?,
            usage: usage.map_err(|error| error.within("usage"))?,
            receipt: receipt.map_err(|error| error.within("receipt"))?,
            sandbox_root: wire.sandbox_root,
            setup_time,
            prepared: wire.prepared,
            unenforced: wire.unenforced,
            watched: wire.watched,
            output_bytes: wire.output_bytes,
            output_truncated: wire.output_truncated,
            output_total: wire.output_total_bytes,
            violations: Violations { seen, total: integer("violation_count", wire.violation_count)? },
            changes: changes.map_err(|error| error.within("changes"))?,
        })
    }
}

impl From<&EndedRun> for internal::EndedRun {
    fn from(ended: &EndedRun) -> Self {
        Self {
            result: Some((&ended.result).into()),
            attempt: ended.attempt,
            start_time: ended.started_at.map(timestamp_to_proto),
            end_time: Some(timestamp_to_proto(ended.ended_at)),
            cancel_reason: ended.cancel_reason.clone().unwrap_or_default(),
        }
    }
}

impl TryFrom<internal::EndedRun> for EndedRun {
    type Error = InvalidField;

    fn try_from(wire: internal::EndedRun) -> Result<Self, InvalidField> {
        let result = RunResult::try_from(required("result", wire.result)?);
        Ok(Self {
            result: result.map_err(|error| error.within("result"))?,
            attempt: wire.attempt,
            started_at: wire.start_time.map(|at| read_timestamp("start_time", &at)).transpose()?,
            ended_at: read_timestamp("end_time", &required("end_time", wire.end_time)?)?,
            cancel_reason: Some(wire.cancel_reason).filter(|reason| !reason.is_empty()),
        })
    }
}
