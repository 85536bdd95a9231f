//! Forward and backward, every schedule and mask, equal to the reference within the tolerance of
//! one device.

use wgpu_attention::{DType, Shape};
use wgpu_attention_mpi::Schedule::{self, Contiguous, Ulysses, Zigzag};
use wgpu_attention_mpi::plan::{Machine, Workload, forecast};

use super::problem::{Problem, Rules, rules};

/// Two query heads to a key head, another width of values, a length that no number of ranks
/// divides.
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

/// Keys and values travel in their own type; all else is f32.
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

/// A block is neither sent to ranks that see none of it, nor are its gradients.
#[test]
fn what_nobody_sees_does_not_travel() {
    let shape = Shape::new(1, 1, 64, 8);
    let sent = |rules: Rules| {
        let problem = Problem::new(shape, rules, DType::F32);
        let results = problem.on_threads(Contiguous, 4);
        [results.bytes, results.messages]
    };
    let rule = |causal, window, documents: &[usize]| Rules { causal, window, documents: documents.into() };
    // Sixteen tokens of keys and values, f32: forth in the forward pass, forth again and gradients
    // in the backward pass.
    let block = 2 * 16 * 8 * 4;
    // To three others each, twice; gradients as often, and home.
    assert_eq!(sent(rule(false, None, &[])), [4 * block * (3 + 3 + 4), 4 * 10]);
    // Rank r's to the 3 − r after it.
    assert_eq!(sent(rule(true, None, &[])), [block * (6 + 6 + 6 + 3), 21]);
    // To the next only.
    assert_eq!(sent(rule(true, Some([15, 0]), &[])), [block * (3 + 3 + 6), 12]);
    assert_eq!(sent(rule(true, None, &[0, 16, 32, 48, 64])), [0, 0]);
}

/// What the forecast for other machines counts is what ranks here send.
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
