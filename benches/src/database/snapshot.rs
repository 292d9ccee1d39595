//! Runs a second in the database while a transaction keeps an old snapshot open, so that no dead
//! row can be removed.

use std::time::{Duration, Instant};

use anyhow::Result;
use codelia_store::LocalPostgres;
use codelia_tests::Database;
use sqlx::{Connection, Executor};

use super::{open, store_load::StoreLoad};
use crate::{measure::Measured, report::Report};

const WITHOUT: &str = "insert and commit, without a snapshot";
const WITH: &str = "… in the last minute of a snapshot";
const AFTER: &str = "… after the snapshot";
const LANES: usize = 8;
const WINDOW: Duration = Duration::from_secs(60);
/// How long the snapshot is open.
pub(crate) const SECONDS: u64 = 600;

/// Measures before, at the end of, and after the snapshot, with runs all the time.
pub(crate) async fn measure(server: &LocalPostgres, seconds: u64) -> Result<Report> {
    let database = Database::on(server).await?;
    let load = StoreLoad::prepare(open(&database).await?, LANES).await?;
    let runs = async || Measured::repeat(LANES, WINDOW, |lane| load.run(lane)).await;
    let mut report = Report::default();
    runs().await?;
    report.add(WITHOUT, runs().await?);
    let mut connection = database.connection().await?;
    connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ").await?;
    connection.execute("SELECT count(*) FROM sessions").await?;
    let begin = Instant::now();
    while begin.elapsed() + WINDOW < Duration::from_secs(seconds) {
        runs().await?;
    }
    report.add(WITH, runs().await?);
    connection.execute("COMMIT").await?;
    connection.close().await?;
    runs().await?;
    report.add(AFTER, runs().await?);
    let share = report.find(WITH)?.rate() / report.find(WITHOUT)?.rate();
    report.check_ratio("rate with the snapshot relative to without", share, 0.8);
    load.store.close().await;
    database.end().await?;
    Ok(report)
}
