//! Starts a program and waits for it, on all cores, as often as possible.

use std::{
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use tokio::task::spawn_blocking;

use crate::measure::Measured;

/// A typical bubblewrap command line.
const BWRAP: &str = "bwrap --unshare-all --die-with-parent --clearenv --cap-drop ALL --ro-bind /usr /usr \
    --symlink usr/bin /bin --symlink usr/lib /lib --symlink usr/lib64 /lib64 --proc /proc --dev /dev --tmpfs /tmp true";

/// A loop that only starts processes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Loop {
    words: &'static str,
    lanes: usize,
}

impl Loop {
    /// Runs `true` in this many lanes.
    pub(crate) fn of_true(lanes: usize) -> Self {
        Self { words: "/bin/true", lanes }
    }

    /// Runs `bwrap … true` in this many lanes.
    pub(crate) fn of_bwrap(lanes: usize) -> Self {
        Self { words: BWRAP, lanes }
    }

    /// Runs the loop for `time`.
    pub(crate) async fn measure(self, time: Duration) -> Result<Measured> {
        Measured::of(
            self.lanes,
            time,
            |_| async move { spawn_blocking(move || fork_and_exec(self.words)).await? },
        )
        .await
    }
}

fn fork_and_exec(words: &str) -> Result<Duration> {
    let begin = Instant::now();
    let mut words = words.split_whitespace();
    let status = Command::new(words.next().unwrap_or_default())
        .args(words)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()?;
    ensure!(status.success(), "{status}");
    Ok(begin.elapsed())
}
