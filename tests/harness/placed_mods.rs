//! Custom functions on a device, with their captures.

use wgpu_attention::mask::{DeviceMask, MaskMod, ScoreMod};
use wgpu_attention::{DType, TensorView};

use super::device::Profile;
use super::memory::Values;
use super::mods::{Capture, OwnMask, OwnScore, Text};
use super::run::{Layout, Placed, place_values};

fn place(text: &Text, profile: &Profile, layout: Layout, salt: u64) -> PlacedText {
    let place = |(n, (_, capture)): (usize, &(&'static str, Capture))| {
        let salt = salt + n as u64;
        match capture {
            Capture::Float(t, dtype) => {
                place_values(profile, Values::Floats(&t.data), *dtype, t.shape, layout, salt)
            }
            Capture::Number(t) => {
                place_values(profile, Values::Numbers(&t.data), DType::U32, t.shape, layout, salt)
            }
            Capture::Bool(t) => {
                place_values(profile, Values::Bools(&t.data), DType::Bool, t.shape, layout, salt)
            }
        }
    };
    PlacedText {
        tensors: text.captured.iter().enumerate().map(place).collect(),
        uniforms: text.uniforms.clone(),
    }
}

struct PlacedText {
    tensors: Vec<Placed>,
    uniforms: Vec<u32>,
}

impl PlacedText {
    fn views(&self) -> Vec<TensorView<'_>> {
        self.tensors.iter().map(Placed::view).collect()
    }
}

/// Mods on a device.
pub struct PlacedMods {
    score: Option<(ScoreMod, PlacedText)>,
    pairs: Option<(MaskMod, PlacedText)>,
}

impl PlacedMods {
    pub fn new(profile: &Profile, score: Option<&OwnScore>, pairs: Option<&OwnMask>, layout: Layout) -> Self {
        let score = score.map(|own| {
            let read = ScoreMod::capturing(&own.text.wgsl, &own.text.declared());
            (read.unwrap_or_else(|e| panic!("{e}")), place(&own.text, profile, layout, 100))
        });
        let pairs = pairs.map(|own| {
            let read = MaskMod::capturing(&own.text.wgsl, &own.text.declared());
            (read.unwrap_or_else(|e| panic!("{e}")), place(&own.text, profile, layout, 200))
        });
        PlacedMods { score, pairs }
    }

    pub fn add<'a>(&'a self, mut mask: DeviceMask<'a>) -> DeviceMask<'a> {
        if let Some((own, placed)) = &self.score {
            mask = mask.score_mod(own.with(&placed.views()).uniforms(bytemuck::cast_slice(&placed.uniforms)));
        }
        if let Some((own, placed)) = &self.pairs {
            mask = mask.mask_mod(own.with(&placed.views()).uniforms(bytemuck::cast_slice(&placed.uniforms)));
        }
        mask
    }
}
