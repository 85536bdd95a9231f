//! Draws the table of cosines as a PNG, with a row and a column for each sentence.

use std::error::Error;

use canvas::{BLACK, Canvas, Font, GREY, HEADING, LABEL, REMARK, SMALL, WHITE, heat, shortened};

const TITLE: &str = "Cosines between sentences";
const NOTE: &str = "all-MiniLM-L6-v2 on the GPU; 1 is the same direction";
const MARGIN: usize = 32;
const GAP: usize = 12;
/// The largest length of a row's label.
const LETTERS: usize = 48;
/// The largest number of sentences in a picture.
pub const MOST: usize = 500;

/// Returns the file's bytes. `cosines` is `[n, n]` for the n texts.
pub fn png(texts: &[String], cosines: &[f64]) -> Result<Vec<u8>, Box<dyn Error>> {
    let n = texts.len();
    let number = |n: usize| format!("{n:>width$}", width = texts.len().to_string().len());
    let labels: Vec<String> = texts
        .iter()
        .enumerate()
        .map(|(at, text)| format!("{}  {}", number(at + 1), shortened(text, LETTERS)))
        .collect();
    // Many sentences have small cells without numbers, and a label only for every few rows.
    let cell = (1100 / n).clamp(2, 64);
    let step = (LABEL.height() + 2).div_ceil(cell);
    let filled = if cell > 12 { cell - 1 } else { cell };
    let with_numbers = cell >= 5 * SMALL.width();
    let letters = labels.iter().map(|label| label.chars().count()).max().unwrap_or(0);

    let left = MARGIN + letters * LABEL.width() + GAP;
    let top = MARGIN + HEADING.height() + REMARK.height() + LABEL.height() + 4 * GAP;
    let bar = left + n * cell + 2 * GAP;
    // The heading may be wider than a small table and its scale.
    let scale = bar + 24 + GAP + 4 * LABEL.width();
    let heading = MARGIN + NOTE.len() * REMARK.width();
    let high = (n * cell).max(3 * LABEL.height());
    let mut canvas = Canvas::new(scale.max(heading) + MARGIN, top + high + MARGIN);
    canvas.text([MARGIN, MARGIN], TITLE, HEADING);
    canvas.text([MARGIN, MARGIN + HEADING.height() + GAP], NOTE, REMARK);

    let centred = |canvas: &mut Canvas, [x, y]: [usize; 2], text: &str, font: Font| {
        let half = text.chars().count() * font.width() / 2;
        canvas.text([x.saturating_sub(half), y.saturating_sub(font.height() / 2)], text, font);
    };
    for (at, label) in labels.iter().enumerate().step_by(step) {
        let middle = at * cell + cell / 2;
        canvas.text([MARGIN, (top + middle).saturating_sub(LABEL.height() / 2)], label, LABEL);
        let columns = (4 * LABEL.width()).div_ceil(cell);
        if at % columns.max(step) == 0 {
            centred(&mut canvas, [left + middle, top - LABEL.height()], &(at + 1).to_string(), LABEL);
        }
    }
    for (at, cosine) in cosines.iter().enumerate() {
        let [x, y] = [left + at % n * cell, top + at / n * cell];
        let colour = shade(*cosine);
        canvas.fill([x, y], [filled, filled], colour);
        if with_numbers {
            // Green contributes most to perceived brightness.
            let dark = colour[1] < 140;
            let font = SMALL.coloured(if dark { WHITE } else { BLACK });
            // Adding 0.0 turns −0.00 into 0.00.
            let rounded = (cosine * 100.0).round() / 100.0 + 0.0;
            centred(&mut canvas, [x + filled / 2, y + filled / 2], &format!("{rounded:.2}"), font);
        }
    }
    for y in 0..high {
        let value = 1.0 - y as f64 / (high - 1) as f64;
        canvas.fill([bar, top + y], [24, 1], shade(value));
    }
    for (tick, text) in ["0", "0.5", "1"].into_iter().enumerate() {
        let y = top + (2 - tick) * (high - 1) / 2;
        canvas.fill([bar + 24, y], [6, 1], GREY);
        canvas.text([bar + 24 + GAP, y.saturating_sub(LABEL.height() / 2)], text, LABEL);
    }
    canvas.png()
}

/// Returns a cosine's colour, linear from 0 to 1. Negative cosines are rare and have the colour
/// of 0.
fn shade(cosine: f64) -> canvas::Colour {
    heat(cosine.clamp(0.0, 1.0).powi(2) as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Draws a table of `n` sentences, and returns width, height and pixels.
    fn drawn(n: usize, cosine: impl Fn(usize, usize) -> f64) -> (usize, usize, Vec<[u8; 3]>) {
        let texts: Vec<String> = (0..n).map(|at| format!("sentence {at}")).collect();
        let cosines: Vec<f64> = (0..n * n).map(|at| cosine(at / n, at % n)).collect();
        let bytes = png(&texts, &cosines).expect("a picture");
        let mut reader = png::Decoder::new(std::io::Cursor::new(bytes)).read_info().expect("a PNG");
        let mut pixels = vec![0; reader.output_buffer_size().expect("a size")];
        let info = reader.next_frame(&mut pixels).expect("pixels");
        (info.width as usize, info.height as usize, pixels.as_chunks().0.to_vec())
    }

    #[test]
    fn cells_have_the_colours_of_their_cosines() {
        // 1 and 0 are the ends of the scale; negative cosines have the colour of 0.
        let cosine = |a: usize, b: usize| [[1.0, 0.6, -0.3], [0.2, 1.0, 0.4], [0.0, 0.8, 1.0]][a][b];
        let (width, _, pixels) = drawn(3, cosine);
        let left = MARGIN + "1  sentence 0".len() * LABEL.width() + GAP;
        let top = MARGIN + HEADING.height() + REMARK.height() + LABEL.height() + 4 * GAP;
        for (a, b) in (0..9).map(|at| (at / 3, at % 3)) {
            // Look at a corner, because the number is in the middle.
            let at = (top + 64 * a + 4) * width + left + 64 * b + 4;
            assert_eq!(pixels[at], shade(cosine(a, b)), "{a}, {b}");
        }
        assert_eq!(shade(-0.3), shade(0.0));
        let green = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0].map(|c| shade(c)[1]);
        assert!(green.is_sorted_by(|a, b| a > b), "{green:?}");
    }

    #[test]
    fn any_number_of_sentences_fits() {
        for n in [1, 2, 99, MOST] {
            let (width, height, pixels) = drawn(n, |a, b| if a == b { 1.0 } else { 0.1 });
            assert!(width < 2200 && height < 1500, "{n}: {width} x {height}");
            // All margins are white.
            let white = |x: usize, y: usize| pixels[y * width + x] == WHITE;
            assert!((0..width).all(|x| white(x, MARGIN / 2) && white(x, height - MARGIN / 4)), "{n}");
            assert!((0..height).all(|y| white(MARGIN / 2, y) && white(width - MARGIN / 4, y)), "{n}");
        }
    }
}
