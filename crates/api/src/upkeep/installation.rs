//! The periodic work of the installation, if this api is its owner.

use codelia_store::{Retention, Store, Upkeep, UpkeepPass};
use codelia_telemetry::metrics;
use codelia_types::LostReason;
use tokio_util::sync::CancellationToken;

/// Works until shutdown, and then until it is dropped does nothing.
pub(crate) async fn keep_up(store: Store, retention: Retention, shutdown: CancellationToken) {
    let mut upkeep = Upkeep::new(store, retention);
    let observe = |pass: &UpkeepPass| {
        metrics().queue(pass.queue_depth, pass.queue_age);
        metrics().runs_lost(LostReason::WorkerLost.as_str(), pass.swept.lost);
        metrics().runs_retried(pass.swept.retried);
        for flag in &pass.tripped {
            metrics().flags.rolled_back(flag.id.as_str(), "guard");
        }
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
