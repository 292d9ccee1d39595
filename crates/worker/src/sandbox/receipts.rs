//! Checks receipts: a sandbox that left something behind takes the worker out of rotation.

use codelia_store::{DrainedBy, Error, EventBody, EventKind, EventSubject, Store};
use codelia_telemetry::metrics;
use codelia_types::{Receipt, WorkerId};
use parking_lot::Mutex;
use serde_json::json;
use tokio::sync::Notify;

/// The receipts of this worker's sandboxes.
#[derive(Debug, Default)]
pub(crate) struct Receipts {
    /// The first that is not clean.
    unclean: Mutex<Option<Receipt>>,
    found: Notify,
}

impl Receipts {
    /// Records the receipt of a destroyed sandbox.
    pub(crate) fn record(&self, receipt: Receipt) {
        if receipt.is_clean() {
            return;
        }
        metrics().receipt_unclean();
        tracing::error!(%receipt, "sandbox left something behind, worker takes no new runs");
        self.unclean.lock().get_or_insert(receipt);
        self.found.notify_one();
    }

    /// Whether all sandboxes left nothing behind.
    pub(crate) fn are_clean(&self) -> bool {
        self.unclean.lock().is_none()
    }

    /// Waits for the first unclean receipt.
    pub(crate) async fn unclean(&self) -> Receipt {
        loop {
            if let Some(receipt) = *self.unclean.lock() {
                return receipt;
            }
            self.found.notified().await;
        }
    }
}

/// Drains the worker in the store because of an unclean receipt, and records why.
pub(crate) async fn leave_rotation(
    store: &Store,
    worker: &WorkerId,
    receipt: Receipt,
) -> Result<(), Error> {
    store.worker_drain(worker, DrainedBy::Worker).await?;
    let concerned = EventSubject { worker: Some(worker.clone()), ..EventSubject::default() };
    let detail = json!({ "reason": "SANDBOX_RECEIPT_UNCLEAN", "receipt": receipt });
    let happening = EventBody { kind: EventKind::WorkerOutOfRotation, field: None, detail };
    store.audit_insert(&concerned, &happening).await
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[test]
    fn one_unclean_receipt_is_enough() {
        let receipts = Receipts::default();
        receipts.record(Receipt::default());
        assert!(receipts.are_clean() && receipts.unclean().now_or_never().is_none());
        receipts.record(Receipt { mounts: 1, ..Receipt::default() });
        receipts.record(Receipt { processes: 2, ..Receipt::default() });
        assert!(!receipts.are_clean());
        assert_eq!(receipts.unclean().now_or_never().map(|receipt| receipt.mounts), Some(1));
    }
}
