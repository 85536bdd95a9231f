//! Draws attention maps as a PNG: one map per head, with queries as rows and keys as columns.

use std::error::Error;
use std::path::Path;

use canvas::{Canvas, GREY, HEADING, LABEL, PLAIN, REMARK, heat, shortened};

const NOTE: &str = "rows: queries, columns: keys, colours: on a square root scale";
const COLUMNS: usize = 4;
const MARGIN: usize = 32;
const GAP: usize = 12;

/// Draws `weights`, `[heads, n, n]` for the `n` tokens, and writes the file.
pub fn write(path: &Path, sentence: &str, tokens: &[String], weights: &[f32]) -> Result<(), Box<dyn Error>> {
    let n = tokens.len();
    let heads = weights.len() / (n * n);
    let labels: Vec<_> = tokens.iter().map(|t| shortened(t, 12)).collect();
    let largest = weights.iter().fold(0.0f32, |a, b| a.max(*b));

    // Long sentences have small cells, and a label only for every few cells.
    let cell = (900 / n).clamp(3, 28);
    let step = LABEL.height().div_ceil(cell);
    let letter = LABEL.width();
    let label = labels.iter().map(|l| l.chars().count()).max().unwrap_or(0) * letter + 8;
    let map = n * cell;
    let panel = [label + map + 2 * GAP, PLAIN.height() + label + map + 3 * GAP];
    let header = 2 * PLAIN.height() + LABEL.height() + 4 * GAP;
    let scale = 8 * letter;
    let grid = (COLUMNS * panel[0]).max(60 * PLAIN.width());
    let rows = heads.div_ceil(COLUMNS);
    let mut canvas = Canvas::new(2 * MARGIN + grid + scale, 2 * MARGIN + header + rows * panel[1]);

    let fits = grid / PLAIN.width();
    let mut y = MARGIN;
    canvas.text([MARGIN, y], "all-MiniLM-L6-v2, layer 0: attention weights", HEADING);
    y += PLAIN.height() + GAP;
    canvas.text([MARGIN, y], &shortened(sentence, fits), PLAIN);
    y += PLAIN.height() + GAP;
    canvas.text([MARGIN, y], NOTE, REMARK);

    for (head, weights) in weights.chunks_exact(n * n).enumerate() {
        let left = MARGIN + label + head % COLUMNS * (grid / COLUMNS);
        let top = MARGIN + header + head / COLUMNS * panel[1];
        canvas.text([left, top], &format!("head {head}"), HEADING);
        let top = top + PLAIN.height() + label + GAP;
        for (t, text) in labels.iter().enumerate().step_by(step) {
            let middle = (t * cell + cell / 2).saturating_sub(LABEL.height() / 2);
            let width = text.chars().count() * letter;
            canvas.text([left - 6 - width, top + middle], text, LABEL);
            canvas.text_upwards([left + middle, top - 6], text, LABEL);
        }
        // Draw thin lines between large cells.
        let filled = if cell > 12 { cell - 1 } else { cell };
        for (at, weight) in weights.iter().enumerate() {
            let corner = [left + at % n * cell, top + at / n * cell];
            canvas.fill(corner, [filled, filled], heat(weight / largest));
        }
    }

    let bar = 16 * cell.max(18);
    let corner = [MARGIN + grid + GAP, MARGIN + header + PLAIN.height() + label + GAP];
    for y in 0..bar {
        let value = 1.0 - y as f32 / (bar - 1) as f32;
        canvas.fill([corner[0], corner[1] + y], [24, 1], heat(value.powi(2)));
    }
    for tick in 0..=4 {
        let text = format!("{:.2}", largest * (tick as f32 / 4.0).powi(2));
        let y = corner[1] + (4 - tick) * (bar - 1) / 4;
        canvas.fill([corner[0] + 24, y], [6, 1], GREY);
        canvas.text([corner[0] + 34, y - LABEL.height() / 2], &text, LABEL);
    }
    canvas.save(path)
}
