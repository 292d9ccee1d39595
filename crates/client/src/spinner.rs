//! A spinner on the terminal during slow steps.

use std::{io::IsTerminal, time::Duration};

use indicatif::ProgressBar;

const TICK_INTERVAL: Duration = Duration::from_millis(100);

/// Spins until dropped. Hidden if stderr is not a terminal.
#[derive(Debug)]
pub struct Spinner(Option<ProgressBar>);

impl Spinner {
    /// Starts a spinner with a message.
    pub fn start(message: &'static str) -> Self {
        Self(std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new_spinner().with_message(message);
            bar.enable_steady_tick(TICK_INTERVAL);
            bar
        }))
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}
