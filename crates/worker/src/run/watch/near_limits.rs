//! The limits that one run got near to: collected while it runs, read by its attached callers.

use codelia_store::{EventBody, EventKind};
use codelia_telemetry::metrics;
use codelia_types::{NearLimit, Resource};
use serde_json::json;
use tokio::sync::watch;

/// One run's limits that were near, each once.
#[derive(Debug)]
pub(crate) struct NearLimitLog {
    /// Attached callers wait for changes.
    log: watch::Sender<Vec<NearLimit>>,
    /// Whether callers may see them at once: they say when something happened.
    is_shown: bool,
}

impl NearLimitLog {
    pub(crate) fn new(is_shown: bool) -> Self {
        Self { log: watch::Sender::default(), is_shown }
    }

    /// Adds a limit if this much of it is near.
    pub(crate) fn check(&self, resource: Resource, used: u64, limit: u64) {
        if let Some(near) = NearLimit::reached(resource, used, limit) {
            self.add(near);
        }
    }

    /// Adds a limit unless it was added.
    pub(crate) fn add(&self, near: NearLimit) {
        let NearLimit { resource, used, limit } = near;
        let is_new = self.log.send_if_modified(|log| {
            let is_new = log.iter().all(|known| known.resource != resource);
            if is_new {
                log.push(near);
            }
            is_new
        });
        if is_new {
            metrics().near_limit(resource.as_str());
            tracing::info!(resource = resource.as_str(), used, limit, "run is near a limit");
        }
    }

    /// The `index`th limit that callers may see.
    pub(crate) fn get(&self, index: usize) -> Option<NearLimit> {
        self.is_shown.then(|| self.log.borrow().get(index).copied()).flatten()
    }

    pub(crate) fn all(&self) -> Vec<NearLimit> {
        self.log.borrow().clone()
    }

    /// Reports new limits.
    pub(crate) fn subscribe(&self) -> watch::Receiver<Vec<NearLimit>> {
        self.log.subscribe()
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
