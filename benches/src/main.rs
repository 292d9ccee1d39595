//! `make bench`: the cost of a run compared with its lower bounds. All parts run on one machine in
//! turns, so that noise affects all alike. `make bench ARGS=isolated,peers` measures these parts,
//! and `--docs` draws the plots of the documentation again.

#![forbid(unsafe_code)]

mod bare;
mod database;
mod disk;
mod egress;
mod files;
mod idle;
mod isolated;
mod measure;
mod modes;
mod neighbours;
mod noise;
mod peers;
mod plot;
mod processor_time;
mod report;
mod runs;
mod scaling;
mod scrape;
mod spine;

use std::time::Duration;

use anyhow::{Result, bail};
use codelia_store::LocalPostgres;
use codelia_tests::Scratch;

use database::{backlog, capacity, cells, growth, lists, retention, snapshot, statement_counts};
use report::Report;

/// Number of turns of each measurement.
const ROUNDS: usize = 4;
/// Length of one round.
const ROUND_TIME: Duration = Duration::from_secs(2);

/// The parts that are measured if none is named, in about ten minutes.
const PARTS: [&str; 6] = ["spine", "isolated", "neighbours", "peers", "capacity", "scaling"];
/// Parts that must be named. Some take hours at full size.
const NAMED_PARTS: [&str; 12] = [
    "cpu_idle",
    "disk",
    "egress",
    "files",
    "scrape",
    "idle",
    "growth",
    "lists",
    "backlog",
    "snapshot",
    "retention",
    "cells",
];
/// Also writes the plots to the documentation.
const DOCS: &str = "--docs";

/// The arguments: names of parts, separated by commas, then the sizes or the length of a part.
fn arguments() -> impl Iterator<Item = String> {
    std::env::args().skip(1).filter(|word| word != DOCS)
}

/// The numbers after the names of parts, or these: sizes, or a length in seconds.
fn numbers(all: &[u64]) -> Result<Vec<u64>> {
    let named = arguments().skip(1).map(|size| Ok(size.parse()?)).collect::<Result<Vec<_>>>()?;
    Ok(if named.is_empty() { all.to_vec() } else { named })
}

#[tokio::main]
async fn main() -> Result<()> {
    let named = arguments().next();
    let parts = named.as_deref().map_or(PARTS.to_vec(), |named| named.split(',').collect());
    if let Some(unknown) =
        parts.iter().find(|part| !PARTS.contains(part) && !NAMED_PARTS.contains(part))
    {
        bail!("unknown part {unknown:?}, expected some of {PARTS:?} or {NAMED_PARTS:?}");
    }
    // Server settings as those of `codelia up`: durability stays on.
    let scratch = Scratch::new()?;
    let server = LocalPostgres::start(&scratch.join("postgres")).await?;
    let mut bench =
        Bench { cores: std::thread::available_parallelism()?.get(), server, targets: Vec::new() };
    for part in parts {
        println!("== {part}");
        if let Some(report) = bench.measure(part, &scratch).await? {
            bench.show(&report);
        }
    }
    println!("== targets");
    bench.targets.iter().for_each(|target| println!("{target}"));
    bench.server.stop().await?;
    Ok(())
}

/// State that all parts use and add to.
struct Bench {
    cores: usize,
    server: LocalPostgres,
    /// Every target of the parts so far, as a line.
    targets: Vec<String>,
}

impl Bench {
    /// Measures a part. `None` if it has printed its own table.
    async fn measure(&mut self, part: &str, scratch: &Scratch) -> Result<Option<Report>> {
        let server = &self.server;
        let cores = self.cores;
        Ok(Some(match part {
            "spine" => spine::measure(server, cores).await?,
            "isolated" => isolated::measure(server, cores).await?,
            "neighbours" => neighbours::measure(server, cores, false).await?,
            "cpu_idle" => neighbours::measure(server, cores, true).await?,
            "disk" => disk::measure(server).await?,
            "egress" => egress::measure(server).await?,
            "files" => files::measure(server, numbers(&[files::MEBIBYTES])?[0]).await?,
            "scrape" => scrape::measure(server, cores).await?,
            "peers" => peers::measure(server, cores).await?,
            "scaling" => scaling::measure(server, cores, &numbers(&scaling::ENDED_RUNS)?).await?,
            "idle" => {
                let counting = statement_counts::start_server(&scratch.join("counting")).await?;
                let report = idle::measure(&counting).await?;
                counting.stop().await?;
                report
            }
            "lists" => lists::measure(server, cores).await?,
            "backlog" => backlog::measure(server, cores, numbers(&[backlog::RUNS])?[0]).await?,
            "snapshot" => snapshot::measure(server, numbers(&[snapshot::SECONDS])?[0]).await?,
            "retention" => retention::measure(server, numbers(&[retention::SECONDS])?[0]).await?,
            other => {
                self.print(other, scratch).await?;
                return Ok(None);
            }
        }))
    }

    /// Measures a part that has no [`Report`].
    async fn print(&self, part: &str, scratch: &Scratch) -> Result<()> {
        match part {
            "capacity" => {
                // Counting statements takes a little time, so the other parts do without.
                let counting = statement_counts::start_server(&scratch.join("counting")).await?;
                let seconds = numbers(&[capacity::SECONDS])?[0];
                for mode in capacity::measure(&counting, self.cores, seconds).await? {
                    println!("{mode}");
                }
                counting.stop().await?;
            }
            "growth" => {
                println!("{}", growth::measure(&self.server, &numbers(&growth::SIZES)?).await?)
            }
            _ => cells::days().for_each(|day| println!("{day}")),
        }
        Ok(())
    }

    fn show(&mut self, report: &Report) {
        println!("{report}");
        self.targets.extend(report.targets());
    }
}
