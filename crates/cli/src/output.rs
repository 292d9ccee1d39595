//! What goes to stdout: tables for people, JSON for programs.

use std::io::{self, Write};

use anyhow::Result;
use comfy_table::{Table, presets::NOTHING};
use serde_json::Value;

/// How results are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Output {
    People,
    Json,
}

/// Nobody reads our stdout any more: a reason to end, quietly.
#[derive(Debug, thiserror::Error)]
#[error("stdout is closed")]
pub(crate) struct StdoutClosed;

impl Output {
    pub(crate) fn is_json(self) -> bool {
        self == Self::Json
    }

    /// Prints things: as one JSON array, or as a table with a row for each.
    pub(crate) fn list<T>(
        self,
        header: &[&str],
        things: &[T],
        json: impl Fn(&T) -> Value,
        row: impl Fn(&T) -> Vec<String>,
    ) -> Result<()> {
        match self {
            Self::Json => line(&Value::Array(things.iter().map(json).collect()).to_string()),
            Self::People => line(&table(header, things.iter().map(row))),
        }
    }

    /// Prints one thing: as a JSON object, or as text.
    pub(crate) fn one(self, json: &Value, text: &str) -> Result<()> {
        match self {
            Self::Json => line(&json.to_string()),
            Self::People => line(text),
        }
    }

    /// Prints one thing: as a JSON object, or as its fields, one a line.
    pub(crate) fn record(self, json: &Value) -> Result<()> {
        let fields = json.as_object().into_iter().flatten();
        let rows = fields
            .filter(|(_, value)| !is_empty(value))
            .map(|(name, value)| vec![name.clone(), plain(value)]);
        let table = table(&[], rows);
        self.one(json, &table)
    }
}

/// Writes a line to stdout.
pub(crate) fn line(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    let written = stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.write_all(b"\n"))
        .and_then(|()| stdout.flush());
    written.map_err(closed_or)
}

/// Turns a failed write to stdout into an error that says whether its reader left.
pub(crate) fn closed_or(error: io::Error) -> anyhow::Error {
    if error.kind() == io::ErrorKind::BrokenPipe { StdoutClosed.into() } else { error.into() }
}

pub(crate) fn table(header: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING);
    if !header.is_empty() {
        table.set_header(header);
    }
    table.add_rows(rows);
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
