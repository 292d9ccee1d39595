//! What a test needs of the machine. What is not there skips the test with a printed reason, or
//! fails it if `CODELIA_TEST_REQUIRE` names it.

/// Whether a test that needs `what` can run here; `missing` says why not.
///
/// # Panics
/// If it cannot and `CODELIA_TEST_REQUIRE` asks for it.
pub fn available(what: &str, missing: Option<&str>) -> bool {
    let Some(reason) = missing else { return true };
    let required = std::env::var("CODELIA_TEST_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|word| word == what), "{what} is required: {reason}");
    eprintln!("skipped: {reason}");
    false
}

/// Whether this process is root.
#[must_use]
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}
