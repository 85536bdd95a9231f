//! The window: two tabs, and the times of a frame and of attention.

use std::error::Error;
use std::time::Duration;

use eframe::egui::{CentralPanel, Color32, Context, Panel, RichText, ScrollArea, Theme, Ui};
use wgpu_attention::{Gpu, Pipelines};

use crate::arguments::{Arguments, Tab};
use crate::masks_tab::MasksTab;
use crate::minilm_tab::MinilmTab;
use crate::picture::Picture;
use crate::screenshot::{Outcome, Screenshot};

/// The time from frame to frame while the device works.
const POLL: Duration = Duration::from_millis(8);

pub struct App {
    tab: Tab,
    masks: MasksTab,
    minilm: MinilmTab,
    /// True if attention runs in every frame.
    always: bool,
    adapter: String,
    screenshot: Option<Screenshot>,
}

impl App {
    /// Makes the operators on the device of the window.
    pub fn new(
        context: &eframe::CreationContext<'_>,
        arguments: Arguments,
        outcome: Outcome,
    ) -> Result<Self, Box<dyn Error + Send + Sync>> {
        let window = context.wgpu_render_state.as_ref().ok_or("eframe made no wgpu device")?;
        let pipelines = Pipelines::with_adapter(&window.device, &window.adapter);
        let gpu = Gpu::with_pipelines(window.queue.clone(), pipelines);
        set_style(&context.egui_ctx);
        let mut masks = MasksTab::new(&gpu, window)?;
        arguments.presets.iter().for_each(|name| masks.choose(name));
        if let Some(text) = arguments.score_mod {
            masks.type_text(text);
        }
        let mut minilm = MinilmTab::new(&gpu, window)?;
        minilm.set(arguments.sentence, [arguments.layer, arguments.head]);
        let info = window.adapter.get_info();
        Ok(App {
            tab: arguments.tab,
            masks,
            minilm,
            always: false,
            adapter: format!("{} ({})", info.name, info.backend),
            screenshot: arguments.screenshot.map(|path| Screenshot::new(path, outcome)),
        })
    }

    /// Computes what the tab shows, and plans the next frame.
    fn update(&mut self, context: &Context) {
        let is_settled = match self.tab {
            Tab::Masks => {
                self.masks.update(self.always);
                self.masks.is_settled()
            }
            Tab::Minilm => {
                self.minilm.update(context, self.always);
                self.minilm.is_settled()
            }
        };
        match &mut self.screenshot {
            Some(screenshot) => screenshot.advance(context, is_settled),
            None if self.always => context.request_repaint(),
            None if !is_settled => context.request_repaint_after(POLL),
            None => (),
        }
    }

    fn picture(&self) -> &Picture {
        match self.tab {
            Tab::Masks => self.masks.picture(),
            Tab::Minilm => self.minilm.picture(),
        }
    }

    fn status(&mut self, ui: &mut Ui, frame: &eframe::Frame) {
        let meter = &self.picture().meter;
        let work = match self.tab {
            Tab::Masks => "attention",
            Tab::Minilm => "six layers",
        };
        let clock = if meter.has_timestamps() { "GPU timestamps" } else { "host, until the next frame" };
        let attention = milliseconds(meter.attention.map(|time| time.as_secs_f32()));
        let host = milliseconds(frame.info().cpu_usage);
        ui.horizontal_wrapped(|ui| {
            ui.label(RichText::new(format!("frame {host}")).monospace())
                .on_hover_text("Host time of the last frame");
            ui.separator();
            ui.label(RichText::new(format!("{work} {attention}")).monospace());
            ui.label(format!("({clock})"));
            ui.separator();
            ui.checkbox(&mut self.always, "compute in every frame");
            if self.always {
                let interval = milliseconds(Some(ui.input(|input| input.stable_dt)));
                ui.label(RichText::new(format!("frame to frame {interval}")).monospace());
            }
            ui.separator();
            ui.label(&self.adapter);
        });
    }
}

impl eframe::App for App {
    fn ui(&mut self, ui: &mut Ui, frame: &mut eframe::Frame) {
        self.update(ui.ctx());
        Panel::top("tabs").show(ui, |ui| {
            ui.horizontal(|ui| {
                ui.selectable_value(&mut self.tab, Tab::Masks, RichText::new("masks and scores").heading());
                ui.selectable_value(&mut self.tab, Tab::Minilm, RichText::new("MiniLM").heading());
            });
        });
        Panel::bottom("times").show(ui, |ui| self.status(ui, frame));
        Panel::left("controls").default_size(430.0).min_size(300.0).show(ui, |ui| {
            ui.add_space(6.0);
            match self.tab {
                Tab::Masks => self.masks.controls(ui),
                Tab::Minilm => {
                    ScrollArea::vertical().auto_shrink(false).show(ui, |ui| self.minilm.controls(ui));
                }
            }
        });
        CentralPanel::default().show(ui, |ui| match self.tab {
            Tab::Masks => self.masks.show(ui),
            Tab::Minilm => self.minilm.show(ui),
        });
    }
}

/// Light, because weights of 0 are. With larger and darker text than egui's.
fn set_style(context: &Context) {
    context.set_theme(Theme::Light);
    context.set_zoom_factor(1.1);
    context.all_styles_mut(|style| {
        style.visuals.override_text_color = Some(Color32::from_gray(30));
        style.visuals.error_fg_color = Color32::from_rgb(190, 30, 30);
        style.spacing.slider_width = 180.0;
    });
}

fn milliseconds(seconds: Option<f32>) -> String {
    seconds.map_or("  ... ms".to_owned(), |seconds| format!("{:>5.2} ms", 1e3 * seconds))
}
