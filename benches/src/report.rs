//! The table.

use std::{fmt, time::Duration};

use crate::{Turn, measure::Measured};

/// p95 from the call to the first byte of output.
const FIRST_BYTE_AIM: Duration = Duration::from_millis(5);
/// Share of the slower bare loop.
const RATE_AIM: f64 = 0.5;

/// All rounds together.
#[derive(Debug, Default)]
pub(crate) struct Report(Option<Turn>);

impl Report {
    /// Adds a round.
    pub(crate) fn add(&mut self, turn: Turn) {
        let Some(sum) = &mut self.0 else {
            self.0 = Some(turn);
            return;
        };
        sum.bare_exec.add(&turn.bare_exec);
        sum.bare_postgres.add(&turn.bare_postgres);
        sum.first_byte.add(&turn.first_byte);
        sum.alone.add(&turn.alone);
        sum.together.add(&turn.together);
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(all) = &self.0 else { return Ok(()) };
        writeln!(f, "{:<44} {:>9} {:>9} {:>9} {:>9}", "", "each s", "p50", "p95", "p99")?;
        row(f, "bare fork+exec of `true`, all cores", &all.bare_exec)?;
        row(f, "bare Postgres insert + update", &all.bare_postgres)?;
        row(f, "Exec `echo`, call to first byte, one at a time", &all.first_byte)?;
        row(f, "Exec `true`, call to outcome, one at a time", &all.alone)?;
        row(f, "Exec `true`, call to outcome, many at once", &all.together)?;
        writeln!(f)?;

        let first_byte = all.first_byte.percentile(95.0);
        verdict(
            f,
            first_byte <= FIRST_BYTE_AIM,
            "p95 to the first byte",
            &milliseconds(first_byte),
            "≤ 5 ms",
        )?;
        let slower = all.bare_exec.rate().min(all.bare_postgres.rate());
        let share = all.together.rate() / slower;
        verdict(
            f,
            share >= RATE_AIM,
            "share of the slower bare loop",
            &format!("{:.0} %", share * 100.0),
            "≥ 50 %",
        )
    }
}

fn row(f: &mut fmt::Formatter<'_>, what: &str, measured: &Measured) -> fmt::Result {
    let [p50, p95, p99] = [50.0, 95.0, 99.0].map(|share| milliseconds(measured.percentile(share)));
    writeln!(f, "{what:<44} {:>9.0} {p50:>9} {p95:>9} {p99:>9}", measured.rate())
}

fn verdict(f: &mut fmt::Formatter<'_>, held: bool, what: &str, value: &str, aim: &str) -> fmt::Result {
    writeln!(f, "{} {what}: {value} (aim {aim})", if held { "held  " } else { "MISSED" })
}

fn milliseconds(duration: Duration) -> String {
    format!("{:.2} ms", duration.as_secs_f64() * 1000.0)
}
