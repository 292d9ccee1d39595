//! The terminal we were started in: raw mode, its size, and when that changes.

use std::io::{self, IsTerminal};

use codelia_proto::v1::Terminal;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

/// Raw mode, until it is dropped.
#[derive(Debug)]
pub(crate) struct RawMode {
    before: Termios,
}

impl RawMode {
    /// Puts the terminal on stdin in raw mode; `None` if stdin is no terminal.
    pub(crate) fn enter() -> io::Result<Option<Self>> {
        if !io::stdin().is_terminal() {
            return Ok(None);
        }
        let before = tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        Ok(Some(Self { before }))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        // A terminal that is gone needs no restoring.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.before);
    }
}

/// The terminal's size; 80×24 if there is none or it does not know.
pub(crate) fn size() -> Terminal {
    let known = tcgetwinsize(io::stdin()).or_else(|_| tcgetwinsize(io::stdout()));
    match known {
        Ok(size) if size.ws_col > 0 && size.ws_row > 0 => {
            Terminal { columns: i32::from(size.ws_col.min(1000)), rows: i32::from(size.ws_row.min(1000)) }
        }
        _ => Terminal { columns: 80, rows: 24 },
    }
}
