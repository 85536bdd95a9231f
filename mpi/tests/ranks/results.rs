//! Compares every schedule and mask, forward and backward, with the reference. The tolerance is
//! the same as for one device.

use wgpu_attention::{DType, Shape};
use wgpu_attention_mpi::Schedule::{self, Contiguous, Ulysses, Zigzag};
use wgpu_attention_mpi::plan::{Machine, Workload, forecast};

use super::problem::{Problem, Rules, rules};

/// Two query heads for each key head, and values of another width.
fn grouped(length: usize) -> Shape {
    Shape { batch: 2, heads: 4, kv_heads: 2, q_len: length, kv_len: length, head_dim: 8, value_dim: 12 }
}

fn check(schedule: Schedule, ranks: usize, shape: Shape, dtype: DType) {
    for rules in rules(shape.q_len) {
        let problem = Problem::new(shape, rules, dtype);
        problem.judge(&problem.on_threads(schedule, ranks));
    }
}

#[test]
fn one_rank() {
    for schedule in [Contiguous, Zigzag, Ulysses] {
        check(schedule, 1, grouped(23), DType::F32);
    }
}

#[test]
fn contiguous() {
    for ranks in [2, 3, 4] {
        check(Contiguous, ranks, grouped(37), DType::F32);
    }
}

#[test]
fn zigzag() {
    for ranks in [2, 3, 4] {
        check(Zigzag, ranks, grouped(37), DType::F32);
    }
}

#[test]
fn ulysses() {
    check(Ulysses, 2, grouped(37), DType::F32);
    let shape = Shape { heads: 12, kv_heads: 3, ..grouped(29) };
    check(Ulysses, 3, shape, DType::F32);
}

/// Keys and values travel in f16 or bf16; everything else is f32.
#[test]
fn half_precision() {
    for schedule in [Contiguous, Zigzag, Ulysses] {
        for dtype in [DType::F16, DType::BF16] {
            let shape = Shape { head_dim: 7, value_dim: 5, ..grouped(37) };
            let rules = rules(37).swap_remove(4);
            let problem = Problem::new(shape, rules, dtype);
            problem.judge(&problem.on_threads(schedule, 2));
        }
    }
}

/// Ranks that see no key of a block receive neither the block nor its gradients.
#[test]
fn unseen_keys_are_not_sent() {
    let shape = Shape::new(1, 1, 64, 8);
    let sent = |rules: Rules| {
        let problem = Problem::new(shape, rules, DType::F32);
        let results = problem.on_threads(Contiguous, 4);
        [results.bytes, results.messages]
    };
    let rule = |causal, window, documents: &[usize]| Rules { causal, window, documents: documents.into() };
    // A block is sixteen tokens of keys and values in f32. Blocks travel once in the forward pass
    // and once in the backward pass, where gradients follow.
    let block = 2 * 16 * 8 * 4;
    // Each block goes to three others, twice. Gradients take three steps, then one to the owner.
    assert_eq!(sent(rule(false, None, &[])), [4 * block * (3 + 3 + 4), 4 * 10]);
    // The block of rank r goes to the 3 − r ranks after it.
    assert_eq!(sent(rule(true, None, &[])), [block * (6 + 6 + 6 + 3), 21]);
    // Each block goes to the next rank only.
    assert_eq!(sent(rule(true, Some([15, 0]), &[])), [block * (3 + 3 + 6), 12]);
    assert_eq!(sent(rule(true, None, &[0, 16, 32, 48, 64])), [0, 0]);
}

/// The forecast counts exactly the bytes that the ranks send.
#[test]
fn forecasts_count_the_bytes_that_are_sent() {
    let (length, element, mut some) = (96, 4, false);
    let shape = Shape { kv_heads: 2, heads: 4, ..Shape::new(1, 4, length, 8) };
    let rules = [(true, None), (true, Some([20, 0])), (false, Some([3, 30])), (false, None)];
    for (schedule, (causal, window)) in
        [Contiguous, Zigzag].into_iter().flat_map(|schedule| rules.map(|rule| (schedule, rule)))
    {
        let rules = Rules { causal, window, documents: vec![] };
        let workload = Workload {
            length,
            ranks: 3,
            heads: 4,
            kv_heads: 2,
            head_dim: 8,
            element,
            schedule,
            mask: rules.sequence(),
        };
        let machine = Machine { flops: 1e9, link: 1e9, staging: 1e9, latency: 0.0 };
        let forecast = forecast(&workload, &machine).expect("a ring");
        let problem = Problem::new(shape, rules, DType::F32);
        let results = problem.on_threads(schedule, 3);
        assert_eq!(forecast.bytes, results.forward_bytes, "{schedule:?} {problem}");
        some |= forecast.bytes > 0;
    }
    assert!(some);
}
