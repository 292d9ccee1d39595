//! What every service of the server shares.

use codelia_store::Store;
use tokio_util::sync::CancellationToken;

use crate::{dispatch::Dispatch, options::Options, quota::OutputQuota, session_cache::Specs};

/// What every service of the server shares.
#[derive(Debug)]
pub(crate) struct Context {
    /// What the operator chose.
    pub(crate) options: Options,
    /// The truth.
    pub(crate) store: Store,
    /// The way to workers.
    pub(crate) dispatch: Dispatch,
    /// What sessions were made with.
    pub(crate) specs: Specs,
    /// What tenants keep of output.
    pub(crate) output: OutputQuota,
    /// Cancelled when streams must end because the server does.
    pub(crate) cut: CancellationToken,
}
