//! The tab of masks and score functions.

use std::sync::Arc;
use std::time::{Duration, Instant};

use eframe::egui::text::LayoutJob;
use eframe::egui::{
    ComboBox, Galley, Label, RichText, ScrollArea, Slider, TextBuffer, TextEdit, TextStyle, TextWrapMode, Ui,
};
use eframe::egui_wgpu::RenderState;
use wgpu_attention::mask::ScoreMod;
use wgpu_attention::{Error, Gpu};

use crate::choices::{MASKS, SCORES, Sizes};
use crate::heat::Map;
use crate::masked::{Functions, Masked, Score};
use crate::picture::Picture;
use crate::plot::Plot;

/// The time without a change after which typed text is compiled. The library keeps each text.
const PAUSE: Duration = Duration::from_millis(400);

const EXAMPLE: &str = "\
// A wave over distances, wider for each head.
fn score_mod(score: f32, at: At) -> f32 {
    let far = f32(abs(at.position - i32(at.key)));
    let width = f32(at.head + 2u);
    return score + 3.0 * cos(far / width);
}
";

/// The chosen score function: a number is one of [`SCORES`].
#[derive(Clone, Copy, PartialEq, Eq)]
enum Chosen {
    None,
    Preset(usize),
    Typed,
}

pub struct MasksTab {
    gpu: Gpu,
    picture: Picture,
    sizes: Sizes,
    head: usize,
    /// One of [`MASKS`].
    mask: Option<usize>,
    score: Chosen,
    text: String,
    /// The time of the last change of the text, until it is compiled.
    edited: Option<Instant>,
    /// True if sizes or functions changed.
    is_stale: bool,
    /// True if the last time includes the compilation of kernels.
    is_cold: bool,
    error: Option<String>,
    ready: Option<(Masked, Functions)>,
}

impl MasksTab {
    pub fn new(gpu: &Gpu, window: &RenderState) -> Result<Self, Error> {
        Ok(MasksTab {
            picture: Picture::new(gpu, window)?,
            gpu: gpu.clone(),
            sizes: Sizes { q_len: 64, kv_len: 64, heads: 4, head_dim: 32 },
            head: 0,
            mask: Some(0),
            score: Chosen::None,
            text: EXAMPLE.to_owned(),
            edited: None,
            is_stale: true,
            is_cold: false,
            error: None,
            ready: None,
        })
    }

    /// Chooses the mask or the score function of this name.
    pub fn choose(&mut self, name: &str) {
        if let Some(n) = MASKS.iter().position(|choice| choice.name == name) {
            self.mask = Some(n);
        } else {
            self.score =
                SCORES.iter().position(|choice| choice.name == name).map_or(Chosen::None, Chosen::Preset);
        }
    }

    /// Chooses a text as the score function.
    pub fn type_text(&mut self, text: String) {
        (self.text, self.score) = (text, Chosen::Typed);
    }

    pub fn picture(&self) -> &Picture {
        &self.picture
    }

    /// True if everything is computed and drawn.
    pub fn is_settled(&self) -> bool {
        !self.is_stale && !self.is_cold && self.edited.is_none() && !self.picture.meter.is_pending()
    }

    /// Computes the weights after a change, and again to time them without compilation. Computes
    /// them in every frame if `always`.
    pub fn update(&mut self, always: bool) {
        self.picture.meter.poll();
        if self.edited.is_some_and(|at| at.elapsed() > PAUSE) {
            (self.edited, self.is_stale) = (None, true);
        }
        if self.picture.meter.is_pending() || !(self.is_stale || self.is_cold || always) {
            return;
        }
        if self.is_stale {
            self.error = self.prepare().err().map(|e| e.to_string());
        }
        if self.error.is_none() {
            self.error = self.run().err().map(|e| e.to_string());
        }
        (self.is_cold, self.is_stale) = (self.is_stale && self.error.is_none(), false);
    }

    /// Makes the tensors and functions. After an error the old ones stay.
    fn prepare(&mut self) -> Result<(), Error> {
        let mask = self.mask.map(|n| (MASKS[n].make)(self.sizes)).transpose()?;
        let score = match self.score {
            Chosen::None => Score::None,
            Chosen::Preset(n) => Score::Preset((SCORES[n].make)(self.sizes)?, ()),
            Chosen::Typed => Score::Typed(ScoreMod::new(&self.text)?),
        };
        let functions = Functions::new(&self.gpu, mask, score)?;
        let masked = match self.ready.take_if(|(masked, _)| masked.sizes() == self.sizes) {
            Some((masked, _)) => masked,
            None => Masked::new(&self.gpu, self.sizes)?,
        };
        self.ready = Some((masked, functions));
        Ok(())
    }

    fn run(&mut self) -> Result<(), Error> {
        let Some((masked, functions)) = &mut self.ready else { return Ok(()) };
        let started = Instant::now();
        let mut encoder = self.gpu.device().create_command_encoder(&Default::default());
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
            label: Some("attention"),
            timestamp_writes: self.picture.meter.timestamps(),
        });
        masked.record(&mut pass, functions)?;
        drop(pass);
        let Sizes { q_len, kv_len, .. } = masked.sizes();
        let map = Map::new(self.head, [q_len, kv_len]);
        self.picture.submit(encoder, (&masked.weights, map), Some(started));
        Ok(())
    }

    /// Shows the choices and the text.
    pub fn controls(&mut self, ui: &mut Ui) {
        self.combo_boxes(ui);
        ui.separator();
        let Sizes { q_len, kv_len, heads, head_dim } = &mut self.sizes;
        let mut changed = false;
        for (size, range, name) in [
            (q_len, 1..=512, "q_len"),
            (kv_len, 1..=512, "kv_len"),
            (&mut *heads, 1..=16, "heads"),
            (head_dim, 1..=128, "head_dim"),
        ] {
            changed |= ui.add(Slider::new(size, range).text(name)).changed();
        }
        self.head = self.head.min(*heads - 1);
        changed |= ui.add(Slider::new(&mut self.head, 0..=*heads - 1).text("head in the picture")).changed();
        self.is_stale |= changed;
        ui.separator();
        self.text_box(ui);
    }

    fn combo_boxes(&mut self, ui: &mut Ui) {
        let name = self.mask.map_or("none", |n| MASKS[n].name);
        let mut changed = false;
        ComboBox::from_label("mask").selected_text(name).width(180.0).height(400.0).show_ui(ui, |ui| {
            changed |= ui.selectable_value(&mut self.mask, None, "none").changed();
            for (n, choice) in MASKS.iter().enumerate() {
                changed |= ui.selectable_value(&mut self.mask, Some(n), choice.name).changed();
            }
        });
        let name = match self.score {
            Chosen::None => "none",
            Chosen::Preset(n) => SCORES[n].name,
            Chosen::Typed => "typed",
        };
        ComboBox::from_label("score function").selected_text(name).width(180.0).height(400.0).show_ui(
            ui,
            |ui| {
                changed |= ui.selectable_value(&mut self.score, Chosen::None, "none").changed();
                changed |= ui.selectable_value(&mut self.score, Chosen::Typed, "typed").changed();
                for (n, choice) in SCORES.iter().enumerate() {
                    changed |= ui.selectable_value(&mut self.score, Chosen::Preset(n), choice.name).changed();
                }
            },
        );
        self.is_stale |= changed;
    }

    fn text_box(&mut self, ui: &mut Ui) {
        ui.label("score_mod in WGSL (typing selects \"typed\")");
        ScrollArea::both().id_salt("text").max_height(240.0).show(ui, |ui| {
            let mut layouter = unwrapped;
            let text_box = TextEdit::multiline(&mut self.text).code_editor().desired_rows(8);
            let text_box = text_box.desired_width(f32::INFINITY).layouter(&mut layouter);
            if ui.add(text_box).changed() {
                self.score = Chosen::Typed;
                self.edited = Some(Instant::now());
            }
        });
        let Some(error) = &self.error else { return };
        ui.add_space(6.0);
        let text = |text| RichText::new(text).monospace().color(ui.visuals().error_fg_color);
        let (message, lines) = error.split_once('\n').unwrap_or((error, ""));
        let [message, lines] = [message, lines].map(text);
        ScrollArea::both().id_salt("error").auto_shrink(false).show(ui, |ui| {
            ui.label(message);
            // Carets stand below their text only in lines that are not wrapped.
            ui.add(Label::new(lines).wrap_mode(TextWrapMode::Extend));
            if self.picture.texture().is_some() {
                ui.label("The picture shows the weights before this error.");
            }
        });
    }

    /// Shows the picture. After an error it is the one before.
    pub fn show(&self, ui: &mut Ui) {
        let Some((texture, size)) = self.picture.texture() else { return };
        Plot { texture, size, tokens: None, largest: self.picture.meter.largest }.show(ui);
    }
}

/// Lays out text in lines that are not wrapped, so that they are the lines that errors name.
fn unwrapped(ui: &Ui, text: &dyn TextBuffer, _wrap_width: f32) -> Arc<Galley> {
    let font = TextStyle::Monospace.resolve(ui.style());
    let job = LayoutJob::simple(text.as_str().to_owned(), font, ui.visuals().text_color(), f32::INFINITY);
    ui.fonts_mut(|fonts| fonts.layout_job(job))
}
