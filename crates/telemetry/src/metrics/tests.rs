//! `docs/metrics.md` is generated from the metrics themselves: after a change, run
//! `CODELIA_BLESS=1 cargo test -p codelia-telemetry`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
    path::Path,
    time::Duration,
};

use codelia_types::Mode;
use opentelemetry::metrics::MeterProvider;
use opentelemetry_sdk::Resource;
use prometheus::{
    Registry,
    proto::{MetricFamily, MetricType},
};

use super::{Metrics, Step};
use crate::pipeline::meter_provider;

const HEAD: &str = "# Metrics

<!-- Generated: CODELIA_BLESS=1 cargo test -p codelia-telemetry -->

Each process serves these at `/metrics` on `metrics.listen`; `codelia up` serves those of both.
Counters and gauges exist from the start with the value 0, so that alerts see the first increase. Of
`codelia_requests_total`, series of other codes than `OK`, `INTERNAL`, `UNAVAILABLE` and `UNKNOWN`
appear with their first call; histograms, `codelia_isolation_setup_p95_seconds` and those of mode
flags appear with their first value; `codelia_tls_certificate_expiry_timestamp_seconds` exists for
each certificate that is configured. Durations are in seconds. Dashboards and alert rules are in
[deploy/observability](../deploy/observability/README.md).

";

/// More values of a label than this are not listed.
const MAX_VALUES: usize = 10;

/// The metrics of a process, after `start` and `record`.
fn families(start: impl Fn(&Metrics), record: impl Fn(&Metrics)) -> BTreeMap<String, MetricFamily> {
    let registry = Registry::new();
    let provider = meter_provider(&registry, Resource::builder().build(), None).unwrap();
    let metrics = Metrics::build(&provider.meter("codelia"));
    start(&metrics);
    record(&metrics);
    let found = registry.gather().into_iter().filter(|family| family.name() != "target_info");
    found.map(|family| (family.name().to_owned(), family)).collect()
}

fn start_api(metrics: &Metrics) {
    metrics.start_api(["codelia.v1.RunService/StartRun".to_owned()]);
}

fn start_worker(metrics: &Metrics) {
    metrics.start_worker([("connect", "allowed"), ("dns", "denied"), ("direct", "no_route")]);
}

/// Records what has no value at the start.
fn record_api(metrics: &Metrics) {
    metrics.certificate_expires("public", 0);
    metrics.certificate_expires("internal", 0);
    metrics.request("other", "OK", Duration::ZERO);
    metrics.step(Step::Admit, Duration::ZERO);
    metrics.flags.percent("name", "bwrap", 0);
    metrics.flags.session("name", "bwrap");
    metrics.flags.session_refused("name");
    metrics.flags.rolled_back("name", "guard");
    metrics.flags.rolled_back("name", "operator");
}

fn record_worker(metrics: &Metrics) {
    metrics.certificate_expires("internal", 0);
    for prepared in [true, false] {
        metrics.setup("bwrap", prepared, Duration::ZERO);
    }
    metrics.removals.removed(0, Duration::ZERO);
    for result in ["started", "refused", "failed"] {
        metrics.flags.run("name", result);
    }
}

/// Every value of every label.
fn labels(family: &MetricFamily) -> BTreeMap<String, BTreeSet<String>> {
    let mut labels: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let pairs = family.get_metric().iter().flat_map(|metric| metric.get_label());
    for pair in pairs {
        labels.entry(pair.name().to_owned()).or_default().insert(pair.value().to_owned());
    }
    labels
}

/// A label with its values, unless they are many or come from elsewhere.
fn label_text(name: &str, values: &BTreeSet<String>) -> String {
    let source = match name {
        "method" => "the methods of the API, or `other`".to_owned(),
        "code" => "the gRPC code".to_owned(),
        "reason" => "as in [errors](errors.md)".to_owned(),
        "step" => Step::ALL.map(Step::as_str).join(", "),
        "mode" => Mode::ALL.map(Mode::as_str).join(", "),
        "via" => "connect, http, socks, transparent, dns, direct".to_owned(),
        "version" => "of the program".to_owned(),
        "flag" => "the id of a flag".to_owned(),
        "outcome" if values.contains("denied") => {
            "allowed, or the reason of the refusal as in [network](network.md)".to_owned()
        }
        _ => {
            assert!(values.len() <= MAX_VALUES, "say where the values of {name} come from");
            values.iter().map(String::as_str).collect::<Vec<_>>().join(", ")
        }
    };
    format!("`{name}`: {source}")
}

fn row(family: &MetricFamily, served_by: &str) -> String {
    let kind = match family.get_field_type() {
        MetricType::COUNTER => "counter",
        MetricType::GAUGE => "gauge",
        MetricType::HISTOGRAM => "histogram",
        other => panic!("{other:?}"),
    };
    let labels: Vec<_> =
        labels(family).iter().map(|(name, values)| label_text(name, values)).collect();
    let help = family.help();
    format!("| `{}` | {kind} | {served_by} | {help} | {} |", family.name(), labels.join("; "))
}

fn document() -> String {
    let (api, worker) = (families(start_api, record_api), families(start_worker, record_worker));
    let mut text = HEAD.to_owned();
    text.push_str("| metric | type | served by | meaning | labels |\n|---|---|---|---|---|\n");
    let all: BTreeMap<_, _> = api.iter().chain(&worker).collect();
    for (name, family) in all {
        let served_by = match (api.contains_key(name), worker.contains_key(name)) {
            (true, true) => "both",
            (true, false) => "api",
            _ => "worker",
        };
        writeln!(text, "{}", row(family, served_by)).unwrap();
    }
    text
}

#[test]
fn documented_metrics_are_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/metrics.md");
    let expected = document();
    if std::env::var_os("CODELIA_BLESS").is_some_and(|value| value == "1") {
        std::fs::write(&path, &expected).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == expected,
        "docs/metrics.md is out of date: run `CODELIA_BLESS=1 cargo test -p codelia-telemetry`"
    );
}

#[test]
fn counters_and_gauges_start_at_zero() {
    let started: BTreeMap<_, _> =
        families(start_api, |_| {}).into_iter().chain(families(start_worker, |_| {})).collect();
    let document = document();
    for name in Metrics::names() {
        let documented = |suffix: &str| document.contains(&format!("| `{name}{suffix}` |"));
        assert!(
            ["", "_total", "_seconds", "_seconds_total"].into_iter().any(documented),
            "{name} has no value: start it in start.rs"
        );
    }
    for line in
        document.lines().filter(|line| line.contains("| counter |") || line.contains("| gauge |"))
    {
        let name = line.split('`').nth(1).unwrap();
        // These need a setup, a certificate and a flag.
        if [
            "codelia_isolation_setup_p95_seconds",
            "codelia_tls_certificate_expiry_timestamp_seconds",
        ]
        .contains(&name)
            || name.starts_with("codelia_flag_")
        {
            continue;
        }
        let family =
            started.get(name).unwrap_or_else(|| panic!("{name} does not exist at the start"));
        for metric in family.get_metric() {
            let value = metric.get_counter().get_value() + metric.get_gauge().get_value();
            let expected = if name == "codelia_build_info" { 1.0 } else { 0.0 };
            assert!((value - expected).abs() < f64::EPSILON, "{name} starts with {value}");
        }
    }
}
