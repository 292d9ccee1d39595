//! Signals during a copy, which leave no temporary file behind.

use anyhow::{Result, bail};

use crate::signals::Signals;

/// Waits for `work` or a signal, which is an error with this message. Dropping `work` removes its
/// temporary files.
pub(super) async fn or_signal<T>(
    work: impl Future<Output = Result<T>>,
    message: &'static str,
) -> Result<T> {
    let mut signals = Signals::catch()?;
    tokio::select! {
        done = work => done,
        _ = signals.next() => bail!(message),
    }
}
