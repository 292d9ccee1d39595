//! Termination signals: SIGINT, SIGTERM and SIGHUP.

use anyhow::Result;
use codelia_telemetry::task;
use tokio::{signal::unix::SignalKind, sync::mpsc};
use tokio_util::sync::CancellationToken;

/// Signals that may wait to be handled.
const QUEUE_SIZE: usize = 4;

/// Receives termination signals.
#[derive(Debug)]
pub(crate) struct Signals(mpsc::Receiver<SignalKind>);

impl Signals {
    /// Installs the handlers. From now on, the signals do not terminate this process.
    pub(crate) fn catch() -> Result<Self> {
        let (sender, receiver) = mpsc::channel(QUEUE_SIZE);
        for kind in [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()] {
            let mut signal = tokio::signal::unix::signal(kind)?;
            let sender = sender.clone();
            task::background("signal", async move {
                while signal.recv().await.is_some() && sender.send(kind).await.is_ok() {}
            });
        }
        Ok(Self(receiver))
    }

    /// Waits for the next signal.
    pub(crate) async fn next(&mut self) -> Option<SignalKind> {
        self.0.recv().await
    }
}

/// Returns a token that the first termination signal cancels.
pub(crate) fn shutdown() -> Result<CancellationToken> {
    let mut signals = Signals::catch()?;
    let shutdown = CancellationToken::new();
    let token = shutdown.clone();
    task::background("shutdown", async move {
        while let Some(signal) = signals.next().await {
            tracing::info!("shutting down ({})", name(signal));
            token.cancel();
        }
    });
    Ok(shutdown)
}

fn name(signal: SignalKind) -> &'static str {
    if signal == SignalKind::interrupt() {
        "SIGINT"
    } else if signal == SignalKind::hangup() {
        "SIGHUP"
    } else {
        "SIGTERM"
    }
}
