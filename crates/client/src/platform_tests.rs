//! A test: the client needs nothing of the server and nothing that only Linux has.
//! `scripts/check-platforms` compiles it for other systems.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use anyhow::{Context, Result};

/// Packages that the client must not depend on, on any system and however indirectly.
const FORBIDDEN: [&str; 13] = [
    "bollard",
    "codelia-api",
    "codelia-backends",
    "codelia-egress",
    "codelia-init",
    "codelia-server",
    "codelia-store",
    "codelia-sys",
    "codelia-worker",
    "libseccomp",
    "nix",
    "object_store",
    "sqlx",
];

/// Packages of `Cargo.lock` with the names of those that they depend on, on any system.
fn packages() -> Result<BTreeMap<String, BTreeSet<String>>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Cargo.lock");
    let lock: toml::Table = fs::read_to_string(path)?.parse()?;
    let mut packages: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for package in lock.get("package").and_then(toml::Value::as_array).context("no packages")? {
        let name =
            package.get("name").and_then(toml::Value::as_str).context("a package has no name")?;
        let entries = package.get("dependencies").and_then(toml::Value::as_array);
        // `NAME`, or `NAME VERSION` if there are several.
        let names = entries.into_iter().flatten().filter_map(toml::Value::as_str);
        let names = names.filter_map(|entry| entry.split(' ').next()).map(str::to_owned);
        packages.entry(name.to_owned()).or_default().extend(names);
    }
    Ok(packages)
}

/// Which forbidden packages a package depends on.
fn forbidden(packages: &BTreeMap<String, BTreeSet<String>>, root: &str) -> Vec<&'static str> {
    let mut open = vec![root];
    let mut found = BTreeSet::new();
    while let Some(name) = open.pop() {
        if found.insert(name)
            && let Some(dependencies) = packages.get(name)
        {
            open.extend(dependencies.iter().map(String::as_str));
        }
    }
    FORBIDDEN.into_iter().filter(|name| found.contains(name)).collect()
}

#[test]
fn client_depends_on_nothing_of_the_server() -> Result<()> {
    let packages = packages()?;
    assert!(packages.contains_key("codelia-client"));
    assert_eq!(forbidden(&packages, "codelia-client"), Vec::<&str>::new());
    // The control: the program has it all.
    assert_eq!(forbidden(&packages, "codelia-cli"), FORBIDDEN);
    Ok(())
}
