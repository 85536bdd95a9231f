//! Sizes at the edges of the stages' tiles: one below, at and above, primes, and the large tiles of
//! GPUs.
//!
//! The stages are private. Each shows in the output that it decides: scores in lse, softmax in the
//! weights, weighted_sum in out. Layers show project and append_keys.

use wgpu_attention::reference::MultiHeadShape;
use wgpu_attention::tuning::{Algorithm, Target};
use wgpu_attention::{DType, Shape};

use crate::harness::layer::{LayerCase, LayerLayout, LayerSetup, Storage};
use crate::harness::layer_options::LayerOptions;
use crate::harness::{Case, FORMS, Layout, Report, Setup, Weights, defaults, due, full, profiles, rest};

/// Runs `case` on every device, target and type, in a dense layout and a window.
fn check(report: &mut Report, case: &Case, weights: Weights) {
    for (n, profile) in profiles().into_iter().enumerate() {
        for form in FORMS {
            for dtype in [DType::F32, [DType::F16, DType::BF16][n]] {
                let layout = if n == 0 { Layout::Dense } else { Layout::Window(case.shape.q_len as u64 | 1) };
                let path = Algorithm::Staged;
                let setup =
                    Setup { profile, form, path, dtype, bias: DType::F32, layout, lse: true, weights };
                report.check_in(case, &setup, &mut Default::default());
            }
        }
    }
}

#[test]
fn scores() {
    crate::harness::in_turn!();
    // The sizes are rows × columns × inner: the tiles of q kᵀ.
    let mut report = Report::new("stages, scores");
    let per_head = Weights::PerHead(DType::F32);
    for (q_len, kv_len, head_dim) in [
        (1, 1, 1),
        (1, 65, 64),
        (63, 64, 65),
        (64, 64, 64),
        (65, 63, 7),
        (4, 129, 12),
        (5, 127, 16),
        (31, 33, 128),
        (2, 3, 257),
    ] {
        let shape = Shape { batch: 1, heads: 2, kv_heads: 1, q_len, kv_len, head_dim, value_dim: 3 };
        check(&mut report, &Case::random(format!("scores {q_len} {kv_len} {head_dim}"), shape), per_head);
    }
    report.finish();
}

#[test]
fn softmax() {
    crate::harness::in_turn!();
    // A row per invocation or per workgroup: as many keys as lanes, one less, one more, many
    // rounds.
    let mut report = Report::new("stages, softmax");
    for kv_len in [1, 2, 127, 128, 129, 255, 256, 257, 1023, 1025, 2048, 3001] {
        let shape = Shape { batch: 2, heads: 1, kv_heads: 1, q_len: 3, kv_len, head_dim: 4, value_dim: 1 };
        let case = Case::random(format!("softmax {kv_len}"), shape);
        check(&mut report, &case.with(|c| c.scale = Some(2.0)), Weights::PerHead(DType::F32));
    }
    // Rows at the edge of the 16 rows of a workgroup.
    for q_len in [15, 16, 17, 33] {
        let shape = Shape { batch: 2, heads: 3, kv_heads: 3, q_len, kv_len: 5, head_dim: 2, value_dim: 1 };
        check(&mut report, &Case::random(format!("softmax rows {q_len}"), shape), Weights::None);
    }
    report.finish();
}

#[test]
fn weighted_sum() {
    crate::harness::in_turn!();
    let mut report = Report::new("stages, weighted_sum");
    for (q_len, kv_len, value_dim) in
        [(1, 64, 1), (3, 2, 63), (64, 64, 64), (65, 17, 65), (2, 131, 127), (33, 8, 132), (1, 1, 301)]
    {
        let shape = Shape { batch: 2, heads: 2, kv_heads: 2, q_len, kv_len, head_dim: 2, value_dim };
        check(
            &mut report,
            &Case::random(format!("weighted_sum {q_len} {kv_len} {value_dim}"), shape),
            Weights::None,
        );
    }
    report.finish();
}

#[test]
fn average_weights() {
    let mut report = Report::new("stages, average_weights");
    for (heads, kv_len) in [(1, 3), (2, 63), (3, 64), (7, 65), (16, 130)] {
        let shape = Shape { batch: 2, heads, kv_heads: 1, q_len: 5, kv_len, head_dim: 3, value_dim: 2 };
        let case = Case::random(format!("average_weights {heads} {kv_len}"), shape);
        check(&mut report, &case, Weights::Mean(DType::F32));
        check(&mut report, &case, Weights::PerHead(DType::F32));
    }
    report.finish();
}

#[test]
fn large_tiles() {
    crate::harness::in_turn!();
    // Enough workgroups for tiles of 128 × 128, in both products.
    let mut report = Report::new("stages, large tiles");
    let shape =
        Shape { batch: 16, heads: 16, kv_heads: 8, q_len: 65, kv_len: 66, head_dim: 5, value_dim: 68 };
    for (dtype, layout) in [
        (DType::F32, Layout::Dense),
        (DType::F32, Layout::Window(3)),
        (DType::F16, Layout::Blhd),
        (DType::BF16, Layout::Dense),
    ] {
        let case = Case::random("large tiles", shape).with(|c| c.rules.causal = true);
        let setup = Setup { dtype, layout, ..Setup::plain(full(), Target::Gpu, Algorithm::Staged) };
        report.check_in(&case, &setup, &mut Default::default());
    }
    report.finish();
}

/// Checks a layer on the staged path, whose shaders are the same for all channels. The `n`th case
/// also runs in f16, or on the plain device in f32 or bf16.
fn check_layer(report: &mut Report, case: &LayerCase, n: usize) {
    let other = [
        (full(), DType::F16, Storage::Separate),
        (defaults(), [DType::F32, DType::BF16][n / 2 % 2], Storage::OneBuffer { gap: 0 }),
    ];
    for (profile, dtype, storage) in [(full(), DType::F32, Storage::Separate), other[n % 2]] {
        for (f, form) in FORMS.into_iter().enumerate() {
            let (usual, key) =
                ((n + usize::from(dtype == DType::F32)) % 2 == f, format!("{}, {form:?}", case.name));
            if !(usual && due(&key) || rest(&key)) {
                continue;
            }
            let setup = LayerSetup {
                profile,
                form,
                path: Algorithm::Staged,
                dtype,
                weight: dtype,
                bias: DType::F32,
                layout: LayerLayout::Dense,
                storage,
                lse: true,
                weights: Weights::None,
            };
            report.check_layer_in(case, &setup, &mut Default::default());
        }
    }
}

#[test]
fn project() {
    let mut report = Report::new("stages, project");
    let sizes = [
        (1usize, 1usize, 1usize, 1usize),
        (63, 5, 2, 32),
        (64, 64, 1, 64),
        (65, 16, 3, 22),
        (3, 129, 5, 13),
        (7, 24, 4, 32),
    ];
    for (n, (length, features, heads, dim)) in sizes.into_iter().enumerate() {
        for narrow in [false, true] {
            let features = if narrow { heads * features.div_ceil(heads) } else { features };
            let mut config = LayerOptions::new(heads * dim, heads);
            config.narrow = narrow;
            (config.query_features, config.key_features, config.value_features) =
                (features, features, features);
            config.out_features = features;
            let name = format!("project {length} {features} {heads} {dim} {narrow}");
            let shape = MultiHeadShape { batch: 2, q_len: length, kv_len: length.div_ceil(2) };
            check_layer(&mut report, &LayerCase::random(name, config, shape, false), n + usize::from(narrow));
        }
    }
    report.finish();
}

#[test]
fn append_keys() {
    crate::harness::in_turn!();
    let mut report = Report::new("stages, append_keys");
    for (heads, dim, value_dim) in [(1, 1, 3), (2, 64, 65), (3, 5, 4), (2, 130, 1)] {
        for (n, (learned, zero)) in [(true, false), (false, true), (true, true)].into_iter().enumerate() {
            let mut config = LayerOptions::new(heads * dim, heads);
            config.value_dim = value_dim;
            config.add_zero_attn = zero;
            let name = format!("append_keys {heads} {dim} {value_dim} {learned} {zero}");
            let shape = MultiHeadShape { batch: 2, q_len: 3, kv_len: 5 };
            check_layer(&mut report, &LayerCase::random(name, config, shape, learned), n + heads);
        }
    }
    report.finish();
}

#[test]
fn project_with_large_tiles() {
    crate::harness::in_turn!();
    // 86 narrow heads of 65 columns over 66 rows: enough workgroups for tiles of 128 × 128.
    let mut report = Report::new("stages, project with large tiles");
    let mut config = LayerOptions::new(86 * 65, 86);
    config.narrow = true;
    (config.query_features, config.key_features, config.value_features) = (86 * 3, 86, 172);
    config.out_features = 5;
    let shape = MultiHeadShape { batch: 2, q_len: 33, kv_len: 34 };
    let case = LayerCase::random("project large".into(), config, shape, false);
    let setup = LayerSetup {
        profile: full(),
        form: Target::Gpu,
        path: Algorithm::Auto,
        dtype: DType::F32,
        weight: DType::F32,
        bias: DType::F32,
        layout: LayerLayout::Dense,
        storage: Storage::Transposed,
        lse: false,
        weights: Weights::None,
    };
    report.check_layer_in(&case, &setup, &mut Default::default());
    report.finish();
}
