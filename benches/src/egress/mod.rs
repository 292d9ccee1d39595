//! The ways out of a sandbox in network mode `proxy`, next to a direct connection and to other proxies
//! and user-mode networks of this machine. All connect to the same server in another network namespace.

use std::{
    fs,
    net::TcpListener,
    path::Path,
    process::{Child, Command, Output, Stdio},
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

/// Measures all ways in turns.
pub(crate) async fn measure(server: &LocalPostgres) -> Result<Report> {
    let network = TestNetwork::start_without_capture().await?.context("needs root and python3")?;
    network.serve(&[HOST])?;
    let scratch = Scratch::new()?;
    fs::write(scratch.join("client.py"), CLIENT)?;
    let policy = format!("network: {{mode: proxy, allowed_hosts: [{HOST}], allowed_ports: [9000, 9001]}}");
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
    let address = network.address().to_string();
    let others = others(&scratch, &mut report)?;
    let mut ways: Vec<Way> = Vec::new();
    for round in 0..=ROUNDS {
        let script = scratch.join("client.py");
        let mut turn = vec![("direct, on the host", on_host(&script, &[&address])?)];
        turn.push((
            "codelia, HTTP CONNECT",
            in_sandbox(&client, &session, &format!("{HOST} ${{HTTP_PROXY#http://}}")).await?,
        ));
        turn.push(("codelia, transparent", in_sandbox(&client, &session, HOST).await?));
        for other in &others {
            turn.push((other.name, other.measure(&script, &address)?));
        }
        // The first round is warm-up.
        turn.into_iter().filter(|_| round > 0).for_each(|(name, result)| add(&mut ways, name, result));
    }
    drop(others);
    summarize(&mut report, &ways)?;
    compare_setup(&mut report, &client, &session).await?;
    cluster.end().await?;
    network.end().await?;
    Ok(report)
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
    let rate =
        |name: &str| ways.iter().find(|way| way.name == name).map(|way| way.median(|it| it.throughput));
    let direct = rate("direct, on the host").context("direct")?;
    let proxy = rate("codelia, HTTP CONNECT").context("proxy")? / direct;
    report.check_ratio("throughput by HTTP CONNECT relative to direct", proxy, 0.7);
    let transparent = rate("codelia, transparent").context("transparent")?;
    report
        .note(&format!("throughput, transparent, relative to direct: {:.0} %", transparent / direct * 100.0));
    if let Some(slirp) = rate("slirp4netns") {
        report.check_ratio("throughput, transparent, relative to slirp4netns", transparent / slirp, 1.0);
    }
    Ok(())
}

/// The setup of sandboxes that were not prepared, with and without the proxy.
async fn compare_setup(report: &mut Report, client: &Client, proxy: &str) -> Result<()> {
    let none = session(client, NetworkMode::None).await?;
    let (mut with, mut without) = (Vec::new(), Vec::new());
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
    let (with, without) = (median(&mut with), median(&mut without));
    report.note(&format!("setup: {:.2} ms with proxy, {:.2} ms with none", with * 1e3, without * 1e3));
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
    let [throughput, connect, exchange] = numbers[..] else { anyhow::bail!("not three numbers: {text:?}") };
    Ok(WayResult { throughput, connect, exchange })
}

/// Another program that leads to the server.
struct Other {
    name: &'static str,
    kind: Kind,
}

enum Kind {
    /// A proxy.
    Proxy { address: String, _process: Killed },
    /// The client runs in a namespace that this command makes.
    Wrapper(Vec<String>),
}

/// A process that is killed when dropped.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Other {
    fn measure(&self, script: &Path, address: &str) -> Result<WayResult> {
        match &self.kind {
            Kind::Proxy { address: proxy, .. } => on_host(script, &[address, proxy]),
            Kind::Wrapper(words) => {
                let mut command = Command::new(&words[0]);
                command.args(&words[1..]).arg(PYTHON).arg(script).arg(address);
                finished(command.output()?)
            }
        }
    }
}

/// Those that are installed. Says which are not.
fn others(scratch: &Scratch, report: &mut Report) -> Result<Vec<Other>> {
    let mut others = Vec::new();
    for name in ["tinyproxy", "squid", "slirp4netns", "pasta"] {
        if !is_installed(name) {
            report.note(&format!("{name}: not installed, not measured"));
            continue;
        }
        let kind = match name {
            "tinyproxy" => tinyproxy(scratch)?,
            "squid" => squid(scratch)?,
            "slirp4netns" => Kind::Wrapper(slirp(scratch)?),
            _ => Kind::Wrapper(["pasta", "--config-net", "-q", "--"].map(str::to_owned).to_vec()),
        };
        match kind {
            Kind::Wrapper(ref words) if !runs_true(words)? => {
                report.note(&format!("{name}: cannot run `true` here, not measured"));
            }
            kind => others.push(Other { name, kind }),
        }
    }
    Ok(others)
}

/// Old versions of pasta hang on new kernels.
fn runs_true(wrapper: &[String]) -> Result<bool> {
    let mut command = Command::new("timeout");
    Ok(command.args(["--kill-after=1", "10"]).args(wrapper).arg("true").output()?.status.success())
}

fn is_installed(program: &str) -> bool {
    ["/usr/bin", "/usr/sbin", "/usr/local/bin"].iter().any(|dir| Path::new(dir).join(program).exists())
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

fn start(command: &mut Command) -> Result<Killed> {
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    Ok(Killed(quiet.spawn().with_context(|| format!("{command:?}"))?))
}

fn tinyproxy(scratch: &Scratch) -> Result<Kind> {
    let (port, file) = (free_port()?, scratch.join("tinyproxy.conf"));
    fs::write(
        &file,
        format!("Port {port}\nListen 127.0.0.1\nMaxClients 100\nConnectPort 9000\nConnectPort 9001\n"),
    )?;
    Ok(Kind::Proxy {
        address: format!("127.0.0.1:{port}"),
        _process: start(Command::new("tinyproxy").arg("-d").arg("-c").arg(file))?,
    })
}

fn squid(scratch: &Scratch) -> Result<Kind> {
    let (port, file) = (free_port()?, scratch.join("squid.conf"));
    let pid = scratch.join("squid.pid");
    let text = format!(
        "http_port 127.0.0.1:{port}\nhttp_access allow all\ncache deny all\naccess_log none\ncache_log /dev/null\npid_filename {}\n",
        pid.display()
    );
    fs::write(&file, text)?;
    Ok(Kind::Proxy {
        address: format!("127.0.0.1:{port}"),
        _process: start(Command::new("squid").args(["-N", "-f"]).arg(file))?,
    })
}

/// A script that makes a network namespace with slirp4netns and runs its arguments there.
fn slirp(scratch: &Scratch) -> Result<Vec<String>> {
    let script = scratch.join("slirp.sh");
    let text = "set -e\nmkfifo $0.$$\nunshare -rn sh -c 'read go < '$0.$$'; exec \"$@\"' sh \"$@\" &\ninner=$!\n\
                slirp4netns --configure --mtu=65520 $inner tap0 >/dev/null 2>&1 &\nouter=$!\nsleep 1\n\
                echo go > $0.$$\nstatus=0; wait $inner || status=$?\nkill $outer; rm $0.$$; exit $status\n";
    fs::write(&script, text)?;
    Ok(vec!["sh".to_owned(), script.display().to_string()])
}
