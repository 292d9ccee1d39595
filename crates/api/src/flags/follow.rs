//! The loop that keeps the rules of mode flags up to date.

use std::{sync::Arc, time::Duration};

use codelia_store::FlagTally;
use codelia_telemetry::backoff::jittered;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::context::Context;

/// Between two looks at the version. Every api follows a change within two seconds.
const INTERVAL: Duration = Duration::from_millis(500);

/// Follows changes and stores what was counted, until it is dropped.
pub(crate) async fn follow(context: Arc<Context>, shutdown: CancellationToken) {
    let Context { store, flags, .. } = &*context;
    let watch = async {
        loop {
            if let Err(error) = flags.refresh(store).await {
                tracing::warn!(%error, "cannot read mode flags, keeping the last ones");
            }
            sleep(jittered(INTERVAL)).await;
        }
    };
    let count = async {
        loop {
            sleep(jittered(FlagTally::INTERVAL)).await;
            flags.store_counts(store).await;
        }
    };
    shutdown.run_until_cancelled(async { tokio::join!(watch, count) }).await;
    // Calls that are open may still create sessions.
    loop {
        flags.store_counts(store).await;
        sleep(FlagTally::INTERVAL).await;
    }
}
