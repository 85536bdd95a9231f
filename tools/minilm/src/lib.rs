//! The model all-MiniLM-L6-v2 for the examples: its files, its tokens, and all of its layers on the
//! GPU.

mod embeddings;
#[cfg(not(target_arch = "wasm32"))]
mod files;
mod model;
mod tokens;

pub use embeddings::{Embeddings, NormBuffers};
#[cfg(not(target_arch = "wasm32"))]
pub use files::Files;
pub use model::{LONGEST, Maps, Model, cosine};
pub use tokens::{Tokenizer, Tokens};

pub const LAYERS: usize = 6;
pub const HEADS: usize = 12;
pub const WIDTH: usize = 384;
/// Width of the feed-forward layers.
pub const HIDDEN: usize = 1536;
/// The number of positions with an embedding.
pub const POSITIONS: usize = 512;
/// The number that its LayerNorms add to the variance.
pub const EPSILON: f64 = 1e-12;

/// The sentences of the stored test vectors.
pub const SENTENCES: [&str; 6] = [
    "A cat sits on the mat.",
    "The kitten is resting on a rug.",
    "Attention weights the values by how well each key matches the query.",
    "Compute shaders run on the graphics processor, one workgroup at a time.",
    "It rained all day in the valley.",
    "Yes",
];
