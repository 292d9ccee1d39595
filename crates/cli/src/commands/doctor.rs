//! `codelia doctor`: what this machine supports, and how to fix what is missing.

use std::{path::PathBuf, process::ExitCode};

use anyhow::Result;
use codelia_backends::{Capabilities, Gap};
use codelia_client::{
    error_report,
    output::{self, Output},
    units,
};
use codelia_policy::Enforceable;
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
    /// What was found; an error if it is not good enough.
    found: Result<String, String>,
    remedy: &'static str,
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

/// Probes each mode. One that this process does not offer is not usable, and says why.
async fn check_modes(config: &Config) -> Vec<Capabilities> {
    let mut problem = "not available in this build or configuration".to_owned();
    let mut probed = Vec::new();
    match backends::create(config, None) {
        Ok(backends) => probed = backends::probe(config, &backends).await,
        Err(error) => problem = error_report::chain(&error),
    }
    let unavailable = |mode| Capabilities {
        mode,
        usable: false,
        enforceable: Enforceable::default(),
        gaps: vec![Gap { missing: problem.clone(), remedy: String::new() }],
    };
    let check = |mode| {
        probed.iter().find(|found| found.mode == mode).cloned().unwrap_or_else(|| unavailable(mode))
    };
    Mode::ALL.into_iter().map(check).collect()
}

fn check_postgres() -> Check {
    let found = find_program("postgres").and_then(|_| find_program("initdb"));
    let found = found.map(|path| path.display().to_string()).ok_or("not found".to_owned());
    let remedy = "install Debian's `postgresql`, or set CODELIA_DATABASE_URL";
    Check { name: "PostgreSQL server", found, remedy }
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
    let name = "database";
    let remedy = "run `codelia migrate`";
    if config.database.url.is_none() {
        let found = Ok("not configured: `codelia up` starts a private one".to_owned());
        return Check { name, found, remedy };
    }
    let store = match Store::connect(config.database.clone()).await {
        Ok(store) => store,
        Err(error) => {
            let found = Err(error_report::chain(&error.into()));
            return Check { name, found, remedy: "check CODELIA_DATABASE_URL" };
        }
    };
    let migrated = store.check_migrated().await;
    store.close().await;
    let found = match migrated {
        Ok(()) => Ok("reachable and migrated".to_owned()),
        Err(error) => Err(error_report::chain(&error.into())),
    };
    Check { name, found, remedy }
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
    let found = output.check().map(|()| found).map_err(|error| error.to_string());
    Check { name: "output store", found, remedy: "correct the settings output.*" }
}

/// Creates a user namespace, because many settings can forbid it.
async fn check_user_namespaces() -> Check {
    let unshare = tokio::process::Command::new("unshare")
        .args(["--user", "--map-root-user", "true"])
        .output()
        .await;
    let found = match unshare {
        Ok(output) if output.status.success() => Ok("available".to_owned()),
        Ok(output) => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Err(_) => Err("not checked: `unshare` not found".to_owned()),
    };
    let remedy = "allow them: sysctl kernel.unprivileged_userns_clone=1";
    Check { name: "user namespaces", found, remedy }
}

fn check_cgroups() -> Check {
    let v2 = std::fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").map(|text| ("v2", text));
    let found = v2.or_else(|_| {
        std::fs::read_to_string("/proc/cgroups").map(|text| ("v1", enabled_v1(&text)))
    });
    let (version, controllers) = found.unwrap_or(("none", String::new()));
    let found = format!("{version}: {}", controllers.trim());
    let has = |needed: &&str| controllers.split_whitespace().any(|found| found == *needed);
    let found = if CONTROLLERS.iter().all(has) { Ok(found) } else { Err(found) };
    let remedy = "enable cpu, memory and pids: limits need them";
    Check { name: "cgroup controllers", found, remedy }
}

/// The mechanism that limits the disk space of sessions, and why nothing better does.
fn check_disk(config: &Config) -> Check {
    let root = config.sandbox_root();
    let existing = root.ancestors().find(|path| path.is_dir()).unwrap_or(&root);
    let report = codelia_worker::check_disk(existing, config.worker.disk, host::separates_users());
    let found = report.map(|report| {
        let rejected = report.rejected.iter();
        let rejected = rejected.map(|(other, missing)| format!("; no {other}: {missing}"));
        report.mechanism.to_string() + &rejected.collect::<String>()
    });
    let found = found.map_err(|error| error.to_string());
    let remedy = "correct worker.disk, or provide what it needs";
    Check { name: "disk limits", found, remedy }
}

/// How network mode `proxy` reaches programs that know no proxy: by local routes in the sandbox.
fn check_egress(modes: &[Capabilities]) -> Check {
    let isolating = modes.iter().filter(|check| check.usable && check.mode != Mode::Logical);
    let (with, without): (Vec<_>, Vec<_>) = isolating.partition(|check| has_egress(check));
    let names = |checks: &[&Capabilities]| {
        checks.iter().map(|check| check.mode.as_str()).collect::<Vec<_>>().join(", ")
    };
    let found = match (with.as_slice(), without.as_slice()) {
        ([], _) => Err("no mode can do it".to_owned()),
        (with, []) => Ok(format!("by local routes: {}", names(with))),
        (with, without) => {
            Ok(format!("by local routes: {}; not in {}", names(with), names(without)))
        }
    };
    Check { name: "network mode proxy", found, remedy: "fix what the modes above lack for it" }
}

/// Whether commands can have network mode `proxy`.
fn has_egress(check: &Capabilities) -> bool {
    check.usable && check.enforceable.egress
}

/// Whether the worker could start runs: it keeps a part of the disk free.
fn check_space(config: &Config) -> Check {
    let root = config.sandbox_root();
    let reserve = config.worker.disk_reserve.map(ByteSize::bytes);
    let found = match codelia_worker::root_space(&root, reserve) {
        Ok(space) => {
            let free = units::bytes(space.free);
            let reserve = units::bytes(space.reserve);
            let found = format!("{free} free for sessions, {reserve} kept free");
            if space.is_short { Err(found) } else { Ok(found) }
        }
        Err(error) => Err(format!("cannot read the free space of {}: {error}", root.display())),
    };
    Check { name: "disk space", found, remedy: "free some space, or lower worker.disk_reserve" }
}

/// Returns the controllers that `/proc/cgroups` lists as enabled (last column).
fn enabled_v1(text: &str) -> String {
    let lines = text.lines().filter(|line| !line.starts_with('#') && line.ends_with('1'));
    lines.filter_map(|line| line.split_whitespace().next()).collect::<Vec<_>>().join(" ")
}

fn mode_json(check: &Capabilities) -> Value {
    let gaps = check.gaps.iter().map(|gap| json!({ "missing": gap.missing, "remedy": gap.remedy }));
    json!({
        "mode": check.mode,
        "usable": check.usable,
        "watchesLimits": check.watches_limits(),
        "networkProxy": has_egress(check),
        "gaps": gaps.collect::<Vec<_>>(),
    })
}

/// The mode, and below it each gap with its fix: both are sentences, too long for a table.
fn mode_text(check: &Capabilities) -> String {
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
    json!({
        "check": check.name,
        "good": check.found.is_ok(),
        "found": found(check),
        "remedy": remedy(check),
    })
}

fn check_row(check: &Check) -> Vec<String> {
    let remedy = remedy(check).unwrap_or_default().to_owned();
    let good = yes_or_no(check.found.is_ok());
    vec![check.name.to_owned(), good, found(check).to_owned(), remedy]
}

fn found(check: &Check) -> &str {
    let (Ok(found) | Err(found)) = &check.found;
    found
}

fn remedy(check: &Check) -> Option<&'static str> {
    check.found.is_err().then_some(check.remedy)
}

fn usable(check: &Capabilities) -> String {
    if check.watches_limits() { "yes, limits watched".to_owned() } else { yes_or_no(check.usable) }
}

fn yes_or_no(value: bool) -> String {
    if value { "yes" } else { "no" }.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proxy_is_shown_by_mode() {
        let check = |mode, egress| Capabilities {
            mode,
            usable: true,
            enforceable: Enforceable { egress, ..Enforceable::default() },
            gaps: vec![],
        };
        let modes =
            [check(Mode::Logical, false), check(Mode::Bwrap, true), check(Mode::Container, false)];
        assert_eq!(found(&check_egress(&modes)), "by local routes: bwrap; not in container");
        assert_eq!(found(&check_egress(&modes[..2])), "by local routes: bwrap");
        let none = check_egress(&modes[2..]);
        assert!(none.found.is_err() && remedy(&none).is_some(), "{none:?}");
    }

    #[test]
    fn cgroup_v1_controllers_come_from_proc() {
        let text = "#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpu\t3\t1\t1\nmemory\t0\t1\t0\npids\t5\t1\t1\n";
        assert_eq!(enabled_v1(text), "cpu pids");
    }
}
