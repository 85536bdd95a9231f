//! Share of the ceiling by shape.

use super::figure::digits;
use super::picture::{Bars, Frame, Plot};
use super::visit::Visit;

pub fn plot(visit: &Visit) -> Plot {
    let rows = visit.kernels().filter(|row| row.bench != "scaling");
    let bars = Bars::new(rows.filter_map(|row| {
        let (share, ms) = (row.share()?, row.ms?);
        let bound = row.bound.as_deref().map(|bound| format!(", {bound}")).unwrap_or_default();
        let label = format!("{:.0} %, {} ms{bound}", 100.0 * share, digits(ms));
        Some((row.title(), row.what.as_str(), share, label))
    }));
    let mut notes = vec![
        "The least time that the device's own measured rates allow, as a share of the time taken, and which of".into(),
        "arithmetic and memory sets it.".into(),
    ];
    notes.extend(visit.warning());
    bars.plot(&Frame {
        title: format!("Share of the ceiling: {}", visit.device()),
        notes,
        ticks: (0..=5).map(|n| (f64::from(n) / 5.0, format!("{} %", 20 * n))).collect(),
        end: 1.0,
    })
}
