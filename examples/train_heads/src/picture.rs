//! Draws all findings as one PNG: plots, then every head's map before and after training.

use std::error::Error;
use std::path::Path;

use canvas::plot::Plot;
use canvas::{Canvas, Colour, HEADING, LABEL, REMARK, SMALL, SUBHEADING, heat};

use crate::heads::{self, Role};
use crate::parameters::{HEADS, LAYERS};
use crate::task::LENGTH;
use crate::{ACCURACY, Findings};

const WHY: &str = "One way: layer 0 tells each letter which one it follows; layer 1 looks for a letter that follows the one read.";
const MARGIN: usize = 32;
const GAP: usize = 12;
/// Pixels of a map's cell: one letter that attends to another.
const CELL: usize = 13;
const MAP: usize = LENGTH * CELL;
/// Space on the left of a map for its letters, and of a row of maps for its label.
const LETTER: usize = 18;
const ROW_LABEL: usize = 104;
const COLUMN: usize = LETTER + MAP + 24;
const WIDTH: usize = 2 * MARGIN + ROW_LABEL + HEADS * COLUMN;
const PLOT: [usize; 2] = [(WIDTH - 2 * MARGIN) / 4 - 84, 190];
const BLUE: Colour = [0, 114, 178];
const ORANGE: Colour = [213, 94, 0];

pub fn write(path: &Path, findings: &Findings) -> Result<(), Box<dyn Error>> {
    let plots = MARGIN + HEADING.height() + 2 * REMARK.height() + 4 * GAP;
    let maps = plots + SUBHEADING.height() + PLOT[1] + 4 * SMALL.height() + 6 * GAP;
    let head = LABEL.height() + GAP / 2;
    let row = MAP + LABEL.height() + 2 * GAP;
    let layer = head + SMALL.height() + MAP + GAP + row + 2 * GAP;
    let height = maps + SUBHEADING.height() + 2 * REMARK.height() + 4 * GAP + LAYERS * layer + MARGIN - GAP;
    let mut canvas = Canvas::new(WIDTH, height);

    let mut y = MARGIN;
    canvas.text([MARGIN, y], "Two layers of attention learn to repeat what followed the last time", HEADING);
    y += HEADING.height() + GAP;
    let letters = format!("Random letters, then the same again: {}", spaced(&findings.text));
    canvas.text([MARGIN, y], &letters, REMARK);
    y += REMARK.height() + GAP / 2;
    let size = format!(
        "{LAYERS} layers of {HEADS} heads, {} parameters, {} steps from random ones with AdamW",
        findings.learned,
        findings.scores.len()
    );
    canvas.text([MARGIN, y], &size, REMARK);

    draw_plots(&mut canvas, plots, findings);

    y = maps;
    canvas.text([MARGIN, y], "What each head attends to", SUBHEADING);
    y += SUBHEADING.height() + GAP / 2;
    canvas.text([MARGIN, y], WHY, REMARK);
    y += REMARK.height() + GAP / 2;
    let note = "rows: letters read, columns: letters attended to;";
    canvas.text([MARGIN, y], note, REMARK);
    let mut x = MARGIN + (note.len() + 1) * REMARK.width();
    canvas.text([x, y], "0", REMARK);
    x += 2 * REMARK.width();
    for step in 0..160 {
        canvas.fill([x + step, y + 3], [1, REMARK.height() - 6], heat((step as f32 / 159.0).powi(2)));
    }
    canvas.text([x + 160 + REMARK.width(), y], "1 of a row's attention (square root scale)", REMARK);
    y += REMARK.height() + 2 * GAP;

    for n in 0..LAYERS {
        for h in 0..HEADS {
            let left = MARGIN + ROW_LABEL + h * COLUMN + LETTER;
            canvas.text([left, y], &format!("head {n}.{h}"), SUBHEADING);
        }
        let mut top = y + head;
        for (h, letter) in (0..HEADS).flat_map(|h| findings.text.chars().enumerate().map(move |l| (h, l))) {
            let left = MARGIN + ROW_LABEL + h * COLUMN + LETTER;
            let x = left + letter.0 * CELL + (CELL - SMALL.width()) / 2;
            canvas.text([x, top], &letter.1.to_string(), SMALL);
        }
        top += SMALL.height();
        for (when, maps) in [("before", &findings.before), ("after", &findings.after)] {
            canvas.text([MARGIN, top + MAP / 2 - LABEL.height()], &format!("layer {n}"), SUBHEADING);
            canvas.text([MARGIN, top + MAP / 2], when, LABEL);
            for h in 0..HEADS {
                let left = MARGIN + ROW_LABEL + h * COLUMN + LETTER;
                draw_map(&mut canvas, [left, top], &findings.text, &maps[n][h * LENGTH * LENGTH..]);
                if when == "after" {
                    canvas.text([left, top + MAP + GAP / 2], &described(findings.roles[n][h]), LABEL);
                }
            }
            top += if when == "before" { MAP + GAP } else { row };
        }
        y += layer;
    }
    canvas.save(path)
}

fn spaced(text: &str) -> String {
    text.chars().flat_map(|letter| [letter, ' ']).collect()
}

/// Describes the main target of a head's attention; empty if there is none.
fn described(role: Role) -> String {
    let Role { own, previous, followed } = role;
    let shares = [(own, "itself"), (previous, "the one before"), (followed, "what followed")];
    let (share, what) = shares.into_iter().fold((1.0 / 3.0, ""), |a, b| if b.0 > a.0 { b } else { a });
    if what.is_empty() { String::new() } else { format!("{:.0} % on {what}", 100.0 * share) }
}

fn draw_map(canvas: &mut Canvas, [left, top]: [usize; 2], text: &str, map: &[f32]) {
    for (i, letter) in text.chars().enumerate() {
        let y = top + i * CELL;
        canvas.text([left - LETTER + 4, y + CELL / 2 - SMALL.height() / 2], &letter.to_string(), SMALL);
        // A letter does not see later letters.
        for j in 0..=i {
            let colour = heat(map[i * LENGTH + j]);
            canvas.fill([left + j * CELL, y], [CELL - 1, CELL - 1], colour);
        }
    }
}

fn draw_plots(canvas: &mut Canvas, top: usize, findings: &Findings) {
    let top = top + SUBHEADING.height() + GAP;
    let quarter = (WIDTH - 2 * MARGIN) / 4;
    let plot = |n: usize, x, y| Plot { left: MARGIN + n * quarter + 60, top, size: PLOT, x, y };
    let percent: Vec<_> = [0.0, 0.5, 1.0].map(|v| (v, format!("{:.0} %", 100.0 * v))).to_vec();

    let steps = findings.scores.len() as f64;
    let ticks: Vec<_> = [0.0, 0.5, 1.0].map(|part| (steps * part, format!("{:.0}", steps * part))).to_vec();
    let highest = findings.scores.iter().fold(1.0, |a: f64, score| a.max(score.loss)).ceil();
    let whole: Vec<_> = (0..=highest as usize).map(|v| (v as f64, v.to_string())).collect();
    let of = |value: fn(&crate::model::Score) -> f64| {
        findings.scores.iter().enumerate().map(move |(n, score)| [n as f64, value(score)])
    };
    let loss = plot(0, [0.0, steps], [0.0, highest]);
    loss.frame(canvas, "Loss", "step", &ticks, &whole);
    loss.line(canvas, of(|score| score.loss), BLUE);

    let accuracy = plot(1, [0.0, steps], [0.0, 1.0]);
    accuracy.frame(canvas, "Accuracy", "step", &ticks, &percent);
    let [x, y] = accuracy.at([0.0, ACCURACY]).map(|v| v.round() as usize);
    (0..PLOT[0]).step_by(8).for_each(|dash| canvas.fill([x + dash, y], [4, 1], ORANGE));
    let goal = format!("at least {:.0} %", 100.0 * ACCURACY);
    let left = x + PLOT[0] - goal.len() * SMALL.width();
    canvas.text([left, y + 4], &goal, SMALL.coloured(ORANGE));
    accuracy.line(canvas, of(|score| score.accuracy), BLUE);

    let all: Vec<_> = heads::all().collect();
    let heads = all.len() as f64;
    let most = findings.importance.as_flattened().iter().fold(f64::MIN_POSITIVE, |a, b| a.max(*b));
    let importance = plot(2, [0.0, heads], [0.0, 1.0]);
    let ticks: Vec<_> = all
        .iter()
        .enumerate()
        .map(|(n, [layer, head])| (n as f64 + 0.5, format!("{layer}.{head}")))
        .collect();
    let tenths: Vec<_> = [0.0, 0.5, 1.0].map(|v| (v, format!("{v:.1}"))).to_vec();
    importance.frame(canvas, "Importance of each head", "head (the most = 1)", &ticks, &tenths);
    for (n, [layer, head]) in all.iter().enumerate() {
        let [left, y] = importance.at([n as f64 + 0.2, findings.importance[*layer][*head] / most]);
        let [right, bottom] = importance.at([n as f64 + 0.8, 0.0]);
        let size = [(right - left) as usize, (bottom - y) as usize];
        canvas.fill([left as usize, y as usize], size, BLUE);
    }

    // The horizontal axis goes from all heads to none.
    let pruned = plot(3, [heads, 0.0], [0.0, 1.0]);
    let ticks: Vec<_> = (0..=all.len()).map(|n| (n as f64, n.to_string())).collect();
    pruned.frame(canvas, "Accuracy, heads pruned", "heads left", &ticks, &percent);
    let curves = [
        (&findings.most_first, ORANGE, "most important first"),
        (&findings.least_first, BLUE, "least important first"),
    ];
    let mut y = top + PLOT[1] + 12 + 2 * SMALL.height();
    for (curve, colour, name) in curves.into_iter().rev() {
        let all = [findings.accuracy].into_iter().chain(curve.iter().map(|pruned| pruned.1));
        pruned.line(canvas, all.enumerate().map(|(n, accuracy)| [heads - n as f64, accuracy]), colour);
        let left = pruned.left + (PLOT[0] - name.len() * SMALL.width()) / 2;
        canvas.text([left, y], name, SMALL.coloured(colour));
        y += SMALL.height();
    }
}
