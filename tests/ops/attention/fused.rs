//! The fused kernel at the edges of its tiles: lengths, channels, groups, long key ranges. The
//! calls have only q, k, v and out.

use wgpu_attention::tuning::{Algorithm, Target};
use wgpu_attention::{Alignment, DType, Shape};

use crate::harness::{
    Case, DropoutData, FORMS, HostData, Layout, Report, Rng, Setup, defaults, due, full, planned_by_name,
    profiles, rest, run, with_registers,
};

fn setup(form: Target) -> Setup {
    Setup::plain(full(), form, Algorithm::Fused)
}

/// Returns setups for `form`: dense, in f16, and an unaligned window in f32 or bf16, chosen by the
/// rules.
fn ways(case: &Case, form: Target) -> [Setup; 3] {
    let dense = setup(form);
    let layout = Layout::Window(case.shape.q_len as u64 | 1);
    let dtype = [DType::F32, DType::BF16][Rng::named(&case.rules.names().join(" + ")).below(2)];
    [dense, Setup { dtype: DType::F16, ..dense }, Setup { profile: defaults(), layout, dtype, ..dense }]
}

/// Runs `case` on both targets in every setup. Each setup is a different kernel.
fn check(report: &mut Report, case: &Case) {
    let rules = case.rules.names().join(" ");
    for setup in FORMS.into_iter().flat_map(|form| ways(case, form)) {
        if due(&format!("{rules}, {:?}, {:?}", setup.form, setup.dtype)) {
            report.check_in(case, &setup, &mut Default::default());
        }
    }
}

/// Runs `case` on both targets, each in one setup that the rules choose.
fn check_once(report: &mut Report, case: &Case) {
    let rules = case.rules.names().join(" ");
    let first = Rng::named(&rules).below(3);
    for (n, form) in FORMS.into_iter().enumerate() {
        for (m, setup) in ways(case, form).into_iter().enumerate() {
            if m == (first + n) % 3 && due(&format!("{rules}, {form:?}"))
                || rest(&format!("{}, {setup}", case.name))
            {
                report.check_in(case, &setup, &mut Default::default());
            }
        }
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
    crate::harness::in_turn!();
    let mut report = Report::new("fused, channels");
    let dims = [
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
    ];
    for (n, (head_dim, value_dim)) in dims.into_iter().enumerate() {
        let shape = Shape { batch: 1, heads: 2, kv_heads: 1, q_len: 37, kv_len: 41, head_dim, value_dim };
        let case = Case::random(format!("fused channels {head_dim} {value_dim}"), shape);
        for form in FORMS {
            // On the software target each size is a different kernel, and kernels of many channels
            // are long.
            let own = form == Target::Gpu || head_dim + value_dim < 150;
            if !(own && due(&format!("{}, {form:?}", case.name)) || rest(&case.name)) {
                continue;
            }
            // The other run is in f16, in unaligned windows or in bf16, in rotation.
            let dense = setup(form);
            let plain = Setup { profile: defaults(), ..dense };
            let other = match n % 3 {
                0 => Setup { dtype: DType::F16, ..dense },
                1 => Setup { layout: Layout::Window(n as u64 | 1), ..plain },
                _ => Setup { dtype: DType::BF16, ..plain },
            };
            report.check_in(&case, &dense, &mut Default::default());
            let also = (n % 4 < 2) == (form == Target::Gpu);
            if head_dim <= 128 && (also || rest(&format!("{}, {form:?}", case.name))) {
                report.check_in(&case, &other, &mut Default::default());
            }
        }
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
            // Each query head has a length, so that the heads of a group see different keys.
            let lengths = |[b, h, ..]: [usize; 4]| (11 * b + 5 * h) as u32 % 50;
            c.rules.lengths = Some(HostData::of([2, heads, 1, 1], lengths));
            c.rules.sinks = Some(HostData::of([1, heads, 1, 1], |[_, h, ..]| h as f32 - 3.0));
        });
        check_once(&mut report, &case);
    }
    report.finish();
}

#[test]
fn long_key_ranges() {
    crate::harness::in_turn!();
    let mut report = Report::new("fused, long");
    for (q_len, kv_len) in [(3, 1000), (70, 1000), (2, 4096), (65, 4096), (1, 10_007)] {
        let shape = Shape { batch: 1, heads: 2, kv_heads: 1, q_len, kv_len, head_dim: 12, value_dim: 8 };
        let case = Case::random(format!("fused long {kv_len}"), shape);
        check_once(&mut report, &case);
        let window = case.clone().with(|c| (c.rules.causal, c.rules.window) = (true, Some([256, 0])));
        check_once(&mut report, &window);
        // Maxima that rise from key to key, so that the running softmax rescales each time.
        check_once(
            &mut report,
            &case.with(|c| {
                let rising = |[.., j]: [usize; 4]| {
                    40.0 * (j as f32 / kv_len as f32) * if j % 7 == 0 { 3.0 } else { 1.0 }
                };
                c.rules.bias = Some(HostData::of([1, 1, 1, kv_len], rising));
            }),
        );
    }
    report.finish();
}

/// Tiles of few rows have slices of 64, 128 and 256 channels. Tiles of many rows have one shader
/// each.
#[test]
fn slices_of_channels() {
    let mut report = Report::new("fused, slices");
    for (q_len, value_dim) in [
        (5, 65),
        (5, 130),
        (5, 260),
        (12, 64),
        (12, 65),
        (12, 130),
        (12, 260),
        (40, 130),
        (40, 200),
        (40, 300),
    ] {
        let shape = Shape { batch: 1, heads: 2, kv_heads: 1, q_len, kv_len: 70, head_dim: 6, value_dim };
        let case =
            Case::random(format!("fused slices {q_len} {value_dim}"), shape).with(|c| c.rules.causal = true);
        let dense = setup(Target::Gpu);
        let window = Setup { profile: defaults(), layout: Layout::Window(q_len as u64 | 1), ..dense };
        for (n, setup) in [dense, window].into_iter().enumerate() {
            let key = format!("{}, {setup}", case.name);
            if n == value_dim % 2 && due(&key) || rest(&key) {
                report.check_in(&case, &setup, &mut Default::default());
            }
        }
    }
    report.finish();
}

/// On the software target, the second of two slices begins early, to be as wide as the first.
#[test]
fn second_slice_begins_early() {
    let mut report = Report::new("fused, two slices");
    let shape = Shape { batch: 1, heads: 1, kv_heads: 1, q_len: 12, kv_len: 20, head_dim: 6, value_dim: 268 };
    let case = Case::random("fused slices, software", shape);
    report.check_in(&case, &setup(Target::Software), &mut Default::default());
    report.finish();
}

/// Kernels read the keep mask of dropout for whole blocks of keys. The last block here is partial.
#[test]
fn dropout_with_large_key_stride() {
    crate::harness::in_turn!();
    let mut report = Report::new("fused, dropout");
    for (q_len, kv_len) in [(40, 33), (3, 33), (70, 65)] {
        let shape = Shape { batch: 2, heads: 4, kv_heads: 2, q_len, kv_len, head_dim: 6, value_dim: 7 };
        let case = Case::random(format!("fused dropout {q_len} {kv_len}"), shape).with(|c| {
            let keep = HostData::of(shape.weights(), |[b, h, i, j]| (b + 2 * h + 3 * i + 5 * j) % 7 < 4);
            c.dropout = Some(DropoutData::Given { p: 0.4, keep });
        });
        for form in FORMS {
            let transposed = Setup { layout: Layout::Blhd, ..setup(form) };
            report.check_in(&case, &transposed, &mut Default::default());
        }
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
                // The score q·k is about ±size for every pair.
                c.scale = Some(1.0);
                c.q.iter_mut().enumerate().for_each(|(n, x)| *x = if n % 4 == 0 { size } else { *x });
                c.k.iter_mut().enumerate().for_each(|(n, x)| *x = if n % 4 == 0 { sign } else { *x });
            });
            for form in FORMS {
                report.check_in(&case, &setup(form), &mut Default::default());
            }
        }
    }
    report.finish();
}

#[test]
fn tiles_without_a_key_are_zero() {
    // Whole tiles of queries see nothing: bottom-right alignment with more queries than keys, and
    // lengths of 0.
    for profile in profiles() {
        for form in FORMS {
            let shape = Shape { kv_len: 5, ..Shape::new(2, 2, 200, 8) };
            let case = Case::random("fused, nothing seen", shape).with(|c| {
                (c.rules.causal, c.rules.alignment) = (true, Alignment::BottomRight);
                c.rules.lengths = Some(HostData::new(vec![0, 5], [2, 1, 1, 1]));
            });
            let got = run(&case, &Setup { profile, ..setup(form) }).expect("a run");
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

/// Tiles for 64 and for 128 registers, which prefetch nothing, and for 256. The cases have every
/// number of rows and every slice, with every step of the kernel.
#[test]
fn register_counts() {
    crate::harness::in_turn!();
    let mut report = Report::new("fused, register counts");
    for count in [256, 128, 64] {
        let setup = Setup { profile: with_registers(full(), count), ..setup(Target::Gpu) };
        for (n, (q_len, value_dim)) in
            [(1, 64), (5, 64), (16, 100), (20, 64), (32, 130), (70, 40), (130, 128)].into_iter().enumerate()
        {
            let shape =
                Shape { batch: 2, heads: 2, kv_heads: 1, q_len, kv_len: 150, head_dim: 36, value_dim };
            if n > 0 && !due(&format!("{count} registers {q_len} {value_dim}")) {
                continue;
            }
            let case = Case::random(format!("{count} registers {q_len} {value_dim}"), shape);
            report.check_in(&case, &setup, &mut Default::default());
            let causal = case.clone().with(|c| c.rules.causal = true);
            report.check_in(&causal, &setup, &mut Default::default());
            let pairs = causal.clone().with(|c| c.softcap = Some(2.0));
            let keep = HostData::of([2, 2, q_len, 150], |[b, h, i, j]| (b + h + i * j) % 3 != 0);
            let dropped = causal.with(|c| c.dropout = Some(DropoutData::Given { p: 0.4, keep }));
            let all = [pairs, dropped];
            for (m, case) in all.iter().enumerate() {
                if m == n % 2 || rest(&format!("{}, {m}", case.name)) {
                    report.check_in(case, &setup, &mut Default::default());
                }
            }
            let word = match (count, q_len) {
                // One query has a decoding kernel.
                (_, 1) => "each=",
                (64, _) => "registers=Narrow",
                (128, _) => "registers=Middle",
                // 8 × 8 scores of an invocation.
                (_, 130) => "lanes=16 slice=128 keys=128",
                (_, 20..) => "lanes=8 slice=64 keys=64",
                _ => "registers=Wide",
            };
            let kernels = wgpu_attention::inspect::compiled(setup.profile.gpu.pipelines());
            assert!(kernels.iter().any(|name| name.contains(word)), "{word}: {kernels:?}");
        }
    }
    report.finish();
}

/// Vectors of 4 and of 16 lanes: full and partial rows, and blocks of every number of queries and
/// keys.
#[test]
fn lanes() {
    crate::harness::in_turn!();
    let mut report = Report::new("fused, lanes");
    let profile = |lanes| planned_by_name(&format!("{lanes} lanes")).expect("there is one");
    for lanes in [4, 16] {
        let setup = Setup { profile: profile(lanes), ..setup(Target::Software) };
        for (n, (q_len, dim)) in
            [(1, 64), (5, 64), (17, 30), (40, 64), (70, 128), (33, 200), (130, 40)].into_iter().enumerate()
        {
            let shape =
                Shape { batch: 2, heads: 2, kv_heads: 1, q_len, kv_len: 75, head_dim: dim, value_dim: dim };
            if n > 0 && !due(&format!("{lanes} lanes {q_len} {dim}")) {
                continue;
            }
            let case = Case::random(format!("{lanes} lanes {q_len} {dim}"), shape);
            let causal = case.clone().with(|c| c.rules.causal = true);
            let keep = HostData::of([2, 2, q_len, 75], |[b, h, i, j]| (b + h + i * j) % 3 != 0);
            let dropped = causal.clone().with(|c| c.dropout = Some(DropoutData::Given { p: 0.4, keep }));
            let pairs = causal.clone().with(|c| c.softcap = Some(2.0));
            for (m, case) in [case, causal, pairs, dropped].iter().enumerate() {
                if m % 2 == n % 2 || rest(&format!("{}, {m}", case.name)) {
                    report.check_in(case, &setup, &mut Default::default());
                }
            }
        }
        let kernels = wgpu_attention::inspect::compiled(setup.profile.gpu.pipelines());
        let word = format!("lanes={lanes}");
        assert!(kernels.iter().any(|name| name.contains(&word)), "{kernels:?}");
    }
    report.finish();
}
