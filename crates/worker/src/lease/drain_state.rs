//! Whether the worker takes anything new.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use crate::sandbox::receipts::Receipts;

/// Whether the worker takes new sessions and runs.
#[derive(Debug)]
pub(crate) struct DrainState {
    shutting_down: AtomicBool,
    by_operator: AtomicBool,
    receipts: Arc<Receipts>,
}

impl DrainState {
    pub(crate) fn new(receipts: Arc<Receipts>) -> Self {
        Self {
            shutting_down: AtomicBool::new(false),
            by_operator: AtomicBool::new(false),
            receipts,
        }
    }

    /// Whether the worker must not take anything new: it shuts down, an operator drains it, or one
    /// of its sandboxes left something behind.
    pub(crate) fn is_draining(&self) -> bool {
        self.shutting_down.load(Ordering::SeqCst)
            || self.by_operator.load(Ordering::Relaxed)
            || !self.receipts.are_clean()
    }

    /// Stores the operator's request; returns whether it changed.
    pub(crate) fn set_by_operator(&self, drain: bool) -> bool {
        self.by_operator.swap(drain, Ordering::Relaxed) != drain
    }

    pub(crate) fn shut_down(&self) {
        self.shutting_down.store(true, Ordering::SeqCst);
    }
}
