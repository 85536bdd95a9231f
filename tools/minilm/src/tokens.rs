//! Sentences as tokens.

use std::error::Error;

use tokenizers::TruncationParams;

/// The tokenizer of `tokenizer.json`, without its padding and length.
pub struct Tokenizer(tokenizers::Tokenizer);

/// One sentence with `[CLS]` and `[SEP]`, without padding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tokens {
    pub ids: Vec<u32>,
    pub texts: Vec<String>,
}

impl Tokenizer {
    pub fn new(file: &[u8]) -> Result<Self, Box<dyn Error>> {
        let mut tokenizer = tokenizers::Tokenizer::from_bytes(file)
            .map_err(|e| format!("tokenizer.json is unusable: {e}"))?;
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|e| e.to_string())?;
        Ok(Tokenizer(tokenizer))
    }

    /// Truncates sentences to `longest` tokens, with `[CLS]` and `[SEP]`.
    pub fn truncated(mut self, longest: usize) -> Result<Self, Box<dyn Error>> {
        let truncation = TruncationParams { max_length: longest, ..Default::default() };
        self.0.with_truncation(Some(truncation)).map_err(|e| e.to_string())?;
        Ok(self)
    }

    pub fn tokens<S: AsRef<str> + Sync>(&self, sentences: &[S]) -> Result<Vec<Tokens>, Box<dyn Error>> {
        let texts: Vec<&str> = sentences.iter().map(AsRef::as_ref).collect();
        let encoded = self.0.encode_batch(texts, true).map_err(|e| format!("tokenizer: {e}"))?;
        if let Some(at) = encoded.iter().position(|e| e.get_ids().is_empty()) {
            return Err(format!(
                "tokenizer: no tokens for \"{}\": is tokenizer.json this model's?",
                sentences[at].as_ref()
            )
            .into());
        }
        Ok(encoded
            .into_iter()
            .map(|e| Tokens { ids: e.get_ids().to_vec(), texts: e.get_tokens().to_vec() })
            .collect())
    }
}
