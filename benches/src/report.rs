//! The tables: what was measured, and which aims held.

use std::{fmt, time::Duration};

use crate::measure::Measured;

/// Measurements by name, in the order they came first, and the verdicts on them.
#[derive(Debug, Default)]
pub(crate) struct Report {
    rows: Vec<(&'static str, Measured)>,
    verdicts: Vec<String>,
}

impl Report {
    /// Adds a measurement, or another round of one.
    pub(crate) fn add(&mut self, name: &'static str, measured: Measured) {
        match self.rows.iter_mut().find(|(known, _)| *known == name) {
            Some((_, sum)) => sum.add(&measured),
            None => self.rows.push((name, measured)),
        }
    }

    /// What was measured under a name.
    pub(crate) fn of(&self, name: &'static str) -> anyhow::Result<&Measured> {
        let found = self.rows.iter().find(|(known, _)| *known == name);
        found.map(|(_, measured)| measured).ok_or_else(|| anyhow::anyhow!("{name} was not measured"))
    }

    /// Holds the p95 of a row to an aim.
    pub(crate) fn judge_p95(&mut self, name: &'static str, most: Duration) -> anyhow::Result<()> {
        let p95 = self.of(name)?.percentile(95.0);
        self.judge(p95 <= most, &format!("p95 of {name}: {} (aim ≤ {})", millis(p95), millis(most)));
        Ok(())
    }

    /// Holds a share to an aim.
    pub(crate) fn judge_share(&mut self, what: &str, share: f64, least: f64) {
        self.judge(share >= least, &format!("{what}: {:.0} % (aim ≥ {:.0} %)", share * 100.0, least * 100.0));
    }

    fn judge(&mut self, held: bool, text: &str) {
        self.verdicts.push(format!("{} {text}", if held { "held  " } else { "MISSED" }));
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<52} {:>9} {:>10} {:>10} {:>10}", "", "each s", "p50", "p95", "p99")?;
        for (name, measured) in &self.rows {
            let [p50, p95, p99] = [50.0, 95.0, 99.0].map(|share| millis(measured.percentile(share)));
            writeln!(f, "{name:<52} {:>9.0} {p50:>10} {p95:>10} {p99:>10}", measured.rate())?;
        }
        writeln!(f)?;
        self.verdicts.iter().try_for_each(|verdict| writeln!(f, "{verdict}"))
    }
}

fn millis(duration: Duration) -> String {
    format!("{:.2} ms", duration.as_secs_f64() * 1000.0)
}
