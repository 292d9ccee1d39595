//! Termination signals: SIGINT, SIGTERM and SIGHUP.

use anyhow::Result;
use codelia_telemetry::task;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::{signal::Signal, system};

/// Signals that may wait to be handled.
const QUEUE_SIZE: usize = 4;

/// Receives termination signals.
#[derive(Debug)]
pub struct Signals(mpsc::Receiver<Signal>);

impl Signals {
    /// Installs the handlers. From now on, the signals do not terminate this process.
    ///
    /// # Errors
    /// The handlers cannot be installed.
    pub fn catch() -> Result<Self> {
        let (sender, receiver) = mpsc::channel(QUEUE_SIZE);
        system::catch_signals(&sender)?;
        Ok(Self(receiver))
    }

    /// Waits for the next signal.
    pub async fn next(&mut self) -> Option<Signal> {
        self.0.recv().await
    }
}

/// Returns a token that the first termination signal cancels.
///
/// # Errors
/// The handlers cannot be installed.
pub fn shutdown() -> Result<CancellationToken> {
    let mut signals = Signals::catch()?;
    let shutdown = CancellationToken::new();
    let token = shutdown.clone();
    task::background("shutdown", async move {
        while let Some(signal) = signals.next().await {
            tracing::info!("shutting down ({})", signal.name());
            token.cancel();
        }
    });
    Ok(shutdown)
}
