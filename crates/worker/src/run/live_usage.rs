//! The usage of a run at this moment. Read only when a caller asks.

use codelia_backends::{CurrentUsage, ListedProcess, UsageReader};
use codelia_proto::{
    duration_to_proto,
    v1::{LiveUsage, RunProcess},
};
use tokio::{task::spawn_blocking, time::Instant};

use super::{active::ActiveRun, io::pacing::OutputPacing};

/// Processes that are listed.
const MAX_PROCESSES: usize = 1000;
/// Characters of a command line that are shown.
const MAX_COMMAND: usize = 512;

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
    #[error(
        "mode {0} has no control group on this worker, which would count it (see `codelia doctor`)"
    )]
    NotCounted(&'static str),
    #[error(
        "the processes cannot be listed in mode {0} on this worker: no control group has them all"
    )]
    NotListed(&'static str),
    #[error("the command has ended, and its result is not stored yet")]
    Ending,
}

/// Reads what a run uses.
pub(crate) async fn read(run: &ActiveRun) -> Result<LiveUsage, Unavailable> {
    let (started_at, usage) = ask(run, UsageReader::read).await?;
    Ok(to_proto(usage, run.output.totals().written, started_at))
}

/// Lists the processes of a run. The command lines of one with secret variables may show them.
pub(crate) async fn processes(run: &ActiveRun) -> Result<Vec<RunProcess>, Unavailable> {
    let (_, listed) = ask(run, |reader| reader.processes(MAX_PROCESSES)).await?;
    let spec = &run.assigned.spec;
    let has_secrets = !spec.command.secret_env_names.is_empty();
    let listed = listed.ok_or(Unavailable::NotListed(spec.mode.as_str()))?.into_iter();
    Ok(listed.map(|process| process_to_proto(process, has_secrets)).collect())
}

/// Has the reader of a run read something on a thread that may block. Also returns when the command
/// was started.
async fn ask<T: Send + 'static>(
    run: &ActiveRun,
    question: impl FnOnce(&UsageReader) -> Result<T, codelia_backends::Error> + Send + 'static,
) -> Result<(Instant, T), Unavailable> {
    let spec = &run.assigned.spec;
    if !OutputPacing::from_policy(&spec.policy).is_immediate() {
        return Err(Unavailable::Paced);
    }
    let Meter { started_at, reader } = run.meter.get().ok_or(Unavailable::NotStarted)?;
    let reader = reader.clone().ok_or(Unavailable::NotCounted(spec.mode.as_str()))?;
    let answer = spawn_blocking(move || question(&reader)).await;
    let answer = answer.map_err(|_| Unavailable::Ending)?.map_err(|error| {
        // The group is removed before the result is stored.
        tracing::debug!(%error, run = %run.id(), "usage of the run not read");
        Unavailable::Ending
    })?;
    Ok((*started_at, answer))
}

fn process_to_proto(process: ListedProcess, has_secrets: bool) -> RunProcess {
    let is_shown = !has_secrets && !process.command.is_empty();
    let command = if is_shown { process.command } else { format!("[{}]", process.name) };
    RunProcess {
        pid: process.pid.cast_signed(),
        parent_pid: process.parent_pid.cast_signed(),
        state: process.state.to_string(),
        cpu_time: Some(duration_to_proto(process.cpu_time)),
        memory_bytes: process.memory_bytes.cast_signed(),
        threads: process.threads.cast_signed(),
        command: command.chars().take(MAX_COMMAND).collect(),
    }
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
