//! Writes a picture of the window and closes it.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};

use eframe::egui::{ColorImage, Context, ViewportCommand};

/// The frames to show before the picture, so that egui knows the sizes of its widgets.
const FRAMES: u32 = 10;

/// The result of a screenshot, for `main`.
pub type Outcome = Arc<Mutex<Option<Result<(), String>>>>;

pub struct Screenshot {
    path: PathBuf,
    frames: u32,
    image: Option<Receiver<Arc<ColorImage>>>,
    outcome: Outcome,
}

impl Screenshot {
    pub fn new(path: PathBuf, outcome: Outcome) -> Self {
        Screenshot { path, frames: 0, image: None, outcome }
    }

    /// Does the next step. Call it once a frame. It waits until `is_settled` is true.
    pub fn advance(&mut self, context: &Context, is_settled: bool) {
        context.request_repaint();
        self.frames += u32::from(is_settled);
        let Some(image) = &self.image else {
            if self.frames > FRAMES {
                let (send, receive) = channel();
                self.image = Some(receive);
                // The receiver is gone if the window closed.
                context.request_screenshot(move |image| drop(send.send(image)));
            }
            return;
        };
        if let Ok(image) = image.try_recv() {
            let written = save(&self.path, &image).map_err(|e| format!("{}: {e}", self.path.display()));
            if let Ok(mut outcome) = self.outcome.lock() {
                *outcome = Some(written);
            }
            context.send_viewport_cmd(ViewportCommand::Close);
        }
    }
}

fn save(path: &Path, image: &ColorImage) -> Result<(), Box<dyn Error>> {
    let mut bytes = Vec::new();
    let [width, height] = image.size.map(|n| n as u32);
    let mut encoder = png::Encoder::new(&mut bytes, width, height);
    encoder.set_color(png::ColorType::Rgb);
    let pixels: Vec<u8> = image.pixels.iter().flat_map(|pixel| [pixel.r(), pixel.g(), pixel.b()]).collect();
    encoder.write_header()?.write_image_data(&pixels)?;
    Ok(std::fs::write(path, bytes)?)
}
