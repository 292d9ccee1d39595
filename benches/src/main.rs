//! `make bench`: the cost of a run compared with its lower bounds. All parts run on one machine in
//! turns, so that noise affects all alike. `make bench ARGS=isolated` measures one part.

#![forbid(unsafe_code)]

mod bare;
mod idle;
mod isolated;
mod measure;
mod neighbours;
mod noise;
mod report;
mod runs;
mod spine;

use std::time::Duration;

use anyhow::Result;
use codelia_store::LocalPostgres;
use codelia_tests::Scratch;

/// Number of turns of each measurement.
const ROUNDS: usize = 5;
/// Length of one turn.
const TURN: Duration = Duration::from_secs(3);

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
    if selected("idle") {
        println!("{}", idle::measure(&server).await?);
    }
    server.stop().await?;
    Ok(())
}
