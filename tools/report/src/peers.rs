//! This crate compared with other libraries.

use std::collections::HashMap;

use super::figure::digits;
use super::picture::{Bars, Frame, Plot};
use super::visit::Visit;

/// The other rows of a shape are measured relative to its first row.
pub fn plot(visit: &Visit) -> Plot {
    let mut first = HashMap::new();
    let mut longest = 1.0_f64;
    let bars = Bars::new(visit.of("peer").filter_map(|row| {
        let ms = row.ms?;
        let times = ms / *first.entry(row.title()).or_insert(ms);
        longest = longest.max(times);
        let than = if times == 1.0 { String::new() } else { format!(", {times:.1}x") };
        Some((row.title(), row.what.as_str(), times, format!("{} ms{than}", digits(ms))))
    }));
    let mut notes = vec!["Time in terms of each shape's first bar: shorter is faster.".to_string()];
    notes.extend(visit.warning());
    let steps = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0];
    let step = steps.into_iter().find(|step| longest / step <= 10.0).unwrap_or(500.0);
    let ticks = (0..).map(|n| f64::from(n) * step).take_while(|x| *x <= longest);
    bars.plot(&Frame {
        title: format!("Beside other programs: {}", visit.device()),
        notes,
        ticks: ticks.map(|x| (x, format!("{x}x"))).collect(),
        end: longest,
    })
}
