//! The time of every statement as the tables grow: on the path of a run, in periodic tasks, and for
//! callers' lists. Each size is measured with tables that were never analyzed, and analyzed.

mod statements;

use std::{fmt, time::Duration};

use anyhow::Result;
use codelia_store::LocalPostgres;
use codelia_tests::Database;

use super::{fill, open, store_load::StoreLoad};
use statements::{Kind, STATEMENTS, Subject};

/// Ended runs at each size.
pub(crate) const SIZES: [u64; 3] = [10_000, 1_000_000, 10_000_000];
/// Nothing on the path of a run or in a periodic task may take longer than this by growing.
const MAX_FACTOR: f64 = 2.0;
/// Smaller differences are noise.
const NOISE: Duration = Duration::from_micros(100);
/// How often a statement is measured; the median counts.
const REPETITIONS: usize = 25;

/// Medians of each statement: by size, never analyzed and analyzed.
#[derive(Debug)]
pub(crate) struct Table {
    sizes: Vec<u64>,
    rows: Vec<(&'static str, Kind, Vec<[Duration; 2]>)>,
}

/// Measures all statements at these sizes, each in a database of its own, in rounds, so that noise
/// affects all sizes alike.
pub(crate) async fn measure(server: &LocalPostgres, sizes: &[u64]) -> Result<Table> {
    let mut databases = Vec::new();
    let mut subjects = Vec::new();
    for size in sizes {
        let database = Database::on(server).await?;
        let load = StoreLoad::prepare(open(&database).await?, 1).await?;
        // The run that the others are copies of.
        load.run(0).await?;
        fill::installation(&database, load.leases[0].session, *size).await?;
        subjects.push(Subject::prepare(load).await?);
        databases.push(database);
    }
    // Pages that filling wrote must not be written to disk while statements are measured.
    databases[0].execute("CHECKPOINT").await?;
    let never = medians(&subjects).await?;
    for database in &databases {
        database.execute("VACUUM ANALYZE").await?;
    }
    databases[0].execute("CHECKPOINT").await?;
    let analyzed = medians(&subjects).await?;
    let times = never.into_iter().zip(analyzed);
    let rows = STATEMENTS.iter().zip(times).map(|(statement, (never, analyzed))| {
        let times = never.into_iter().zip(analyzed).map(|(never, analyzed)| [never, analyzed]);
        (statement.name, statement.kind, times.collect())
    });
    let table = Table { sizes: sizes.to_vec(), rows: rows.collect() };
    for (subject, database) in subjects.into_iter().zip(databases) {
        subject.load.store.close().await;
        database.end().await?;
    }
    Ok(table)
}

/// The median of each statement at each size.
async fn medians(subjects: &[Subject]) -> Result<Vec<Vec<Duration>>> {
    let mut medians = Vec::new();
    for statement in &STATEMENTS {
        let mut times = vec![Vec::new(); subjects.len()];
        for _ in 0..REPETITIONS {
            for (subject, times) in subjects.iter().zip(&mut times) {
                times.push((statement.measure)(subject).await?);
            }
        }
        medians.push(times.into_iter().map(median).collect());
    }
    Ok(medians)
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

impl Table {
    /// The slowest time of a statement at any size relative to the time at the smallest size, for
    /// tables that were never analyzed and for analyzed ones: a plan that differs between them is
    /// not growth.
    fn factors(times: &[[Duration; 2]]) -> [f64; 2] {
        [0, 1].map(|column| {
            let (first, slowest) = bounds(times, column);
            slowest.as_secs_f64() / first.as_secs_f64().max(1e-6)
        })
    }

    fn is_flat(times: &[[Duration; 2]]) -> bool {
        let is_flat = |column: usize| {
            let (first, slowest) = bounds(times, column);
            Self::factors(times)[column] <= MAX_FACTOR || slowest.saturating_sub(first) < NOISE
        };
        is_flat(0) && is_flat(1)
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<44} {:<9}", "median in ms: never analyzed / analyzed", "")?;
        for size in &self.sizes {
            write!(f, " {:>17}", format!("{size} runs"))?;
        }
        writeln!(f, " {:>15}", "factors")?;
        for (name, kind, times) in &self.rows {
            write!(f, "{name:<44} {:<9}", kind.as_str())?;
            for [never, analyzed] in times {
                let cell = format!("{:.2} / {:.2}", millis(*never), millis(*analyzed));
                write!(f, " {cell:>17}")?;
            }
            let mark = if !kind.is_bounded() || Self::is_flat(times) { "" } else { "  MISSED" };
            let [never, analyzed] = Self::factors(times);
            let factors = format!("{never:.1}x / {analyzed:.1}x");
            writeln!(f, " {factors:>15}{mark}")?;
        }
        let bounded = self.rows.iter().filter(|(_, kind, _)| kind.is_bounded());
        let missed = bounded.filter(|(_, _, times)| !Self::is_flat(times)).count();
        let verdict = if missed == 0 { "met   " } else { "MISSED" };
        writeln!(
            f,
            "\n{verdict} statements on the path of a run or in a periodic task that grow by more than {MAX_FACTOR} ×: {missed}"
        )
    }
}

/// The time at the smallest size and the slowest one at any size.
fn bounds(times: &[[Duration; 2]], column: usize) -> (Duration, Duration) {
    let mut all = times.iter().map(|columns| columns[column]);
    let first = all.next().unwrap_or_default();
    (first, all.fold(first, Duration::max))
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}
