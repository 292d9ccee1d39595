//! Ends the leases of workers that are gone, expires sessions, stops suspended tenants and removes
//! deleted ones. Every api does it, so that it happens even if no worker is left.

use std::time::Duration;

use codelia_store::{Store, SweepReport};
use codelia_telemetry::{backoff::jittered, metrics};

const INTERVAL: Duration = Duration::from_secs(1);
/// Maximum rows that one pass changes, so that it never holds many locks.
const MAX_ROWS: i64 = 500;

/// Sweeps until it is dropped.
pub(crate) async fn sweep(store: Store) {
    loop {
        if let Err(error) = sweep_once(&store).await {
            tracing::warn!(%error, "sweep failed, retrying");
        }
        // Several servers should not sweep at the same time.
        tokio::time::sleep(jittered(INTERVAL)).await;
    }
}

async fn sweep_once(store: &Store) -> Result<(), codelia_store::Error> {
    let swept = store.lease_sweep_any_tenant(MAX_ROWS).await?;
    if swept != SweepReport::default() {
        tracing::info!(swept.sessions, swept.retried, swept.lost, "ended leases of lost workers");
    }
    let refused = store.run_expire_queued_any_tenant(MAX_ROWS).await?;
    if refused > 0 {
        tracing::info!(refused, "ended runs that waited too long for a worker");
    }
    let expired = store.session_expire_any_tenant(MAX_ROWS).await?;
    if expired > 0 {
        tracing::info!(expired, "expired sessions");
    }
    store.tenant_sweep_any_tenant(MAX_ROWS).await?;
    metrics().queue_depth(store.run_queue_depth_any_tenant().await?);
    Ok(())
}
