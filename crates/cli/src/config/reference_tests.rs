//! `docs/configuration.md` is generated from the comments and defaults of all options: after a
//! change, run `CODELIA_BLESS=1 cargo test -p codelia-cli documented`.

use std::{fmt::Write, path::Path};

use figment::value::{Dict, Value};

use super::{
    keys::{self, KEYS, Key},
    show,
};

const HEAD: &str = "# Configuration

<!-- Generated: CODELIA_BLESS=1 cargo test -p codelia-cli documented -->

Every key, its environment variable and its default. A flag wins over a variable, a variable over
the file that `--config` or `CODELIA_CONFIG` names (TOML). Unknown keys and `CODELIA_` variables are
refused. Durations and sizes have units: `500ms`, `10m`, `7d`; `64 KiB`, `512 MiB`, `2 GiB`.
`codelia config show` prints the effective values and their sources. The settings are explained in
[operations](operations.md).
";

/// The type of a value, for people.
fn kind(rust: &str) -> String {
    let inner =
        rust.strip_prefix("Option<").and_then(|rest| rest.strip_suffix('>')).unwrap_or(rust);
    let kind = match inner.rsplit("::").next().unwrap_or(inner) {
        "Duration" => "duration",
        "ByteSize" => "size",
        "bool" => "true or false",
        "Cores" | "f64" => "number",
        "u32" | "usize" | "NonZeroU32" | "NonZeroUsize" => "integer",
        "DatabaseUrl" | "SecretString" => "text, secret",
        _ => "text",
    };
    kind.to_owned()
}

/// The row of a key.
fn row(key: &Key, defaults: &Dict) -> String {
    let Key { path, variable, option, .. } = key;
    let value = Value::from(defaults.clone()).find(path).and_then(|value| show::text(&value));
    let default = match (option.unset(), value.as_deref()) {
        ("", None) => panic!("the comment of {path} does not say what applies by default"),
        ("", Some("")) => "empty".to_owned(),
        ("", Some(value)) => format!("`{value}`"),
        (unset, _) => unset.to_owned(),
    };
    format!(
        "| `{path}` | `{variable}` | {} | {default} | {} |",
        kind(option.kind),
        option.meaning()
    )
}

#[test]
fn documented_keys_are_current() {
    let defaults = keys::defaults();
    let mut text = HEAD.to_owned();
    let title =
        |key: &Key| key.path.split_once('.').map_or("general", |(section, _)| section).to_owned();
    for section in KEYS.chunk_by(|a, b| title(a) == title(b)) {
        let title = title(&section[0]);
        let head = "| key | variable | type | default | meaning |\n|---|---|---|---|---|";
        write!(text, "\n## {title}\n\n{head}\n").unwrap();
        for key in section {
            writeln!(text, "{}", row(key, &defaults)).unwrap();
        }
    }
    check_document("configuration.md", &text);
}

/// Compares a generated document with its file, or writes it if `CODELIA_BLESS` is 1.
fn check_document(name: &str, expected: &str) {
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
