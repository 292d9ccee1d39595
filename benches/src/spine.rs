//! The cost of a run in mode `logical` compared with its two lower bounds: fork and exec, and a
//! database insert and update.

use std::time::Duration;

use anyhow::Result;
use codelia_store::LocalPostgres;
use codelia_tests::{Cluster, ClusterOptions, Database};

use crate::{
    ROUND_TIME, ROUNDS,
    bare::{exec::Loop, postgres::BarePostgres},
    report::Report,
    runs::Runs,
};

const FORK_AND_EXEC: &str = "bare fork+exec of `true`, all cores";
const INSERT_AND_UPDATE: &str = "bare Postgres insert + update";
const FIRST_BYTE: &str = "Exec `echo`, call to first byte, one at a time";
const ALONE: &str = "Exec `true`, call to outcome, one at a time";
const TOGETHER: &str = "Exec `true`, call to outcome, concurrent";

/// Measures all rows in rounds. The first round is warm-up.
pub(crate) async fn measure(server: &LocalPostgres, cores: usize) -> Result<Report> {
    let cluster = Cluster::start_on(
        Database::on(server).await?,
        ClusterOptions { slots: 4 * cores, ..ClusterOptions::default() },
    )
    .await?;
    let bare_postgres = BarePostgres::prepare(server.database("bare").await?, 4 * cores).await?;
    let alone = Runs::prepare(&cluster, "alone", 1).await?;
    let together = Runs::prepare(&cluster, "together", 4 * cores).await?;

    let mut report = Report::default();
    for round in 0..=ROUNDS {
        let measured_rows = [
            (FORK_AND_EXEC, Loop::of_true(cores).measure(ROUND_TIME).await?),
            (INSERT_AND_UPDATE, bare_postgres.measure(ROUND_TIME).await?),
            (FIRST_BYTE, alone.first_byte(ROUND_TIME).await?),
            (ALONE, alone.outcome(ROUND_TIME).await?),
            (TOGETHER, together.outcome(ROUND_TIME).await?),
        ];
        if round > 0 {
            measured_rows.into_iter().for_each(|(name, measured)| report.add(name, measured));
        }
    }
    bare_postgres.end().await?;
    cluster.end().await?;

    report.check_percentile(FIRST_BYTE, 95.0, Duration::from_millis(5))?;
    let share = report.find(TOGETHER)?.rate() / report.find(FORK_AND_EXEC)?.rate();
    report.check_ratio("logical: runs of `true` relative to bare fork+exec", share, 0.25);
    Ok(report)
}
