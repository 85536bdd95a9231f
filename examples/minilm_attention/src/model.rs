//! What comes before and after attention in a BERT layer: tokens, embeddings, LayerNorm. On the CPU.

use std::error::Error;

use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use tokenizers::{PaddingParams, Tokenizer};

pub const HEADS: usize = 12;
pub const WIDTH: usize = 384;
const POSITIONS: usize = 512;
const EPSILON: f64 = 1e-12;

/// Sentences as tokens, padded to the longest.
pub struct Batch {
    pub sentences: usize,
    pub length: usize,
    /// `[sentences, length]`
    pub ids: Vec<u32>,
    /// `[sentences, length]`: a token of the sentence, not padding.
    pub real: Vec<bool>,
    /// The tokens of each sentence, without padding.
    pub tokens: Vec<Vec<String>>,
}

impl Batch {
    pub fn new(tokenizer: &[u8], sentences: &[String]) -> Result<Self, Box<dyn Error>> {
        let mut tokenizer = Tokenizer::from_bytes(tokenizer).map_err(|e| format!("tokenizer.json: {e}"))?;
        // The file asks for 128 tokens, always.
        tokenizer.with_padding(Some(PaddingParams::default()));
        tokenizer.with_truncation(None).map_err(|e| e.to_string())?;
        let encoded =
            tokenizer.encode_batch(sentences.to_vec(), true).map_err(|e| format!("tokenizer: {e}"))?;
        let length = encoded.first().map_or(0, |e| e.len());
        if length > POSITIONS {
            return Err(format!("a sentence has {length} tokens, the model reads {POSITIONS}").into());
        }
        let real: Vec<_> = encoded.iter().flat_map(|e| e.get_attention_mask()).map(|m| *m == 1).collect();
        let tokens = encoded
            .iter()
            .zip(real.chunks(length))
            .map(|(e, real)| e.get_tokens().iter().zip(real).filter(|(_, r)| **r).map(|(t, _)| t.clone()))
            .map(Iterator::collect)
            .collect();
        let ids = encoded.iter().flat_map(|e| e.get_ids()).copied().collect();
        Ok(Batch { sentences: sentences.len(), length, ids, real, tokens })
    }

    /// Drops the rows of padding from `[sentences, groups, length, ..]`.
    pub fn real_rows<T: Copy>(&self, x: &[T], groups: usize) -> Vec<T> {
        let row = x.len() / (self.sentences * groups * self.length);
        let is_real = |n: usize| self.real[n / (groups * self.length) * self.length + n % self.length];
        x.chunks_exact(row).enumerate().filter(|(n, _)| is_real(*n)).flat_map(|(_, x)| x).copied().collect()
    }
}

/// Word + position + token type 0, normalised: `[sentences, length, WIDTH]`.
pub fn embed(tensors: &SafeTensors, batch: &Batch) -> Result<Vec<f32>, Box<dyn Error>> {
    let table = |kind: &str| tensors.tensor(&format!("embeddings.{kind}_embeddings.weight"));
    let (words, positions, types) = (table("word")?, table("position")?, table("token_type")?);
    // Only the rows that are used are read from the file.
    let row = |table: &TensorView, n: usize| floats(&table.data()[n * WIDTH * 4..][..WIDTH * 4]);
    let mut sum = Vec::with_capacity(batch.ids.len() * WIDTH);
    for (n, id) in batch.ids.iter().enumerate() {
        let (word, position) = (row(&words, *id as usize), row(&positions, n % batch.length));
        let parts = word.iter().zip(&position).zip(row(&types, 0));
        sum.extend(parts.map(|((w, p), t)| f64::from(*w) + f64::from(*p) + f64::from(t)));
    }
    layer_norm(tensors, "embeddings.LayerNorm", &sum)
}

/// LayerNorm over rows of [`WIDTH`].
pub fn layer_norm(tensors: &SafeTensors, name: &str, x: &[f64]) -> Result<Vec<f32>, Box<dyn Error>> {
    let weight = floats(tensors.tensor(&format!("{name}.weight"))?.data());
    let bias = floats(tensors.tensor(&format!("{name}.bias"))?.data());
    let mut y = Vec::with_capacity(x.len());
    for row in x.chunks_exact(WIDTH) {
        let mean = row.iter().sum::<f64>() / WIDTH as f64;
        let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / WIDTH as f64;
        let factor = 1.0 / (variance + EPSILON).sqrt();
        let scaled = row.iter().zip(weight.iter().zip(&bias));
        y.extend(scaled.map(|(x, (w, b))| ((x - mean) * factor * f64::from(*w) + f64::from(*b)) as f32));
    }
    Ok(y)
}

/// The elements of an F32 tensor, which need not be aligned in the file.
pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|four| f32::from_le_bytes(*four)).collect()
}
