//! `make bench`: what a run costs, beside what it cannot be faster than. All in one run on one machine, in
//! turns, so that a noisy moment hits everybody alike. `make bench ARGS=isolated` measures one part alone.

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

/// How often each takes its turn, and for how long.
const ROUNDS: usize = 5;
const TURN: Duration = Duration::from_secs(3);

#[tokio::main]
async fn main() -> Result<()> {
    let cores = std::thread::available_parallelism()?.get();
    // The server as `codelia up` starts it: nothing is switched off to look fast.
    let scratch = Scratch::new()?;
    let server = LocalPostgres::start(&scratch.join("postgres")).await?;
    let part = std::env::args().nth(1);
    let wanted = |name: &str| part.as_deref().is_none_or(|part| part == name);
    if wanted("spine") {
        println!("{}", spine::measure(&server, cores).await?);
    }
    if wanted("isolated") {
        println!("{}", isolated::measure(&server, cores).await?);
    }
    if wanted("neighbours") {
        for (yields, how) in
            [(false, "commands share processors"), (true, "commands yield (sandbox.cpu_idle)")]
        {
            println!("{how}\n{}", neighbours::measure(&server, cores, yields).await?);
        }
    }
    if wanted("idle") {
        println!("{}", idle::measure(&server).await?);
    }
    server.stop().await?;
    Ok(())
}
