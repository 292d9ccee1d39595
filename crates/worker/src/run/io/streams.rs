//! Moves bytes between a command and its run: output into the log and on to the store, input from
//! the caller to the command.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use codelia_store::{OutputStream, Store};
use codelia_telemetry::task;
use codelia_types::Resource;
use futures::future::join_all;
use tokio::{
    sync::mpsc,
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{
    output::OutputLog,
    pacing::OutputPacing,
    rate::OutputRate,
    stdio::{Reader, Writer},
};
use crate::run::{active::ActiveRun, retry::retry_until_fenced};

/// How long a little output waits for more before it is flushed.
const FLUSH_DELAY: Duration = Duration::from_millis(200);
/// How long the pipes of an ended command may stay open. No process should still hold them.
const PIPES_TIMEOUT: Duration = Duration::from_secs(1);

/// The tasks of one run's streams.
#[derive(Debug)]
pub(crate) struct Streams {
    pacing: OutputPacing,
    readers: JoinHandle<()>,
    flusher: JoinHandle<()>,
    stop: CancellationToken,
    writer: Option<JoinHandle<()>>,
}

impl Streams {
    /// Starts to read and flush output, and to write input.
    pub(crate) fn start(
        store: &Store,
        run: &Arc<ActiveRun>,
        outputs: Vec<(OutputStream, Reader)>,
        stdin: Option<(Writer, mpsc::Receiver<Bytes>)>,
    ) -> Self {
        let stop = CancellationToken::new();
        let writing = run.clone();
        let pacing = OutputPacing::from_policy(&run.assigned.spec.policy);
        Self {
            pacing,
            readers: task::background("read output", async move {
                join_all(
                    outputs
                        .into_iter()
                        .map(|(stream, reader)| copy(reader, stream, &writing, pacing)),
                )
                .await;
            }),
            flusher: task::background(
                "flush output",
                flush(store.clone(), run.clone(), stop.clone()),
            ),
            stop,
            writer: stdin
                .map(|(writer, input)| task::background("write input", feed(writer, input))),
        }
    }

    /// Reads what an ended command left in its pipes, and closes the log. The commit stores what
    /// is not flushed by then.
    pub(crate) async fn finish(mut self, log: &OutputLog) {
        if let Some(writer) = &self.writer {
            writer.abort();
        }
        log.lift_backpressure();
        if timeout(PIPES_TIMEOUT + self.pacing.interval() * 2, &mut self.readers).await.is_err() {
            tracing::warn!("output pipes stayed open after the command ended, dropping the rest");
            self.readers.abort();
        }
        log.close();
        self.stop.cancel();
        if let Err(error) = self.flusher.await {
            tracing::error!(%error, "output flusher failed");
        }
    }
}

async fn copy(mut reader: Reader, stream: OutputStream, run: &ActiveRun, pacing: OutputPacing) {
    let append = |data| {
        let written = run.output.append(stream, data).unsigned_abs();
        run.near_limits.check(
            Resource::OutputBytes,
            written,
            run.assigned.spec.limits.output_bytes,
        );
    };
    let mut rate = OutputRate::new(Instant::now());
    loop {
        run.output.room().await;
        let data = match reader.read().await {
            Ok(data) if data.is_empty() => return,
            Ok(data) => data,
            Err(error) => return tracing::error!(%error, "cannot read output"),
        };
        let delay = rate.delay_after(data.len(), Instant::now());
        if pacing.is_immediate() {
            append(data);
        } else {
            pacing.collect(data, &mut reader).await.into_iter().for_each(append);
        }
        if !delay.is_zero() {
            sleep(delay).await;
        }
    }
}

/// Ends when the input ends or the command closes its side.
async fn feed(mut writer: Writer, mut input: mpsc::Receiver<Bytes>) {
    while let Some(data) = input.recv().await {
        if let Err(error) = writer.write_all(&data).await {
            return tracing::debug!(%error, "command closed its input");
        }
    }
    if let Err(error) = writer.finish().await {
        tracing::debug!(%error, "command closed its input");
    }
}

/// Moves output to the store until it is stopped. A failed flush is retried with the same rows: it
/// may have been stored.
async fn flush(store: Store, run: Arc<ActiveRun>, stop: CancellationToken) {
    while flush_is_due(&run.output, &stop).await {
        let batch = run.output.unflushed();
        if batch.chunks.is_empty() {
            continue;
        }
        let append = || store.output_append(run.id(), &run.lease, &batch.chunks);
        if retry_until_fenced("store output", &run, append).await.is_err() {
            // The run cannot be committed without its output.
            return run.fence.cancel();
        }
        run.output.flushed(&batch);
    }
}

/// Waits until there is something to flush; `false` if the flusher must stop.
async fn flush_is_due(log: &OutputLog, stop: &CancellationToken) -> bool {
    if stop.run_until_cancelled(log.due()).await.is_none() {
        return false;
    }
    if log.should_flush_now() {
        return true;
    }
    let more = async {
        tokio::select! {
            () = log.due() => {}
            () = sleep(FLUSH_DELAY) => {}
        }
    };
    stop.run_until_cancelled(more).await.is_some()
}
