//! The ways out of a sandbox in network mode `proxy`, next to a direct connection and to other
//! proxies and user-mode networks of this machine. All connect to the same server in another
//! network namespace.
//!
//! `make bench ARGS="egress slirp4netns setup"` measures only the parts whose names contain these
//! words, and the direct connection.

mod namespace;
mod others;
mod ways_in;

use std::{
    fs,
    path::Path,
    process::{Command, Output},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::{
    CreateSessionRequest, Limits, NetworkMode, NetworkPolicy, Policy, PortList, TextList,
};
use codelia_store::LocalPostgres;
use codelia_tests::{Client, Cluster, ClusterOptions, Database, Exec, Scratch, TestNetwork, shell};

use crate::{ROUNDS, report::Report};

const CLIENT: &str = include_str!("client.py");
const PYTHON: &str = "/usr/bin/python3";
const DIRECT: &str = "direct, on the host";
const CONNECT: &str = "codelia, HTTP CONNECT";
const TRANSPARENT: &str = "codelia, transparent";
const HOST: &str = "allowed.example.com";
/// Runs whose setup is compared.
const SETUPS: i64 = 40;

/// A way to the server, and its result in each round.
struct Way {
    name: &'static str,
    rounds: Vec<WayResult>,
}

/// Throughput in MB/s, and connecting and one exchange in microseconds.
#[derive(Debug, Clone, Copy)]
struct WayResult {
    throughput: f64,
    connect: f64,
    exchange: f64,
}

/// Measures all ways in rounds.
pub(crate) async fn measure(server: &LocalPostgres) -> Result<Report> {
    let network = TestNetwork::start_without_capture().await?.context("needs root and python3")?;
    network.serve(&[HOST])?;
    let scratch = Scratch::new()?;
    fs::write(scratch.join("client.py"), CLIENT)?;
    let policy =
        format!("network: {{mode: proxy, allowed_hosts: [{HOST}], allowed_ports: [9000, 9001]}}");
    fs::write(scratch.join("policy.yaml"), policy)?;
    let settings = vec![
        ("CODELIA_SANDBOX_MODE", "bwrap".to_owned()),
        ("CODELIA_SANDBOX_POLICY", scratch.join("policy.yaml").display().to_string()),
        ("CODELIA_EGRESS_RESOLVERS", network.resolver()),
    ];
    let shape = ClusterOptions { settings, ..ClusterOptions::default() };
    let cluster = Cluster::start_on(Database::on(server).await?, shape).await?;
    let client = cluster.tenant("bench").await?;
    let session = session(&client, NetworkMode::Proxy).await?;
    client.put(&session, "client.py", CLIENT).await?;

    let mut report = Report::default();
    let parts = Parts::from_arguments();
    let others = others::start(&parts, &scratch, &network.address().to_string(), &mut report)?;
    let mut ways: Vec<Way> = Vec::new();
    for round in 0..=ROUNDS {
        let script = scratch.join("client.py");
        let mut turn = vec![(DIRECT, on_host(&script, &[&network.address().to_string()])?)];
        if parts.contain(CONNECT) {
            let arguments = format!("{HOST} ${{HTTP_PROXY#http://}}");
            turn.push((CONNECT, in_sandbox(&client, &session, &arguments).await?));
        }
        if parts.contain(TRANSPARENT) {
            turn.push((TRANSPARENT, in_sandbox(&client, &session, HOST).await?));
        }
        for other in &others {
            turn.push((other.name, other.measure(&script)?));
        }
        // The first round is warm-up.
        turn.into_iter()
            .filter(|_| round > 0)
            .for_each(|(name, result)| add(&mut ways, name, result));
    }
    drop(others);
    summarize(&mut report, &ways)?;
    if parts.contain("setup") {
        compare_setup(&mut report, &client, &session).await?;
        ways_in::compare_setup(&mut report)?;
    }
    cluster.end().await?;
    network.end().await?;
    Ok(report)
}

/// The parts that are measured: all, or those that were named.
struct Parts(Vec<String>);

impl Parts {
    fn from_arguments() -> Self {
        Self(crate::arguments().skip(1).collect())
    }

    fn contain(&self, name: &str) -> bool {
        self.0.is_empty() || self.0.iter().any(|part| name.contains(part.as_str()))
    }
}

fn add(ways: &mut Vec<Way>, name: &'static str, result: WayResult) {
    match ways.iter_mut().find(|way| way.name == name) {
        Some(way) => way.rounds.push(result),
        None => ways.push(Way { name, rounds: vec![result] }),
    }
}

impl Way {
    fn median(&self, field: impl Fn(&WayResult) -> f64) -> f64 {
        let mut all: Vec<f64> = self.rounds.iter().map(field).collect();
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    }
}

fn summarize(report: &mut Report, ways: &[Way]) -> Result<()> {
    for way in ways {
        report.note(&format!(
            "{:<24} {:>6.0} MB/s, connect and exchange {:>5.0} µs, exchange {:>4.0} µs",
            way.name,
            way.median(|it| it.throughput),
            way.median(|it| it.connect),
            way.median(|it| it.exchange),
        ));
    }
    let rate = |name: &str| {
        ways.iter().find(|way| way.name == name).map(|way| way.median(|it| it.throughput))
    };
    let direct = rate(DIRECT).context(DIRECT)?;
    if let Some(proxy) = rate(CONNECT) {
        report.check_ratio("throughput by HTTP CONNECT relative to direct", proxy / direct, 0.7);
    }
    if let Some(transparent) = rate(TRANSPARENT) {
        let share = transparent / direct * 100.0;
        report.note(&format!("throughput, transparent, relative to direct: {share:.0} %"));
        if let Some(slirp) = rate("slirp4netns") {
            report.check_ratio(
                "throughput, transparent, relative to slirp4netns",
                transparent / slirp,
                1.0,
            );
        }
    }
    Ok(())
}

/// The setup of sandboxes that were not prepared, with and without the proxy.
async fn compare_setup(report: &mut Report, client: &Client, proxy: &str) -> Result<()> {
    let none = session(client, NetworkMode::None).await?;
    let mut with = Vec::new();
    let mut without = Vec::new();
    for number in 0..SETUPS {
        for (session, times) in [(proxy, &mut with), (none.as_str(), &mut without)] {
            let mut request = shell(session, "true");
            // No prepared sandbox has this limit.
            request.limits = Some(Limits { pids: Some(100 + number), ..Limits::default() });
            let done = Exec::start(client, request).await?.finish().await?;
            let setup = done.started.context("started")?.setup_time.context("setup time")?;
            times.push(Duration::new(u64::try_from(setup.seconds)?, u32::try_from(setup.nanos)?));
        }
    }
    let median = |times: &mut Vec<Duration>| {
        times.sort();
        times[times.len() / 2].as_secs_f64()
    };
    let with = median(&mut with);
    let without = median(&mut without);
    report.note(&format!(
        "setup: {:.2} ms with proxy, {:.2} ms with none",
        with * 1e3,
        without * 1e3
    ));
    report.check_factor("setup with proxy relative to none", with / without, 1.3);
    Ok(())
}

async fn session(client: &Client, network: NetworkMode) -> Result<String> {
    let hosts = TextList { values: vec![HOST.to_owned()] };
    let policy = NetworkPolicy {
        allowed_hosts: Some(hosts),
        allowed_ports: Some(PortList { values: vec![9000, 9001] }),
        ..NetworkPolicy::default()
    };
    let request = CreateSessionRequest {
        network: network.into(),
        policy: (network == NetworkMode::Proxy)
            .then(|| Policy { network: Some(policy), ..Policy::default() }),
        ..CreateSessionRequest::default()
    };
    Ok(client.create(request).await?.name)
}

async fn in_sandbox(client: &Client, session: &str, arguments: &str) -> Result<WayResult> {
    let request = shell(session, &format!("{PYTHON} client.py {arguments}"));
    let done = Exec::start(client, request).await?.finish_without_timeout().await?;
    parse(&done.stdout_text()).with_context(|| format!("{done:?}"))
}

fn on_host(script: &Path, arguments: &[&str]) -> Result<WayResult> {
    finished(Command::new(PYTHON).arg(script).args(arguments).output()?)
}

fn finished(output: Output) -> Result<WayResult> {
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    parse(&String::from_utf8(output.stdout)?)
}

fn parse(text: &str) -> Result<WayResult> {
    let numbers = text.split_whitespace().map(str::parse).collect::<Result<Vec<f64>, _>>()?;
    let [throughput, connect, exchange] = numbers[..] else {
        anyhow::bail!("not three numbers: {text:?}")
    };
    Ok(WayResult { throughput, connect, exchange })
}
