//! `docs/cli.md` is generated from the arguments: after a change, run
//! `CODELIA_BLESS=1 cargo test -p codelia-cli documented`.

use std::{fmt::Write, path::Path};

use clap::{Command, CommandFactory};

use super::{Cli, help};

const HEAD: &str = "# Command line

<!-- Generated: CODELIA_BLESS=1 cargo test -p codelia-cli documented -->

The help of every command, as `--help` prints it. Global options are listed once.

";
const WIDTH: usize = 98;

/// Compares a generated document with its file, or writes it if `CODELIA_BLESS` is 1.
pub(crate) fn check_document(name: &str, expected: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name);
    if std::env::var_os("CODELIA_BLESS").is_some_and(|value| value == "1") {
        std::fs::write(&path, expected).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == expected,
        "docs/{name} is out of date: run `CODELIA_BLESS=1 cargo test -p codelia-cli documented`"
    );
}

/// Adds the help of a command and of all below it.
fn add(text: &mut String, command: &Command, path: &str) {
    let shown = command.clone().bin_name(path).term_width(WIDTH).render_help().to_string();
    let lines: Vec<_> = shown.lines().map(str::trim_end).collect();
    // The language is not a shell's: what follows an example is not part of it.
    write!(text, "## {path}\n\n```help\n{}\n```\n\n", lines.join("\n").trim_end()).unwrap();
    let below = command.get_subcommands().filter(|command| !command.is_hide_set());
    for command in below.filter(|command| command.get_name() != "help") {
        add(text, command, &format!("{path} {}", command.get_name()));
    }
}

#[test]
fn documented_commands_are_current() {
    let mut text = HEAD.to_owned();
    add(&mut text, &help::with_groups(Cli::command()), "codelia");
    check_document("cli.md", &format!("{}\n", text.trim_end()));
}
