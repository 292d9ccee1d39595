//! Results on stdout: text and tables, or JSON with `--json`. Messages on stderr. What goes to a
//! terminal passes through `safe_text`.

use std::io::{self, Write};

use anyhow::Result;
use codelia_proto::json::{JsonError, to_dynamic, to_json};
use prost::Name;
use serde_json::Value;

use crate::{fields, safe_text, style, system, table};

/// Width of lists that do not go to a terminal.
const LIST_WIDTH: usize = 100;

/// Format of the results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    Text,
    Json,
}

/// The reader of stdout is gone. The program exits without an error message.
#[derive(Debug, thiserror::Error)]
#[error("stdout is closed")]
pub struct StdoutClosed;

impl Output {
    pub fn is_json(self) -> bool {
        self == Self::Json
    }

    /// Prints messages as a JSON array, or as a table with one row for each. Long cells are cut to
    /// fit the terminal.
    pub fn print_list<M: Name>(
        self,
        header: &[&str],
        messages: &[M],
        row: impl Fn(&M) -> Vec<String>,
    ) -> Result<()> {
        match self {
            Self::Json => self.print(&json_array(messages)?, ""),
            Self::Text => write_line(&fitting_table(header, messages.iter().map(row))),
        }
    }

    /// Prints items that are no messages as a JSON array, or as a table without cutting cells.
    pub fn print_whole_list<T>(
        self,
        header: &[&str],
        items: &[T],
        json: impl Fn(&T) -> Value,
        row: impl Fn(&T) -> Vec<String>,
    ) -> Result<()> {
        match self {
            Self::Json => self.print(&items.iter().map(json).collect(), ""),
            Self::Text => write_line(&table(header, items.iter().map(row))),
        }
    }

    /// Prints a JSON object, or a text.
    pub fn print(self, json: &Value, text: &str) -> Result<()> {
        match self {
            Self::Json => write_line(&json.to_string()),
            Self::Text => write_line(text),
        }
    }

    /// Prints a message as JSON, or a text.
    pub fn print_message_as<M: Name>(self, message: &M, text: &str) -> Result<()> {
        match self {
            Self::Json => self.print_json(message),
            Self::Text => write_line(text),
        }
    }

    /// Prints a message as JSON; nothing without `--json`.
    pub fn print_json<M: Name>(self, message: &M) -> Result<()> {
        if self.is_json() { write_line(&to_json(message)?.to_string()) } else { Ok(()) }
    }

    /// Prints a message as JSON, or its fields, one per line.
    pub fn print_message<M: Name>(self, message: &M) -> Result<()> {
        match self {
            Self::Json => self.print_json(message),
            Self::Text => write_line(&table(&[], fields::rows(&to_dynamic(message)?).into_iter())),
        }
    }

    /// Prints a JSON object that is no message of the API, or its fields, one per line.
    pub fn print_fields(self, json: &Value) -> Result<()> {
        let fields = json.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
        self.print(json, &table(&[], fields.map(|(name, value)| vec![name.clone(), plain(value)])))
    }
}

/// Writes lines to stdout.
pub fn write_line(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    let written = stdout
        .write_all(safe_text::lines(text, &stdout).as_bytes())
        .and_then(|()| stdout.write_all(b"\n"))
        .and_then(|()| stdout.flush());
    written.map_err(stdout_error)
}

/// Writes a message of one line to stderr. Nothing can be done if that fails.
pub fn write_message(text: &str) {
    let mut stderr = io::stderr().lock();
    let line = format!("{}\n", safe_text::line(text, &stderr));
    let _ = stderr.write_all(line.as_bytes());
}

/// Writes a note of this program to stderr: one line that starts with its name.
pub fn write_note(text: &str) {
    write_message(&format!("codelia: {text}"));
}

/// Writes `error: ` and a message of one line to stderr.
pub fn write_error(message: &str) {
    write_after_label(safe_text::line(message, &io::stderr()).as_ref());
}

/// Like [`write_error`], for a message that may have several lines.
pub fn write_error_lines(message: &str) {
    write_after_label(safe_text::lines(message, &io::stderr()).as_ref());
}

fn write_after_label(safe: &str) {
    let mut stderr = io::stderr().lock();
    let line = format!("{} {safe}\n", style::error("error:", &stderr));
    let _ = stderr.write_all(line.as_bytes());
}

/// Converts an error of writing to stdout; a broken pipe becomes [`StdoutClosed`].
pub fn stdout_error(error: io::Error) -> anyhow::Error {
    if error.kind() == io::ErrorKind::BrokenPipe { StdoutClosed.into() } else { error.into() }
}

/// Returns the JSON array of messages.
pub(crate) fn json_array<'a, M: Name + 'a>(
    messages: impl IntoIterator<Item = &'a M>,
) -> Result<Value, JsonError> {
    messages.into_iter().map(to_json).collect()
}

/// Formats a table for stdout like [`table()`], with long cells cut to fit the terminal.
pub fn fitting_table(header: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    table::format(header, safe(rows), list_width())
}

/// Formats a table for stdout, without borders.
pub fn table(header: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    table::format(header, safe(rows), usize::MAX)
}

/// Makes cells safe for stdout. Their width is measured afterwards.
fn safe(rows: impl Iterator<Item = Vec<String>>) -> impl Iterator<Item = Vec<String>> {
    let safe = |cell: String| safe_text::line(&cell, &io::stdout()).into_owned();
    rows.map(move |row| row.into_iter().map(safe).collect())
}

fn list_width() -> usize {
    system::stdout_columns().filter(|columns| *columns > 0).map_or(LIST_WIDTH, usize::from)
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(plain).collect::<Vec<_>>().join(" "),
        other => other.to_string(),
    }
}
