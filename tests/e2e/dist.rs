//! What `make dist` packs: complete, the same every time, and with a true list of components.

use std::{
    collections::BTreeSet,
    env, fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use codelia_tests::{Program, Scratch, available};
use serde_json::Value;

/// One of each kind of file that an installation needs.
const FILES: [&str; 18] = [
    "bin/codelia",
    "bin/codelia-init",
    "share/man/man1/codelia.1",
    "share/man/man1/codelia-session-create.1",
    "share/bash-completion/completions/codelia",
    "share/zsh/site-functions/_codelia",
    "share/fish/vendor_completions.d/codelia.fish",
    "lib/systemd/system/codelia-api.service",
    "lib/systemd/system/codelia-worker.service",
    "deploy/compose.yaml",
    "deploy/codelia-worker-seccomp.json",
    "deploy/k8s/node/codelia-worker.apparmor",
    "deploy/k8s/overlays/prod/kustomization.yaml",
    "deploy/observability/alerts.yaml",
    "LICENSE",
    "CHANGELOG.md",
    "THIRD-PARTY-NOTICES.txt",
    "codelia.cdx.json",
];

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A directory with the programs of this build, which are quicker to make than those of a release.
fn programs(scratch: &Scratch) -> Result<Option<PathBuf>> {
    let init = env::var_os("CODELIA_INIT").filter(|_| repository().join(".git").exists());
    if !available("cargo", init.is_none().then_some("no CODELIA_INIT, or not a git repository")) {
        return Ok(None);
    }
    let directory = scratch.join("programs");
    fs::create_dir(&directory)?;
    std::os::unix::fs::symlink(Program::find()?.path(), directory.join("codelia"))?;
    std::os::unix::fs::symlink(init.context("CODELIA_INIT")?, directory.join("codelia-init"))?;
    Ok(Some(directory))
}

fn dist(programs: &Path, output: &Path) -> Command {
    let mut command = Command::new(repository().join("scripts/dist"));
    command.arg(programs).arg(output);
    command
}

/// Packs, and returns the tarball.
fn pack(programs: &Path, output: &Path) -> Result<PathBuf> {
    let done = dist(programs, output).output()?;
    ensure!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    Ok(PathBuf::from(String::from_utf8(done.stdout)?.trim()))
}

/// Returns whether every checksum in the directory holds.
fn checksums_hold(directory: &Path) -> Result<bool> {
    let check = ["--check", "--quiet", "--strict", "SHA256SUMS"];
    Ok(Command::new("sha256sum").args(check).current_dir(directory).output()?.status.success())
}

fn files_below(directory: &Path, prefix: &Path) -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(files_below(&path, prefix)?);
        } else {
            found.insert(path.strip_prefix(prefix)?.display().to_string());
        }
    }
    Ok(found)
}

#[test]
fn release_is_complete_and_reproducible() -> Result<()> {
    let scratch = Scratch::new()?;
    let Some(programs) = programs(&scratch)? else { return Ok(()) };
    let tarball = pack(&programs, &scratch.join("first"))?;
    pack(&programs, &scratch.join("second"))?;
    let sums =
        ["first", "second"].map(|dir| fs::read_to_string(scratch.join(dir).join("SHA256SUMS")));
    let [first, second] = sums;
    assert_eq!(first?, second?, "the same programs give the same bytes");
    for directory in ["first", "second"] {
        assert!(checksums_hold(&scratch.join(directory))?);
    }

    let unpacked = Command::new("tar")
        .arg("-xzf")
        .arg(&tarball)
        .arg("-C")
        .arg(scratch.join("second"))
        .status()?;
    ensure!(unpacked.success(), "{unpacked}");
    let name = tarball
        .file_name()
        .and_then(|name| name.to_str()?.strip_suffix(".tar.gz"))
        .context("a name")?;
    let root = scratch.join("second").join(name);
    let mut files = files_below(&root, &root)?;
    for file in FILES {
        assert!(files.contains(file), "{file} is missing");
    }
    let listed = fs::read_to_string(root.join("SHA256SUMS"))?;
    let listed: BTreeSet<_> =
        listed.lines().filter_map(|line| Some(line.split_once("  ")?.1.to_owned())).collect();
    assert!(files.remove("SHA256SUMS"));
    assert_eq!(files, listed, "every file has its checksum");
    assert!(checksums_hold(&root)?);

    let codelia = root.join("bin/codelia");
    let version = Command::new(&codelia).arg("--version").output()?;
    assert_eq!(version.stdout, Program::find()?.command().arg("--version").output()?.stdout);
    assert!(
        !version.stdout.is_empty() && codelia.metadata()?.permissions().mode() & 0o777 == 0o755
    );
    fs::write(root.join("LICENSE"), "something else")?;
    assert!(!checksums_hold(&root)?, "the control");
    Ok(())
}

/// Returns the crates whose source a program names, in the messages of its panics.
fn crates_in(program: &Path) -> Result<BTreeSet<String>> {
    // …/registry/src/index.crates.io-0123/NAME-VERSION/src/…
    let pattern = "registry/src/[^/]+/[a-zA-Z0-9_.+-]+/";
    let found = Command::new("grep")
        .args(["--text", "-oE", pattern])
        .arg(program)
        .env("LC_ALL", "C")
        .output()?;
    let names = String::from_utf8_lossy(&found.stdout).into_owned();
    Ok(names.lines().filter_map(|path| Some(path.split('/').nth(3)?.to_owned())).collect())
}

#[test]
fn every_linked_crate_is_listed() -> Result<()> {
    let scratch = Scratch::new()?;
    let Some(programs) = programs(&scratch)? else { return Ok(()) };
    let script = repository().join("scripts/sbom.py");
    let made = Command::new(script)
        .arg("1000000000")
        .arg(scratch.path())
        .current_dir(repository())
        .output()?;
    ensure!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let path = scratch.join("codelia.cdx.json");
    let text = fs::read_to_string(&path)?;
    let bill: Value = serde_json::from_str(&text)?;
    let part =
        |component: &Value, key: &str| component[key].as_str().unwrap_or_default().to_owned();
    let listed = bill["components"].as_array().context("components")?;
    let listed: BTreeSet<_> = listed
        .iter()
        .map(|component| part(component, "name") + "-" + &part(component, "version"))
        .collect();
    let linked = crates_in(&programs.join("codelia"))?;
    let unlisted: Vec<_> = linked.difference(&listed).collect();
    assert!(unlisted.is_empty(), "{unlisted:?}");
    // What makes the comparison worth something.
    assert!(
        linked.len() > 50 && linked.iter().any(|name| name.starts_with("tokio-1.")),
        "{linked:?}"
    );
    // What only tests use is not linked, so it is not listed.
    assert!(!listed.iter().any(|name| name.starts_with("proptest-")));
    is_valid_by_the_schema(&path, &text)
}

fn is_valid_by_the_schema(path: &Path, text: &str) -> Result<()> {
    let python = env::var_os("CODELIA_TEST_PYTHON");
    let missing =
        python.is_none().then_some("no Python with the validator: run scripts/python-client");
    if !available("python", missing) {
        return Ok(());
    }
    let script = repository().join("tests/clients/python/validate_sbom.py");
    let python = python.context("python")?;
    let validate = || Command::new(&python).arg(&script).arg(path).output();
    let done = validate()?;
    ensure!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    fs::write(path, text.replace("\"bomFormat\"", "\"format\""))?;
    ensure!(!validate()?.status.success(), "the control");
    Ok(())
}

/// The programs of this build contain paths of this machine, other files must not.
#[test]
fn machine_path_is_not_packed() -> Result<()> {
    let scratch = Scratch::new()?;
    let Some(programs) = programs(&scratch)? else { return Ok(()) };
    // As if this were built below a directory that a document names.
    let done =
        dist(&programs, &scratch.join("out")).env("CARGO_TARGET_DIR", "/etc/codelia").output()?;
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(!done.status.success() && said.contains("deploy/systemd/README.md"), "{said}");
    assert!(said.contains("contain a path of this machine"), "{said}");
    assert!(!scratch.join("out/SHA256SUMS").exists());
    Ok(())
}
