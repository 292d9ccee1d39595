//! What the server does beside answering: it lets the truth move on when no worker is left to do
//! it, and tells load balancers whether it can answer. Both re-read the truth every time.

use std::{sync::Arc, time::Duration};

use codelia_proto::v1::{
    admin_service_server, policy_service_server, run_service_server, session_service_server,
};
use codelia_store::Store;
use codelia_telemetry::metrics;
use rand::Rng;
use tokio_util::sync::CancellationToken;
use tonic_health::{ServingStatus, server::HealthReporter};

use crate::context::Context;

const SWEEP_EVERY: Duration = Duration::from_secs(1);
/// Rows that one sweep changes at most, so that it never holds many locks.
const SWEEP_LIMIT: i64 = 500;
const PING_EVERY: Duration = Duration::from_secs(1);
const PING_PATIENCE: Duration = Duration::from_secs(2);
/// So many unanswered pings in a row are no hiccup.
const MISSED_PINGS: u32 = 3;
/// The empty name stands for the server as a whole.
const HEALTH_NAMES: [&str; 5] = [
    "",
    session_service_server::SERVICE_NAME,
    policy_service_server::SERVICE_NAME,
    run_service_server::SERVICE_NAME,
    admin_service_server::SERVICE_NAME,
];

/// Sweeps until the server stops.
pub(crate) async fn sweep(context: Arc<Context>, stop: CancellationToken) {
    while !stop.is_cancelled() {
        if let Err(error) = sweep_once(&context.store).await {
            tracing::warn!(%error, "the sweep failed; the next one tries again");
        }
        let pause = jittered(SWEEP_EVERY);
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = stop.cancelled() => {}
        }
    }
}

async fn sweep_once(store: &Store) -> Result<(), codelia_store::Error> {
    let swept = store.lease_sweep_any_tenant(SWEEP_LIMIT).await?;
    if swept != codelia_store::SweepReport::default() {
        tracing::info!(
            swept.sessions,
            swept.retried,
            swept.lost,
            "leases of workers that are gone were ended"
        );
    }
    let expired = store.session_expire_any_tenant(SWEEP_LIMIT).await?;
    if expired > 0 {
        tracing::info!(expired, "sessions expired");
    }
    metrics().queue_depth(store.run_queue_depth_any_tenant().await?);
    Ok(())
}

/// Several servers should not sweep at the same moment.
fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(rand::rng().random_range(0.75..1.25))
}

/// Keeps the health service true until the server stops.
pub(crate) async fn watch_health(context: Arc<Context>, reporter: HealthReporter, stop: CancellationToken) {
    let mut missed = 0;
    while !stop.is_cancelled() {
        missed = if answers(&context.store).await { 0 } else { missed + 1 };
        if missed == 0 {
            set_health(&reporter, ServingStatus::Serving).await;
        } else if missed == MISSED_PINGS {
            tracing::warn!("the database does not answer");
            set_health(&reporter, ServingStatus::NotServing).await;
        }
        tokio::select! {
            () = tokio::time::sleep(PING_EVERY) => {}
            () = stop.cancelled() => {}
        }
    }
    set_health(&reporter, ServingStatus::NotServing).await;
}

async fn answers(store: &Store) -> bool {
    matches!(tokio::time::timeout(PING_PATIENCE, store.ping()).await, Ok(Ok(())))
}

async fn set_health(reporter: &HealthReporter, status: ServingStatus) {
    for name in HEALTH_NAMES {
        reporter.set_service_status(name, status).await;
    }
}
