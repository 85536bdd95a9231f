//! Stacks of few rows on GPUs, whose products have a separate kernel.

use wgpu_attention::DType;
use wgpu_attention::layers::NormOrder;
use wgpu_attention::rows::NormConfig;
use wgpu_attention::tuning::Target;

use super::data::Stack;
use super::encoder::{Setup, drawn};
use crate::harness::rotary::RotaryData;
use crate::harness::run::Layout;
use crate::harness::{Report, Rng, Rules, defaults, due, full};

/// Returns a causal stack of seven rows, with the norm before each part.
fn stack(n: u64, norm: NormConfig) -> Stack {
    let (stack, _) = drawn(n);
    let head_dim = stack.features / stack.heads;
    let rules = Rules { causal: true, ..Default::default() };
    let rotary = head_dim.is_multiple_of(2).then(|| RotaryData::in_order(head_dim));
    // The gate of a gated layer has no bias.
    let biased = stack.biased || n.is_multiple_of(2);
    let transposed = n % 4 == 1 || n % 4 == 2;
    let stack = Stack { length: 7, order: NormOrder::Pre, norm, rules, rotary, biased, transposed, ..stack };
    Stack::random(&mut Rng::new(n ^ 0xfe37), 1 + n as usize % 3, n.is_multiple_of(2), stack)
}

#[test]
fn few_rows_equal_the_reference() {
    let mut report = Report::new("stacks of few rows");
    for n in 0..12 {
        if ![0, 2, 3].contains(&n) && !due(&format!("stacks of few rows {n}")) {
            continue;
        }
        let norm = if n % 5 < 2 { NormConfig::layer() } else { NormConfig::rms() };
        let stack = stack(n, norm);
        let dtypes = match n % 4 {
            2 => [DType::F16; 2],
            3 => [DType::BF16, DType::F32],
            _ => [DType::F32, [DType::F32, DType::F16][n as usize % 2]],
        };
        let layout = if n % 3 == 0 { Layout::Dense } else { Layout::Window(n) };
        let profile = if n == 4 { defaults() } else { full() };
        let setup = Setup { profile, form: Target::Gpu, dtypes, layout };
        for steps in [None, Some([3, 1, 1, 2].as_slice())] {
            let judged = stack.outcome(&setup, steps, n % 4 < 2);
            report.record(&format!("stack {n} in {steps:?}"), &setup, judged);
        }
    }
    report.finish();
}
