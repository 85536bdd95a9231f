//! A batch of sentences for the layer, padded to the longest.

use minilm::Tokens;

/// Sentences of tokens, padded to the longest.
pub struct Batch {
    pub sentences: usize,
    pub length: usize,
    /// `[sentences, length]`: true for a token, false for padding.
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

    /// Every token's row in the embedding table, `[sentences, length]`. Padding has the row of
    /// `[PAD]`.
    pub fn words(&self) -> Vec<u32> {
        let padded =
            |t: &Tokens| t.ids.iter().copied().chain(std::iter::repeat(0)).take(self.length).collect();
        self.tokens.iter().flat_map::<Vec<u32>, _>(padded).collect()
    }

    /// Every token's position in its sentence, `[sentences, length]`.
    pub fn positions(&self) -> Vec<u32> {
        (0..self.sentences).flat_map(|_| 0..self.length as u32).collect()
    }

    /// Drops the rows of padding from `[sentences, groups, length, ..]`.
    pub fn real_rows<T: Copy>(&self, x: &[T], groups: usize) -> Vec<T> {
        let row = x.len() / (self.sentences * groups * self.length);
        let is_real = |n: usize| self.real[n / (groups * self.length) * self.length + n % self.length];
        x.chunks_exact(row).enumerate().filter(|(n, _)| is_real(*n)).flat_map(|(_, x)| x).copied().collect()
    }
}
