//! `codelia doctor`: what this machine can enforce, and what is missing for the rest.

use std::{path::PathBuf, process::ExitCode};

use anyhow::Result;
use codelia_backends::Capabilities;
use codelia_store::Store;
use codelia_types::Mode;
use serde_json::{Value, json};

use crate::{
    config::Config,
    modes, options,
    output::{self, Output},
};

/// Something this machine has or lacks.
#[derive(Debug)]
struct Check {
    name: &'static str,
    good: bool,
    found: String,
    remedy: &'static str,
}

/// A mode and whether it can be used here.
#[derive(Debug)]
struct Row {
    mode: Mode,
    usable: bool,
    gaps: Vec<(String, String)>,
}

/// Looks at everything; fails if no mode is usable.
pub(crate) async fn doctor(config: &Config, output: Output) -> Result<ExitCode> {
    let modes = mode_rows(config).await;
    let checks = [postgres(), database(config).await?, user_namespaces().await, cgroups()];
    if output.is_json() {
        let modes: Vec<Value> = modes.iter().map(mode_json).collect();
        let checks: Vec<Value> = checks.iter().map(check_json).collect();
        output::line(&json!({ "modes": modes, "checks": checks }).to_string())?;
    } else {
        output.list(&["MODE", "USABLE", "MISSING", "REMEDY"], &modes, mode_json, mode_row)?;
        output::line("")?;
        output.list(&["CHECK", "GOOD", "FOUND", "REMEDY"], &checks, check_json, check_row)?;
    }
    let usable = modes.iter().any(|row| row.usable);
    Ok(if usable { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn mode_rows(config: &Config) -> Vec<Row> {
    let (found, problem) = match modes::backends(config) {
        Ok(backends) => (modes::probe(config, &backends).await, None),
        Err(error) => (Vec::new(), Some(format!("{error:#}"))),
    };
    Mode::ALL.into_iter().map(|mode| mode_of(mode, &found, problem.as_deref())).collect()
}

fn mode_of(mode: Mode, found: &[Capabilities], problem: Option<&str>) -> Row {
    match (found.iter().find(|one| one.mode == mode), problem) {
        (Some(one), _) => {
            let gaps = one.gaps.iter().map(|gap| (gap.missing.clone(), gap.remedy.clone())).collect();
            Row { mode, usable: one.usable, gaps }
        }
        (None, Some(problem)) if mode == Mode::Logical => {
            Row { mode, usable: false, gaps: vec![(problem.to_owned(), String::new())] }
        }
        (None, _) => Row {
            mode,
            usable: false,
            gaps: vec![("not in this version of codelia".to_owned(), String::new())],
        },
    }
}

fn postgres() -> Check {
    let found = find_program("postgres").and_then(|_| find_program("initdb"));
    Check {
        name: "PostgreSQL server",
        good: found.is_some(),
        found: found.map_or_else(|| "no binaries".to_owned(), |path| path.display().to_string()),
        remedy: "install Debian's `postgresql`, or set CODELIA_DATABASE_URL",
    }
}

/// Looks where `up` looks: in PATH and where Debian keeps the servers.
fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let debian = versions.map(|version| version.path().join("bin"));
    std::env::split_paths(&path).chain(debian).map(|dir| dir.join(name)).find(|program| program.is_file())
}

async fn database(config: &Config) -> Result<Check> {
    let check = |good, found: String| Check { name: "database", good, found, remedy: "codelia migrate" };
    let Some(options) = options::store(config)? else {
        return Ok(check(true, "none configured: `up` starts its own".to_owned()));
    };
    let store = match Store::connect(options).await {
        Ok(store) => store,
        Err(error) => {
            let found = format!("{:#}", anyhow::Error::from(error));
            return Ok(Check { remedy: "check CODELIA_DATABASE_URL", ..check(false, found) });
        }
    };
    let migrated = store.check_migrated().await;
    store.close().await;
    Ok(match migrated {
        Ok(()) => check(true, "reachable and migrated".to_owned()),
        Err(error) => check(false, error.to_string()),
    })
}

/// Tries one, since half a dozen settings decide about it.
async fn user_namespaces() -> Check {
    let tried =
        tokio::process::Command::new("unshare").args(["--user", "--map-root-user", "true"]).output().await;
    let (good, found) = match tried {
        Ok(ended) if ended.status.success() => (true, "can be made".to_owned()),
        Ok(ended) => (false, String::from_utf8_lossy(&ended.stderr).trim().to_owned()),
        Err(_) => (false, "not tried: `unshare` is missing".to_owned()),
    };
    Check {
        name: "user namespaces",
        good,
        found,
        remedy: "allow them: sysctl kernel.unprivileged_userns_clone=1",
    }
}

fn cgroups() -> Check {
    let unified = std::fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").map(|text| ("v2", text));
    let found =
        unified.or_else(|_| std::fs::read_to_string("/proc/cgroups").map(|text| ("v1", enabled_v1(&text))));
    let (version, controllers) = found.unwrap_or(("none", String::new()));
    let good =
        ["cpu", "memory", "pids"].iter().all(|need| controllers.split_whitespace().any(|has| has == *need));
    Check {
        name: "cgroup controllers",
        good,
        found: format!("{version}: {}", controllers.trim()),
        remedy: "cpu, memory and pids are needed to enforce limits",
    }
}

/// The names in `/proc/cgroups` whose last column says that they are on.
fn enabled_v1(text: &str) -> String {
    let lines = text.lines().filter(|line| !line.starts_with('#') && line.ends_with('1'));
    lines.filter_map(|line| line.split_whitespace().next()).collect::<Vec<_>>().join(" ")
}

fn mode_json(row: &Row) -> Value {
    let gaps: Vec<Value> =
        row.gaps.iter().map(|(missing, remedy)| json!({ "missing": missing, "remedy": remedy })).collect();
    json!({ "mode": row.mode, "usable": row.usable, "gaps": gaps })
}

fn mode_row(row: &Row) -> Vec<String> {
    let column =
        |pick: fn(&(String, String)) -> &String| row.gaps.iter().map(pick).cloned().collect::<Vec<_>>();
    vec![
        row.mode.to_string(),
        yes_or_no(row.usable),
        column(|gap| &gap.0).join("\n"),
        column(|gap| &gap.1).join("\n"),
    ]
}

fn check_json(check: &Check) -> Value {
    json!({ "check": check.name, "good": check.good, "found": check.found, "remedy": remedy(check) })
}

fn check_row(check: &Check) -> Vec<String> {
    let remedy = remedy(check).unwrap_or_default().to_owned();
    vec![check.name.to_owned(), yes_or_no(check.good), check.found.clone(), remedy]
}

fn remedy(check: &Check) -> Option<&'static str> {
    (!check.good).then_some(check.remedy)
}

fn yes_or_no(truth: bool) -> String {
    if truth { "yes" } else { "no" }.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn controllers_of_the_first_version_are_read_from_their_table() {
        let text =
            "#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpu\t3\t1\t1\nmemory\t0\t1\t0\npids\t5\t1\t1\n";
        assert_eq!(enabled_v1(text), "cpu pids");
    }
}
