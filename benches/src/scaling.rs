//! How the cost of a run grows: with concurrent callers, with sessions, and with ended runs in the
//! database.

use anyhow::Result;
use codelia_store::LocalPostgres;
use codelia_tests::{Cluster, ClusterOptions, Database};
use codelia_types::Mode;

use crate::{
    ROUND_TIME, database::fill, measure::Measured, modes, plot::Lines, report::Report, runs::Runs,
};

/// Concurrent callers, each with a session of its own.
const CALLERS: [usize; 4] = [1, 2, 4, 8];
/// Sessions that eight callers use in turn.
const SESSIONS: [usize; 4] = [1, 10, 100, 1000];
/// Callers of [`SESSIONS`] and [`ENDED_RUNS`].
const MANY: usize = 8;
/// Ended runs in the database, if none are named: ten million take long to insert.
pub(crate) const ENDED_RUNS: [u64; 2] = [10_000, 1_000_000];
/// Measured rounds after one as warm-up. All numbers together make a curve, so each needs only few.
const ROUNDS: usize = 1;

/// Measurements at one size of something that grows.
struct Point {
    of: &'static str,
    size: u64,
    mode: Mode,
    measured: Measured,
}

/// Measures all modes in one installation, in rounds, and draws runs per second and p95.
pub(crate) async fn measure(
    server: &LocalPostgres,
    cores: usize,
    ended_runs: &[u64],
) -> Result<Report> {
    let shape = ClusterOptions { slots: MANY.max(4 * cores), ..ClusterOptions::default() };
    let cluster = Cluster::start_on(Database::on(server).await?, shape).await?;
    let mut report = Report::default();
    let modes = modes::served(&cluster, &modes::ALL, &mut report).await?;
    let mut points = Vec::new();
    for callers in CALLERS {
        let runs = prepare(&cluster, &modes, "callers", callers).await?;
        points.extend(measure_turns("callers", callers as u64, &runs, callers).await?);
    }
    for sessions in SESSIONS {
        let runs = prepare(&cluster, &modes, "sessions", sessions).await?;
        points.extend(measure_turns("sessions", sessions as u64, &runs, MANY).await?);
    }
    points.extend(with_ended_runs(&cluster, &modes, ended_runs).await?);
    cluster.end().await?;
    for point in &points {
        report.note(&format!(
            "{:<8} {:>9} {:<11} {:>6.0} runs/s, p95 {:.1} ms",
            point.mode.as_str(),
            point.size,
            point.of,
            rate(&point.measured),
            p95(&point.measured)
        ));
    }
    for of in ["callers", "sessions", "ended runs"] {
        draw(of, &modes, &points, &mut report)?;
    }
    Ok(report)
}

async fn with_ended_runs(cluster: &Cluster, modes: &[Mode], sizes: &[u64]) -> Result<Vec<Point>> {
    // The tenant to whom half of the ended runs belong.
    let template = Runs::prepare(cluster, "load", 1).await?;
    let runs = prepare(cluster, modes, "ended", MANY).await?;
    let mut points = Vec::new();
    let mut filled = 0;
    for &size in sizes {
        fill::ended_runs(&cluster.database, template.session_id(0)?, size.saturating_sub(filled))
            .await?;
        filled = filled.max(size);
        fill::settle(&cluster.database).await?;
        points.extend(measure_turns("ended runs", size, &runs, MANY).await?);
    }
    Ok(points)
}

/// Creates this many sessions in each mode.
async fn prepare(
    cluster: &Cluster,
    modes: &[Mode],
    of: &str,
    sessions: usize,
) -> Result<Vec<(Mode, Runs)>> {
    let mut all = Vec::new();
    for &mode in modes {
        let tenant = format!("{of}-{sessions}-{}", mode.as_str());
        all.push((mode, Runs::prepare_in(cluster, mode, &tenant, sessions).await?));
    }
    Ok(all)
}

/// Measures the modes in rounds.
async fn measure_turns(
    of: &'static str,
    size: u64,
    runs: &[(Mode, Runs)],
    callers: usize,
) -> Result<Vec<Point>> {
    for (_, runs) in runs {
        runs.in_turn(callers, ROUND_TIME / 2).await?;
    }
    let mut points: Vec<Point> = Vec::new();
    for _ in 0..ROUNDS {
        for (mode, runs) in runs {
            let measured = runs.in_turn(callers, ROUND_TIME).await?;
            match points.iter_mut().find(|point| point.mode == *mode) {
                Some(point) => point.measured.add(&measured),
                None => points.push(Point { of, size, mode: *mode, measured }),
            }
        }
    }
    Ok(points)
}

/// Draws runs per second and p95, with a line for each mode.
fn draw(of: &'static str, modes: &[Mode], points: &[Point], report: &mut Report) -> Result<()> {
    let rate: fn(&Measured) -> f64 = rate;
    for (name, unit, value) in [("rate", "runs/s", rate), ("p95", "p95 in ms", p95)] {
        let line = |mode: &Mode| {
            let own = points.iter().filter(|point| point.of == of && point.mode == *mode);
            #[expect(clippy::cast_precision_loss, reason = "sizes stay far below 2^53")]
            let places = own.map(|point| (point.size as f64, value(&point.measured)));
            (mode.as_str().to_owned(), places.collect())
        };
        let title = format!("Runs of `true`: {unit} by {of}");
        let plot = Lines { title, x: of, unit, lines: modes.iter().map(line).collect() };
        report.note(&format!(
            "plot: {}",
            plot.write(&format!("{}-{name}", of.replace(' ', "-")))?.display()
        ));
    }
    Ok(())
}

fn rate(measured: &Measured) -> f64 {
    measured.rate()
}

fn p95(measured: &Measured) -> f64 {
    measured.percentile(95.0).as_secs_f64() * 1000.0
}
