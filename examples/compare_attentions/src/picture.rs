//! Draws time, error and memory as one PNG.

use std::error::Error;
use std::path::Path;

use canvas::plot::Plot;
use canvas::{Canvas, Colour, HEADING, LABEL, REMARK, SMALL, SUBHEADING};
use wgpu_attention::wgpu;

use crate::kinds::Kind;
use crate::{Curve, Point};

const MARGIN: usize = 32;
const GAP: usize = 12;
const PLOT: [usize; 2] = [400, 330];
/// Space on the left of a plot, for its numbers.
const NUMBERS: usize = 76;
const COLUMN: usize = NUMBERS + PLOT[0] + 24;
const WIDTH: usize = 2 * MARGIN + 3 * COLUMN;
/// Okabe and Ito's colours, which most people can distinguish, and three more. Each kind has one.
const COLOURS: [Colour; Kind::ALL.len()] = [
    [30, 30, 30],
    [140, 140, 140],
    [204, 121, 167],
    [0, 114, 178],
    [213, 94, 0],
    [0, 158, 115],
    [230, 159, 0],
    [86, 180, 233],
    [120, 80, 40],
    [205, 190, 40],
    [90, 30, 130],
    [160, 30, 40],
];

/// The value of a point that a plot shows, if it was measured.
type Quantity = fn(&Point) -> Option<f64>;

pub fn write(path: &Path, info: &wgpu::AdapterInfo, curves: &[Curve]) -> Result<(), Box<dyn Error>> {
    let top = MARGIN + HEADING.height() + REMARK.height() + SUBHEADING.height() + 4 * GAP;
    let legend = top + PLOT[1] + 3 * SMALL.height() + 3 * GAP;
    let height = legend + curves.len().div_ceil(5) * (LABEL.height() + GAP) + MARGIN;
    let mut canvas = Canvas::new(WIDTH, height);
    canvas.text([MARGIN, MARGIN], "Kinds of attention against length", HEADING);
    let what = format!("one head of 64 channels, f32, on {} ({})", info.name, info.backend);
    canvas.text([MARGIN, MARGIN + HEADING.height() + GAP / 2], &what, REMARK);

    let all = || curves.iter().flat_map(|curve| &curve.points);
    let lengths = all().fold([usize::MAX, 0], |[a, b], p| [a.min(p.length), b.max(p.length)]);
    let x = lengths.map(|length| (length as f64).log2());
    let x = [x[0], x[1].max(x[0] + 1.0)];
    let kilo = |n: usize| if n < 1024 { n.to_string() } else { format!("{}k", n / 1024) };
    let ticks: Vec<_> = (x[0] as usize..=x[1] as usize).map(|n| (n as f64, kilo(1 << n))).collect();
    let plots: [(&str, Quantity, [f64; 2]); 3] = [
        ("Time, ms", |p| Some(p.ms), [0.1, 10.0]),
        ("Temporary memory, KiB", |p| Some(p.bytes as f64 / 1024.0), [1.0, 1024.0]),
        ("Error, share of the exact result", |p| p.error, [1e-3, 1.0]),
    ];
    for (n, (title, value, least)) in plots.into_iter().enumerate() {
        // Zero has no logarithm: draw it at the lower edge.
        let log = |v: f64| v.max(f64::MIN_POSITIVE).log10();
        let values = || all().filter_map(value).filter(|v| *v > 0.0).map(log);
        let low = values().fold(log(least[0]), f64::min).floor();
        let high = values().fold(log(least[1]), f64::max).ceil();
        let left = MARGIN + n * COLUMN + NUMBERS;
        let plot = Plot { left, top, size: PLOT, x, y: [low, high] };
        let decades: Vec<_> = (low as i32..=high as i32)
            .map(|n| {
                (
                    f64::from(n),
                    if n < 0 { format!("{}", 10f64.powi(n)) } else { 10u64.pow(n as u32).to_string() },
                )
            })
            .collect();
        plot.frame(&mut canvas, title, "tokens", &ticks, &decades);
        for (curve, colour) in curves.iter().zip(COLOURS) {
            let points = curve.points.iter().filter_map(|p| Some([(p.length as f64).log2(), log(value(p)?)]));
            plot.line(&mut canvas, points, colour);
        }
    }
    for (n, (curve, colour)) in curves.iter().zip(COLOURS).enumerate() {
        let (left, top) =
            (MARGIN + NUMBERS + n % 5 * (WIDTH - 2 * MARGIN) / 5, legend + n / 5 * (LABEL.height() + GAP));
        canvas.fill([left, top + LABEL.height() / 2 - 2], [28, 4], colour);
        canvas.text([left + 40, top], &curve.kind.name(), LABEL);
    }
    canvas.save(path)
}
