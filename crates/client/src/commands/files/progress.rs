//! Progress of a copy on the terminal.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressStyle};

/// Shows the progress of `size` bytes. Hidden if stderr is not a terminal.
pub(super) fn bar(size: Option<u64>) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    match size {
        None => {
            let style = ProgressStyle::with_template("{spinner} {bytes} {bytes_per_sec} {msg}");
            ProgressBar::new_spinner()
                .with_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()))
        }
        Some(size) => {
            let style = ProgressStyle::with_template(
                "{bar:30} {bytes}/{total_bytes} {bytes_per_sec} {msg}",
            );
            ProgressBar::new(size)
                .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        }
    }
}
