//! Time and memory against length.

use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use super::figure::{digits, memory};
use super::picture::{Area, Drawn, GRID, Plot, TEXT, colours, head, place, svg, write};
use super::visit::Visit;

type Points = Vec<(f64, f64)>;

/// The time or memory of one kind of call.
#[derive(Default)]
struct Series {
    points: Points,
    exponent: Option<f64>,
}

/// Returns `None` if nothing was measured at two lengths.
pub fn plot(visit: &Visit) -> Plot {
    let mut names = Vec::new();
    let (mut times, mut memories): (Vec<Series>, Vec<Series>) = (Vec::new(), Vec::new());
    for row in visit.of("scaling") {
        let name = [&row.what, row.mask(), row.dtype()];
        let name: Vec<&str> = name.into_iter().filter(|word| !["none", "f32"].contains(word)).collect();
        let n = place(&mut names, &name.join(" "));
        if n == times.len() {
            times.push(Series::default());
            memories.push(Series::default());
        }
        match (row.kv_len, row.ms, row.value, row.unit.as_deref()) {
            (Some(length), Some(ms), ..) => {
                times[n].points.push((length as f64, ms));
                // Zero has no place on a logarithmic axis.
                let bytes = row.bytes.filter(|bytes| *bytes > 0.0);
                memories[n].points.extend(bytes.map(|bytes| (length as f64, bytes)));
            }
            (_, _, exponent, Some("time exponent")) => times[n].exponent = exponent,
            (_, _, exponent, Some("memory exponent")) => memories[n].exponent = exponent,
            _ => {}
        }
    }
    if !times.iter().any(|series| series.points.len() >= 2) {
        return Ok(None);
    }
    let mut notes: Vec<String> = visit.warning().into_iter().collect();
    notes.push("After a name: the exponent of the power of the length that fits the longer ones.".into());
    let top = 34 + 18 * notes.len() as i32;
    let height = top + CHART + 10 + 20 * names.len() as i32;
    svg(960, height as u32, |area| {
        head(area, &format!("Growth with length: {}", visit.device()), &notes)?;
        let (_, panels) = area.split_vertically(top);
        let (left, right) = panels.split_horizontally(480);
        panel(&left, "time, ms", &names, &times, digits)?;
        panel(&right, "memory beside q, k and v: output and scratch", &names, &memories, memory)
    })
    .map(Some)
}

const CHART: i32 = 390;

fn panel(area: &Area, title: &str, names: &[String], series: &[Series], name: fn(f64) -> String) -> Drawn {
    let (chart, key) = area.split_vertically(CHART);
    let all = || series.iter().flat_map(|series| &series.points);
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
    for (n, (Series { points, exponent }, colour)) in series.iter().zip(colours(names)).enumerate() {
        chart.draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2)))?;
        chart.draw_series(points.iter().map(|p| Circle::new(*p, 3, colour.filled())))?;
        let fitted = exponent.map(|exponent| format!(" ~ n^{exponent:.2}")).unwrap_or_default();
        let at = 8 + 20 * n as i32;
        key.draw(&Rectangle::new([(70, at - 6), (82, at + 6)], colour.filled()))?;
        write(&key, &format!("{}{fitted}", names[n]), (88, at), TEXT, HPos::Left, false)?;
    }
    Ok(())
}
