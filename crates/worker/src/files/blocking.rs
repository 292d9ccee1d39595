//! Work with files, which blocks its thread.

use codelia_types::Reason;
use tokio::task::spawn_blocking;

use super::error::FileError;

/// Does file work outside the async runtime.
pub(super) async fn blocking<T, F>(work: F) -> Result<T, FileError>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T, FileError> + Send + 'static,
{
    match spawn_blocking(work).await {
        Ok(done) => done,
        Err(panic) => {
            tracing::error!(%panic, "file call panicked");
            Err(Reason::Internal.into())
        }
    }
}
