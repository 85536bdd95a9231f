//! The functions that the page calls.

use std::error::Error;

use minilm::{HEADS, LAYERS, LONGEST, Maps, Model, Tokenizer, Tokens, WIDTH, cosine};
use wasm_bindgen::JsError;
use wasm_bindgen::prelude::wasm_bindgen;
use wgpu_attention::Gpu;
use wgpu_attention_models::Safetensors;

#[wasm_bindgen]
extern "C" {
    /// Tells the page that the program panicked and cannot be used any more.
    #[wasm_bindgen(js_name = panicked)]
    fn panicked(message: &str);
    /// Tells the page that the device is lost.
    #[wasm_bindgen(js_name = deviceLost)]
    fn device_lost(message: &str);
}

/// The model in a device's memory.
#[wasm_bindgen]
pub struct Loaded {
    gpu: Gpu,
    model: Model,
    tokenizer: Tokenizer,
}

/// The model's results for a sentence.
#[wasm_bindgen]
pub struct Sentence {
    tokens: Vec<String>,
    maps: Maps,
}

fn error(e: Box<dyn Error>) -> JsError {
    JsError::new(&e.to_string())
}

/// Loads the model from two files' bytes. Errors use `name` for the weights' file.
#[wasm_bindgen]
pub async fn load(name: String, weights: Vec<u8>, tokenizer: Vec<u8>) -> Result<Loaded, JsError> {
    std::panic::set_hook(Box::new(|info| panicked(&info.to_string())));
    // Check the files before requesting a device.
    let tokenizer = Tokenizer::new(&tokenizer).and_then(|t| t.truncated(LONGEST)).map_err(error)?;
    let weights = Safetensors::from_bytes(name, weights)?;
    let gpu = Gpu::new_async().await?;
    gpu.device().set_device_lost_callback(|reason, message| {
        if reason != wgpu::DeviceLostReason::Destroyed {
            device_lost(&message);
        }
    });
    let model = Model::with_room(&gpu, &weights, LONGEST).map_err(error)?;
    Ok(Loaded { gpu, model, tokenizer })
}

#[wasm_bindgen]
impl Loaded {
    /// Runs the model on the first 256 tokens of one sentence.
    pub async fn run(&mut self, sentence: String) -> Result<Sentence, JsError> {
        let tokens = self.tokenizer.tokens(&[sentence]).map_err(error)?.remove(0);
        let maps = self.model.maps_async(&tokens).await.map_err(error)?;
        let Tokens { texts, .. } = tokens;
        Ok(Sentence { tokens: texts, maps })
    }

    /// Frees the device's memory.
    pub fn unload(self) {
        self.gpu.device().destroy();
    }
}

#[wasm_bindgen]
impl Sentence {
    #[wasm_bindgen(getter)]
    pub fn tokens(&self) -> Vec<String> {
        self.tokens.clone()
    }

    /// The attention weights of n tokens, `[layers, heads, n, n]`: queries as rows, keys as
    /// columns.
    #[wasm_bindgen(getter)]
    pub fn weights(&self) -> Vec<f32> {
        self.maps.weights.clone()
    }

    /// The sentence's unit vector.
    #[wasm_bindgen(getter)]
    pub fn vector(&self) -> Vec<f32> {
        self.maps.vector.clone()
    }
}

/// The numbers of layers and heads, and the longest sentence in tokens.
#[wasm_bindgen]
pub fn sizes() -> Vec<usize> {
    vec![LAYERS, HEADS, LONGEST]
}

/// The cosines between n contiguous unit vectors, `[n, n]`.
#[wasm_bindgen]
pub fn similarity(vectors: Vec<f32>) -> Vec<f64> {
    let rows = || vectors.chunks_exact(WIDTH);
    rows().flat_map(|a| rows().map(move |b| cosine(a, b))).collect()
}
