//! `make bench`: what a run costs, beside the two things it cannot be faster than. All in one run
//! on one machine, in turns, so that a noisy moment hits everybody alike.

#![forbid(unsafe_code)]

mod bare_exec;
mod bare_postgres;
mod measure;
mod report;
mod runs;

use std::time::Duration;

use anyhow::Result;
use codelia_store::Server;
use codelia_tests::{Cluster, Database, Scratch, Shape};

use crate::{bare_exec::BareExec, bare_postgres::BarePostgres, measure::Measured, runs::Runs};

/// How often each takes its turn, and for how long.
const ROUNDS: usize = 5;
const TURN: Duration = Duration::from_secs(3);

#[tokio::main]
async fn main() -> Result<()> {
    let cores = std::thread::available_parallelism()?.get();
    // The server as `codelia up` starts it: nothing is switched off to look fast.
    let scratch = Scratch::new()?;
    let server = Server::start(&scratch.join("postgres")).await?;
    let cluster =
        Cluster::on(Database::on(&server).await?, Shape { slots: 4 * cores, ..Shape::default() }).await?;

    let bare_exec = BareExec::new(cores);
    let bare_postgres = BarePostgres::prepare(server.database("bare").await?, 4 * cores).await?;
    let alone = Runs::prepare(&cluster, "alone", 1).await?;
    let together = Runs::prepare(&cluster, "together", 4 * cores).await?;

    let mut report = report::Report::default();
    for round in 0..=ROUNDS {
        let turn = turn(&bare_exec, &bare_postgres, &alone, &together).await?;
        // The first round warms up.
        if round > 0 {
            report.add(turn);
        }
    }
    println!("{report}");
    bare_postgres.end().await?;
    cluster.end().await?;
    server.stop().await?;
    Ok(())
}

/// What one round measured.
#[derive(Debug)]
struct Turn {
    bare_exec: Measured,
    bare_postgres: Measured,
    first_byte: Measured,
    alone: Measured,
    together: Measured,
}

async fn turn(
    bare_exec: &BareExec,
    bare_postgres: &BarePostgres,
    alone: &Runs,
    together: &Runs,
) -> Result<Turn> {
    Ok(Turn {
        bare_exec: bare_exec.measure(TURN).await?,
        bare_postgres: bare_postgres.measure(TURN).await?,
        first_byte: alone.first_byte(TURN).await?,
        alone: alone.outcome(TURN).await?,
        together: together.outcome(TURN).await?,
    })
}
