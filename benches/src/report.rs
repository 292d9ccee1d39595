//! Tables of measurements, and whether they meet their targets.

use std::{fmt, time::Duration};

use crate::measure::Measured;

/// Measurements by name, in order of their first turn, and the results of the checks.
#[derive(Debug, Default)]
pub(crate) struct Report {
    rows: Vec<(String, Measured)>,
    lines: Vec<Line>,
}

/// A line below the table.
#[derive(Debug)]
struct Line {
    /// Whether a target was met; `None` without one.
    met: Option<bool>,
    text: String,
}

impl Report {
    /// Adds a measurement, or another turn of it.
    pub(crate) fn add(&mut self, name: &str, measured: Measured) {
        match self.rows.iter_mut().find(|(known, _)| known == name) {
            Some((_, sum)) => sum.add(&measured),
            None => self.rows.push((name.to_owned(), measured)),
        }
    }

    /// Returns a measurement by name.
    pub(crate) fn find(&self, name: &str) -> anyhow::Result<&Measured> {
        let found = self.rows.iter().find(|(known, _)| known == name);
        found
            .map(|(_, measured)| measured)
            .ok_or_else(|| anyhow::anyhow!("{name} was not measured"))
    }

    /// The measurements in order.
    pub(crate) fn rows(&self) -> impl Iterator<Item = (&str, &Measured)> {
        self.rows.iter().map(|(name, measured)| (name.as_str(), measured))
    }

    /// The lines with targets.
    pub(crate) fn targets(&self) -> impl Iterator<Item = String> {
        self.lines.iter().filter(|line| line.met.is_some()).map(ToString::to_string)
    }

    /// Compares a percentile of a row with its target.
    pub(crate) fn check_percentile(
        &mut self,
        name: &str,
        share: f64,
        max: Duration,
    ) -> anyhow::Result<()> {
        let value = self.find(name)?.percentile(share);
        let text = format!("p{share} of {name}: {} (target ≤ {})", millis(value), millis(max));
        self.check(value <= max, &text);
        Ok(())
    }

    /// Compares a ratio with its target.
    pub(crate) fn check_ratio(&mut self, what: &str, ratio: f64, min: f64) {
        self.check(
            ratio >= min,
            &format!("{what}: {:.0} % (target ≥ {:.0} %)", ratio * 100.0, min * 100.0),
        );
    }

    /// Compares how many times something took longer with the most it may.
    pub(crate) fn check_factor(&mut self, what: &str, factor: f64, max: f64) {
        self.check(factor <= max, &format!("{what}: {factor:.2} × (target ≤ {max} ×)"));
    }

    /// Adds a line without a target.
    pub(crate) fn note(&mut self, text: &str) {
        self.lines.push(Line { met: None, text: text.to_owned() });
    }

    /// Adds a line that says whether a target was met.
    pub(crate) fn check(&mut self, met: bool, text: &str) {
        self.lines.push(Line { met: Some(met), text: text.to_owned() });
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.rows.is_empty() {
            writeln!(f, "{:<52} {:>9} {:>10} {:>10} {:>10}", "", "per s", "p50", "p95", "p99")?;
        }
        for (name, measured) in &self.rows {
            let [p50, p95, p99] =
                [50.0, 95.0, 99.0].map(|share| millis(measured.percentile(share)));
            writeln!(f, "{name:<52} {:>9.0} {p50:>10} {p95:>10} {p99:>10}", measured.rate())?;
        }
        writeln!(f)?;
        self.lines.iter().try_for_each(|line| writeln!(f, "{line}"))
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let met = match self.met {
            Some(true) => "met",
            Some(false) => "MISSED",
            None => "",
        };
        write!(f, "{met:<6} {}", self.text)
    }
}

fn millis(duration: Duration) -> String {
    format!("{:.2} ms", duration.as_secs_f64() * 1000.0)
}
