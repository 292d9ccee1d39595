//! The limits that one run got near to: collected while it runs, read by its attached callers.

use codelia_store::{EventBody, EventKind};
use codelia_telemetry::metrics;
use codelia_types::{NearLimit, Resource};
use parking_lot::Mutex;
use serde_json::json;
use tokio::sync::watch;

/// One run's limits that were near, each once.
#[derive(Debug)]
pub(crate) struct NearLimitLog {
    log: Mutex<Vec<NearLimit>>,
    /// Attached callers wait on it.
    changed: watch::Sender<()>,
    /// Whether callers may see them at once: they say when something happened.
    is_shown: bool,
}

impl NearLimitLog {
    pub(crate) fn new(is_shown: bool) -> Self {
        Self { log: Mutex::default(), changed: watch::Sender::new(()), is_shown }
    }

    /// Adds a limit if this much of it is near.
    pub(crate) fn check(&self, resource: Resource, used: u64, limit: u64) {
        if let Some(near) = NearLimit::of(resource, used, limit) {
            self.add(near);
        }
    }

    /// Adds a limit unless it was added.
    pub(crate) fn add(&self, near: NearLimit) {
        let NearLimit { resource, used, limit } = near;
        {
            let mut log = self.log.lock();
            if log.iter().any(|known| known.resource == resource) {
                return;
            }
            log.push(near);
        }
        metrics().near_limit(resource.as_str());
        tracing::info!(resource = resource.as_str(), used, limit, "run is near a limit");
        self.changed.send_replace(());
    }

    /// The `index`th limit that callers may see.
    pub(crate) fn get(&self, index: usize) -> Option<NearLimit> {
        self.is_shown.then(|| self.log.lock().get(index).copied()).flatten()
    }

    pub(crate) fn all(&self) -> Vec<NearLimit> {
        self.log.lock().clone()
    }

    /// Reports new limits.
    pub(crate) fn subscribe(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }
}

/// The events that record the limits.
pub(crate) fn events(near: &[NearLimit]) -> impl Iterator<Item = EventBody> {
    near.iter().map(|NearLimit { resource, used, limit }| EventBody {
        kind: EventKind::LimitNear,
        field: Some(format!("limits.{}", resource.as_str())),
        detail: json!({ "used": used, "limit": limit }),
    })
}
