//! The fused kernel at the edges of its tiles: lengths, channels, groups; long key ranges; nothing but q, k, v, out.

use wgpu_attention::{Alignment, DType, Path, Shape, Tiling};

use crate::harness::{Case, Layout, Part, Report, Setup, TILINGS, Weights, defaults, full, profiles, run};

fn setup(tiling: Tiling) -> Setup {
    Setup {
        profile: full(),
        tiling,
        path: Path::Fused,
        dtype: DType::F32,
        bias: DType::F32,
        layout: Layout::Dense,
        lse: true,
        weights: Weights::None,
    }
}

/// Runs `case` in both forms, and in f16 through a window where nothing is aligned.
fn check(report: &mut Report, case: &Case) {
    for tiling in TILINGS {
        let dense = setup(tiling);
        report.check_in(case, &dense, &mut Default::default());
        let layout = Layout::Window(case.shape.q_len as u64 | 1);
        let small = Setup { profile: defaults(), layout, ..dense };
        report.check_in(case, &small, &mut Default::default());
        let half = Setup { dtype: DType::F16, ..dense };
        report.check_in(case, &half, &mut Default::default());
    }
}

#[test]
fn lengths() {
    let mut report = Report::new("fused, lengths");
    for q_len in [1, 2, 31, 63, 64, 65, 130] {
        for kv_len in [1, 3, 31, 32, 33, 63, 64, 65, 129] {
            let shape = Shape { batch: 1, heads: 2, kv_heads: 1, q_len, kv_len, head_dim: 16, value_dim: 16 };
            let case = Case::random(format!("fused {q_len} {kv_len}"), shape);
            check(&mut report, &case.clone().with(|c| c.rules.causal = true));
            check(&mut report, &case);
        }
    }
    report.finish();
}

#[test]
fn channels() {
    let mut report = Report::new("fused, channels");
    for (head_dim, value_dim) in [
        (1, 1),
        (2, 5),
        (7, 64),
        (13, 7),
        (20, 132),
        (64, 64),
        (65, 63),
        (80, 96),
        (128, 128),
        (129, 3),
        (192, 128),
        (256, 256),
        (576, 512),
    ] {
        let shape = Shape { batch: 1, heads: 2, kv_heads: 1, q_len: 37, kv_len: 41, head_dim, value_dim };
        check(&mut report, &Case::random(format!("fused channels {head_dim} {value_dim}"), shape));
    }
    report.finish();
}

#[test]
fn groups_share_their_keys() {
    let mut report = Report::new("fused, groups");
    for (heads, kv_heads, q_len) in [(3, 3, 5), (6, 2, 1), (8, 1, 9), (7, 1, 11), (32, 2, 3)] {
        let shape = Shape { batch: 2, heads, kv_heads, q_len, kv_len: 45, head_dim: 8, value_dim: 12 };
        let case = Case::random(format!("fused groups {heads} {kv_heads}"), shape).with(|c| {
            c.rules.causal = true;
            // A length per query head: the heads of a group see different keys.
            let lengths = |[b, h, ..]: [usize; 4]| (11 * b + 5 * h) as u32 % 50;
            c.rules.lengths = Some(Part::of([2, heads, 1, 1], lengths));
            c.rules.sinks = Some(Part::of([1, heads, 1, 1], |[_, h, ..]| h as f32 - 3.0));
        });
        check(&mut report, &case);
    }
    report.finish();
}

#[test]
fn long_key_ranges() {
    let mut report = Report::new("fused, long");
    for (q_len, kv_len) in [(3, 1000), (70, 1000), (2, 4096), (65, 4096), (1, 10_007)] {
        let shape = Shape { batch: 1, heads: 2, kv_heads: 1, q_len, kv_len, head_dim: 12, value_dim: 8 };
        let case = Case::random(format!("fused long {kv_len}"), shape);
        check(&mut report, &case);
        check(&mut report, &case.clone().with(|c| (c.rules.causal, c.rules.window) = (true, Some([256, 0]))));
        // Maxima that rise from key to key: the running softmax must start anew all the time.
        check(
            &mut report,
            &case.with(|c| {
                let rising = |[.., j]: [usize; 4]| {
                    40.0 * (j as f32 / kv_len as f32) * if j % 7 == 0 { 3.0 } else { 1.0 }
                };
                c.rules.bias = Some(Part::of([1, 1, 1, kv_len], rising));
            }),
        );
    }
    report.finish();
}

#[test]
fn large_scores_of_either_sign() {
    let mut report = Report::new("fused, large scores");
    let shape = Shape { kv_heads: 1, kv_len: 90, ..Shape::new(1, 2, 40, 4) };
    for size in [1e2, 1e3, 1e4] {
        for sign in [1.0, -1.0] {
            let case = Case::random(format!("fused scores {size} {sign}"), shape).with(|c| {
                // q·k is about ±size for every pair.
                c.scale = Some(1.0);
                c.q.iter_mut().enumerate().for_each(|(n, x)| *x = if n % 4 == 0 { size } else { *x });
                c.k.iter_mut().enumerate().for_each(|(n, x)| *x = if n % 4 == 0 { sign } else { *x });
            });
            for tiling in TILINGS {
                report.check_in(&case, &setup(tiling), &mut Default::default());
            }
        }
    }
    report.finish();
}

#[test]
fn tiles_without_a_key_are_zero() {
    // Whole tiles of queries see nothing: bottom-right with more queries than keys, and lengths of 0.
    for profile in profiles() {
        for tiling in TILINGS {
            let shape = Shape { kv_len: 5, ..Shape::new(2, 2, 200, 8) };
            let case = Case::random("fused, nothing seen", shape).with(|c| {
                (c.rules.causal, c.rules.alignment) = (true, Alignment::BottomRight);
                c.rules.lengths = Some(Part::new(vec![0, 5], [2, 1, 1, 1]));
            });
            let got = run(&case, &Setup { profile, ..setup(tiling) }).expect("a run");
            let lse = got.lse.expect("lse");
            let dead = |row: usize| row < 400 || row % 200 < 195;
            for (row, lse) in lse.iter().enumerate() {
                let out = &got.out[row * 8..][..8];
                assert_eq!(dead(row), *lse == f64::NEG_INFINITY, "row {row}");
                assert!(!dead(row) || out.iter().all(|x| x.to_bits() == 0), "row {row}: {out:?}");
            }
        }
    }
}
