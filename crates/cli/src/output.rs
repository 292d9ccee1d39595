//! Results on stdout: text and tables, or JSON with `--json`. Messages on stderr. What goes to a
//! terminal passes through [`safe_text`].

use std::io::{self, Write};

use anyhow::Result;
use rustix::termios::tcgetwinsize;
use serde_json::Value;

use crate::{safe_text, style, table};

/// Width of lists that do not go to a terminal.
const LIST_WIDTH: usize = 100;

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

    /// Prints items as a JSON array, or as a table with one row per item. Long cells are cut to fit
    /// the terminal.
    pub(crate) fn print_list<T>(
        self,
        header: &[&str],
        items: &[T],
        json: impl Fn(&T) -> Value,
        row: impl Fn(&T) -> Vec<String>,
    ) -> Result<()> {
        write_line(&match self {
            Self::Json => json_array(items, json),
            Self::Text => table::format(header, safe(items.iter().map(row)), list_width()),
        })
    }

    /// Like [`Output::print_list`], without cutting cells.
    pub(crate) fn print_whole_list<T>(
        self,
        header: &[&str],
        items: &[T],
        json: impl Fn(&T) -> Value,
        row: impl Fn(&T) -> Vec<String>,
    ) -> Result<()> {
        write_line(&match self {
            Self::Json => json_array(items, json),
            Self::Text => table(header, items.iter().map(row)),
        })
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
        self.print(json, &table(&[], fields(json).into_iter()))
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

/// Writes `error: ` and a message of one line to stderr.
pub(crate) fn write_error(message: &str) {
    write_after_label(safe_text::line(message, &io::stderr()).as_ref());
}

/// Like [`write_error`], for a message that may have several lines.
pub(crate) fn write_error_lines(message: &str) {
    write_after_label(safe_text::lines(message, &io::stderr()).as_ref());
}

fn write_after_label(safe: &str) {
    let mut stderr = io::stderr().lock();
    let line = format!("{} {safe}\n", style::error("error:", &stderr));
    let _ = stderr.write_all(line.as_bytes());
}

/// Converts an error of writing to stdout; a broken pipe becomes [`StdoutClosed`].
pub(crate) fn stdout_error(error: io::Error) -> anyhow::Error {
    if error.kind() == io::ErrorKind::BrokenPipe { StdoutClosed.into() } else { error.into() }
}

fn json_array<T>(items: &[T], json: impl Fn(&T) -> Value) -> String {
    Value::Array(items.iter().map(json).collect()).to_string()
}

/// Formats a table for stdout, without borders.
pub(crate) fn table(header: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    table::format(header, safe(rows), usize::MAX)
}

/// Makes cells safe for stdout. Their width is measured afterwards.
fn safe(rows: impl Iterator<Item = Vec<String>>) -> impl Iterator<Item = Vec<String>> {
    let safe = |cell: String| safe_text::line(&cell, &io::stdout()).into_owned();
    rows.map(move |row| row.into_iter().map(safe).collect())
}

fn list_width() -> usize {
    // Fails if stdout is not a terminal.
    match tcgetwinsize(io::stdout()) {
        Ok(size) if size.ws_col > 0 => size.ws_col.into(),
        _ => LIST_WIDTH,
    }
}

/// The non-empty fields of an object as rows. A field of an object in it is `outer.inner`.
fn fields(json: &Value) -> Vec<Vec<String>> {
    let mut rows = Vec::new();
    for (name, value) in json.as_object().into_iter().flatten().filter(|(_, value)| !is_empty(value)) {
        match value {
            Value::Object(_) => rows.extend(fields(value).into_iter().map(|mut row| {
                row[0] = format!("{name}.{}", row[0]);
                row
            })),
            value => rows.push(vec![name.clone(), plain(value)]),
        }
    }
    rows
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
