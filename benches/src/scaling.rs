//! How the cost of a run grows: with concurrent callers, with sessions, and with ended runs in the
//! database.

use anyhow::Result;
use codelia_store::LocalPostgres;
use codelia_tests::{Cluster, ClusterOptions, Database};

use crate::{TURN, database::fill, measure::Measured, plot::Lines, report::Report, runs::Runs};

/// Concurrent callers, each with a session of its own.
const CALLERS: [usize; 4] = [1, 2, 4, 8];
/// Sessions that eight callers use in turn.
const SESSIONS: [usize; 4] = [1, 10, 100, 1000];
/// Callers of [`SESSIONS`] and [`ENDED_RUNS`].
const MANY: usize = 8;
/// Ended runs in the database, if none are named: ten million take long to insert.
pub(crate) const ENDED_RUNS: [u64; 2] = [10_000, 1_000_000];
/// Rounds, the first one as warm-up.
const ROUNDS: usize = 3;

/// A quantity that grows, and what was measured at each size.
struct Growth {
    of: &'static str,
    sizes: Vec<(u64, Measured)>,
}

/// Measures each mode in an installation of its own, and draws runs per second and p95.
pub(crate) async fn measure(server: &LocalPostgres, cores: usize, ended_runs: &[u64]) -> Result<Report> {
    let mut report = Report::default();
    let mut modes = Vec::new();
    for mode in ["logical", "bwrap"] {
        let growths = of_mode(server, cores, mode, ended_runs).await?;
        for growth in &growths {
            for (size, measured) in &growth.sizes {
                let p95 = measured.percentile(95.0).as_secs_f64() * 1000.0;
                report.note(&format!(
                    "{mode:<8} {size:>9} {:<14} {:>6.0} runs/s, p95 {p95:.1} ms",
                    growth.of,
                    measured.rate()
                ));
            }
        }
        modes.push((mode, growths));
    }
    for (index, of) in modes[0].1.iter().map(|growth| growth.of).enumerate() {
        for (unit, value) in [("runs/s", rate as fn(&Measured) -> f64), ("p95 in ms", p95)] {
            let lines =
                modes.iter().map(|(mode, growths)| ((*mode).to_owned(), growths[index].points(value)));
            let title = format!("Runs of `true` in a second, by {of}");
            let plot = Lines { title, x: of, unit, lines: lines.collect() };
            let name =
                format!("{}-{}", of.replace(' ', "-"), unit.split_once([' ', '/']).map_or(unit, |cut| cut.0));
            report.note(&format!("plot: {}", plot.write(&name)?.display()));
        }
    }
    Ok(report)
}

async fn of_mode(
    server: &LocalPostgres,
    cores: usize,
    mode: &str,
    ended_runs: &[u64],
) -> Result<Vec<Growth>> {
    let settings = vec![("CODELIA_SANDBOX_MODE", mode.to_owned())];
    let shape = ClusterOptions { slots: MANY.max(4 * cores), settings, ..ClusterOptions::default() };
    let cluster = Cluster::start_on(Database::on(server).await?, shape).await?;
    let mut all = vec![
        by(&cluster, "callers", &CALLERS, |callers| callers).await?,
        by(&cluster, "sessions", &SESSIONS, |_| MANY).await?,
    ];
    let runs = Runs::prepare(&cluster, "load", MANY).await?;
    let (mut sizes, mut filled) = (Vec::new(), 0);
    for &count in ended_runs {
        fill::ended_runs(&cluster.database, runs.session_id(0)?, count - filled).await?;
        filled = count;
        cluster.database.execute("CHECKPOINT").await?;
        sizes.push((count, turns(&runs, MANY).await?));
    }
    all.push(Growth { of: "ended runs", sizes });
    cluster.end().await?;
    Ok(all)
}

/// Measures with growing numbers of sessions.
async fn by(
    cluster: &Cluster,
    of: &'static str,
    sizes: &[usize],
    callers: impl Fn(usize) -> usize,
) -> Result<Growth> {
    let mut measured = Vec::new();
    for &size in sizes {
        let runs = Runs::prepare(cluster, &format!("{of}-{size}"), size).await?;
        measured.push((size as u64, turns(&runs, callers(size)).await?));
    }
    Ok(Growth { of, sizes: measured })
}

async fn turns(runs: &Runs, callers: usize) -> Result<Measured> {
    runs.in_turn(callers, TURN).await?;
    let mut sum = runs.in_turn(callers, TURN).await?;
    for _ in 1..ROUNDS {
        sum.add(&runs.in_turn(callers, TURN).await?);
    }
    Ok(sum)
}

impl Growth {
    #[expect(clippy::cast_precision_loss, reason = "sizes stay far below 2^53")]
    fn points(&self, value: impl Fn(&Measured) -> f64) -> Vec<(f64, f64)> {
        self.sizes.iter().map(|(size, measured)| (*size as f64, value(measured))).collect()
    }
}

fn rate(measured: &Measured) -> f64 {
    measured.rate()
}

fn p95(measured: &Measured) -> f64 {
    measured.percentile(95.0).as_secs_f64() * 1000.0
}
