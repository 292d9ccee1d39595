//! A simulation of one day in which tenants are spread over cells: how many cells carry a load, and
//! how long runs wait at the peak. Each cell has one Postgres, whose processor time for a run was
//! measured by the part `capacity`.

use std::{f64::consts::TAU, fmt};

use rand::{Rng, SeedableRng, rngs::StdRng};

const SECONDS_PER_DAY: u32 = 86_400;
const TENANTS: u32 = 10_000;
/// The n-th largest tenant has 1/n^EXPONENT of the load of the largest.
const EXPONENT: f64 = 0.9;
/// The busiest time of the day has this many times the average load,
const DAILY_PEAK: f64 = 2.0;
/// and a tenant's load comes in bursts of this many times its average, at random.
const BURST: f64 = 10.0;
const BURST_SECONDS: u32 = 60;
/// Share of its cores that Postgres may use for runs; the rest is for lists, upkeep and vacuum.
const USABLE: f64 = 0.6;

/// Processor time of Postgres for one run, in seconds, as the part `capacity` measured it: in a
/// session that exists,
const COST: f64 = 0.0008;
/// and in a session of its own.
const COST_WITH_SESSION: f64 = 0.0039;

/// The installation to simulate.
#[derive(Debug, Clone, Copy)]
struct Load {
    /// Runs of all tenants in a day.
    runs_per_day: f64,
    /// Cores of the Postgres of each cell.
    cores: f64,
    /// Processor time of Postgres for one run, in seconds.
    cost: f64,
    /// Number of cells.
    cells: usize,
}

/// The result of one simulated day.
#[derive(Debug)]
pub(crate) struct Day {
    load: Load,
    /// The highest load of any cell relative to its capacity, in any second.
    peak: f64,
    /// The longest time that runs of any cell had to wait, in seconds.
    longest_wait: f64,
    /// Seconds of the day, in the cell with most of them, in which runs waited for more than a
    /// second.
    slow_seconds: u32,
}

/// A hundred million runs a day on more and more cells, and smaller loads on one.
pub(crate) fn days() -> impl Iterator<Item = Day> {
    let loads = [(1e6, 1), (1e7, 1), (1e8, 1), (1e8, 2), (1e8, 4), (1e8, 8), (1e8, 16)];
    [COST, COST_WITH_SESSION].into_iter().flat_map(move |cost| {
        loads.map(|(runs_per_day, cells)| simulate(Load { runs_per_day, cores: 16.0, cost, cells }))
    })
}

/// Simulates a day, second by second. The same load gives the same day.
fn simulate(load: Load) -> Day {
    let mut random = StdRng::seed_from_u64(1);
    let weights: Vec<f64> = (1..=TENANTS).map(|rank| f64::from(rank).powf(-EXPONENT)).collect();
    let total: f64 = weights.iter().sum();
    let average = load.runs_per_day / f64::from(SECONDS_PER_DAY);
    let capacity = load.cores * USABLE / load.cost;
    let cell_of: Vec<usize> = weights.iter().map(|_| random.random_range(0..load.cells)).collect();
    let mut backlog = vec![0.0_f64; load.cells];
    let mut slow = vec![0_u32; load.cells];
    let mut arriving = vec![0.0_f64; load.cells];
    let mut peak = 0.0_f64;
    let mut longest_wait = 0.0_f64;
    for second in 0..SECONDS_PER_DAY {
        if second % BURST_SECONDS == 0 {
            let time_of_day = 1.0
                + (DAILY_PEAK - 1.0) * (f64::from(second) / f64::from(SECONDS_PER_DAY) * TAU).sin();
            arriving.fill(0.0);
            for (weight, cell) in weights.iter().zip(&cell_of) {
                let is_burst = random.random_bool(1.0 / BURST);
                let factor = if is_burst { BURST } else { 0.0 };
                arriving[*cell] += average * weight / total * factor * time_of_day;
            }
        }
        for cell in 0..load.cells {
            peak = peak.max(arriving[cell] / capacity);
            backlog[cell] = (backlog[cell] + arriving[cell] - capacity).max(0.0);
            let wait = backlog[cell] / capacity;
            longest_wait = longest_wait.max(wait);
            slow[cell] += u32::from(wait > 1.0);
        }
    }
    Day { load, peak, longest_wait, slow_seconds: slow.into_iter().max().unwrap_or_default() }
}

impl fmt::Display for Day {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Load { runs_per_day, cores, cost, cells } = self.load;
        write!(
            f,
            "{runs_per_day:>8.0e} runs/day, {cells:>3} cells of {cores:>2} cores, {:.2} ms a run: \
             peak {:>4.0} %, longest wait {:>6.1} s, seconds with a wait above 1 s: {}",
            cost * 1000.0,
            self.peak * 100.0,
            self.longest_wait,
            self.slow_seconds,
        )
    }
}
