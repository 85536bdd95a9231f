//! The operators, in the same folders as in `src`.

pub mod additive;
pub mod attention;
pub mod cache;
pub mod layers;
pub mod linear_attention;
pub mod linformer;
pub mod local;
pub mod lsh;
pub mod mask;
pub mod matmul;
pub mod position;
pub mod recurrent;
pub mod rows;
pub mod selected;
