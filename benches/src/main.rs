//! `make bench`: the cost of a run compared with its lower bounds. All parts run on one machine in
//! turns, so that noise affects all alike. `make bench ARGS=isolated` measures one part.

#![forbid(unsafe_code)]

mod bare;
mod database;
mod egress;
mod idle;
mod isolated;
mod measure;
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

use anyhow::Result;
use codelia_store::LocalPostgres;
use codelia_tests::Scratch;

use database::{backlog, capacity, cells, growth, lists, retention, snapshot, statement_counts};

/// Number of turns of each measurement.
const ROUNDS: usize = 5;
/// Length of one turn.
const TURN: Duration = Duration::from_secs(3);

/// The numbers after the name of a part, or these: its sizes, or its length in seconds.
fn numbers(all: &[u64]) -> Result<Vec<u64>> {
    let named = std::env::args().skip(2).map(|size| Ok(size.parse()?)).collect::<Result<Vec<_>>>()?;
    Ok(if named.is_empty() { all.to_vec() } else { named })
}

#[tokio::main]
async fn main() -> Result<()> {
    let cores = std::thread::available_parallelism()?.get();
    // The same server settings as `codelia up`: durability stays on.
    let scratch = Scratch::new()?;
    let server = LocalPostgres::start(&scratch.join("postgres")).await?;
    let part = std::env::args().nth(1);
    let selected = |name: &str| part.as_deref().is_none_or(|part| part == name);
    if selected("spine") {
        println!("{}", spine::measure(&server, cores).await?);
    }
    if selected("isolated") {
        println!("{}", isolated::measure(&server, cores).await?);
    }
    if selected("neighbours") {
        for (cpu_idle, title) in [
            (false, "neighbours with normal CPU priority"),
            (true, "neighbours with idle CPU priority (sandbox.cpu_idle)"),
        ] {
            println!("{title}\n{}", neighbours::measure(&server, cores, cpu_idle).await?);
        }
    }
    if selected("egress") {
        println!("{}", egress::measure(&server).await?);
    }
    if selected("scrape") {
        println!("{}", scrape::measure(&server, cores).await?);
    }
    if selected("peers") {
        println!("{}", peers::measure(&server, cores).await?);
    }
    if selected("scaling") {
        println!("{}", scaling::measure(&server, cores, &numbers(&scaling::ENDED_RUNS)?).await?);
    }
    if selected("idle") {
        println!("{}", idle::measure(&server).await?);
    }
    if selected("capacity") {
        // Counting statements takes a little time, so the other parts do without.
        let counting = statement_counts::start_server(&scratch.join("counting")).await?;
        for mode in capacity::measure(&counting, cores, numbers(&[capacity::SECONDS])?[0]).await? {
            println!("{mode}");
        }
        counting.stop().await?;
    }
    // Long: hours for all of them at full size. They run only if they are named.
    match part.as_deref() {
        Some("growth") => println!("{}", growth::measure(&server, &numbers(&growth::SIZES)?).await?),
        Some("lists") => println!("{}", lists::measure(&server, cores).await?),
        Some("backlog") => {
            println!("{}", backlog::measure(&server, cores, numbers(&[backlog::RUNS])?[0]).await?)
        }
        Some("snapshot") => {
            println!("{}", snapshot::measure(&server, numbers(&[snapshot::SECONDS])?[0]).await?)
        }
        Some("retention") => {
            println!("{}", retention::measure(&server, numbers(&[retention::SECONDS])?[0]).await?)
        }
        Some("cells") => cells::days().for_each(|day| println!("{day}")),
        _ => {}
    }
    server.stop().await?;
    Ok(())
}
