//! Starts a program and waits for it, on all cores, as often as possible.

use std::{
    io::Read,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use codelia_tests::Scratch;
use tokio::task::spawn_blocking;

use crate::measure::Measured;

/// A typical bubblewrap command line, and the command in it.
macro_rules! bwrap {
    ($command:literal) => {
        concat!(
            "bwrap --unshare-all --die-with-parent --clearenv --cap-drop ALL --ro-bind /usr /usr ",
            "--symlink usr/bin /bin --symlink usr/lib /lib --symlink usr/lib64 /lib64 ",
            "--proc /proc --dev /dev --tmpfs /tmp ",
            $command
        )
    };
}

pub(crate) const BWRAP: &str = bwrap!("true");
const BWRAP_ECHO: &str = bwrap!("echo x");

/// A loop that only starts processes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Loop<'a> {
    words: &'a str,
    lanes: usize,
}

impl Loop<'static> {
    /// Runs `true` in this many lanes.
    pub(crate) fn of_true(lanes: usize) -> Self {
        Self { words: "/bin/true", lanes }
    }

    /// Runs `bwrap … true` in this many lanes.
    pub(crate) fn of_bwrap(lanes: usize) -> Self {
        Self { words: BWRAP, lanes }
    }
}

impl<'a> Loop<'a> {
    /// Runs a program with its arguments, separated by spaces, in this many lanes.
    pub(crate) fn new(words: &'a str, lanes: usize) -> Self {
        Self { words, lanes }
    }

    /// Runs the loop for `time`.
    pub(crate) async fn measure(self, time: Duration) -> Result<Measured> {
        // Some programs leave files in the working directory, so each lane has its own.
        let directories = (0..self.lanes).map(|_| Scratch::new()).collect::<Result<Vec<_>>>()?;
        Measured::repeat(self.lanes, time, |lane| {
            let words = self.words.to_owned();
            let directory = directories[lane].path().to_owned();
            async move { spawn_blocking(move || fork_and_exec(&words, &directory)).await? }
        })
        .await
    }
}

/// Starts this many `bwrap … echo` at the same time. Measures to the first byte of their output.
pub(crate) async fn bwrap_burst(count: usize) -> Result<Measured> {
    Measured::each(count, async |_| spawn_blocking(bwrap_first_byte).await?).await
}

fn bwrap_first_byte() -> Result<Duration> {
    let begin = Instant::now();
    let mut words = BWRAP_ECHO.split_whitespace();
    let mut child = Command::new(words.next().unwrap_or_default())
        .args(words)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let mut byte = [0];
    let read = child.stdout.take().map(|mut output| output.read_exact(&mut byte));
    let latency = begin.elapsed();
    let status = child.wait()?;
    ensure!(status.success(), "{status}: {BWRAP_ECHO}");
    read.transpose()?;
    Ok(latency)
}

fn fork_and_exec(line: &str, directory: &Path) -> Result<Duration> {
    let begin = Instant::now();
    let mut words = line.split_whitespace();
    let status = Command::new(words.next().unwrap_or_default())
        .args(words)
        .current_dir(directory)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()?;
    ensure!(status.success(), "{status}: {line}");
    Ok(begin.elapsed())
}
