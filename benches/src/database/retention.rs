//! Retention next to the peak rate: a session for each run, and the tables stop growing.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use anyhow::Result;
use codelia_store::{LocalPostgres, Retention, Upkeep};
use codelia_tests::Database;
use futures::future::try_join_all;
use tokio::time::{MissedTickBehavior, interval};

use super::{open, store_load::StoreLoad};
use crate::report::Report;

/// Runs, and sessions, a second.
const RATE: u64 = 500;
const LANES: u64 = 10;
/// How long runs are written.
pub(crate) const SECONDS: u64 = 600;
/// How long rows are kept.
const KEEP: Duration = Duration::from_secs(60);
const SAMPLE_INTERVAL: Duration = Duration::from_secs(30);

const ROWS: &str = "SELECT (SELECT count(*) FROM ended_runs) + (SELECT count(*) FROM run_output)
                         + (SELECT count(*) FROM sessions)";
const BYTES: &str =
    "SELECT sum(pg_total_relation_size(oid))::bigint FROM pg_class WHERE relkind = 'r'
                     AND relnamespace = 'public'::regnamespace";

/// Writes at the rate while upkeep purges. Compares the sizes of the second half with each other.
pub(crate) async fn measure(server: &LocalPostgres, seconds: u64) -> Result<Report> {
    let length = Duration::from_secs(seconds);
    let database = Database::on(server).await?;
    let store = open(&database).await?;
    let load = StoreLoad::prepare(store.clone(), 0).await?;
    let retention = Retention { runs: KEEP, output: KEEP, audit: KEEP };
    let mut upkeep = Upkeep::new(store.clone(), retention);
    let written = AtomicU64::new(0);
    let mut report = Report::default();
    let samples = async {
        let begin = Instant::now();
        let mut sizes = Vec::new();
        while begin.elapsed() < length {
            tokio::time::sleep(SAMPLE_INTERVAL).await;
            let rows = database.number(ROWS).await?;
            let bytes = database.number(BYTES).await?;
            let rate = written.load(Ordering::Relaxed) / begin.elapsed().as_secs().max(1);
            report.note(&format!(
                "{:>4} s {rate:>5} runs/s {rows:>8} rows {:>6} MB",
                begin.elapsed().as_secs(),
                bytes >> 20
            ));
            sizes.push(bytes);
        }
        anyhow::Ok((sizes, written.load(Ordering::Relaxed)))
    };
    let writes = try_join_all((0..LANES).map(|_| write(&load, &written)));
    let (sizes, runs) = tokio::select! {
        samples = samples => samples?,
        ended = writes => anyhow::bail!("the writes ended: {ended:?}"),
        () = upkeep.run(|_| {}) => anyhow::bail!("the upkeep ended"),
    };
    #[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^53")]
    {
        let rate = runs as f64 / length.as_secs_f64();
        report.check_ratio("runs written relative to the rate", rate / RATE as f64, 0.95);
        let half = sizes.len() / 2;
        let first = sizes[half];
        let last = sizes[sizes.len() - 1];
        report.check_factor(
            "size at the end relative to half-time",
            last as f64 / first as f64,
            1.1,
        );
    }
    store.close().await;
    database.end().await?;
    Ok(report)
}

/// Writes one session with a run after another, at this lane's share of the rate.
async fn write(load: &StoreLoad, written: &AtomicU64) -> Result<()> {
    let mut ticks = interval(Duration::from_secs(1) * u32::try_from(LANES)? / u32::try_from(RATE)?);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    loop {
        ticks.tick().await;
        load.session_with_run().await?;
        written.fetch_add(1, Ordering::Relaxed);
    }
}
