//! `scripts/gpu cargo bench -p benches --bench matrix [-- [--length N] [--quick]]`
//!
//! Measures prefill of f16 tensors on matrix units. It compares the time with the same call without
//! them, and with the units' highest rate (see `ceilings`). It prints medians of several runs on
//! the device. Sampled rows are compared with the reference first. On a device without matrix units
//! there is nothing to time.

use common::bed::{Bed, median};
use common::problem::{Case, Problem, Rule, Way};
use common::rows::{append, of_attention, of_share, row};
use common::settings::{argument, quick};
use common::share::{Kind, Share};
use wgpu_attention::{DType, Shape};

/// Times a case, and prints it with its floors.
fn time(bed: &Bed, case: Case, way: Way) -> Share {
    let problem = Problem::new(&bed.gpu, case).expect("room for the problem");
    let mut pass = problem.check(bed, way, problem.scratch(&bed.gpu, way).expect("room for the scratch"));
    let runs = if quick() { 3 } else { 15 };
    let times = (0..runs).map(|_| bed.time(&mut pass).as_secs_f64() * 1e3).collect();
    let kind = if way == Way::Matrix { Kind::Matrix } else { Kind::Plain };
    let share = bed.ceilings().share(kind, case.work(), median(times).expect("a run")).expect("matrix units");
    let row = row(&bed.gpu, "matrix", way.name());
    append(&of_share(of_attention(row, case.shape, &case.rule.name(), case.dtype), &share));
    share
}

fn main() {
    let Some(bed) = Bed::open() else { return };
    println!("fragments: {:?}", bed.fragments);
    if bed.fragments.is_empty() {
        return println!("no matrix units: nothing to time");
    }
    let usual = match (quick(), bed.software()) {
        (true, _) => 128,
        (false, true) => 512,
        (false, false) => 16384,
    };
    let length = argument("--length").map_or(usual, |n| n.parse().expect("--length N"));
    // 2048 channels in all, as in the papers on FlashAttention.
    let channels = match (quick(), bed.software()) {
        (true, _) => 128,
        (false, true) => 256,
        (false, false) => 2048,
    };
    let exp2 = bed.ceilings().exp2_gps.giga;
    println!(
        "{:36} {:>10} {:>10} {:>9} {:>9} {:>9} {:>9} {:>9}",
        "", "ms", "GFLOP/s", "matrix", "exp2", "memory", "without", "its FMA"
    );
    let cases = [(64, Rule::Causal), (64, Rule::None), (128, Rule::Causal), (128, Rule::None)];
    for (head_dim, rule) in cases.into_iter().take(if quick() { 1 } else { 4 }) {
        let shape = Shape::new(1, channels / head_dim, length, head_dim);
        let case = Case::new(shape, rule, DType::F16);
        let share = time(&bed, case, Way::Matrix);
        let without = time(&bed, case, Way::Fused);
        let flops = case.work().flops;
        let pairs = flops / (4 * head_dim) as f64;
        println!(
            "{:36} {:10.3} {:10.1} {:8.1}% {:8.1}% {:8.1}% {:8.2}x {:8.1}%",
            case.id(),
            share.ms,
            flops / share.ms / 1e6,
            100.0 * share.arithmetic / share.ms,
            100.0 * pairs / exp2 / 1e6 / share.ms,
            100.0 * share.memory / share.ms,
            without.ms / share.ms,
            100.0 * without.arithmetic / without.ms,
        );
    }
    println!(
        "matrix, exp2, memory: what each ceiling allows at least, as a share of the time; without: that much slower"
    );
}
