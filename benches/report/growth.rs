//! Time and scratch memory against length.

use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use super::picture::{Area, Drawn, GRID, Plot, TEXT, colours, head, place, svg, write};
use super::row::{digits, memory};
use super::visit::Visit;

/// Exponent p of y ≈ c · xᵖ by least squares of the logarithms, over the longer half of the points: what is fixed per call bends
/// the shorter. `None` of less than two.
pub fn exponent(points: &[(f64, f64)]) -> Option<f64> {
    let mut points: Vec<(f64, f64)> =
        points.iter().filter(|(x, y)| *x > 0.0 && *y > 0.0).map(|(x, y)| (x.ln(), y.ln())).collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    let half = points.split_off(points.len() / 2);
    let points = if half.len() >= 2 { half } else { points.into_iter().chain(half).collect() };
    let n = points.len() as f64;
    let (mx, my) = (points.iter().map(|p| p.0).sum::<f64>() / n, points.iter().map(|p| p.1).sum::<f64>() / n);
    let spread: f64 = points.iter().map(|(x, _)| (x - mx).powi(2)).sum();
    (points.len() >= 2 && spread > 0.0)
        .then(|| points.iter().map(|(x, y)| (x - mx) * (y - my)).sum::<f64>() / spread)
}

type Points = Vec<(f64, f64)>;

/// `None` where nothing was measured at two lengths.
pub fn plot(visit: &Visit) -> Plot {
    let mut names = Vec::new();
    let (mut times, mut scratch): (Vec<Points>, Vec<Points>) = (Vec::new(), Vec::new());
    for row in visit.of("scaling") {
        let (Some(length), Some(ms)) = (row.kv_len, row.ms) else { continue };
        let mask = if row.mask() == "none" || row.what.contains(row.mask()) { "" } else { row.mask() };
        let n = place(&mut names, format!("{} {mask}", row.what).trim_end());
        if n == times.len() {
            times.push(Vec::new());
            scratch.push(Vec::new());
        }
        times[n].push((length as f64, ms));
        // On a logarithmic axis nothing has no place.
        scratch[n].extend(row.bytes.filter(|bytes| *bytes > 0.0).map(|bytes| (length as f64, bytes)));
    }
    if !times.iter().any(|points| points.len() >= 2) {
        return Ok(None);
    }
    let mut notes: Vec<String> = visit.warning().into_iter().collect();
    notes.push(
        "In brackets: the exponent fitted to the longer half of the lengths; none: no memory is taken."
            .into(),
    );
    let top = 34 + 18 * notes.len() as i32;
    let drawn = svg(960, (top + 400 + 20 * names.len() as i32) as u32, |area| {
        head(area, &format!("Growth with length: {}", visit.device()), &notes)?;
        let (_, panels) = area.split_vertically(top);
        let (left, right) = panels.split_horizontally(480);
        panel(&left, "time, ms", &names, &times, digits)?;
        panel(&right, "scratch memory", &names, &scratch, memory)
    });
    drawn.map(Some)
}

fn panel(area: &Area, title: &str, names: &[String], series: &[Points], name: fn(f64) -> String) -> Drawn {
    let (chart, key) = area.split_vertically(390);
    let all = || series.iter().flatten();
    let range = |of: fn(&(f64, f64)) -> f64, slack: f64| {
        let (low, high) =
            all().map(of).fold((f64::INFINITY, 0.0), |(l, h): (f64, f64), x| (l.min(x), h.max(x)));
        if low.is_finite() { low / slack..high * slack } else { 1.0..10.0 }
    };
    let (x, y) = (range(|p| p.0, 1.15), range(|p| p.1, 1.6));
    let mut lengths: Vec<f64> = all().map(|p| p.0).collect();
    lengths.sort_by(f64::total_cmp);
    lengths.dedup();
    let mut chart = ChartBuilder::on(&chart)
        .caption(title, ("sans-serif", TEXT + 2))
        .margin(12)
        .x_label_area_size(42)
        .y_label_area_size(70)
        .build_cartesian_2d(x.log_scale().base(2.0), y.log_scale())?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .label_style(("sans-serif", TEXT - 1))
        .x_desc("length (keys)")
        .x_labels(10)
        .y_labels(8)
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| name(*y))
        .draw()?;
    for (n, (points, colour)) in series.iter().zip(colours(names)).enumerate() {
        chart.draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2)))?;
        chart.draw_series(points.iter().map(|p| Circle::new(*p, 3, colour.filled())))?;
        let fitted = match exponent(points) {
            Some(exponent) => format!("{} [{exponent:.2}]", names[n]),
            None => format!("{} [none]", names[n]),
        };
        let at = 8 + 20 * n as i32;
        key.draw(&Rectangle::new([(70, at - 6), (82, at + 6)], colour.filled()))?;
        write(&key, &fitted, (88, at), TEXT, HPos::Left, false)?;
    }
    Ok(())
}
