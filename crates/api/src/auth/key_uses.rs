//! Records the last use of keys, at most once a minute for each key: no call waits for it.

use std::time::{Duration, Instant};

use codelia_store::{Caller, Store};
use codelia_telemetry::task;
use codelia_types::KeyId;

use crate::cache::Recently;

/// How long this server does not record a key again, whatever the store says.
const INTERVAL: Duration = Duration::from_secs(60);

/// The keys whose use this server recorded lately.
#[derive(Debug)]
pub(crate) struct KeyUses(Recently<KeyId>);

impl Default for KeyUses {
    fn default() -> Self {
        Self(Recently::new(INTERVAL))
    }
}

impl KeyUses {
    /// Records in the background that a key is used, unless this server did so lately.
    pub(crate) fn record(&self, store: &Store, caller: &Caller) {
        let key = caller.key;
        if !self.0.is_due(key, Instant::now()) {
            return;
        }
        let store = store.clone();
        let tenant = caller.tenant.clone();
        task::background("key use", async move {
            if let Err(error) = store.key_touch(&tenant, key).await {
                tracing::warn!(%error, %key, "cannot record the use of a key");
            }
        });
    }
}
