//! Waits for free descriptors. A teardown without any cannot see whether a sandbox left something
//! behind, and must not count that as something left.

use std::time::Duration;

use codelia_sys::{Errno, fd};
use tokio::time::sleep;

/// Descriptors that a step of a teardown uses at the same time.
const NEEDED: usize = 4;
const RETRY_DELAY: Duration = Duration::from_millis(50);

/// Waits until a few descriptors are free.
pub(super) async fn available() {
    let mut is_logged = false;
    while matches!(try_open(), Err(Errno::MFILE | Errno::NFILE)) {
        if !is_logged {
            tracing::error!("no free descriptors: the teardown of a sandbox waits for some");
            is_logged = true;
        }
        sleep(RETRY_DELAY).await;
    }
}

fn try_open() -> Result<(), Errno> {
    (0..NEEDED).map(|_| fd::dev_null()).collect::<Result<Vec<_>, _>>().map(drop)
}
