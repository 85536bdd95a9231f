//! Draws a map with labels on both axes and a scale.

use canvas::{heat, shortened};
use eframe::egui::epaint::TextShape;
use eframe::egui::{
    Align2, Color32, FontId, Painter, Pos2, Rect, Response, Sense, Stroke, TextureId, Ui, pos2, vec2,
};

/// Points between a map and its labels.
const GAP: f32 = 6.0;
/// The width of the scale, with its numbers.
const SCALE: f32 = 84.0;
/// The longest label, in characters.
const LONGEST: usize = 14;

/// A map's texture, its queries and keys, and the value of the darkest colour.
pub struct Plot<'a> {
    pub texture: TextureId,
    pub size: [usize; 2],
    /// The token of each query and key. Without tokens, the labels are numbers.
    pub tokens: Option<&'a [String]>,
    pub largest: Option<f32>,
}

impl Plot<'_> {
    /// Fills the rest of `ui`.
    pub fn show(&self, ui: &mut Ui) {
        let (response, painter) = ui.allocate_painter(ui.available_size(), Sense::hover());
        let font = FontId::monospace(if self.tokens.is_some() { 13.0 } else { 12.0 });
        let ink = ui.visuals().text_color();
        let pen = Pen { painter: &painter, font, ink };
        let [rows, columns] = self.size;
        let widest = pen.width(self.tokens.unwrap_or_default()).max(pen.width(&[rows.to_string()]));
        // The names of the axes have a line each.
        let line = pen.height() + GAP;
        let above = line + if self.tokens.is_some() { widest } else { pen.height() } + GAP;
        let left = line + widest + GAP;
        let area = response.rect;
        let room = vec2(area.width() - left - SCALE, area.height() - above - GAP);
        let cell = cell(room.into(), self.size);
        let corner = area.min + vec2(left, above);
        let map = Rect::from_min_size(corner, vec2(columns as f32, rows as f32) * cell);
        let all = Rect::from_min_max(pos2(0.0, 0.0), pos2(1.0, 1.0));
        painter.image(self.texture, map, all, Color32::WHITE);
        self.labels(&pen, map, cell);
        pen.text(pos2(map.center().x, area.top()), Align2::CENTER_TOP, "keys");
        pen.upwards(pos2(area.left() + 0.5 * pen.height(), map.center().y), Align2::CENTER_CENTER, "queries");
        if let Some(largest) = self.largest {
            scale(&pen, pos2(map.right() + 18.0, map.top()), map.height().clamp(120.0, 280.0), largest);
        }
        self.name_pair(response, map, cell);
    }

    fn label(&self, n: usize) -> String {
        self.tokens.map_or(n.to_string(), |tokens| shortened(tokens.get(n).map_or("", |t| t), LONGEST))
    }

    fn labels(&self, pen: &Pen, map: Rect, cell: f32) {
        let room = if self.tokens.is_some() { pen.height() } else { 40.0 };
        let step = step(cell, room, self.tokens.is_some());
        for row in (0..self.size[0]).step_by(step) {
            let at = pos2(map.left() - GAP, map.top() + (row as f32 + 0.5) * cell);
            pen.text(at, Align2::RIGHT_CENTER, &self.label(row));
        }
        for column in (0..self.size[1]).step_by(step) {
            let at = pos2(map.left() + (column as f32 + 0.5) * cell, map.top() - GAP);
            match self.tokens {
                Some(_) => pen.upwards(at, Align2::LEFT_CENTER, &self.label(column)),
                None => pen.text(at, Align2::CENTER_BOTTOM, &self.label(column)),
            }
        }
    }

    /// Names the pair under the pointer.
    fn name_pair(&self, response: Response, map: Rect, cell: f32) {
        let Some(at) = response.hover_pos().filter(|at| map.contains(*at)) else { return };
        let [column, row] = [at.x - map.left(), at.y - map.top()].map(|x| (x / cell) as usize);
        let text = format!("query {}, key {}", self.label(row), self.label(column));
        response.on_hover_text_at_pointer(text);
    }
}

/// The size of a square cell, so that `[rows, columns]` of them fit. Larger cells have whole
/// pixels.
fn cell([width, height]: [f32; 2], [rows, columns]: [usize; 2]) -> f32 {
    let most = (width / columns as f32).min(height / rows as f32).clamp(0.1, 40.0);
    if most > 2.0 { most.floor() } else { most }
}

/// The number of cells from label to label. Numbers have round steps.
fn step(cell: f32, room: f32, any: bool) -> usize {
    let least = (room / cell).ceil().max(1.0) as usize;
    if any {
        return least;
    }
    let round = (0..9).flat_map(|power| [1, 2, 5].map(|n| n * 10usize.pow(power)));
    round.into_iter().find(|step| *step >= least).unwrap_or(least)
}

/// Draws the colours and their values. The colours follow a square root.
fn scale(pen: &Pen, corner: Pos2, height: f32, largest: f32) {
    const STEPS: usize = 128;
    for n in 0..STEPS {
        let value = 1.0 - n as f32 / (STEPS - 1) as f32;
        let [r, g, b] = heat(value.powi(2));
        let top = corner + vec2(0.0, n as f32 * height / STEPS as f32);
        let strip = Rect::from_min_size(top, vec2(16.0, height / STEPS as f32 + 0.5));
        pen.painter.rect_filled(strip, 0.0, Color32::from_rgb(r, g, b));
    }
    for tick in 0..=4 {
        let value = largest * (tick as f32 / 4.0).powi(2);
        let y = corner.y + (4 - tick) as f32 / 4.0 * height;
        let ends = [pos2(corner.x + 16.0, y), pos2(corner.x + 20.0, y)];
        pen.painter.line_segment(ends, Stroke::new(1.0, pen.ink));
        let align = match tick {
            4 => Align2::LEFT_TOP,
            0 => Align2::LEFT_BOTTOM,
            _ => Align2::LEFT_CENTER,
        };
        pen.text(pos2(corner.x + 24.0, y), align, &format!("{value:.3}"));
    }
}

/// Writes labels.
struct Pen<'a> {
    painter: &'a Painter,
    font: FontId,
    ink: Color32,
}

impl Pen<'_> {
    fn text(&self, at: Pos2, align: Align2, text: &str) {
        self.painter.text(at, align, text, self.font.clone(), self.ink);
    }

    /// Writes text that runs upwards. `align` is that of the text before it is turned.
    fn upwards(&self, at: Pos2, align: Align2, text: &str) {
        let galley = self.painter.layout_no_wrap(text.to_owned(), self.font.clone(), self.ink);
        let corner = at - align.pos_in_rect(&galley.rect).to_vec2();
        let quarter = -std::f32::consts::FRAC_PI_2;
        self.painter.add(TextShape::new(corner, galley, self.ink).with_angle_and_anchor(quarter, align));
    }

    /// The width of the widest text.
    fn width(&self, texts: &[String]) -> f32 {
        let widths = texts.iter().map(|text| {
            let text = shortened(text, LONGEST);
            self.painter.layout_no_wrap(text, self.font.clone(), self.ink).size().x
        });
        widths.fold(0.0, f32::max)
    }

    fn height(&self) -> f32 {
        self.painter.layout_no_wrap("A".to_owned(), self.font.clone(), self.ink).size().y
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_fit_in_their_room() {
        assert_eq!(cell([640.0, 320.0], [64, 64]), 5.0);
        assert_eq!(cell([640.0, 320.0], [4, 4]), 40.0);
        assert_eq!(cell([512.0, 512.0], [1024, 2]), 0.5);
        assert!(cell([-3.0, 0.0], [8, 8]) > 0.0);
    }

    #[test]
    fn labels_have_round_steps() {
        assert_eq!([5.0, 0.5, 40.0].map(|cell| step(cell, 40.0, false)), [10, 100, 1]);
        assert_eq!(step(3.0, 16.0, true), 6);
    }
}
