//! Draws the losses and the accuracies as one PNG.

use std::error::Error;
use std::path::Path;

use canvas::plot::Plot;
use canvas::{Canvas, Colour, HEADING, LABEL, REMARK, SUBHEADING};

use crate::model::{LAYERS, WIDTH};
use crate::{Learned, PAIRS};

const MARGIN: usize = 32;
const GAP: usize = 12;
const PLOT: [usize; 2] = [420, 260];
const COLUMN: usize = PLOT[0] + 110;
const PAGE: usize = 2 * MARGIN + 2 * COLUMN - 30;
const COLOURS: [Colour; 3] = [[0, 114, 178], [0, 158, 115], [213, 94, 0]];

pub fn write(path: &Path, all: &[Learned; 3]) -> Result<(), Box<dyn Error>> {
    let top = MARGIN + HEADING.height() + REMARK.height() + SUBHEADING.height() + 5 * GAP;
    let legend = top + PLOT[1] + 60;
    let mut canvas = Canvas::new(PAGE, legend + LABEL.height() + MARGIN);
    canvas.text([MARGIN, MARGIN], "Associative recall: pairs, then the value of each key", HEADING);
    let steps = all[0].scores.len();
    let remark = format!(
        "{LAYERS} layers of width {WIDTH}, each after the same convolution; {steps} steps with AdamW"
    );
    canvas.text([MARGIN, MARGIN + HEADING.height() + GAP], &remark, REMARK);

    let plot = |n: usize, x, y| Plot { left: MARGIN + 60 + n * COLUMN, top, size: PLOT, x, y };
    let highest = all.iter().flat_map(|of| &of.scores).fold(1.0, |a: f64, score| a.max(score.loss)).ceil();
    let loss = plot(0, [0.0, steps as f64], [0.0, highest]);
    let ticks: Vec<_> = (0..=4).map(|n| (steps * n / 4) as f64).map(|v| (v, format!("{v:.0}"))).collect();
    let whole: Vec<_> = (0..=highest as usize).map(|v| (v as f64, v.to_string())).collect();
    loss.frame(&mut canvas, "Loss of each answer", "step", &ticks, &whole);

    let most = all[0].recalled.last().map_or(1, |last| last.0);
    let recall = plot(1, [0.0, most as f64], [0.0, 1.0]);
    let ticks: Vec<_> = all[0].recalled.iter().map(|(pairs, _)| (*pairs as f64, pairs.to_string())).collect();
    let percent: Vec<_> = [0.0, 0.25, 0.5, 0.75, 1.0].map(|v| (v, format!("{:.0} %", 100.0 * v))).to_vec();
    let axis = format!("pairs of a sequence (trained on {PAIRS})");
    recall.frame(&mut canvas, "Right answers", &axis, &ticks, &percent);

    let mut x = MARGIN + 60;
    for (of, colour) in all.iter().zip(COLOURS) {
        loss.line(&mut canvas, of.scores.iter().enumerate().map(|(n, s)| [n as f64, s.loss]), colour);
        let points = of.recalled.iter().map(|(pairs, accuracy)| [*pairs as f64, *accuracy]);
        recall.line(&mut canvas, points, colour);
        canvas.fill([x, legend + LABEL.height() / 2 - 2], [28, 4], colour);
        let name = of.kind.to_string();
        canvas.text([x + 36, legend], &name, LABEL);
        x += 36 + name.len() * LABEL.width() + 40;
    }
    canvas.save(path)
}
