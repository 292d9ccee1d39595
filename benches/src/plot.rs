//! Plots of measurements as SVG files, without a library: bars and lines on logarithmic axes.

use std::{fmt::Write, fs, path::PathBuf};

use anyhow::Result;

const WIDTH: f64 = 760.0;
const LEFT: f64 = 300.0;
const ROW: f64 = 26.0;
const TOP: f64 = 44.0;
const HEIGHT: f64 = 320.0;
const COLORS: [&str; 4] = ["#1f6feb", "#d1242f", "#1a7f37", "#9a6700"];
/// Where the files are written, with a copy for the documentation if `--docs` asks for it.
const DIRECTORY: &str = "target/bench";
const DOCS_DIRECTORY: &str = "docs/images";

/// One bar for each name.
pub(crate) struct Bars {
    pub(crate) title: String,
    pub(crate) unit: &'static str,
    pub(crate) bars: Vec<(String, f64)>,
}

/// Lines over a common axis.
pub(crate) struct Lines {
    pub(crate) title: String,
    /// The name of the horizontal axis.
    pub(crate) x: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) lines: Vec<(String, Vec<(f64, f64)>)>,
}

impl Bars {
    /// Writes the plot and returns its path.
    pub(crate) fn write(&self, name: &str) -> Result<PathBuf> {
        save(name, &self.draw()?)
    }

    fn draw(&self) -> Result<String> {
        let axis = Axis::over(self.bars.iter().map(|(_, value)| *value), LEFT, WIDTH - 90.0);
        let bottom = TOP + ROW * count(self.bars.len());
        let mut svg = opening(&self.title, bottom + 20.0)?;
        for (index, (name, value)) in self.bars.iter().enumerate() {
            let y = TOP + ROW * count(index);
            let color = if name.starts_with("Codelia") { COLORS[0] } else { "#8c959f" };
            let end = axis.place(*value);
            text(&mut svg, LEFT - 8.0, y + 15.0, "end", name)?;
            writeln!(
                svg,
                r#"<rect x="{LEFT}" y="{y}" width="{:.1}" height="20" fill="{color}"/>"#,
                (end - LEFT).max(1.0)
            )?;
            text(&mut svg, end + 6.0, y + 15.0, "start", &format!("{value:.0} {}", self.unit))?;
        }
        Ok(svg + "</svg>\n")
    }
}

impl Lines {
    /// Writes the plot and returns its path.
    pub(crate) fn write(&self, name: &str) -> Result<PathBuf> {
        save(name, &self.draw()?)
    }

    fn draw(&self) -> Result<String> {
        let points = || self.lines.iter().flat_map(|(_, points)| points);
        let left = 70.0;
        let bottom = TOP + HEIGHT;
        let across = Axis::over(points().map(|point| point.0), left, WIDTH - 200.0);
        let up = Axis::over(points().map(|point| point.1), bottom, TOP);
        let mut svg = opening(&self.title, bottom + 44.0)?;
        for (x, label) in across.marks() {
            writeln!(svg, r##"<path d="M{x:.1} {TOP}V{bottom}" stroke="#d0d7de"/>"##)?;
            text(&mut svg, x, bottom + 16.0, "middle", &label)?;
        }
        for (y, label) in up.marks() {
            writeln!(svg, r##"<path d="M{left} {y:.1}H{}" stroke="#d0d7de"/>"##, WIDTH - 200.0)?;
            text(&mut svg, left - 6.0, y + 4.0, "end", &label)?;
        }
        text(
            &mut svg,
            left,
            bottom + 36.0,
            "start",
            &format!("{}; vertical: {}", self.x, self.unit),
        )?;
        for (index, (name, points)) in self.lines.iter().enumerate() {
            let color = COLORS[index % COLORS.len()];
            let places: Vec<_> =
                points.iter().map(|(x, y)| (across.place(*x), up.place(*y))).collect();
            let path: Vec<_> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            writeln!(
                svg,
                r#"<polyline points="{}" fill="none" stroke="{color}" stroke-width="2"/>"#,
                path.join(" ")
            )?;
            for (x, y) in &places {
                writeln!(svg, r#"<circle cx="{x:.1}" cy="{y:.1}" r="3" fill="{color}"/>"#)?;
            }
            if let Some((x, y)) = places.last() {
                text(&mut svg, x + 8.0, y + 4.0, "start", name)?;
            }
        }
        Ok(svg + "</svg>\n")
    }
}

/// A logarithmic axis from a power of ten to another.
struct Axis {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Axis {
    fn over(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Self {
        let (low, high) = values.fold((f64::MAX, f64::MIN), |(low, high), value| {
            let value = value.max(1e-3).log10();
            (low.min(value), high.max(value))
        });
        let low = low.floor();
        Self { low, high: high.ceil().max(low + 1.0), from, to }
    }

    fn place(&self, value: f64) -> f64 {
        let share = (value.max(1e-3).log10() - self.low) / (self.high - self.low);
        self.from + share * (self.to - self.from)
    }

    /// The powers of ten.
    fn marks(&self) -> Vec<(f64, String)> {
        let mut marks = Vec::new();
        let mut power = self.low;
        while power <= self.high {
            let value = 10_f64.powf(power);
            marks.push((self.place(value), format!("{value}")));
            power += 1.0;
        }
        marks
    }
}

fn opening(title: &str, height: f64) -> Result<String> {
    let mut svg = String::new();
    writeln!(
        svg,
        r#"<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="12">"#
    )?;
    writeln!(svg, r#"<rect width="100%" height="100%" fill="white"/>"#)?;
    text(&mut svg, 12.0, 24.0, "start", title)?;
    Ok(svg)
}

fn text(svg: &mut String, x: f64, y: f64, anchor: &str, words: &str) -> Result<()> {
    let words = words.replace('&', "&amp;").replace('<', "&lt;");
    Ok(writeln!(svg, r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}">{words}</text>"#)?)
}

fn save(name: &str, svg: &str) -> Result<PathBuf> {
    let in_docs = std::env::args().any(|word| word == crate::DOCS);
    let mut path = PathBuf::new();
    for directory in [DIRECTORY, DOCS_DIRECTORY].into_iter().take(1 + usize::from(in_docs)) {
        fs::create_dir_all(directory)?;
        path = PathBuf::from(directory).join(format!("{name}.svg"));
        fs::write(&path, svg)?;
    }
    Ok(path)
}

#[expect(clippy::cast_precision_loss, reason = "a handful of rows")]
fn count(number: usize) -> f64 {
    number as f64
}
