//! The periodic work of the installation, if this api is its owner.

use codelia_store::{Retention, Store, Upkeep, UpkeepPass};
use codelia_telemetry::metrics;
use tokio_util::sync::CancellationToken;

/// Works until shutdown, and then until it is dropped does nothing.
pub(crate) async fn sweep(store: Store, retention: Retention, shutdown: CancellationToken) {
    let mut upkeep = Upkeep::new(store, retention);
    let observe = |pass: &UpkeepPass| {
        metrics().queue_depth(pass.queue_depth);
        if let Some(rows) = pass.misplaced {
            metrics().misplaced_rows(rows);
        }
    };
    shutdown.run_until_cancelled(upkeep.run(observe)).await;
    if let Err(error) = upkeep.release().await {
        tracing::debug!(%error, "cannot release the upkeep, which ends by itself");
    }
    std::future::pending().await
}
