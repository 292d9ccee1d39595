//! The units in `deploy/systemd`: systemd accepts them, and what they call and set exists.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use codelia_tests::{Program, Scratch, available};

use crate::kubernetes::{command_error, settings_error};

const UNITS: [&str; 2] = ["codelia-api.service", "codelia-worker.service"];

fn unit(name: &str) -> Result<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/systemd").join(name);
    fs::read_to_string(path).with_context(|| name.to_owned())
}

/// The values of a key in a unit.
fn values<'a>(unit: &'a str, key: &str) -> Vec<&'a str> {
    unit.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('=')).collect()
}

#[test]
fn units_name_existing_commands_and_settings() -> Result<()> {
    let program = Program::find()?;
    for name in UNITS {
        let unit = unit(name)?;
        let start = values(&unit, "ExecStart");
        let words: Vec<_> = start[0].split(' ').skip(1).collect();
        assert_eq!(command_error(&program, &words)?, None, "{name}");
        let settings =
            values(&unit, "Environment").into_iter().filter_map(|text| text.split_once('='));
        let settings: BTreeMap<_, _> =
            settings.map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
        assert!(!settings.is_empty(), "{name}");
        assert_eq!(settings_error(&program, &settings)?, None, "{name}");
    }
    let worker = unit(UNITS[1])?;
    assert_eq!(values(&worker, "Delegate"), ["yes"]);
    let drain = values(&worker, "Environment").into_iter().find_map(|text| {
        text.strip_prefix("CODELIA_WORKER_DRAIN_GRACE=")?.strip_suffix('s')?.parse::<u64>().ok()
    });
    let stop: u64 = values(&worker, "TimeoutStopSec")[0].parse()?;
    assert!(stop > drain.context("a time to drain")?, "systemd kills a worker that drains");
    Ok(())
}

#[test]
fn systemd_accepts_the_units() -> Result<()> {
    let found = Command::new("systemd-analyze").arg("--version").output().is_ok();
    if !available("systemd", (!found).then_some("no systemd-analyze: install systemd")) {
        return Ok(());
    }
    let (program, scratch) = (Program::find()?, Scratch::new()?);
    let write = |name: &str, text: String| -> Result<PathBuf> {
        let path = scratch.join(name);
        fs::write(
            &path,
            text.replace("/usr/local/bin/codelia", &program.path().display().to_string()),
        )?;
        Ok(path)
    };
    let verify = |unit: &Path| -> Result<String> {
        let done = Command::new("systemd-analyze").arg("verify").arg(unit).output()?;
        Ok(String::from_utf8_lossy(&done.stderr).into_owned())
    };
    for name in UNITS {
        assert_eq!(verify(&write(name, unit(name)?)?)?, "", "{name}");
    }
    let wrong = write("wrong.service", unit(UNITS[1])?.replace("Delegate=", "Delegated="))?;
    assert!(verify(&wrong)?.contains("Delegated"), "the control");
    Ok(())
}
