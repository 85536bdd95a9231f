//! A map of weights in the window: its texture, and the time of its attention.

use std::time::Instant;

use eframe::egui::TextureId;
use eframe::egui_wgpu::RenderState;
use wgpu_attention::{Error, Gpu};

use crate::heat::{Heat, Map};
use crate::meter::Meter;

pub struct Picture {
    pub meter: Meter,
    heat: Heat,
    window: RenderState,
    texture: Option<TextureId>,
    map: Map,
}

impl Picture {
    pub fn new(gpu: &Gpu, window: &RenderState) -> Result<Self, Error> {
        Ok(Picture {
            meter: Meter::new(gpu),
            heat: Heat::new(gpu)?,
            window: window.clone(),
            texture: None,
            map: Map::default(),
        })
    }

    /// Submits `encoder`, then draws a map of `weights`. egui shows the texture in this frame.
    /// `started` is the instant before the attention was recorded, if it ran.
    pub fn submit(
        &mut self,
        mut encoder: wgpu::CommandEncoder,
        (weights, map): (&wgpu::Buffer, Map),
        started: Option<Instant>,
    ) {
        let is_new = self.heat.record(&mut encoder, weights, map);
        self.meter.submit(encoder, &self.heat.largest, started);
        self.map = map;
        if !is_new && self.texture.is_some() {
            return;
        }
        let view = self.heat.texture.create_view(&Default::default());
        let (device, filter) = (&self.window.device, wgpu::FilterMode::Nearest);
        let mut renderer = self.window.renderer.write();
        match self.texture {
            Some(id) => renderer.update_egui_texture_from_wgpu_texture(device, &view, filter, id),
            None => self.texture = Some(renderer.register_native_texture(device, &view, filter)),
        }
    }

    /// The texture, and its queries and keys.
    pub fn texture(&self) -> Option<(TextureId, [usize; 2])> {
        Some((self.texture?, [self.map.rows as usize, self.map.columns as usize]))
    }
}
