//! What comes before the first layer, on the CPU in f64: rows of tables, LayerNorm.

use std::error::Error;
use std::sync::Arc;

use wgpu_attention_models::{Safetensors, TensorData};

use crate::{EPSILON, POSITIONS, WIDTH};

/// LayerNorm over rows of [`WIDTH`].
pub struct Norm {
    weight: Vec<f32>,
    bias: Vec<f32>,
}

impl Norm {
    /// The norm `name` of the file.
    pub fn new(weights: &Safetensors, name: &str) -> Result<Self, Box<dyn Error>> {
        let vector = |part: &str| -> Result<Vec<f32>, Box<dyn Error>> {
            Ok(weights.tensor(&format!("{name}.{part}"))?.expect_shape(&[WIDTH])?.to_f32())
        };
        Ok(Norm { weight: vector("weight")?, bias: vector("bias")? })
    }

    pub fn rows(&self, x: &[f64]) -> Vec<f32> {
        let mut y = Vec::with_capacity(x.len());
        for row in x.chunks_exact(WIDTH) {
            let mean = row.iter().sum::<f64>() / WIDTH as f64;
            let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / WIDTH as f64;
            let factor = 1.0 / (variance + EPSILON).sqrt();
            let scaled = row.iter().zip(self.weight.iter().zip(&self.bias));
            y.extend(scaled.map(|(x, (w, b))| ((x - mean) * factor * f64::from(*w) + f64::from(*b)) as f32));
        }
        y
    }
}

/// Word + position + token type 0, normalised.
pub struct Embeddings {
    weights: Arc<Safetensors>,
    /// Position + token type 0, which every sentence needs.
    places: Vec<f64>,
    norm: Norm,
}

impl Embeddings {
    /// The tables of the file, of which only rows that are used are read.
    pub fn new(weights: &Arc<Safetensors>) -> Result<Self, Box<dyn Error>> {
        let table = |kind: &str| table(weights, kind);
        let words = table("word")?;
        words.expect_shape(&[words.shape().first().copied().unwrap_or(0), WIDTH])?;
        let positions = table("position")?.expect_shape(&[POSITIONS, WIDTH])?.to_f32();
        let kind = table("token_type")?.expect_shape(&[2, WIDTH])?.at(0)?.to_f32();
        let kind = kind.iter().copied().cycle();
        let places = positions.iter().zip(kind).map(|(p, t)| f64::from(*p) + f64::from(t)).collect();
        Ok(Embeddings { weights: weights.clone(), places, norm: Norm::new(weights, "embeddings.LayerNorm")? })
    }

    /// The first layer's input, `[ids.len(), WIDTH]`, of one sentence of at most [`POSITIONS`] tokens.
    pub fn rows(&self, ids: &[u32]) -> Result<Vec<f32>, Box<dyn Error>> {
        if ids.len() > POSITIONS {
            return Err(format!("a sentence has {} tokens, the model reads {POSITIONS}", ids.len()).into());
        }
        let words = table(&self.weights, "word")?;
        let mut sum = Vec::with_capacity(ids.len() * WIDTH);
        for (id, place) in ids.iter().zip(self.places.chunks_exact(WIDTH)) {
            let word = words.at(*id as usize)?.to_f32();
            sum.extend(word.iter().zip(place).map(|(w, p)| f64::from(*w) + p));
        }
        Ok(self.norm.rows(&sum))
    }
}

fn table<'a>(weights: &'a Safetensors, kind: &str) -> Result<TensorData<'a>, wgpu_attention_models::Error> {
    weights.tensor(&format!("embeddings.{kind}_embeddings.weight"))
}
