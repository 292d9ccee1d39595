//! Work with files: off the async runtime, and with results that are no failures.

use std::io::{self, ErrorKind};

use tokio::task::{JoinError, spawn_blocking};

/// Does file work outside the async runtime. Work that panicked fails, too.
pub(crate) async fn blocking<T, E, F>(work: F) -> Result<T, E>
where
    T: Send + 'static,
    E: From<JoinError> + Send + 'static,
    F: FnOnce() -> Result<T, E> + Send + 'static,
{
    spawn_blocking(work).await?
}

/// The result of work with something that may be absent; `None` if it is.
pub(crate) fn if_exists<T>(done: io::Result<T>) -> io::Result<Option<T>> {
    match done {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        done => done.map(Some),
    }
}

/// The result of creating something that may exist; `false` if it does.
pub(crate) fn unless_exists(created: io::Result<()>) -> io::Result<bool> {
    match created {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
        created => created.map(|()| true),
    }
}
