//! Tables without borders. Lists fit the terminal, or 100 columns if stdout is not one.

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Spaces between columns.
const GAP: usize = 2;
/// Columns that are cut keep this many characters.
const MIN_WIDTH: usize = 8;

/// Formats a table. If it is wider than `max`, the widest cells are cut, but never the first
/// column, which names the object.
pub(crate) fn format(
    header: &[&str],
    rows: impl Iterator<Item = Vec<String>>,
    max: usize,
) -> String {
    let header: Vec<String> = header.iter().map(|cell| (*cell).to_owned()).collect();
    let lines: Vec<Vec<String>> =
        Some(header).filter(|header| !header.is_empty()).into_iter().chain(rows).collect();
    let widths = fit(widths(&lines), max);
    let lines = lines.iter().map(|cells| line(cells, &widths));
    lines.collect::<Vec<_>>().join("\n")
}

fn widths(lines: &[Vec<String>]) -> Vec<usize> {
    let columns = lines.iter().map(Vec::len).max().unwrap_or_default();
    let width =
        |column: usize| lines.iter().filter_map(|cells| Some(cells.get(column)?.width())).max();
    (0..columns).map(|column| width(column).unwrap_or_default()).collect()
}

/// Narrows the widest columns until the table has at most `max` columns, if that is possible.
fn fit(mut widths: Vec<usize>, max: usize) -> Vec<usize> {
    let gaps = GAP * widths.len().saturating_sub(1);
    while widths.iter().sum::<usize>() + gaps > max {
        let widest = widths.iter_mut().skip(1).max();
        match widest {
            Some(width) if *width > MIN_WIDTH => *width -= 1,
            _ => break,
        }
    }
    widths
}

fn line(cells: &[String], widths: &[usize]) -> String {
    let mut line = String::new();
    for (cell, &width) in cells.iter().zip(widths) {
        let cell = cut(cell, width);
        line.push_str(&cell);
        line.push_str(&" ".repeat(width.saturating_sub(cell.width()) + GAP));
    }
    line.truncate(line.trim_end().len());
    line
}

fn cut(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let mut used = 1;
    let kept = text.chars().take_while(|c| {
        used += c.width().unwrap_or_default();
        used <= width
    });
    let mut cut: String = kept.collect();
    cut.push('…');
    cut
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(cells: &[&[&str]]) -> impl Iterator<Item = Vec<String>> {
        let rows: Vec<Vec<String>> =
            cells.iter().map(|row| row.iter().map(|cell| (*cell).to_owned()).collect()).collect();
        rows.into_iter()
    }

    #[test]
    fn columns_are_aligned_by_display_width() {
        let table = format(&["A", "B"], rows(&[&["日本", "x"], &["é", ""]]), 100);
        assert_eq!(table, "A     B\n日本  x\né");
        assert_eq!(format(&[], rows(&[]), 100), "");
    }

    #[test]
    fn widest_cells_are_cut_to_fit() {
        let long = "c".repeat(80);
        let table = format(
            &["ID", "NAME", "COMMAND"],
            rows(&[&["0123456789abcdef", "somebody", &long]]),
            60,
        );
        assert!(table.lines().all(|line| line.width() <= 60), "{table}");
        assert!(
            table.contains("0123456789abcdef  somebody  ccc") && table.ends_with('…'),
            "{table}"
        );
        let ids = format(&["ID", "B"], rows(&[&[&long, "x"]]), 40);
        assert!(ids.contains(&long), "the first column is whole");
        assert_eq!(cut("日本語", 4), "日…");
    }
}
