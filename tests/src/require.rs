//! The only way to skip a test. A test that needs something of the machine asks [`available`],
//! which prints why the test is skipped, or fails it if `CODELIA_TEST_REQUIRE` lists the need.
//!
//! The file depends on `std` alone. Tests of crates that may not depend on `codelia-tests`
//! include it: `#[path = "../../../../tests/src/require.rs"] mod require;`.

#![allow(unreachable_pub, reason = "other crates include this file as a private module")]

/// A comma-separated list of needs whose absence fails a test instead of skipping it.
const REQUIRE: &str = "CODELIA_TEST_REQUIRE";

/// Everything that a test may need and that `CODELIA_TEST_REQUIRE` may list.
const NEEDS: [&str; 29] = [
    "postgres",
    "pgbouncer",
    "cgroup",
    "cgroup1",
    "cgroup2",
    "python",
    "programs",
    "compiler",
    "ia32",
    "logical",
    "bwrap",
    "nsjail",
    "native",
    "container",
    "podman",
    "vm",
    "cargo",
    "root",
    "user",
    "processors",
    "core_pattern",
    "disk",
    "browser",
    "kubectl",
    "promtool",
    "systemd",
    "loop",
    "quota",
    "shared_mounts",
];

/// Returns whether a test that needs `need` can run here. `missing` says why it cannot.
///
/// ```text
/// if !available("root", (!is_root()).then_some("only root can mount")) {
///     return;
/// }
/// ```
///
/// # Panics
/// If the need is missing and required, or if `need` or a name in `CODELIA_TEST_REQUIRE` is
/// unknown.
pub fn available(need: &str, missing: Option<&str>) -> bool {
    let required = std::env::var(REQUIRE).unwrap_or_default();
    match decide(need, missing, &required) {
        Ok(None) => true,
        Ok(Some(reason)) => {
            eprintln!("skipped: {reason}");
            false
        }
        Err(message) => panic!("{message}"),
    }
}

/// Returns why to skip the test, `None` to run it, or the message to fail it with.
fn decide<'a>(
    need: &str,
    missing: Option<&'a str>,
    required: &str,
) -> Result<Option<&'a str>, String> {
    let required: Vec<&str> =
        required.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
    if let Some(unknown) = required.iter().find(|name| !NEEDS.contains(name)) {
        return Err(format!("{REQUIRE}: unknown name {unknown:?}, expected one of {NEEDS:?}"));
    }
    if !NEEDS.contains(&need) {
        return Err(format!("a test needs {need:?}, which is not listed in require.rs: {NEEDS:?}"));
    }
    match missing {
        Some(reason) if required.contains(&need) => {
            Err(format!("{REQUIRE} lists {need}: {reason}"))
        }
        missing => Ok(missing),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_need_skips_or_fails() {
        assert_eq!(decide("root", None, "root"), Ok(None));
        assert_eq!(decide("root", Some("not root"), "bwrap"), Ok(Some("not root")));
        assert_eq!(decide("root", Some("not root"), ""), Ok(Some("not root")));
        let failed = decide("root", Some("not root"), "bwrap, root").unwrap_err();
        assert!(failed.contains("root: not root"), "{failed}");
    }

    #[test]
    fn unknown_name_fails_even_if_present() {
        assert!(decide("root", None, "root,bwarp").unwrap_err().contains("bwarp"));
        assert!(decide("rooot", None, "").unwrap_err().contains("rooot"));
    }
}
