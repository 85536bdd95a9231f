//! The parameters of FlashAttention's tests.

use wgpu_attention::Gpu;

use crate::case::Case;
use crate::outcome::Ran;
use crate::{cached, dense};

pub fn run(gpu: &Gpu, case: &Case) -> Ran {
    if case.inputs.contains_key("k_cache") { cached::step(gpu, case) } else { dense::attend(gpu, case) }
}
