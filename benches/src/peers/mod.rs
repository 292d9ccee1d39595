//! Other ways to run a command on this machine, next to Codelia in the same run: raw tools, a
//! container engine, a sandbox for agents, and a job queue without isolation.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use codelia_store::LocalPostgres;
use codelia_tests::{Cluster, ClusterOptions, Database, ENGINE_SOCKET, Scratch, engine_command};

use crate::{
    ROUND_TIME,
    bare::exec::{BWRAP, Loop},
    measure::Measured,
    modes,
    plot::Bars,
    report::Report,
    runs::Runs,
};

/// Rounds, the first one as warm-up.
const ROUNDS: usize = 2;
/// Environment variable with the directory of `scripts/peers`.
const PEERS: &str = "CODELIA_BENCH_PEERS";
/// The image of the container engine.
const IMAGE: &str = "codelia-base";
/// The container that `docker exec` enters.
const CONTAINER: &str = "codelia-bench";
const QUEUE: &str = "job queue (graphile-worker), no isolation";

/// A program that is started for each run.
struct Peer {
    name: &'static str,
    words: String,
}

/// Measures all rows in rounds and draws them.
pub(crate) async fn measure(server: &LocalPostgres, cores: usize) -> Result<Report> {
    let scratch = Scratch::new()?;
    let callers = 4 * cores;
    let shape = ClusterOptions { slots: callers, ..ClusterOptions::default() };
    let cluster = Cluster::start_on(Database::on(server).await?, shape).await?;
    let mut modes = Vec::new();
    let mut report = Report::default();
    for mode in modes::served(&cluster, &modes::ALL, &mut report).await? {
        let name = mode.as_str();
        let runs = Runs::prepare_in(&cluster, mode, &format!("peers-{name}"), callers).await?;
        modes.push((format!("Codelia, {name}"), runs));
    }
    let engine = Container::start(&mut report)?;
    let peers = peers(&scratch, engine.is_some(), &mut report)?;
    let queue = queue_modules(&mut report);
    let database = Database::on(server).await?;
    for round in 0..=ROUNDS {
        let mut measured_rows = Vec::new();
        for peer in &peers {
            measured_rows
                .push((peer.name, Loop::new(&peer.words, cores).measure(ROUND_TIME).await?));
        }
        if let Some(modules) = &queue {
            measured_rows.push((QUEUE, queue_round(&scratch, modules, &database.url(), callers)?));
        }
        for (name, runs) in &modes {
            measured_rows.push((name, runs.outcome(ROUND_TIME).await?));
        }
        if round > 0 {
            measured_rows.into_iter().for_each(|(name, measured)| report.add(name, measured));
        }
    }
    drop(engine);
    cluster.end().await?;
    database.end().await?;
    let rates = report.rows().map(|(name, measured)| (name.to_owned(), measured.rate()));
    let title = format!("Runs of `true` in a second on {cores} processors (logarithmic)");
    let plot = Bars { title, unit: "runs/s", bars: rates.collect() };
    report.note(&format!("plot: {}", plot.write("peers")?.display()));
    Ok(report)
}

/// The programs that this machine has. Says which are missing.
fn peers(scratch: &Scratch, has_engine: bool, report: &mut Report) -> Result<Vec<Peer>> {
    let mut peers = vec![
        Peer { name: "fork and exec, no isolation", words: "/bin/true".to_owned() },
        Peer { name: "bwrap", words: BWRAP.to_owned() },
    ];
    match env::var("CODELIA_NSJAIL") {
        Ok(nsjail) => peers.push(Peer { name: "nsjail", words: format!("{nsjail} {NSJAIL}") }),
        Err(_) => report.note("left out: nsjail (CODELIA_NSJAIL is not set)"),
    }
    if has_engine {
        let docker = format!("docker --host unix://{}", env::var(ENGINE_SOCKET)?);
        peers.push(Peer {
            name: "docker exec in a running container",
            words: format!("{docker} exec {CONTAINER} true"),
        });
        peers.push(Peer {
            name: "docker run",
            words: format!("{docker} run --rm --network none --log-driver none {IMAGE} true"),
        });
    }
    let settings = scratch.join("settings.json");
    std::fs::write(&settings, RUNTIME_SETTINGS)?;
    match modules().filter(|_| has_program("rg") && has_program("socat")) {
        Some(modules) => peers.push(Peer {
            name: "sandbox-runtime (srt)",
            words: format!(
                "{} --settings {} true",
                modules.join("node_modules/.bin/srt").display(),
                settings.display()
            ),
        }),
        None => report.note("left out: sandbox-runtime (needs npm, ripgrep and socat)"),
    }
    Ok(peers)
}

const NSJAIL: &str = "--really_quiet --mode o --user 1000 --group 1000 --disable_rlimits --bindmount_ro /usr \
    --symlink usr/bin:/bin --symlink usr/lib:/lib --symlink usr/lib64:/lib64 --tmpfsmount /tmp -- /usr/bin/true";

const RUNTIME_SETTINGS: &str = r#"{"network": {"allowedDomains": [], "deniedDomains": []},
    "filesystem": {"denyRead": [], "allowWrite": ["."], "denyWrite": []}}"#;

fn modules() -> Option<PathBuf> {
    env::var_os(PEERS).map(PathBuf::from).filter(|path| path.is_dir())
}

fn has_program(name: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).any(|dir| dir.join(name).is_file())
}

fn queue_modules(report: &mut Report) -> Option<PathBuf> {
    let modules = modules();
    if modules.is_none() {
        report.note("left out: job queue (scripts/peers found no npm)");
    }
    modules
}

/// One round of the job queue. Its own process measures, as its users' would.
fn queue_round(
    scratch: &Scratch,
    modules: &Path,
    database: &str,
    callers: usize,
) -> Result<Measured> {
    let script = scratch.join("queue.mjs");
    std::fs::write(&script, include_str!("queue.mjs"))?;
    let begin = Instant::now();
    let done = Command::new("node")
        .arg(script)
        .arg(modules)
        .args([database, &callers.to_string(), &ROUND_TIME.as_secs().to_string()])
        .output()
        .context("node")?;
    ensure!(done.status.success(), "queue.mjs: {}", String::from_utf8_lossy(&done.stderr));
    ensure!(begin.elapsed() >= ROUND_TIME, "the round was too short");
    let times = String::from_utf8(done.stdout)?;
    let times = times.lines().map(|line| Ok(Duration::from_micros(line.parse()?)));
    Measured::from_latencies(times.collect::<Result<Vec<_>>>()?, ROUND_TIME)
}

/// A container that waits for `docker exec`. Dropping it removes it.
struct Container;

impl Container {
    fn start(report: &mut Report) -> Result<Option<Self>> {
        if env::var_os(ENGINE_SOCKET).is_none() {
            report.note(&format!("left out: docker ({ENGINE_SOCKET} is not set)"));
            return Ok(None);
        }
        engine_command(&[
            "run",
            "--detach",
            "--name",
            CONTAINER,
            "--network",
            "none",
            IMAGE,
            "sleep",
            "inf",
        ])?;
        Ok(Some(Self))
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        if let Err(error) = engine_command(&["rm", "--force", CONTAINER]) {
            eprintln!("cannot remove the container: {error}");
        }
    }
}
