//! Curves in a frame.

use crate::{Canvas, Colour, GREY, SMALL, SUBHEADING};

const GRID: Colour = [225; 3];
const GAP: usize = 12;

/// A plot's place and the ranges of its axes.
pub struct Plot {
    pub left: usize,
    pub top: usize,
    /// Width and height, in pixels.
    pub size: [usize; 2],
    pub x: [f64; 2],
    pub y: [f64; 2],
}

impl Plot {
    /// Returns the pixel position of a point. Points above or below the frame are moved to its
    /// edge.
    pub fn at(&self, [x, y]: [f64; 2]) -> [f32; 2] {
        let along = |[from, to]: [f64; 2], value: f64| ((value - from) / (to - from)) as f32;
        let (right, up) = (along(self.x, x), along(self.y, y).clamp(0.0, 1.0));
        let [width, height] = self.size.map(|n| n as f32);
        [self.left as f32 + right * width, self.top as f32 + (1.0 - up) * height]
    }

    /// Draws the title, ticks with lines across, and the label of the horizontal axis.
    pub fn frame(
        &self,
        canvas: &mut Canvas,
        title: &str,
        axis: &str,
        x: &[(f64, String)],
        y: &[(f64, String)],
    ) {
        let (left, bottom) = (self.left, self.top + self.size[1]);
        canvas.text([left, self.top - SUBHEADING.height() - GAP], title, SUBHEADING);
        for (value, text) in y {
            let [_, y] = self.at([self.x[0], *value]).map(|v| v.round() as usize);
            canvas.fill([left, y], [self.size[0], 1], GRID);
            let width = text.chars().count() * SMALL.width();
            canvas.text([left - 8 - width, y - SMALL.height() / 2], text, SMALL);
        }
        for (value, text) in x {
            let [x, _] = self.at([*value, self.y[0]]).map(|v| v.round() as usize);
            canvas.fill([x, bottom], [1, 5], GREY);
            let width = text.chars().count() * SMALL.width();
            canvas.text([x - width / 2, bottom + 8], text, SMALL);
        }
        canvas.fill([left, bottom], [self.size[0] + 1, 1], GREY);
        let width = axis.chars().count() * SMALL.width();
        let y = bottom + 10 + SMALL.height();
        canvas.text([left + (self.size[0] - width) / 2, y], axis, SMALL.coloured(GREY));
    }

    pub fn line(&self, canvas: &mut Canvas, points: impl Iterator<Item = [f64; 2]>, colour: Colour) {
        let points: Vec<_> = points.map(|point| self.at(point)).collect();
        canvas.line(&points, 2.5, colour);
    }
}
