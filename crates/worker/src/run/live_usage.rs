//! What a run uses at this moment. Read only when a caller asks.

use codelia_backends::{CurrentUsage, UsageReader};
use codelia_proto::{duration_to_proto, v1::LiveUsage};
use tokio::{task::spawn_blocking, time::Instant};

use crate::run::{active::ActiveRun, output_pacing::OutputPacing};

/// Measures a command that was started.
#[derive(Debug)]
pub(crate) struct Meter {
    pub(crate) started_at: Instant,
    /// `None` if nothing counts what the command uses.
    pub(crate) reader: Option<UsageReader>,
}

/// Why it cannot be said what a run uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unavailable {
    #[error("the command has not started yet")]
    NotStarted,
    #[error("policy.resources.release_interval hides what happens between two releases")]
    Paced,
    #[error("mode {0} has no control group on this worker, which would count it (see `codelia doctor`)")]
    NotCounted(&'static str),
    #[error("the command has ended, and its result is not stored yet")]
    Ending,
}

/// Reads what a run uses.
pub(crate) async fn read(run: &ActiveRun) -> Result<LiveUsage, Unavailable> {
    let spec = &run.assigned.spec;
    if !OutputPacing::of(&spec.policy).is_immediate() {
        return Err(Unavailable::Paced);
    }
    let Meter { started_at, reader } = run.meter.get().ok_or(Unavailable::NotStarted)?;
    let reader = reader.clone().ok_or(Unavailable::NotCounted(spec.mode.as_str()))?;
    let usage = spawn_blocking(move || reader.read()).await;
    let usage = usage.map_err(|_| Unavailable::Ending)?.map_err(|error| {
        // The group is removed before the result is stored.
        tracing::debug!(%error, run = %run.id(), "usage of the run not read");
        Unavailable::Ending
    })?;
    Ok(to_proto(usage, run.output.totals().written, *started_at))
}

fn to_proto(usage: CurrentUsage, output_bytes: i64, started_at: Instant) -> LiveUsage {
    LiveUsage {
        cpu_time: usage.cpu_time.map(duration_to_proto),
        memory_bytes: usage.memory_bytes.map(u64::cast_signed),
        page_cache_bytes: usage.page_cache_bytes.map(u64::cast_signed),
        peak_memory_bytes: usage.peak_memory_bytes.map(u64::cast_signed),
        processes: usage.tasks.map(u64::cast_signed),
        read_bytes: usage.io_bytes.map(|(read, _)| read.cast_signed()),
        written_bytes: usage.io_bytes.map(|(_, written)| written.cast_signed()),
        output_bytes,
        wall_time: Some(duration_to_proto(started_at.elapsed())),
    }
}
