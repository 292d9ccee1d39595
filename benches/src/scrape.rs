//! Processor time of a scrape of `/metrics` under load, for the api and the worker.
//!
//! One scrape costs less than a tick of the kernel's clock, so the processes are scraped without a
//! pause while runs go, and compared with turns of the same load without scrapes.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use codelia_store::LocalPostgres;
use codelia_tests::{Cluster, ClusterOptions, Database};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use crate::{ROUND_TIME, ROUNDS, processor_time::ProcessorTime, report::Report, runs::Runs};

const PROCESSES: [&str; 2] = ["api", "worker"];
/// The share of a core that scrapes once a second may take.
const MAX_SHARE: f64 = 0.01;
/// The default interval of Prometheus.
const DEFAULT_INTERVAL: Duration = Duration::from_secs(15);

/// The sums of all turns of one kind.
#[derive(Debug, Default)]
struct Total {
    runs: f64,
    scrapes: [f64; 2],
    /// Seconds of processor time, by process.
    used: [f64; 2],
}

/// Measures turns with and without scrapes. The first round is warm-up.
pub(crate) async fn measure(server: &LocalPostgres, cores: usize) -> Result<Report> {
    let shape =
        ClusterOptions { apis: 0, workers: 0, slots: 4 * cores, ..ClusterOptions::default() };
    let mut cluster = Cluster::start_on(Database::on(server).await?, shape).await?;
    let addresses = [free_address().await?, free_address().await?];
    cluster.add_api_with(&[("CODELIA_METRICS_LISTEN", &addresses[0])]).await?;
    cluster.add_worker_with(&[("CODELIA_METRICS_LISTEN", &addresses[1])]).await?;
    let load = Runs::prepare(&cluster, "load", 4 * cores).await?;

    let mut without = Total::default();
    let mut with = Total::default();
    for round in 0..=ROUNDS {
        for (total, scrapes) in [(&mut without, false), (&mut with, true)] {
            let turn = turn(&cluster, &load, scrapes.then_some(&addresses)).await?;
            if round > 0 {
                total.add(&turn);
            }
        }
    }
    let mut report = Report::default();
    for (index, process) in PROCESSES.into_iter().enumerate() {
        let bytes = scrape(&addresses[index]).await?.len();
        let of_runs = without.used[index] / without.runs * with.runs;
        // Less than nothing is noise.
        let each = ((with.used[index] - of_runs) / with.scrapes[index]).max(0.0);
        let millis = each * 1000.0;
        report.note(&format!(
            "{process}: {millis:.3} ms of processor time for a scrape of {bytes} bytes"
        ));
        let often =
            format!("{process}, scraped once a second under load: {:.3} % of a core", each * 100.0);
        report.check(each < MAX_SHARE, &format!("{often} (target < {:.0} %)", MAX_SHARE * 100.0));
        let seldom = each / DEFAULT_INTERVAL.as_secs_f64() * 100.0;
        report.note(&format!("{process}, scraped every 15 s under load: {seldom:.4} % of a core"));
    }
    cluster.end().await?;
    Ok(report)
}

impl Total {
    fn add(&mut self, turn: &Self) {
        self.runs += turn.runs;
        for index in 0..PROCESSES.len() {
            self.scrapes[index] += turn.scrapes[index];
            self.used[index] += turn.used[index];
        }
    }
}

/// One turn of load, with scrapes if there are addresses.
async fn turn(cluster: &Cluster, load: &Runs, addresses: Option<&[String; 2]>) -> Result<Total> {
    let ended = AtomicBool::new(false);
    let counts = [AtomicU64::new(0), AtomicU64::new(0)];
    let before = ProcessorTime::read(cluster).await?;
    let runs = async {
        let measured = load.outcome(ROUND_TIME).await;
        ended.store(true, Ordering::Relaxed);
        measured
    };
    let scraping = |index: usize| {
        let ended = &ended;
        let count = &counts[index];
        async move {
            let Some(addresses) = addresses else { return Ok(()) };
            while !ended.load(Ordering::Relaxed) {
                scrape(&addresses[index]).await?;
                count.fetch_add(1, Ordering::Relaxed);
            }
            anyhow::Ok(())
        }
    };
    let (runs, of_api, of_worker) = tokio::join!(runs, scraping(0), scraping(1));
    of_api.and(of_worker)?;
    let used = ProcessorTime::read(cluster).await?.since(&before);
    #[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^53")]
    let runs = runs?.count() as f64;
    let scrapes = counts.map(|count| count.into_inner() as f64);
    Ok(Total { runs, scrapes, used: PROCESSES.map(|process| used[process]) })
}

/// Reads the page as Prometheus does.
pub(crate) async fn scrape(address: &str) -> Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    let request = format!("GET /metrics HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut page = String::new();
    stream.read_to_string(&mut page).await?;
    let (head, body) = page.split_once("\r\n\r\n").context("a page without a head")?;
    ensure!(head.starts_with("HTTP/1.1 200"), "{head}");
    Ok(body.to_owned())
}

pub(crate) async fn free_address() -> Result<String> {
    Ok(TcpListener::bind("127.0.0.1:0").await?.local_addr()?.to_string())
}
