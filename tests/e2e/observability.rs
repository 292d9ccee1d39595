//! Dashboards, alert rules and runbooks agree with the metrics that processes serve.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result};
use codelia_tests::{Cluster, ClusterOptions, available};
use serde_json::Value;

use crate::service::{free_address, http_get};

/// Metrics of Prometheus itself.
const FOREIGN: [&str; 1] = ["up"];
/// Metrics that have no value before something happened: the p95 of setup, the end of certificates,
/// and all of mode flags.
const LATER: [&str; 3] =
    ["codelia_isolation_setup_p95_seconds", "codelia_tls_certificate_expiry", "codelia_flag_"];

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

fn has_promtool() -> bool {
    let found = Command::new("promtool").arg("--version").output().is_ok();
    available("promtool", (!found).then_some("no promtool: install prometheus"))
}

/// The type of every documented metric.
fn documented() -> Result<BTreeMap<String, String>> {
    let text = fs::read_to_string(repository("docs/metrics.md"))?;
    let rows = text.lines().filter(|line| line.starts_with("| `codelia_"));
    let cell = |row: &str, number: usize| {
        row.split('|').nth(number).unwrap_or_default().trim().replace('`', "")
    };
    Ok(rows.map(|row| (cell(row, 1), cell(row, 2))).collect())
}

/// Returns the names of metrics in a text that do not exist.
fn unknown_metrics(text: &str, documented: &BTreeMap<String, String>) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let names = words.filter(|word| word.starts_with("codelia_") && *word != "codelia_");
    let exists = |name: &&str| {
        documented.contains_key(*name)
            || ["_bucket", "_sum", "_count"].iter().any(|suffix| {
                name.strip_suffix(suffix)
                    .and_then(|name| documented.get(name))
                    .is_some_and(|kind| kind == "histogram")
            })
    };
    names.filter(|name| !exists(name)).map(str::to_owned).collect()
}

#[test]
fn dashboards_and_rules_name_existing_metrics() -> Result<()> {
    let documented = documented()?;
    assert!(documented.len() > 30 && !documented.contains_key(FOREIGN[0]), "{documented:?}");
    let control =
        "codelia_slots + codelia_slot + codelia_run_step_seconds_bucket + codelia_slots_bucket";
    let wrong = ["codelia_slot", "codelia_slots_bucket"].map(str::to_owned);
    assert_eq!(unknown_metrics(control, &documented), BTreeSet::from(wrong), "the control");
    let mut texts = vec![repository("deploy/observability/alerts.yaml")];
    texts.push(repository("deploy/k8s/base/worker.yaml"));
    texts.push(repository("deploy/k8s/base/api.yaml"));
    texts.push(repository("deploy/k8s/components/keda/scaled-object.yaml"));
    for dashboard in fs::read_dir(repository("deploy/observability/dashboards"))?.flatten() {
        let board: Value = serde_json::from_slice(&fs::read(dashboard.path())?)?;
        assert!(
            board["panels"].as_array().is_some_and(|panels| panels.len() > 3),
            "{:?}",
            dashboard.path()
        );
        texts.push(dashboard.path());
    }
    assert!(texts.len() > 6, "{texts:?}");
    for path in texts {
        let text = fs::read_to_string(&path)?;
        assert_eq!(unknown_metrics(&text, &documented), BTreeSet::new(), "{}", path.display());
    }
    Ok(())
}

#[test]
fn every_alert_has_a_runbook() -> Result<()> {
    let rules = fs::read_to_string(repository("deploy/observability/alerts.yaml"))?;
    let alerts: BTreeSet<_> =
        rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert!(alerts.len() > 10, "{alerts:?}");
    let pages = fs::read_dir(repository("docs/runbooks"))?.flatten();
    let pages: Vec<_> = pages.map(|page| page.file_name().to_string_lossy().into_owned()).collect();
    let pages: BTreeSet<_> = pages.iter().filter_map(|page| page.strip_suffix(".md")).collect();
    assert_eq!(pages, alerts);
    for alert in alerts {
        assert!(rules.contains(&format!("runbook: docs/runbooks/{alert}.md")), "{alert}");
    }
    Ok(())
}

#[test]
fn alerts_fire_in_their_tests() -> Result<()> {
    if !has_promtool() {
        return Ok(());
    }
    let directory = repository("deploy/observability");
    let test = Command::new("promtool")
        .args(["test", "rules", "alerts.test.yaml"])
        .current_dir(&directory)
        .output()?;
    assert!(test.status.success(), "{}", String::from_utf8_lossy(&test.stderr));
    let tests = fs::read_to_string(directory.join("alerts.test.yaml"))?;
    let rules = fs::read_to_string(directory.join("alerts.yaml"))?;
    for alert in rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")) {
        for case in ["fires", "is quiet"] {
            assert!(
                tests.contains(&format!("- name: {alert} {case}\n")),
                "no test that {alert} {case}"
            );
        }
    }
    Ok(())
}

/// The body of a scrape.
async fn scrape(address: &str) -> Result<String> {
    let answer = http_get(address, "/metrics").await?.1;
    Ok(answer.split_once("\r\n\r\n").context("a body")?.1.to_owned())
}

/// Returns what Prometheus has against the names, types and texts of the metrics.
fn lint(page: &str) -> Result<String> {
    let mut command = Command::new("promtool");
    command
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn()?;
    child.stdin.take().context("stdin")?.write_all(page.as_bytes())?;
    let done = child.wait_with_output()?;
    Ok(String::from_utf8_lossy(&[done.stdout, done.stderr].concat()).into_owned())
}

#[tokio::test]
async fn fresh_process_serves_every_counter_at_zero() -> Result<()> {
    let (api, worker) = (free_address().await?, free_address().await?);
    let mut cluster =
        Cluster::start_with(ClusterOptions { apis: 0, workers: 0, ..Default::default() }).await?;
    cluster.add_worker_with(&[("CODELIA_METRICS_LISTEN", &worker)]).await?;
    cluster.add_api_with(&[("CODELIA_METRICS_LISTEN", &api)]).await?;
    let pages = [scrape(&api).await?, scrape(&worker).await?];
    let mut served = BTreeSet::new();
    for page in &pages {
        assert!(page.lines().count() > 100, "{page}");
        for line in page.lines().filter(|line| !line.starts_with('#')) {
            let name = line.split(['{', ' ']).next().unwrap_or_default();
            served.insert(name.to_owned());
            let is_counter = page.contains(&format!("# TYPE {name} counter\n"));
            assert!(!is_counter || line.ends_with(" 0"), "{line}");
        }
        if has_promtool() {
            assert_eq!(lint(page)?, "");
            assert_ne!(
                lint(&page.replace("codelia_connections_refused_total", "codelia_refused"))?,
                "",
                "the control"
            );
        }
    }
    let is_later = |name: &str| LATER.iter().any(|later| name.starts_with(later));
    for (name, kind) in
        documented()?.iter().filter(|(name, kind)| *kind != "histogram" && !is_later(name))
    {
        assert!(served.contains(name), "the {kind} {name} does not exist at the start");
    }
    assert_eq!(
        unknown_metrics(&pages.concat(), &documented()?),
        BTreeSet::new(),
        "run CODELIA_BLESS=1 cargo test -p codelia-telemetry"
    );
    cluster.end().await
}
