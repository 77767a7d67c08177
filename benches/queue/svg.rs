//! A bar chart with the spread of each bar, as SVG.

use std::fmt::Write as _;

use crate::bars::Series;

const WIDTH: f64 = 860.0;
const LABELS: f64 = 420.0;
const ROW: f64 = 34.0;
const TOP: f64 = 48.0;

/// One horizontal bar per series: the median, with a line from the least to the most.
pub fn bars(title: &str, series: &[&Series]) -> String {
    let rows: Vec<_> = series.iter().filter_map(|series| Some((series.who.as_str(), series.spread()?))).collect();
    let most = rows.iter().map(|(_, (_, _, max))| *max).fold(1.0, f64::max);
    let scale = (WIDTH - LABELS - 90.0) / most;
    #[expect(clippy::cast_precision_loss, reason = "a handful of rows")]
    let y = |row: usize| TOP + ROW * row as f64;
    let height = y(rows.len()) + 16.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" \
         font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
         <text x=\"16\" y=\"28\" font-size=\"16\" font-weight=\"bold\" fill=\"#222\">{}</text>\n",
        escaped(title)
    );
    for (row, (who, (min, median, max))) in rows.into_iter().enumerate() {
        let (top, middle) = (y(row), y(row) + ROW / 2.0);
        let color = if who == "jobrequest" { "#2a6fb0" } else { "#b8bfc6" };
        let (from, at, to) = (LABELS + min * scale, LABELS + median * scale, LABELS + max * scale);
        _ = writeln!(
            svg,
            "<text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"end\" fill=\"#222\">{}</text>\n\
             <rect x=\"{LABELS}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{color}\"/>\n\
             <line x1=\"{from:.1}\" x2=\"{to:.1}\" y1=\"{middle:.1}\" y2=\"{middle:.1}\" stroke=\"#222\" stroke-width=\"2\"/>\n\
             <text x=\"{:.1}\" y=\"{:.0}\" fill=\"#222\">{median:.0}</text>",
            LABELS - 10.0,
            middle + 4.0,
            escaped(who),
            top + 5.0,
            at - LABELS,
            ROW - 10.0,
            to + 8.0,
            middle + 4.0,
        );
    }
    svg.push_str("</svg>\n");
    svg
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}
