//! State that all services of the server share.

use codelia_store::Store;
use tokio_util::sync::CancellationToken;

use crate::{dispatch::Dispatch, options::Options, quota::OutputQuota, session_cache::SessionCache};

/// State that all services of the server share.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) options: Options,
    pub(crate) store: Store,
    pub(crate) dispatch: Dispatch,
    pub(crate) session_cache: SessionCache,
    pub(crate) output_quota: OutputQuota,
    /// Cancelled when open streams must end because the shutdown grace is over.
    pub(crate) stop_streams: CancellationToken,
}
