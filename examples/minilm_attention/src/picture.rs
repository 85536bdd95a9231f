//! Attention maps as a PNG: one map per head, rows are queries, columns are keys.

use std::error::Error;
use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

use noto_sans_mono_bitmap::{FontWeight, RasterHeight, get_raster, get_raster_width};

const NOTE: &str = "rows: queries, columns: keys, colours: on a square root scale";
const COLUMNS: usize = 4;
const MARGIN: usize = 32;
const GAP: usize = 12;

type Colour = [u8; 3];
const WHITE: Colour = [255; 3];
const BLACK: Colour = [30; 3];
const GREY: Colour = [110; 3];

const HEADING: Font = Font { size: RasterHeight::Size24, weight: FontWeight::Bold, colour: BLACK };
const PLAIN: Font = Font { size: RasterHeight::Size24, weight: FontWeight::Regular, colour: BLACK };
const LABEL: Font = Font { size: RasterHeight::Size20, weight: FontWeight::Regular, colour: BLACK };
const REMARK: Font = Font { size: RasterHeight::Size20, weight: FontWeight::Regular, colour: GREY };

/// Draws `weights`, `[heads, n, n]` for the `n` tokens, and writes the file.
pub fn write(path: &Path, sentence: &str, tokens: &[String], weights: &[f32]) -> Result<(), Box<dyn Error>> {
    let n = tokens.len();
    let heads = weights.len() / (n * n);
    let labels: Vec<_> = tokens.iter().map(|t| shortened(t, 12)).collect();
    let largest = weights.iter().fold(0.0f32, |a, b| a.max(*b));

    // Long sentences get small cells, and a label for every few of them.
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
        // Thin lines between cells that are large enough for them.
        let filled = if cell > 12 { cell - 1 } else { cell };
        for (at, weight) in weights.iter().enumerate() {
            let corner = [left + at % n * cell, top + at / n * cell];
            canvas.fill(corner, [filled, filled], colour(weight / largest));
        }
    }

    let bar = 16 * cell.max(18);
    let corner = [MARGIN + grid + GAP, MARGIN + header + PLAIN.height() + label + GAP];
    for y in 0..bar {
        let value = 1.0 - y as f32 / (bar - 1) as f32;
        canvas.fill([corner[0], corner[1] + y], [24, 1], colour(value.powi(2)));
    }
    for tick in 0..=4 {
        let text = format!("{:.2}", largest * (tick as f32 / 4.0).powi(2));
        let y = corner[1] + (4 - tick) * (bar - 1) / 4;
        canvas.fill([corner[0] + 24, y], [6, 1], GREY);
        canvas.text([corner[0] + 34, y - LABEL.height() / 2], &text, LABEL);
    }
    canvas.save(path)
}

/// `text`, or its beginning and two dots if it is longer than `most`.
pub fn shortened(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    text.chars().take(most.saturating_sub(2)).chain("..".chars()).collect()
}

/// From light yellow to dark blue for 0 to 1. By the square root: in long sentences most weights are small.
fn colour(value: f32) -> Colour {
    let colorous::Color { r, g, b } = colorous::YELLOW_GREEN_BLUE.eval_continuous(value.sqrt().into());
    [r, g, b]
}

struct Canvas {
    width: usize,
    height: usize,
    pixels: Vec<Colour>,
}

impl Canvas {
    fn new(width: usize, height: usize) -> Self {
        Canvas { width, height, pixels: vec![WHITE; width * height] }
    }

    fn fill(&mut self, [left, top]: [usize; 2], [width, height]: [usize; 2], colour: Colour) {
        for y in top..top + height {
            for x in left..left + width {
                self.blend([x, y], colour, 255);
            }
        }
    }

    /// Text whose upper left corner is `at`.
    fn text(&mut self, [left, top]: [usize; 2], text: &str, font: Font) {
        font.glyphs(text, |x, y, opacity| self.blend([left + x, top + y], font.colour, opacity));
    }

    /// Text that runs upwards from `bottom`.
    fn text_upwards(&mut self, [left, bottom]: [usize; 2], text: &str, font: Font) {
        font.glyphs(text, |x, y, opacity| {
            self.blend([left + y, bottom.saturating_sub(x)], font.colour, opacity);
        });
    }

    fn blend(&mut self, [x, y]: [usize; 2], colour: Colour, opacity: u8) {
        if x < self.width && y < self.height {
            let pixel = &mut self.pixels[y * self.width + x];
            for (old, new) in pixel.iter_mut().zip(colour) {
                let mixed = u32::from(*old) * u32::from(255 - opacity) + u32::from(new) * u32::from(opacity);
                *old = (mixed / 255) as u8;
            }
        }
    }

    fn save(&self, path: &Path) -> Result<(), Box<dyn Error>> {
        let file = File::create(path).map_err(|e| format!("cannot write {}: {e}", path.display()))?;
        let mut encoder = png::Encoder::new(BufWriter::new(file), self.width as u32, self.height as u32);
        encoder.set_color(png::ColorType::Rgb);
        let mut writer = encoder.write_header()?;
        writer.write_image_data(self.pixels.as_flattened())?;
        Ok(writer.finish()?)
    }
}

#[derive(Clone, Copy)]
struct Font {
    size: RasterHeight,
    weight: FontWeight,
    colour: Colour,
}

impl Font {
    fn height(self) -> usize {
        self.size.val()
    }

    /// Of every letter.
    fn width(self) -> usize {
        get_raster_width(self.weight, self.size)
    }

    /// Calls `draw(x, y, opacity)` for every pixel of the text. What the font lacks is a question mark.
    fn glyphs(self, text: &str, mut draw: impl FnMut(usize, usize, u8)) {
        let raster = |letter| get_raster(letter, self.weight, self.size);
        for (n, letter) in text.chars().enumerate() {
            let glyph = raster(letter).or_else(|| raster('?'));
            for (y, row) in glyph.iter().flat_map(|glyph| glyph.rows().enumerate()) {
                row.iter().enumerate().for_each(|(x, opacity)| draw(n * self.width() + x, y, *opacity));
            }
        }
    }
}
