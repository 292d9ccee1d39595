//! `docs/configuration.md` is generated from the keys, and from what `docs/operations.md` says about
//! them: after a change, run `CODELIA_BLESS=1 cargo test -p codelia-cli documented`.

use std::fmt::Write;

use super::keys::{KEYS, Key, Kind};
use crate::args::check_document;

const OPERATIONS: &str = include_str!("../../../../docs/operations.md");
const HEAD: &str = "# Configuration

<!-- Generated: CODELIA_BLESS=1 cargo test -p codelia-cli documented -->

Every key, its environment variable and its default. A flag wins over a variable, a variable over
the file that `--config` or `CODELIA_CONFIG` names (TOML). Unknown keys and `CODELIA_` variables are
refused. `codelia config show` prints the effective values and their sources. The settings are
explained in [operations](operations.md).
";

/// The text of a key in a table of `docs/operations.md`: `| keys | default | meaning |`.
fn meaning(key: &Key) -> String {
    let name = format!("`{}`", key.path);
    let rows = OPERATIONS.lines().filter(|line| line.starts_with("| `"));
    let cells = rows.map(|row| row.split('|').map(str::trim).collect::<Vec<_>>());
    let found = cells.filter(|cells| cells.len() == 5).find(|cells| cells[1].contains(&name));
    found.map(|cells| cells[3].to_owned()).unwrap_or_default()
}

fn row(key: &Key) -> String {
    let kind = match key.kind {
        Kind::Text => "text",
        Kind::Integer => "integer",
        Kind::Float => "number",
        Kind::Bool => "true or false",
    };
    let default = match (key.default, key.unset) {
        (Some(""), _) => "empty".to_owned(),
        (Some(default), _) => format!("`{default}`"),
        (None, unset) => unset.to_owned(),
    };
    let secret = if key.secret { ", secret" } else { "" };
    format!("| `{}` | `{}` | {kind}{secret} | {default} | {} |", key.path, key.env, meaning(key))
}

#[test]
fn documented_keys_are_current() {
    let mut text = HEAD.to_owned();
    let mut section = None;
    for key in KEYS {
        let own = key.path.split_once('.').map_or("general", |(section, _)| section);
        if section != Some(own) {
            section = Some(own);
            write!(
                text,
                "\n## {own}\n\n| key | variable | type | default | meaning |\n|---|---|---|---|---|\n"
            )
            .unwrap();
        }
        writeln!(text, "{}", row(key)).unwrap();
    }
    assert!(KEYS.iter().filter(|key| !meaning(key).is_empty()).count() > 40, "few meanings found");
    check_document("configuration.md", &text);
}
