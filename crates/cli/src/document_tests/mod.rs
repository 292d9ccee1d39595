//! Tests of the documents: those that are generated are current, and the commands in all of them
//! parse.

mod command_tests;

use std::path::Path;

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
