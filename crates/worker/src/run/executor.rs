//! What executes runs: its parts, and why it may have no result. `execute` starts commands,
//! `supervise` stays with them, `commit` ends their runs.

use std::{sync::Arc, time::Duration};

use codelia_policy::EscapeOptions;
use codelia_store::{FlagTally, SecretKey};
use codelia_types::Receipt;

use super::{retry::LeaseLost, signs::canary::CanaryResponder};
use crate::{
    core::Core,
    disk::Space,
    egress::Egress,
    sandbox::{backends::Denial, receipts::Receipts},
    session::spare_maker::SpareMaker,
};

/// Executes runs that were activated and commits their results.
#[derive(Debug)]
pub(crate) struct Executor {
    pub(crate) core: Arc<Core>,
    pub(crate) spares: Arc<SpareMaker>,
    pub(crate) receipts: Arc<Receipts>,
    pub(crate) egress: Arc<Egress>,
    pub(crate) flags: Arc<FlagTally>,
    pub(crate) space: Arc<Space>,
    /// Answers to decoys that commands open.
    pub(crate) canaries: Arc<CanaryResponder>,
    /// From the signal that asks a command to end to the one that kills it.
    pub(crate) kill_grace: Duration,
    /// How long a read waits for a decision.
    pub(crate) read_timeout: Duration,
    /// The responses to attempts to escape.
    pub(crate) escape: Arc<EscapeOptions>,
    /// Decrypts secret variables.
    pub(crate) secret_key: Option<SecretKey>,
}

/// Why a run has no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoResult {
    /// The lease is lost: the store decides what becomes of the run.
    LeaseLost,
    /// Its command was not started, and this worker no longer holds its session or shuts down.
    NotHeld,
}

impl From<LeaseLost> for NoResult {
    fn from(LeaseLost: LeaseLost) -> Self {
        Self::LeaseLost
    }
}

/// Why a command was not started.
#[derive(Debug)]
pub(crate) enum NotStarted {
    /// It can have no sandbox.
    Denied(Denial),
    /// The run was canceled; the receipt of the sandbox that was prepared for it.
    Canceled(Receipt),
    /// The worker may not start it.
    NoResult(NoResult),
}

impl From<Denial> for NotStarted {
    fn from(denial: Denial) -> Self {
        Self::Denied(denial)
    }
}

impl From<NoResult> for NotStarted {
    fn from(no_result: NoResult) -> Self {
        Self::NoResult(no_result)
    }
}
