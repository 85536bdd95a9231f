//! How work is shared out: tiles, workgroups, splits. Pure functions of sizes and the device.

mod backward;
mod backward_matrix;
mod candidates;
mod captured_gradients;
mod choice;
mod decode;
mod fused;
mod fused_cpu;
mod gradients_of;
mod linear;
mod matmul;
mod matrix;
mod outline;
mod pieces;
mod quantized;
mod rectangles;
mod score_gradients;
mod softmax;
mod tuning;

pub(crate) use backward::{BackwardPlan, BackwardTiles};
pub(crate) use backward_matrix::BackwardMatrix;
pub(crate) use candidates::{candidates, product_candidates, with_other_splits};
pub(crate) use captured_gradients::CapturedGradientsPlan;
pub(crate) use choice::{Choice, choose, score_matrix};
pub(crate) use decode::{DecodeCpu, DecodeGpu};
pub(crate) use fused::{FusedPlan, FusedTiles, MOST_SPLITS};
pub(crate) use gradients_of::GradientsOf;
pub(crate) use linear::{HeadBytes, HeadGroup, LinearOutline, LinearPlan, LinearTiles};
pub(crate) use matmul::{
    MatmulShape, MatrixTiles, ProductOutline, Tiles, choose_gradient, choose_product, grid, tiles,
};
pub(crate) use matrix::FusedMatrix;
pub(crate) use outline::{KeyLayout, Outline, Reach, WeightsOutput};
pub(crate) use quantized::{QuantizedTiles, quantized_tiles};
pub(crate) use rectangles::{Rectangle, Sides, rectangles};
pub(crate) use score_gradients::{Added, ScoreGradientsPlan};
pub(crate) use softmax::{Rows, rows, rows_or_parts};
pub use tuning::{KernelForm, MatrixUnits, Path, Tuning};
