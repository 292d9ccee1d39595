//! The first floor: the kernel's fork and exec of `true`, as many at once as there are cores.

use std::{
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::Result;
use tokio::task::spawn_blocking;

use crate::measure::Measured;

/// A loop of nothing but processes.
#[derive(Debug)]
pub(crate) struct BareExec {
    lanes: usize,
}

impl BareExec {
    pub(crate) fn new(lanes: usize) -> Self {
        Self { lanes }
    }

    /// Starts `true` and waits for it, for `time`.
    pub(crate) async fn measure(&self, time: Duration) -> Result<Measured> {
        Measured::of(self.lanes, time, |_| async { Ok(spawn_blocking(fork_and_exec).await??) }).await
    }
}

fn fork_and_exec() -> std::io::Result<Duration> {
    let begin = Instant::now();
    let mut command = Command::new("/bin/true");
    command.env_clear().stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status()?;
    Ok(begin.elapsed())
}
