//! The tables of the crate agree with the code: every action has a row, what a row names exists,
//! and every variant is checked.

use std::{
    fs,
    path::{Path, PathBuf},
};

const TABLE: &str = include_str!("../src/statements.md");

fn crates() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The text between two others, or nothing.
fn between<'a>(text: &'a str, start: &str, end: &str) -> &'a str {
    text.split_once(start).and_then(|(_, rest)| rest.split_once(end)).map_or("", |(found, _)| found)
}

/// The variants of the enum in a source that starts with this line.
fn variants<'a>(source: &'a str, start: &str) -> Vec<&'a str> {
    let lines =
        between(source, start, "\n}\n").lines().filter_map(|line| line.strip_prefix("    "));
    let names = lines.filter(|line| line.starts_with(|first: char| first.is_ascii_uppercase()));
    names.filter_map(|line| line.split(|next: char| !next.is_ascii_alphanumeric()).next()).collect()
}

/// The inline code of a text.
fn inline_code(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

/// What is wrong with a row of the table.
fn mistakes(row: &str) -> Vec<String> {
    let cells: Vec<_> = row.split('|').map(inline_code).collect();
    let (functions, files) = (&cells[2], &cells[3]);
    let sources: Vec<_> =
        files.iter().map(|file| (file, fs::read_to_string(crates().join(file)))).collect();
    let missing = sources.iter().filter(|(_, source)| source.is_err());
    let mut mistakes: Vec<_> = missing.map(|(file, _)| format!("no file {file}")).collect();
    for function in functions {
        let definition = format!("fn {function}");
        let defines = |source: &str| {
            source
                .match_indices(&definition)
                .any(|(at, _)| source[at + definition.len()..].starts_with(['(', '<']))
        };
        if !sources.iter().any(|(_, source)| source.as_ref().is_ok_and(|source| defines(source))) {
            mistakes.push(format!("no function {function}"));
        }
    }
    mistakes
}

#[test]
fn every_action_stands_for_existing_code() {
    let rows: Vec<_> = TABLE.lines().filter(|line| line.starts_with("| `")).collect();
    let wrong: Vec<_> = rows.iter().flat_map(|row| mistakes(row)).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
    let faults = between(TABLE, "No code stands behind", "\n\n");
    let mut named: Vec<_> =
        rows.iter().map(|row| inline_code(row)[0]).chain(inline_code(faults)).collect();
    let mut actions = variants(include_str!("../src/action.rs"), "pub enum Action {\n");
    named.sort_unstable();
    actions.sort_unstable();
    assert_eq!(named, actions);
}

#[test]
fn wrong_row_is_rejected() {
    let row = "| `Insert` | `run_inserted` | `store/src/run/insert.rs`, `store/src/sql/none.sql` |";
    assert_eq!(mistakes(row), ["no file store/src/sql/none.sql", "no function run_inserted"]);
}

#[test]
fn every_variant_is_checked() {
    let tests = include_str!("variants/mod.rs");
    let all = variants(include_str!("../src/variant.rs"), "pub enum Variant {\n");
    let is_checked =
        |variant: &&str| tests.contains(&format!("check_violation(Variant::{variant},"));
    let unchecked: Vec<_> = all.into_iter().filter(|variant| !is_checked(variant)).collect();
    assert_eq!(unchecked, ["Correct"]);
}
