//! The parts that all plots share.

use std::error::Error;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

pub type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
pub type Drawn = Result<(), Box<dyn Error>>;
/// The text of an SVG, if there is something to draw.
pub type Plot = Result<Option<String>, Box<dyn Error>>;

/// Colours that colour-blind readers can tell apart (Okabe and Ito).
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(213, 94, 0),
    RGBColor(110, 110, 110),
];

pub const GRID: RGBColor = RGBColor(222, 222, 222);
pub const TEXT: u32 = 13;

/// Returns a colour for each name. The crate's two paths have the same colours in every plot.
pub fn colours(names: &[String]) -> Vec<RGBColor> {
    let mut others = 2..;
    let mut of = |name: &String| match name.as_str() {
        "fused" => 0,
        "staged" => 1,
        _ => others.next().expect("no end"),
    };
    names.iter().map(|name| COLOURS[of(name) % COLOURS.len()]).collect()
}

/// Draws a picture on white, independent of the page's background.
pub fn svg(width: u32, height: u32, draw: impl FnOnce(&Area) -> Drawn) -> Result<String, Box<dyn Error>> {
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, (width, height)).into_drawing_area();
        area.fill(&WHITE)?;
        draw(&area)?;
        area.present()?;
    }
    Ok(text)
}

pub fn write(area: &Area, text: &str, at: (i32, i32), size: u32, side: HPos, bold: bool) -> Drawn {
    let style = if bold { FontStyle::Bold } else { FontStyle::Normal };
    let font = ("sans-serif", size).into_font().style(style);
    let style = TextStyle::from(font).color(&BLACK).pos(Pos::new(side, VPos::Center));
    area.draw(&Text::new(text.to_string(), at, style))?;
    Ok(())
}

/// Draws title and notes.
pub fn head(area: &Area, title: &str, notes: &[String]) -> Drawn {
    write(area, title, (MARGIN, 22), 18, HPos::Left, true)?;
    for (n, note) in notes.iter().enumerate() {
        write(area, note, (MARGIN, 46 + 18 * n as i32), TEXT, HPos::Left, false)?;
    }
    Ok(())
}

/// Draws names with their colours, in lines of at most `width`. Returns their height.
pub fn legend(area: Option<&Area>, names: &[String], top: i32, width: i32) -> Result<i32, Box<dyn Error>> {
    let (mut x, mut y) = (MARGIN, top);
    for (name, colour) in names.iter().zip(colours(names)) {
        let wide = 34 + name.chars().count() as i32 * 8;
        if x > MARGIN && x + wide > width {
            (x, y) = (MARGIN, y + 20);
        }
        if let Some(area) = area {
            area.draw(&Rectangle::new([(x, y - 6), (x + 12, y + 6)], colour.filled()))?;
            write(area, name, (x + 18, y), TEXT, HPos::Left, false)?;
        }
        x += wide;
    }
    Ok(y + 20 - top)
}

pub const MARGIN: i32 = 16;
pub const WIDTH: i32 = 900;
const BAR: i32 = 15;
const GAP: i32 = 12;

/// Groups of horizontal bars. Each group has one name.
pub struct Bars {
    /// The names of the series, one per colour.
    series: Vec<String>,
    groups: Vec<(String, Vec<Bar>)>,
}

struct Bar {
    series: usize,
    length: f64,
    label: String,
}

/// The frame around bars.
pub struct Frame {
    pub title: String,
    pub notes: Vec<String>,
    /// The positions of the axis lines, with their labels.
    pub ticks: Vec<(f64, String)>,
    pub end: f64,
}

impl Bars {
    /// Groups bars from tuples of group, series, length and label.
    pub fn new<'a>(bars: impl Iterator<Item = (String, &'a str, f64, String)>) -> Self {
        let (mut names, mut all) = (Vec::new(), Bars { series: Vec::new(), groups: Vec::new() });
        for (group, series, length, label) in bars {
            let n = place(&mut names, &group);
            if n == all.groups.len() {
                all.groups.push((group, Vec::new()));
            }
            all.groups[n].1.push(Bar { series: place(&mut all.series, series), length, label });
        }
        all
    }

    /// Returns `None` if there are no bars.
    pub fn plot(&self, frame: &Frame) -> Plot {
        if self.groups.is_empty() {
            return Ok(None);
        }
        let longest = self.groups.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0) as i32;
        let left = MARGIN + (longest * 7).max(60) + 8;
        let right = WIDTH - 150; // room for labels
        let notes = 44 + 18 * frame.notes.len() as i32;
        let top = notes + legend(None, &self.series, 0, WIDTH)? + 24;
        let height: i32 = self.groups.iter().map(|(_, bars)| BAR * bars.len() as i32 + GAP).sum();
        let x = |value: f64| {
            left + (f64::from(right - left) * (value / frame.end).clamp(0.0, 1.0)).round() as i32
        };
        let colours = colours(&self.series);
        svg(WIDTH as u32, (top + height + 16) as u32, |area| {
            head(area, &frame.title, &frame.notes)?;
            legend(Some(area), &self.series, notes + 6, WIDTH)?;
            for (value, name) in &frame.ticks {
                area.draw(&PathElement::new(vec![(x(*value), top - 4), (x(*value), top + height)], GRID))?;
                write(area, name, (x(*value), top - 14), TEXT - 1, HPos::Center, false)?;
            }
            let mut y = top + GAP / 2;
            for (name, bars) in &self.groups {
                let tall = BAR * bars.len() as i32;
                write(area, name, (left - 8, y + tall / 2), TEXT, HPos::Right, false)?;
                for Bar { series, length, label } in bars {
                    let end = (x(*length), y + BAR - 1);
                    area.draw(&Rectangle::new([(left, y + 1), end], colours[*series].filled()))?;
                    write(area, label, (end.0 + 5, y + BAR / 2), TEXT - 2, HPos::Left, false)?;
                    y += BAR;
                }
                y += GAP;
            }
            area.draw(&PathElement::new(vec![(left, top - 4), (left, top + height)], BLACK))?;
            Ok(())
        })
        .map(Some)
    }
}

/// Returns the place of `name` in `names`. A new name is added at the end.
pub fn place(names: &mut Vec<String>, name: &str) -> usize {
    names.iter().position(|known| known == name).unwrap_or_else(|| {
        names.push(name.to_string());
        names.len() - 1
    })
}
