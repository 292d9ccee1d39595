//! The signals that ask this process to end.

use anyhow::Result;
use codelia_telemetry::task;
use tokio::{signal::unix::SignalKind, sync::mpsc};
use tokio_util::sync::CancellationToken;

/// SIGINT, SIGTERM and SIGHUP, as they come.
#[derive(Debug)]
pub(crate) struct Signals(mpsc::Receiver<i32>);

impl Signals {
    /// From here on they no longer end this process by themselves.
    pub(crate) fn catch() -> Result<Self> {
        let (tell, told) = mpsc::channel(4);
        for kind in [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()] {
            let mut caught = tokio::signal::unix::signal(kind)?;
            let tell = tell.clone();
            task::background("signal", async move {
                while caught.recv().await.is_some() && tell.send(kind.as_raw_value()).await.is_ok() {}
            });
        }
        Ok(Self(told))
    }

    /// The next one's number.
    pub(crate) async fn next(&mut self) -> Option<i32> {
        self.0.recv().await
    }
}

/// A token that is canceled by the first such signal.
pub(crate) fn shutdown() -> Result<CancellationToken> {
    let mut signals = Signals::catch()?;
    let shutdown = CancellationToken::new();
    let token = shutdown.clone();
    task::background("shutdown", async move {
        while signals.next().await.is_some() {
            tracing::info!("told to stop");
            token.cancel();
        }
    });
    Ok(shutdown)
}
