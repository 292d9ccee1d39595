//! Tables of measurements, and whether they meet their targets.

use std::{fmt, time::Duration};

use crate::measure::Measured;

/// Measurements by name, in order of their first turn, and the results of the checks.
#[derive(Debug, Default)]
pub(crate) struct Report {
    rows: Vec<(&'static str, Measured)>,
    checks: Vec<String>,
}

impl Report {
    /// Adds a measurement, or another turn of it.
    pub(crate) fn add(&mut self, name: &'static str, measured: Measured) {
        match self.rows.iter_mut().find(|(known, _)| *known == name) {
            Some((_, sum)) => sum.add(&measured),
            None => self.rows.push((name, measured)),
        }
    }

    /// Returns a measurement by name.
    pub(crate) fn of(&self, name: &'static str) -> anyhow::Result<&Measured> {
        let found = self.rows.iter().find(|(known, _)| *known == name);
        found.map(|(_, measured)| measured).ok_or_else(|| anyhow::anyhow!("{name} was not measured"))
    }

    /// The measurements in order.
    pub(crate) fn rows(&self) -> impl Iterator<Item = (&'static str, &Measured)> {
        self.rows.iter().map(|(name, measured)| (*name, measured))
    }

    /// Compares the p95 of a row with its target.
    pub(crate) fn check_p95(&mut self, name: &'static str, max: Duration) -> anyhow::Result<()> {
        let p95 = self.of(name)?.percentile(95.0);
        self.check(p95 <= max, &format!("p95 of {name}: {} (target ≤ {})", millis(p95), millis(max)));
        Ok(())
    }

    /// Compares a ratio with its target.
    pub(crate) fn check_ratio(&mut self, what: &str, ratio: f64, min: f64) {
        self.check(ratio >= min, &format!("{what}: {:.0} % (target ≥ {:.0} %)", ratio * 100.0, min * 100.0));
    }

    /// Compares how many times something took longer with the most it may.
    pub(crate) fn check_factor(&mut self, what: &str, factor: f64, max: f64) {
        self.check(factor <= max, &format!("{what}: {factor:.2} × (target ≤ {max} ×)"));
    }

    /// Adds a line without a target.
    pub(crate) fn note(&mut self, text: &str) {
        self.checks.push(format!("       {text}"));
    }

    /// Adds a line that says whether a target was met.
    pub(crate) fn check(&mut self, met: bool, text: &str) {
        self.checks.push(format!("{} {text}", if met { "met   " } else { "MISSED" }));
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<52} {:>9} {:>10} {:>10} {:>10}", "", "per s", "p50", "p95", "p99")?;
        for (name, measured) in &self.rows {
            let [p50, p95, p99] = [50.0, 95.0, 99.0].map(|share| millis(measured.percentile(share)));
            writeln!(f, "{name:<52} {:>9.0} {p50:>10} {p95:>10} {p99:>10}", measured.rate())?;
        }
        writeln!(f)?;
        self.checks.iter().try_for_each(|check| writeln!(f, "{check}"))
    }
}

fn millis(duration: Duration) -> String {
    format!("{:.2} ms", duration.as_secs_f64() * 1000.0)
}
