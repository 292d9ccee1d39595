//! Runs chaos tests and prints the result of each seed. Fails if anything was lost, doubled or left
//! behind.
//!
//! Environment variables: `SEEDS="7 8"`, `RUNS=500`, `SESSIONS=50`, `LONGEST=15` (maximum duration
//! of a run in ticks of 0.2 s), `MODES=bwrap,bwrap,container` (a mode that is listed more often
//! gets more sessions), `FAULTS=KillWorker,Cut` (default: all but those that need a special server,
//! `ALL`), `POOLER=1` (the processes reach Postgres through PgBouncer), `MIN_EXITS=0.3` (the share
//! of runs that must exit) and `WEAKEN=fencing|guard` (disables a safeguard).

use std::{env, panic::AssertUnwindSafe, process::ExitCode, str::FromStr};

use anyhow::{Context, Result, bail};
use codelia_proto::v1::SandboxMode;
use codelia_tests::{
    ENGINE_SOCKET,
    chaos::{DisabledSafeguard, Fault, Options, Report, run_seed},
};
use futures::FutureExt;

const DEFAULT_SEEDS: u64 = 20;
const DEFAULT_RUNS: usize = 500;
/// The share of runs that must exit in spite of the faults.
const DEFAULT_MIN_EXITS: f64 = 0.6;
const DEFAULT_MAX_RUN_TICKS: u32 = 15;
/// The default mode gets most sessions. Containers are slow and get one in ten, if there is an
/// engine.
const DEFAULT_MODES: &str = "native,logical,bwrap,nsjail,native,logical,bwrap,nsjail,native";
const SLOW_MODE: &str = ",container";

#[tokio::main]
async fn main() -> Result<ExitCode> {
    let seeds = seeds()?;
    let runs = setting("RUNS").map_or(Ok(DEFAULT_RUNS), |text| text.parse()).context("RUNS")?;
    let modes = setting("MODES").unwrap_or_else(default_modes);
    let max_run_ticks = setting("LONGEST")
        .map_or(Ok(DEFAULT_MAX_RUN_TICKS), |text| text.parse())
        .context("LONGEST")?;
    let (parsed_modes, faults, disabled) = (parse_modes(&modes)?, faults()?, disabled()?);
    let sessions = setting("SESSIONS")
        .map_or(Ok(runs.div_ceil(10).max(3)), |text| text.parse())
        .context("SESSIONS")?;
    let min_exits = setting("MIN_EXITS")
        .map_or(Ok(DEFAULT_MIN_EXITS), |text| text.parse())
        .context("MIN_EXITS")?;
    let options = Options {
        seed: 0,
        runs,
        sessions,
        modes: parsed_modes,
        max_run_ticks,
        faults,
        pooler: setting("POOLER").is_some(),
        disabled,
        defects: Vec::new(),
        min_exits,
    };
    println!("chaos: {} seeds × {runs} runs, modes {modes}", seeds.len());
    println!(
        "{:>6} {:>6} {:>6} {:>7} {:>9} {:>7} {:>8}  outcomes",
        "seed", "faults", "lost", "doubled", "leftovers", "exposed", "seconds"
    );
    let mut failed = Vec::new();
    for seed in seeds {
        let options = Options { seed, ..options.clone() };
        // A panic of the harness fails only its own seed.
        let result = AssertUnwindSafe(run_seed(&options)).catch_unwind().await;
        if !show(
            seed,
            result.unwrap_or_else(|_| Err(anyhow::anyhow!("the harness panicked, see above"))),
        ) {
            failed.push(seed);
            println!("       replay: SEEDS={seed} RUNS={runs} MODES={modes} make chaos");
        }
    }
    if failed.is_empty() {
        println!("nothing lost, nothing doubled, nothing left behind, nothing exposed");
        return Ok(ExitCode::SUCCESS);
    }
    println!("failed seeds: {failed:?}");
    Ok(ExitCode::FAILURE)
}

/// Prints the row of a seed. Returns whether nothing was found.
fn show(seed: u64, result: Result<Report>) -> bool {
    let report = match result {
        Ok(report) => report,
        Err(error) => {
            println!("{seed:>6} failed: {error:#}");
            return false;
        }
    };
    let Report { outcomes, faults, findings, resumed_watches, took, .. } = report;
    let faults = faults.len();
    let outcomes: Vec<_> = outcomes.iter().map(|(kind, count)| format!("{kind} {count}")).collect();
    println!(
        "{seed:>6} {faults:>6} {:>6} {:>7} {:>9} {:>7} {:>8.1}  {}; {resumed_watches} watches resumed",
        findings.lost.len(),
        findings.doubled.len(),
        findings.leftovers.len(),
        findings.exposed.len(),
        took.as_secs_f64(),
        outcomes.join(", ")
    );
    for (kind, found) in [
        ("lost", &findings.lost),
        ("doubled", &findings.doubled),
        ("left", &findings.leftovers),
        ("exposed", &findings.exposed),
    ] {
        found.iter().take(10).for_each(|what| println!("       {kind}: {what}"));
    }
    findings.is_clean()
}

fn setting(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

fn default_modes() -> String {
    let slow = setting(ENGINE_SOCKET).map_or("", |_| SLOW_MODE);
    format!("{DEFAULT_MODES}{slow}")
}

fn seeds() -> Result<Vec<u64>> {
    match setting("SEEDS") {
        Some(text) => {
            text.split_whitespace().map(|word| u64::from_str(word).context("SEEDS")).collect()
        }
        None => Ok((1..=DEFAULT_SEEDS).collect()),
    }
}

fn parse_modes(text: &str) -> Result<Vec<SandboxMode>> {
    let parse = |word: &str| {
        let name = format!("SANDBOX_MODE_{}", word.to_uppercase());
        SandboxMode::from_str_name(&name).with_context(|| format!("MODES: {word}"))
    };
    text.split(',').map(parse).collect()
}

fn faults() -> Result<Vec<Fault>> {
    let Some(text) = setting("FAULTS") else { return Ok(Fault::ALL.to_vec()) };
    let mut faults = Vec::new();
    for word in text.split(',') {
        let mut all = Fault::ALL.into_iter().chain(Fault::SPECIAL);
        match word {
            "ALL" => faults.extend(Fault::ALL),
            _ => faults.push(
                all.find(|fault| format!("{fault:?}") == word)
                    .with_context(|| format!("FAULTS: {word}"))?,
            ),
        }
    }
    Ok(faults)
}

fn disabled() -> Result<DisabledSafeguard> {
    match setting("WEAKEN").as_deref() {
        None => Ok(DisabledSafeguard::None),
        Some("guard") => Ok(DisabledSafeguard::CommitGuard),
        Some("fencing") => Ok(DisabledSafeguard::SelfFencing),
        Some(other) => bail!("WEAKEN: {other}"),
    }
}
