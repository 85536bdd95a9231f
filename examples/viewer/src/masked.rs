//! Attention among pseudorandom vectors, with a mask and a score function.

use wgpu_attention::mask::{DeviceMask, ScoreMod};
use wgpu_attention::presets::{MaskPreset, ScorePreset};
use wgpu_attention::{Attention, Config, DType, Error, Forward, Gpu, Mask, Scratch, ScratchSize, TensorView};

use crate::choices::Sizes;

/// The mask and the score function of a call, with their tables on the device.
pub struct Functions {
    mask: Option<(MaskPreset, Vec<wgpu::Buffer>)>,
    score: Score<Vec<wgpu::Buffer>>,
}

/// A score function. `T` holds the buffers of a preset's tables.
pub enum Score<T = ()> {
    None,
    Preset(ScorePreset, T),
    Typed(ScoreMod),
}

impl Functions {
    /// Uploads the tables.
    pub fn new(gpu: &Gpu, mask: Option<MaskPreset>, score: Score) -> Result<Self, Error> {
        let mask = match mask {
            Some(mask) => Some((mask.clone(), gpu.upload_tables(mask.tables())?)),
            None => None,
        };
        let score = match score {
            Score::None => Score::None,
            Score::Preset(score, ()) => {
                let tables = gpu.upload_tables(score.tables())?;
                Score::Preset(score, tables)
            }
            Score::Typed(score) => Score::Typed(score),
        };
        Ok(Functions { mask, score })
    }

    fn bound(&self) -> DeviceMask<'_> {
        let mut all = Mask::none();
        if let Some((mask, tables)) = &self.mask {
            all = all.mask_mod(mask.bound(tables));
        }
        match &self.score {
            Score::None => all,
            Score::Preset(score, tables) => all.score_mod(score.bound(tables)),
            Score::Typed(score) => all.score_mod(*score),
        }
    }
}

/// Attention of given sizes, with its tensors.
pub struct Masked {
    gpu: Gpu,
    sizes: Sizes,
    attention: Attention,
    scratch: Scratch,
    q: wgpu::Buffer,
    k: wgpu::Buffer,
    v: wgpu::Buffer,
    out: wgpu::Buffer,
    /// `[heads, q_len, kv_len]`.
    pub weights: wgpu::Buffer,
}

impl Masked {
    pub fn new(gpu: &Gpu, sizes: Sizes) -> Result<Self, Error> {
        let Sizes { q_len, kv_len, heads, head_dim } = sizes;
        let config = Config::new(heads, head_dim);
        let [q, k, v] = inputs(sizes);
        Ok(Masked {
            attention: Attention::with_pipelines(gpu.pipelines(), config)?,
            scratch: Scratch::new(gpu.device(), ScratchSize::default())?,
            q: gpu.upload(&q)?,
            k: gpu.upload(&k)?,
            v: gpu.upload(&v)?,
            out: gpu.buffer(heads * q_len * head_dim * size_of::<f32>())?,
            weights: gpu.buffer(heads * q_len * kv_len * size_of::<f32>())?,
            gpu: gpu.clone(),
            sizes,
        })
    }

    pub fn sizes(&self) -> Sizes {
        self.sizes
    }

    /// Records the attention. The first call with new functions compiles kernels.
    pub fn record(&mut self, pass: &mut wgpu::ComputePass, functions: &Functions) -> Result<(), Error> {
        let Sizes { q_len, kv_len, heads, head_dim } = self.sizes;
        let view = |buffer, rows, width| TensorView::new(buffer, DType::F32, [1, heads, rows, width]);
        let [q, out] = [&self.q, &self.out].map(|buffer| view(buffer, q_len, head_dim));
        let [k, v] = [&self.k, &self.v].map(|buffer| view(buffer, kv_len, head_dim));
        let weights = view(&self.weights, q_len, kv_len);
        let call = Forward::new(q, k, v, out).mask(functions.bound()).weights(weights);
        self.scratch.ensure(self.gpu.device(), self.attention.scratch_size(&call)?)?;
        self.attention.forward(pass, &call, &mut self.scratch)
    }
}

/// Pseudorandom queries, keys and values.
pub fn inputs(sizes: Sizes) -> [Vec<f32>; 3] {
    let Sizes { q_len, kv_len, heads, head_dim } = sizes;
    let rows = [q_len, kv_len, kv_len];
    std::array::from_fn(|seed| {
        (0..rows[seed] * heads * head_dim).map(|n| noise(seed as u32 + 1, n as u32)).collect()
    })
}

/// A number from −2 to 2.
fn noise(seed: u32, n: u32) -> f32 {
    // The finalizer of MurmurHash3.
    let mut x = n ^ (seed << 24);
    for factor in [0x85eb_ca6b, 0xc2b2_ae35u32] {
        x = (x ^ (x >> 15)).wrapping_mul(factor);
    }
    (x >> 8) as f32 / (1 << 22) as f32 - 2.0
}
