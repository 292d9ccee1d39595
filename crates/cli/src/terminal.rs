//! The local terminal: raw mode and size.

use std::io::{self, IsTerminal};

use codelia_proto::v1::Terminal;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

/// Puts the terminal in raw mode until dropped.
#[derive(Debug)]
pub(crate) struct RawMode {
    original: Termios,
}

impl RawMode {
    /// Puts the terminal on stdin in raw mode; `None` if stdin is not a terminal.
    pub(crate) fn enter() -> io::Result<Option<Self>> {
        if !io::stdin().is_terminal() {
            return Ok(None);
        }
        let original = tcgetattr(io::stdin())?;
        let mut raw = original.clone();
        raw.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        Ok(Some(Self { original }))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        // Nothing to restore if the terminal is gone.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.original);
    }
}

/// Returns the terminal's size, or 80×24 if it is unknown.
pub(crate) fn size() -> Terminal {
    let size = tcgetwinsize(io::stdin()).or_else(|_| tcgetwinsize(io::stdout()));
    match size {
        Ok(size) if size.ws_col > 0 && size.ws_row > 0 => {
            Terminal { columns: i32::from(size.ws_col.min(1000)), rows: i32::from(size.ws_row.min(1000)) }
        }
        _ => Terminal { columns: 80, rows: 24 },
    }
}
