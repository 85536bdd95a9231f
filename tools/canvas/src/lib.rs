//! Rectangles, lines and text on white, saved as a PNG.

pub mod plot;

use std::error::Error;
use std::fs;
use std::path::Path;

use noto_sans_mono_bitmap::{FontWeight, RasterHeight, get_raster, get_raster_width};

/// Red, green, blue.
pub type Colour = [u8; 3];
pub const WHITE: Colour = [255; 3];
pub const BLACK: Colour = [30; 3];
pub const GREY: Colour = [110; 3];

pub const HEADING: Font = Font { size: RasterHeight::Size24, weight: FontWeight::Bold, colour: BLACK };
pub const PLAIN: Font = Font { size: RasterHeight::Size24, weight: FontWeight::Regular, colour: BLACK };
pub const SUBHEADING: Font = Font { size: RasterHeight::Size20, weight: FontWeight::Bold, colour: BLACK };
pub const LABEL: Font = Font { size: RasterHeight::Size20, weight: FontWeight::Regular, colour: BLACK };
pub const REMARK: Font = Font { size: RasterHeight::Size20, weight: FontWeight::Regular, colour: GREY };
pub const SMALL: Font = Font { size: RasterHeight::Size16, weight: FontWeight::Regular, colour: BLACK };

/// Returns a colour for a value from 0 to 1, from light yellow to dark blue. It uses the square
/// root, because most weights of long sequences are small.
pub fn heat(value: f32) -> Colour {
    let colorous::Color { r, g, b } = colorous::YELLOW_GREEN_BLUE.eval_continuous(value.sqrt().into());
    [r, g, b]
}

/// Returns `text`, or its beginning and two dots if it is longer than `most`.
pub fn shortened(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    text.chars().take(most.saturating_sub(2)).chain("..".chars()).collect()
}

/// Pixels, counted from the upper left corner. Points outside are not drawn.
pub struct Canvas {
    width: usize,
    height: usize,
    pixels: Vec<Colour>,
}

impl Canvas {
    pub fn new(width: usize, height: usize) -> Self {
        Canvas { width, height, pixels: vec![WHITE; width * height] }
    }

    pub fn fill(&mut self, [left, top]: [usize; 2], [width, height]: [usize; 2], colour: Colour) {
        for y in top..top + height {
            for x in left..left + width {
                self.blend([x, y], colour, 255);
            }
        }
    }

    /// Draws a line from point to point, `thick` pixels wide.
    pub fn line(&mut self, points: &[[f32; 2]], thick: f32, colour: Colour) {
        let reach = thick / 2.0 + 0.5;
        for pair in points.windows(2) {
            let ([ax, ay], [bx, by]) = (pair[0], pair[1]);
            let (dx, dy) = (bx - ax, by - ay);
            let length = (dx * dx + dy * dy).max(f32::MIN_POSITIVE);
            let span = |a: f32, b: f32| (a.min(b) - reach).max(0.0) as usize..=(a.max(b) + reach) as usize;
            for y in span(ay, by) {
                for x in span(ax, bx) {
                    let (px, py) = (x as f32 - ax, y as f32 - ay);
                    // The position of the nearest point along the segment.
                    let t = ((px * dx + py * dy) / length).clamp(0.0, 1.0);
                    let distance = (px - t * dx).hypot(py - t * dy);
                    let opacity = (reach - distance).clamp(0.0, 1.0);
                    self.blend([x, y], colour, (255.0 * opacity) as u8);
                }
            }
        }
    }

    /// Draws text whose upper left corner is `at`.
    pub fn text(&mut self, [left, top]: [usize; 2], text: &str, font: Font) {
        font.glyphs(text, |x, y, opacity| self.blend([left + x, top + y], font.colour, opacity));
    }

    /// Draws text that runs upwards from `bottom`.
    pub fn text_upwards(&mut self, [left, bottom]: [usize; 2], text: &str, font: Font) {
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

    /// Returns the bytes of a PNG.
    pub fn png(&self) -> Result<Vec<u8>, Box<dyn Error>> {
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, self.width as u32, self.height as u32);
        encoder.set_color(png::ColorType::Rgb);
        let mut writer = encoder.write_header()?;
        writer.write_image_data(self.pixels.as_flattened())?;
        writer.finish()?;
        Ok(bytes)
    }

    pub fn save(&self, path: &Path) -> Result<(), Box<dyn Error>> {
        Ok(fs::write(path, self.png()?).map_err(|e| format!("cannot write {}: {e}", path.display()))?)
    }
}

#[derive(Clone, Copy)]
pub struct Font {
    size: RasterHeight,
    weight: FontWeight,
    colour: Colour,
}

impl Font {
    pub fn height(self) -> usize {
        self.size.val()
    }

    /// Returns the width of a letter; all have the same.
    pub fn width(self) -> usize {
        get_raster_width(self.weight, self.size)
    }

    pub fn coloured(self, colour: Colour) -> Self {
        Font { colour, ..self }
    }

    /// Calls `draw(x, y, opacity)` for every pixel of the text. A letter that the font lacks is
    /// replaced by a similar letter or a question mark.
    fn glyphs(self, text: &str, mut draw: impl FnMut(usize, usize, u8)) {
        let raster = |letter| get_raster(letter, self.weight, self.size);
        for (n, letter) in text.chars().enumerate() {
            let glyph = raster(letter).or_else(|| raster(plain(letter)));
            for (y, row) in glyph.iter().flat_map(|glyph| glyph.rows().enumerate()) {
                row.iter().enumerate().for_each(|(x, opacity)| draw(n * self.width() + x, y, *opacity));
            }
        }
    }
}

/// Returns the typewriter letter for a typographic one.
fn plain(letter: char) -> char {
    match letter {
        '“' | '”' | '„' | '«' | '»' => '"',
        '‘' | '’' | '‚' => '\'',
        '‐' | '‑' | '–' | '—' | '−' => '-',
        _ => '?',
    }
}
