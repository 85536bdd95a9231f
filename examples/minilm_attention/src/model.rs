//! Sentences as the layer takes them here: padded to the longest.

use std::error::Error;

use minilm::{Embeddings, Tokens, WIDTH};

/// Sentences of tokens, padded to the longest.
pub struct Batch {
    pub sentences: usize,
    pub length: usize,
    /// `[sentences, length]`: a token of the sentence, not padding.
    pub real: Vec<bool>,
    /// The tokens of each sentence, without padding.
    pub tokens: Vec<Tokens>,
}

impl Batch {
    pub fn new(tokens: Vec<Tokens>) -> Self {
        let length = tokens.iter().map(|t| t.ids.len()).max().unwrap_or(0);
        let real = tokens.iter().flat_map(|t| (0..length).map(|n| n < t.ids.len())).collect();
        Batch { sentences: tokens.len(), length, real, tokens }
    }

    /// The layer's input: `[sentences, length, WIDTH]`, zero for padding.
    pub fn rows(&self, embeddings: &Embeddings) -> Result<Vec<f32>, Box<dyn Error>> {
        let mut rows = Vec::with_capacity(self.real.len() * WIDTH);
        for (n, tokens) in self.tokens.iter().enumerate() {
            rows.extend(embeddings.rows(&tokens.ids)?);
            rows.resize((n + 1) * self.length * WIDTH, 0.0);
        }
        Ok(rows)
    }

    /// Drops the rows of padding from `[sentences, groups, length, ..]`.
    pub fn real_rows<T: Copy>(&self, x: &[T], groups: usize) -> Vec<T> {
        let row = x.len() / (self.sentences * groups * self.length);
        let is_real = |n: usize| self.real[n / (groups * self.length) * self.length + n % self.length];
        x.chunks_exact(row).enumerate().filter(|(n, _)| is_real(*n)).flat_map(|(_, x)| x).copied().collect()
    }
}
