//! Judges receipts: a sandbox that left something behind takes the worker out of rotation.

use std::sync::{Mutex, MutexGuard, PoisonError};

use codelia_store::{Error, EventBody, EventKind, EventSubject};
use codelia_telemetry::metrics;
use codelia_types::Receipt;
use serde_json::json;
use tokio::sync::Notify;

use crate::worker::Worker;

/// What became of the sandboxes of a worker.
#[derive(Debug, Default)]
pub(crate) struct Receipts {
    /// The first that was not clean.
    unclean: Mutex<Option<Receipt>>,
    found: Notify,
}

impl Receipts {
    /// Takes notice of one.
    pub(crate) fn judge(&self, receipt: Receipt) {
        if receipt.is_clean() {
            return;
        }
        metrics().receipt_unclean();
        tracing::error!(?receipt, "a sandbox left something behind: the worker takes nothing new");
        self.lock().get_or_insert(receipt);
        self.found.notify_one();
    }

    /// Whether the worker may take anything new.
    pub(crate) fn are_clean(&self) -> bool {
        self.lock().is_none()
    }

    /// Waits for one that is not clean.
    async fn unclean(&self) -> Receipt {
        loop {
            if let Some(receipt) = *self.lock() {
                return receipt;
            }
            self.found.notified().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Receipt>> {
        self.unclean.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits until the worker has to go out of rotation, and tells everybody.
pub(crate) async fn go_out_of_rotation(worker: &Worker) -> Result<(), Error> {
    let receipt = worker.receipts.unclean().await;
    worker.poll_now.notify_one();
    worker.store.worker_drain(worker.id()).await?;
    let concerned = EventSubject { worker: Some(worker.id().clone()), ..EventSubject::default() };
    let detail = json!({ "reason": "SANDBOX_RECEIPT_UNCLEAN", "receipt": receipt });
    let happening = EventBody { kind: EventKind::WorkerOutOfRotation, field: None, detail };
    worker.store.event_insert(&concerned, &happening).await
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[test]
    fn one_sandbox_that_left_something_behind_is_enough() {
        let receipts = Receipts::default();
        receipts.judge(Receipt::default());
        assert!(receipts.are_clean() && receipts.unclean().now_or_never().is_none());
        receipts.judge(Receipt { mounts: 1, ..Receipt::default() });
        receipts.judge(Receipt { processes: 2, ..Receipt::default() });
        assert!(!receipts.are_clean());
        assert_eq!(receipts.unclean().now_or_never().map(|receipt| receipt.mounts), Some(1));
    }
}
