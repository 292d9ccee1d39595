//! Points at which tests kill the worker. Programs built for release have none.

/// Kills this process with SIGKILL if `CODELIA_TEST_KILL_AT` is `name`, or at the Nth time if it is
/// `name:N`.
#[cfg(debug_assertions)]
pub(crate) fn point(name: &str) {
    use std::sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
    };

    use rustix::process::{Signal, getpid, kill_process};

    static KILL_AT: LazyLock<Option<(String, u64)>> = LazyLock::new(|| {
        let at = std::env::var("CODELIA_TEST_KILL_AT").ok()?;
        let (name, number) = at.split_once(':').unwrap_or((&at, "1"));
        Some((name.to_owned(), number.parse().ok()?))
    });
    static PASSED: AtomicU64 = AtomicU64::new(0);
    if let Some((at, number)) = &*KILL_AT
        && at == name
        && PASSED.fetch_add(1, Ordering::Relaxed) + 1 == *number
        && kill_process(getpid(), Signal::KILL).is_ok()
    {
        // The signal ends the process before any other call.
        loop {
            std::thread::park();
        }
    }
}

#[cfg(not(debug_assertions))]
pub(crate) fn point(_name: &str) {}
