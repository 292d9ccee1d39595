//! Carries bytes between a command and its run: output into the log and on to the store, input from
//! the caller.

use std::{future::Future, sync::Arc, time::Duration};

use bytes::Bytes;
use codelia_store::{Error, OutputStream};
use codelia_telemetry::task;
use futures::future::join_all;
use tokio::{
    sync::mpsc,
    task::JoinHandle,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::{
    run::output::OutputLog,
    run::output_pacing::Release,
    run::stdio::{Reader, Writer},
    run::table::ActiveRun,
    worker::Worker,
};

/// How long output waits for more before it is flushed.
const FLUSH_AFTER: Duration = Duration::from_millis(200);
/// How long an ended command's pipes may stay open: nobody should hold them.
const STRAY_WAIT: Duration = Duration::from_secs(1);
/// How often a statement that the database refuses is tried.
const REFUSED_TRIES: u32 = 5;

/// The lease under which a run is executed is lost; its result must be dropped.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lost;

/// The tasks of one run's streams.
#[derive(Debug)]
pub(crate) struct Streams {
    release: Release,
    readers: JoinHandle<()>,
    flusher: JoinHandle<()>,
    stop: CancellationToken,
    writer: Option<JoinHandle<()>>,
}

impl Streams {
    /// Starts to read and flush output and to write input.
    pub(crate) fn start(
        worker: &Arc<Worker>,
        run: &Arc<ActiveRun>,
        outputs: Vec<(OutputStream, Reader)>,
        stdin: Option<(Writer, mpsc::Receiver<Bytes>)>,
    ) -> Self {
        let stop = CancellationToken::new();
        let log = run.output.clone();
        let release = Release::of(&run.assigned.spec.policy);
        Self {
            release,
            readers: task::background("read output", async move {
                join_all(outputs.into_iter().map(|(stream, reader)| copy(reader, stream, &log, release)))
                    .await;
            }),
            flusher: task::background("flush output", flush(worker.clone(), run.clone(), stop.clone())),
            stop,
            writer: stdin.map(|(writer, input)| task::background("write input", feed(writer, input))),
        }
    }

    /// The command has ended: takes what is left in its pipes, and closes the log. What the log
    /// has not flushed then is for the commit.
    pub(crate) async fn finish(mut self, log: &OutputLog) {
        if let Some(writer) = &self.writer {
            writer.abort();
        }
        log.open_gate();
        if timeout(STRAY_WAIT + self.release.interval() * 2, &mut self.readers).await.is_err() {
            tracing::warn!("somebody holds an ended command's output open: the rest is dropped");
            self.readers.abort();
        }
        log.close();
        self.stop.cancel();
        if let Err(error) = self.flusher.await {
            tracing::error!(%error, "the flusher failed");
        }
    }
}

async fn copy(mut reader: Reader, stream: OutputStream, log: &OutputLog, release: Release) {
    loop {
        log.room().await;
        match reader.read().await {
            Ok(data) if data.is_empty() => return,
            Ok(data) if release.is_at_once() => log.append(stream, data),
            Ok(data) => {
                let held = release.collect(data, &mut reader).await;
                held.into_iter().for_each(|data| log.append(stream, data));
            }
            Err(error) => return tracing::error!(%error, "output cannot be read"),
        }
    }
}

/// Ends when the input ends or the command closed its side.
async fn feed(mut writer: Writer, mut input: mpsc::Receiver<Bytes>) {
    while let Some(data) = input.recv().await {
        if let Err(error) = writer.write_all(&data).await {
            return tracing::debug!(%error, "the command takes no more input");
        }
    }
    if let Err(error) = writer.finish().await {
        tracing::debug!(%error, "the command takes no more input");
    }
}

/// Moves output to the store until it is stopped. A flush that was begun is brought to its end
/// with the same rows: whether a failed one was stored is unknown.
async fn flush(worker: Arc<Worker>, run: Arc<ActiveRun>, stop: CancellationToken) {
    while flush_is_due(&run.output, &stop).await {
        let batch = run.output.unflushed();
        if batch.chunks.is_empty() {
            continue;
        }
        let append = || worker.store.output_append(run.id(), &run.lease, &batch.chunks);
        if insist("store output", &run, append).await.is_err() {
            // Nothing of it can be committed any more.
            return run.fence.cancel();
        }
        run.output.flushed(&batch);
    }
}

/// Waits until there is something to flush; `false` if the flusher is to stop.
async fn flush_is_due(log: &OutputLog, stop: &CancellationToken) -> bool {
    if stop.run_until_cancelled(log.due()).await.is_none() {
        return false;
    }
    if log.is_much() {
        return true;
    }
    let more = async {
        tokio::select! {
            () = log.due() => {}
            () = sleep(FLUSH_AFTER) => {}
        }
    };
    stop.run_until_cancelled(more).await.is_some()
}

/// Tries until the store has done it, as long as the run's lease is live.
pub(crate) async fn insist<F, T>(
    what: &'static str,
    run: &ActiveRun,
    attempt: impl Fn() -> F,
) -> Result<T, Lost>
where
    F: Future<Output = Result<T, Error>>,
{
    let mut refused = 0;
    let mut pause = Duration::from_millis(20);
    loop {
        match run.fence.run_until_cancelled(attempt()).await {
            Some(Ok(done)) => return Ok(done),
            None | Some(Err(Error::Fenced)) => return Err(Lost),
            Some(Err(error @ Error::Unavailable(_))) => tracing::warn!(%error, what, "trying again"),
            Some(Err(error)) => {
                refused += 1;
                tracing::error!(error = &error as &dyn std::error::Error, what, "the store refuses");
                if refused >= REFUSED_TRIES {
                    return Err(Lost);
                }
            }
        }
        sleep(pause).await;
        pause = (pause * 2).min(Duration::from_secs(1));
    }
}
