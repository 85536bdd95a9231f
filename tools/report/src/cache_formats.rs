//! Memory against loss of quality, for the formats of keys and values that `chat` compares.
//!
//! `chat --perplexity README.md > FILE` makes the text, and `cargo run -p report --
//! --cache-formats FILE` writes the picture to `docs/caches.svg`.

use std::error::Error;

use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use super::picture::{Area, Drawn, GRID, MARGIN, TEXT, WIDTH, colours, head, svg, write};

/// A row of the table.
#[derive(Clone, Debug, PartialEq)]
pub struct Format {
    pub name: String,
    pub perplexity: f64,
    /// The bytes of one token in all layers.
    pub bytes: f64,
}

impl Format {
    /// True if keys and values are multiplied by a matrix before they are stored.
    fn rotated(&self) -> bool {
        self.name.ends_with("-rotated")
    }
}

/// Reads the first table of the text. It begins with the line of `cache` and ends with an empty
/// line.
pub fn parse(text: &str) -> Result<Vec<Format>, String> {
    let mut lines = text.lines().enumerate();
    if !lines.any(|(_, line)| line.split_whitespace().next() == Some("cache")) {
        return Err("no line begins with `cache`: is this the output of `chat --perplexity`?".into());
    }
    let mut formats = Vec::new();
    for (n, line) in lines.take_while(|(_, line)| !line.trim().is_empty()) {
        let format = row(line).ok_or_else(|| {
            format!("{}: not a name, perplexity, × of f32, bytes and ms of a token: {line:?}", n + 1)
        })?;
        formats.push(format);
    }
    Ok(formats)
}

/// Reads a line of the table. Perplexity and bytes must be positive.
fn row(line: &str) -> Option<Format> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [name, perplexity, _, bytes, _] = words[..] else { return None };
    let positive = |word: &str| word.parse().ok().filter(|x: &f64| x.is_finite() && *x > 0.0);
    Some(Format { name: name.into(), perplexity: positive(perplexity)?, bytes: positive(bytes)? })
}

/// The least loss in the picture, in percent. Zero has no place on a logarithmic axis.
const FLOOR: f64 = 0.01;
const LEFT: i32 = MARGIN + 64;
const RIGHT: i32 = WIDTH - MARGIN;
const TOP: i32 = 104;
const BOTTOM: i32 = TOP + 540;
/// Half the width of a marker.
const MARKER: i32 = 5;

/// Draws the formats of a text.
pub fn plot(text: &str) -> Result<String, Box<dyn Error>> {
    let formats = parse(text)?;
    let exact = formats.iter().find(|format| format.name == "f32").ok_or("the table has no row of f32")?;
    let loss = |format: &Format| (100.0 * (format.perplexity / exact.perplexity - 1.0)).max(FLOOR);
    let least = formats.iter().map(|format| format.bytes).fold(f64::INFINITY, f64::min);
    let most = formats.iter().map(|format| format.bytes).fold(0.0, f64::max);
    let worst = formats.iter().map(loss).fold(1.0, f64::max);
    // Room for names on both sides, and under the lowest points.
    let x = Axis { low: least / 1.8, high: most * 1.25, from: LEFT, to: RIGHT };
    let y = Axis { low: FLOOR / 1.6, high: worst * 1.6, from: BOTTOM, to: TOP };
    let points: Vec<(i32, i32)> = formats.iter().map(|f| (x.at(f.bytes), y.at(loss(f)))).collect();
    let names: Vec<&str> = formats.iter().map(|format| format.name.as_str()).collect();
    let places = places(&points, &names)?;
    let kinds = ["plain", "times a Walsh–Hadamard matrix"].map(String::from);
    let colours = colours(&kinds);
    svg(WIDTH as u32, (BOTTOM + 52) as u32, |area| {
        head(area, "SmolLM2-135M: memory of keys and values against loss of quality", &[])?;
        let mut at = MARGIN + MARKER;
        for (n, kind) in kinds.iter().enumerate() {
            marker(area, (at, 48), n == 1, colours[n])?;
            write(area, kind, (at + 12, 48), TEXT, HPos::Left, false)?;
            at += 44 + wide(kind);
        }
        let label = "perplexity ÷ exact − 1, in % (0.01 % and less is drawn at 0.01 %)";
        write(area, label, (MARGIN, TOP - 22), TEXT, HPos::Left, false)?;
        for tick in y.ticks(&[1.0]) {
            area.draw(&PathElement::new(vec![(LEFT, y.at(tick)), (RIGHT, y.at(tick))], GRID))?;
            let sign = if tick <= FLOOR { "≤ " } else { "" };
            write(area, &format!("{sign}{tick} %"), (LEFT - 8, y.at(tick)), TEXT - 1, HPos::Right, false)?;
        }
        for tick in x.ticks(&[1.0, 2.0, 5.0]) {
            area.draw(&PathElement::new(vec![(x.at(tick), TOP), (x.at(tick), BOTTOM)], GRID))?;
            write(area, &tick.to_string(), (x.at(tick), BOTTOM + 14), TEXT - 1, HPos::Center, false)?;
        }
        let axes = vec![(LEFT, TOP), (LEFT, BOTTOM), (RIGHT, BOTTOM)];
        area.draw(&PathElement::new(axes, BLACK))?;
        let middle = (LEFT + RIGHT) / 2;
        write(area, "bytes a token, all layers", (middle, BOTTOM + 36), TEXT, HPos::Center, false)?;
        for ((format, point), place) in formats.iter().zip(&points).zip(&places) {
            marker(area, *point, format.rotated(), colours[usize::from(format.rotated())])?;
            let (at, side) = place.anchor(point.0);
            write(area, &format.name, at, TEXT, side, false)?;
        }
        Ok(())
    })
}

/// Draws a triangle for a rotated format, and a circle for another one.
fn marker(area: &Area, at: (i32, i32), rotated: bool, colour: RGBColor) -> Drawn {
    if rotated {
        area.draw(&TriangleMarker::new(at, MARKER + 1, colour.filled()))?;
    } else {
        area.draw(&Circle::new(at, MARKER, colour.filled()))?;
    }
    Ok(())
}

/// A logarithmic axis from `low` at pixel `from` to `high` at pixel `to`.
struct Axis {
    low: f64,
    high: f64,
    from: i32,
    to: i32,
}

impl Axis {
    /// Returns the pixel of a value.
    fn at(&self, value: f64) -> i32 {
        let part = (value / self.low).ln() / (self.high / self.low).ln();
        self.from + (f64::from(self.to - self.from) * part).round() as i32
    }

    /// Returns the products of `steps` and powers of ten that are on the axis.
    fn ticks(&self, steps: &[f64]) -> Vec<f64> {
        let powers = self.low.log10().floor() as i32..=self.high.log10().floor() as i32;
        let power = |n: i32| if n < 0 { 1.0 / 10f64.powi(-n) } else { 10f64.powi(n) };
        let all = powers.flat_map(|n| steps.iter().map(move |step| step * power(n)));
        all.filter(|tick| (self.low..=self.high).contains(tick)).collect()
    }
}

/// A rectangle of pixels.
#[derive(Clone, Copy, Debug)]
pub struct Rect {
    left: i32,
    top: i32,
    right: i32,
    bottom: i32,
}

impl Rect {
    /// Returns the rectangle of a size around a centre.
    fn around((x, y): (i32, i32), width: i32, height: i32) -> Self {
        let (left, top) = (x - width / 2, y - height / 2);
        Rect { left, top, right: left + width, bottom: top + height }
    }

    /// True if the rectangles have a common pixel.
    pub fn overlaps(&self, other: &Rect) -> bool {
        let apart = self.right <= other.left || other.right <= self.left;
        !(apart || self.bottom <= other.top || other.bottom <= self.top)
    }

    /// Returns the position and side of a text in the rectangle, close to a point at `x`.
    fn anchor(&self, x: i32) -> ((i32, i32), HPos) {
        let (at, side) = match x {
            _ if x < self.left => (self.left, HPos::Left),
            _ if x > self.right => (self.right, HPos::Right),
            _ => (x, HPos::Center),
        };
        ((at, (self.top + self.bottom) / 2), side)
    }

    /// True if the rectangle is between the axes.
    fn inside(&self) -> bool {
        self.left > LEFT && self.right < RIGHT && self.top > TOP && self.bottom < BOTTOM
    }
}

/// Returns a width in which the text has room.
fn wide(text: &str) -> i32 {
    7 * text.chars().count() as i32
}

/// Returns a place for each name, close to its point. A name gets the first free place of eight:
/// right, left, above, below, then the corners.
pub fn places(points: &[(i32, i32)], names: &[&str]) -> Result<Vec<Rect>, String> {
    let markers = points.iter().map(|point| Rect::around(*point, 2 * MARKER, 2 * MARKER));
    let mut taken: Vec<Rect> = markers.collect();
    for ((x, y), name) in points.iter().zip(names) {
        let (width, height) = (wide(name), TEXT as i32 + 1);
        let (side, up) = (MARKER + 4 + width / 2, MARKER + 2 + height / 2);
        let corner = height / 2 + 2;
        let shifts = [(side, 0), (-side, 0), (0, -up), (0, up)];
        let corners = [(side, -corner), (side, corner), (-side, -corner), (-side, corner)];
        let place = shifts
            .iter()
            .chain(&corners)
            .map(|(right, down)| Rect::around((x + right, y + down), width, height))
            .find(|place| place.inside() && !taken.iter().any(|other| other.overlaps(place)))
            .ok_or_else(|| format!("no free place for the name {name} at its point"))?;
        taken.push(place);
    }
    Ok(taken.split_off(points.len()))
}
