//! The size of the local terminal.

use codelia_proto::v1::Terminal;

use crate::system;

/// Largest size that the server accepts.
const MAX: u16 = 1000;

/// Returns the terminal's size, or 80×24 if it is unknown.
pub(crate) fn size() -> Terminal {
    match system::terminal_size() {
        Some((columns, rows)) if columns > 0 && rows > 0 => {
            Terminal { columns: columns.min(MAX).into(), rows: rows.min(MAX).into() }
        }
        _ => Terminal { columns: 80, rows: 24 },
    }
}
