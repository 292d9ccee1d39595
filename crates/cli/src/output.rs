//! Results on stdout: text and tables, or JSON with `--json`. Messages on stderr. What goes to a
//! terminal passes through [`safe_text`].

use std::io::{self, Write};

use anyhow::Result;
use comfy_table::{Table, presets::NOTHING};
use serde_json::Value;

use crate::safe_text;

/// Format of the results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Output {
    Text,
    Json,
}

/// The reader of stdout is gone. The program exits without an error message.
#[derive(Debug, thiserror::Error)]
#[error("stdout is closed")]
pub(crate) struct StdoutClosed;

impl Output {
    pub(crate) fn is_json(self) -> bool {
        self == Self::Json
    }

    /// Prints items as a JSON array, or as a table with one row per item.
    pub(crate) fn print_list<T>(
        self,
        header: &[&str],
        items: &[T],
        json: impl Fn(&T) -> Value,
        row: impl Fn(&T) -> Vec<String>,
    ) -> Result<()> {
        match self {
            Self::Json => write_line(&Value::Array(items.iter().map(json).collect()).to_string()),
            Self::Text => write_line(&table(header, items.iter().map(row))),
        }
    }

    /// Prints a JSON object, or a text.
    pub(crate) fn print(self, json: &Value, text: &str) -> Result<()> {
        match self {
            Self::Json => write_line(&json.to_string()),
            Self::Text => write_line(text),
        }
    }

    /// Prints a JSON object, or its non-empty fields, one per line.
    pub(crate) fn print_fields(self, json: &Value) -> Result<()> {
        let fields = json.as_object().into_iter().flatten();
        let rows = fields
            .filter(|(_, value)| !is_empty(value))
            .map(|(name, value)| vec![name.clone(), plain(value)]);
        let table = table(&[], rows);
        self.print(json, &table)
    }
}

/// Writes lines to stdout.
pub(crate) fn write_line(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    let written = stdout
        .write_all(safe_text::lines(text, &stdout).as_bytes())
        .and_then(|()| stdout.write_all(b"\n"))
        .and_then(|()| stdout.flush());
    written.map_err(stdout_error)
}

/// Writes a message of one line to stderr. Nothing can be done if that fails.
pub(crate) fn write_message(text: &str) {
    let mut stderr = io::stderr().lock();
    let line = format!("{}\n", safe_text::line(text, &stderr));
    let _ = stderr.write_all(line.as_bytes());
}

/// Like [`write_message`], for a message that may have several lines.
pub(crate) fn write_messages(text: &str) {
    let mut stderr = io::stderr().lock();
    let lines = format!("{}\n", safe_text::lines(text, &stderr));
    let _ = stderr.write_all(lines.as_bytes());
}

/// Converts an error of writing to stdout; a broken pipe becomes [`StdoutClosed`].
pub(crate) fn stdout_error(error: io::Error) -> anyhow::Error {
    if error.kind() == io::ErrorKind::BrokenPipe { StdoutClosed.into() } else { error.into() }
}

/// Formats a table for stdout, without borders.
pub(crate) fn table(header: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING);
    if !header.is_empty() {
        table.set_header(header);
    }
    let safe = |cell: String| safe_text::line(&cell, &io::stdout()).into_owned();
    table.add_rows(rows.map(|row| row.into_iter().map(safe).collect::<Vec<_>>()));
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.trim_fmt()
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(plain).collect::<Vec<_>>().join(" "),
        Value::Object(fields) => fields
            .iter()
            .map(|(name, value)| format!("{name}={}", plain(value)))
            .collect::<Vec<_>>()
            .join(" "),
        other => other.to_string(),
    }
}
