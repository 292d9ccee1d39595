//! `codelia doctor`: what this machine supports, and how to fix what is missing.

use std::{path::PathBuf, process::ExitCode};

use anyhow::Result;
use codelia_backends::Capabilities;
use codelia_client::{
    error_report,
    output::{self, Output},
    units,
};
use codelia_store::{OutputLocation, Store};
use codelia_types::{ByteSize, Mode};
use serde_json::{Value, json};

use crate::{backends, config::Config, delegation, host};

/// Controllers that limits need.
const CONTROLLERS: [&str; 3] = ["cpu", "memory", "pids"];

/// Result of checking one requirement.
#[derive(Debug)]
struct Check {
    name: &'static str,
    ok: bool,
    found: String,
    remedy: &'static str,
}

/// Result of probing one sandbox mode.
#[derive(Debug)]
struct ModeCheck {
    mode: Mode,
    usable: bool,
    /// Whether limits are watched instead of enforced.
    watches_limits: bool,
    /// Whether commands can have network mode `proxy`.
    egress: bool,
    gaps: Vec<Gap>,
}

/// Something that is missing, and how to get it.
#[derive(Debug)]
struct Gap {
    missing: String,
    remedy: String,
}

/// Checks everything. Fails if the configured mode, or without one every mode, is not usable.
pub(crate) async fn doctor(config: &Config, output: Output) -> Result<ExitCode> {
    // As `up` does, so that both find the same.
    delegation::enter(config).await?;
    let config = &backends::watching_if_needed(config);
    let modes = check_modes(config).await;
    let checks = [
        check_postgres(),
        check_database(config).await,
        check_output(config),
        check_user_namespaces().await,
        check_cgroups(),
        check_egress(&modes),
        check_disk(config),
        check_space(config),
    ];
    if output.is_json() {
        let modes: Vec<Value> = modes.iter().map(mode_json).collect();
        let checks: Vec<Value> = checks.iter().map(check_json).collect();
        output::write_line(&json!({ "modes": modes, "checks": checks }).to_string())?;
    } else {
        output::write_line("MODE       USABLE")?;
        modes.iter().map(mode_text).try_for_each(|text| output::write_line(&text))?;
        output::write_line("")?;
        let table =
            output::fitting_table(&["CHECK", "OK", "FOUND", "FIX"], checks.iter().map(check_row));
        output::write_line(&table)?;
    }
    // A worker with a configured mode does not start without it.
    let is_needed = |mode| config.sandbox.mode.is_none_or(|needed| needed == mode);
    let usable = modes.iter().any(|check| check.usable && is_needed(check.mode));
    Ok(if usable { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn check_modes(config: &Config) -> Vec<ModeCheck> {
    let (capabilities, problem) = match backends::create(config, None) {
        Ok(backends) => (backends::probe(config, &backends).await, None),
        Err(error) => (Vec::new(), Some(error_report::chain(&error))),
    };
    Mode::ALL.into_iter().map(|mode| check_mode(mode, &capabilities, problem.as_deref())).collect()
}

/// `problem` is why no backend could be created.
fn check_mode(mode: Mode, capabilities: &[Capabilities], problem: Option<&str>) -> ModeCheck {
    let unusable = |missing: &str| ModeCheck {
        mode,
        usable: false,
        watches_limits: false,
        egress: false,
        gaps: vec![Gap { missing: missing.to_owned(), remedy: String::new() }],
    };
    match (capabilities.iter().find(|found| found.mode == mode), problem) {
        (Some(found), _) => {
            let gaps = found.gaps.iter();
            let gaps = gaps
                .map(|gap| Gap { missing: gap.missing.clone(), remedy: gap.remedy.clone() })
                .collect();
            let (usable, watches_limits) = (found.usable, found.watches_limits());
            ModeCheck {
                mode,
                usable,
                watches_limits,
                egress: usable && found.enforceable.egress,
                gaps,
            }
        }
        (None, Some(problem)) => unusable(problem),
        (None, None) => unusable("not available in this build or configuration"),
    }
}

fn check_postgres() -> Check {
    let found = find_program("postgres").and_then(|_| find_program("initdb"));
    Check {
        name: "PostgreSQL server",
        ok: found.is_some(),
        found: found.map_or_else(|| "not found".to_owned(), |path| path.display().to_string()),
        remedy: "install Debian's `postgresql`, or set CODELIA_DATABASE_URL",
    }
}

/// Searches where `up` does: PATH and Debian's PostgreSQL directories.
fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let debian = versions.map(|version| version.path().join("bin"));
    std::env::split_paths(&path)
        .chain(debian)
        .map(|dir| dir.join(name))
        .find(|program| program.is_file())
}

async fn check_database(config: &Config) -> Check {
    let check =
        |ok, found: String| Check { name: "database", ok, found, remedy: "run `codelia migrate`" };
    if config.database.url.is_none() {
        return check(true, "not configured: `codelia up` starts a private one".to_owned());
    }
    let store = match Store::connect(config.database.clone()).await {
        Ok(store) => store,
        Err(error) => {
            let found = error_report::chain(&error.into());
            return Check { remedy: "check CODELIA_DATABASE_URL", ..check(false, found) };
        }
    };
    let migrated = store.check_migrated().await;
    store.close().await;
    match migrated {
        Ok(()) => check(true, "reachable and migrated".to_owned()),
        Err(error) => check(false, error_report::chain(&error.into())),
    }
}

/// Shows where output goes. Whether the place works is checked when a process starts with it.
fn check_output(config: &Config) -> Check {
    let output = &config.output;
    let found = match &output.store {
        None if config.database.url.is_none() => {
            format!("not configured: `codelia up` uses a directory for more than {}", output.inline)
        }
        None | Some(OutputLocation::Postgres) => "all in the database".to_owned(),
        Some(location) => format!("{location} for more than {}", output.inline),
    };
    let checked = output.check();
    Check {
        name: "output store",
        ok: checked.is_ok(),
        found: checked.map_or_else(|error| error.to_string(), |()| found),
        remedy: "correct the settings output.*",
    }
}

/// Creates a user namespace, because many settings can forbid it.
async fn check_user_namespaces() -> Check {
    let unshare = tokio::process::Command::new("unshare")
        .args(["--user", "--map-root-user", "true"])
        .output()
        .await;
    let (ok, found) = match unshare {
        Ok(output) if output.status.success() => (true, "available".to_owned()),
        Ok(output) => (false, String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Err(_) => (false, "not checked: `unshare` not found".to_owned()),
    };
    Check {
        name: "user namespaces",
        ok,
        found,
        remedy: "allow them: sysctl kernel.unprivileged_userns_clone=1",
    }
}

fn check_cgroups() -> Check {
    let v2 = std::fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").map(|text| ("v2", text));
    let found = v2.or_else(|_| {
        std::fs::read_to_string("/proc/cgroups").map(|text| ("v1", enabled_v1(&text)))
    });
    let (version, controllers) = found.unwrap_or(("none", String::new()));
    let ok = CONTROLLERS
        .iter()
        .all(|needed| controllers.split_whitespace().any(|controller| controller == *needed));
    Check {
        name: "cgroup controllers",
        ok,
        found: format!("{version}: {}", controllers.trim()),
        remedy: "enable cpu, memory and pids: limits need them",
    }
}

/// What limits the disk space of sessions, and why nothing better does.
fn check_disk(config: &Config) -> Check {
    let root = config.sandbox_root();
    let existing = root.ancestors().find(|path| path.is_dir()).unwrap_or(&root);
    let report =
        codelia_worker::check_disk(existing, config.worker.disk, host::separates_users());
    let (ok, found) = match report {
        Ok(report) => {
            let rejected =
                report.rejected.iter().map(|(other, missing)| format!("; no {other}: {missing}"));
            (true, report.mechanism.to_string() + &rejected.collect::<String>())
        }
        Err(error) => (false, error.to_string()),
    };
    Check {
        name: "disk limits",
        ok,
        found,
        remedy: "correct worker.disk, or provide what it needs",
    }
}

/// How network mode `proxy` reaches programs that know no proxy: by local routes in the sandbox.
fn check_egress(modes: &[ModeCheck]) -> Check {
    let isolating = modes.iter().filter(|check| check.usable && check.mode != Mode::Logical);
    let (with, without): (Vec<_>, Vec<_>) = isolating.partition(|check| check.egress);
    let names = |checks: &[&ModeCheck]| {
        checks.iter().map(|check| check.mode.as_str()).collect::<Vec<_>>().join(", ")
    };
    let found = match (with.as_slice(), without.as_slice()) {
        ([], _) => "no mode can do it".to_owned(),
        (with, []) => format!("by local routes: {}", names(with)),
        (with, without) => format!("by local routes: {}; not in {}", names(with), names(without)),
    };
    let ok = !with.is_empty();
    Check { name: "network mode proxy", ok, found, remedy: "fix what the modes above lack for it" }
}

/// Whether the worker could start runs: it keeps a part of the disk free.
fn check_space(config: &Config) -> Check {
    let root = config.sandbox_root();
    let reserve = config.worker.disk_reserve.map(ByteSize::bytes);
    let (ok, found) = match codelia_worker::root_space(&root, reserve) {
        Ok(space) => {
            let (free, reserve) = (units::bytes(space.free), units::bytes(space.reserve));
            (!space.is_short, format!("{free} free for sessions, {reserve} kept free"))
        }
        Err(error) => (false, format!("cannot read the free space of {}: {error}", root.display())),
    };
    Check { name: "disk space", ok, found, remedy: "free some space, or lower worker.disk_reserve" }
}

/// Returns the controllers that `/proc/cgroups` lists as enabled (last column).
fn enabled_v1(text: &str) -> String {
    let lines = text.lines().filter(|line| !line.starts_with('#') && line.ends_with('1'));
    lines.filter_map(|line| line.split_whitespace().next()).collect::<Vec<_>>().join(" ")
}

fn mode_json(check: &ModeCheck) -> Value {
    let gaps = check.gaps.iter().map(|gap| json!({ "missing": gap.missing, "remedy": gap.remedy }));
    json!({
        "mode": check.mode,
        "usable": check.usable,
        "watchesLimits": check.watches_limits,
        "networkProxy": check.egress,
        "gaps": gaps.collect::<Vec<_>>(),
    })
}

/// The mode, and below it each gap with its fix: both are sentences, too long for a table.
fn mode_text(check: &ModeCheck) -> String {
    let mut lines = vec![format!("{:10} {}", check.mode.to_string(), usable(check))];
    for gap in &check.gaps {
        lines.push(format!("  missing  {}", gap.missing));
        if !gap.remedy.is_empty() {
            lines.push(format!("  fix      {}", gap.remedy));
        }
    }
    lines.join("\n")
}

fn check_json(check: &Check) -> Value {
    json!({ "check": check.name, "good": check.ok, "found": check.found, "remedy": remedy(check) })
}

fn check_row(check: &Check) -> Vec<String> {
    let remedy = remedy(check).unwrap_or_default().to_owned();
    vec![check.name.to_owned(), yes_or_no(check.ok), check.found.clone(), remedy]
}

fn remedy(check: &Check) -> Option<&'static str> {
    (!check.ok).then_some(check.remedy)
}

fn usable(check: &ModeCheck) -> String {
    if check.watches_limits { "yes, limits watched".to_owned() } else { yes_or_no(check.usable) }
}

fn yes_or_no(value: bool) -> String {
    if value { "yes" } else { "no" }.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proxy_is_shown_by_mode() {
        let check = |mode, egress| ModeCheck {
            mode,
            usable: true,
            watches_limits: false,
            egress,
            gaps: vec![],
        };
        let modes =
            [check(Mode::Logical, false), check(Mode::Bwrap, true), check(Mode::Container, false)];
        assert_eq!(check_egress(&modes).found, "by local routes: bwrap; not in container");
        assert_eq!(check_egress(&modes[..2]).found, "by local routes: bwrap");
        let none = check_egress(&modes[2..]);
        assert!(!none.ok && remedy(&none).is_some(), "{none:?}");
    }

    #[test]
    fn cgroup_v1_controllers_come_from_proc() {
        let text = "#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpu\t3\t1\t1\nmemory\t0\t1\t0\npids\t5\t1\t1\n";
        assert_eq!(enabled_v1(text), "cpu pids");
    }
}
