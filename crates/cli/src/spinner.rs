//! A sign of life on the terminal while something takes its time.

use std::{io::IsTerminal, time::Duration};

use indicatif::ProgressBar;

/// Spins until it is dropped; only where somebody can see it.
#[derive(Debug)]
pub(crate) struct Spinner(Option<ProgressBar>);

impl Spinner {
    /// Starts to spin beside `text`.
    pub(crate) fn start(text: &'static str) -> Self {
        Self(std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new_spinner().with_message(text);
            bar.enable_steady_tick(Duration::from_millis(100));
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
