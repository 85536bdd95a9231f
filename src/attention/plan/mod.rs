//! Plans: tiles, workgroups and splits. They are pure functions of sizes and the device.

mod backward;
mod backward_matrix;
mod candidates;
mod captured_gradients;
mod choice;
mod decode;
mod fused;
mod fused_cpu;
mod gradients_of;
mod matrix;
mod outline;
mod rectangles;
mod score_gradients;

pub(crate) use backward::{BackwardPlan, BackwardTiles};
pub(crate) use backward_matrix::BackwardMatrix;
pub(crate) use candidates::{candidates, product_candidates, with_other_splits};
pub(crate) use captured_gradients::CapturedGradientsPlan;
pub(crate) use choice::{Choice, choose, score_matrix};
pub(crate) use decode::{DecodeCpu, DecodeGpu};
pub(crate) use fused::{FusedPlan, FusedTiles, MOST_SPLITS};
pub(crate) use gradients_of::GradientsOf;
pub(crate) use matrix::FusedMatrix;
pub(crate) use outline::{KeyLayout, Outline, Reach, WeightsOutput};
pub(crate) use rectangles::{Rectangle, Sides, rectangles};
pub(crate) use score_gradients::{Added, ScoreGradientsPlan};
