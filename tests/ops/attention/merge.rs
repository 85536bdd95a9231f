//! Attention over parts of the keys, merged, equals attention over all keys.

use wgpu_attention::attention::{Merge, MergeForward, Partial};
use wgpu_attention::reference;
use wgpu_attention::reference::widen;
use wgpu_attention::tuning::Algorithm;
use wgpu_attention::{DType, Shape};

use crate::harness::merge::{Cut, merged};
use crate::harness::{Case, HostData, Report, full, profiles};

#[test]
fn merged_parts_equal_whole_attention() {
    crate::harness::in_turn!();
    let mut report = Report::new("merge");
    let shape = Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 7, kv_len: 67, head_dim: 12, value_dim: 21 };
    let plain = Case::random("merge", shape);
    // Some rows see no key of the first part, some see no key at all.
    let dead = plain.clone().with(|c| {
        c.name += ", dead rows";
        let keep = |[_, h, i, j]: [usize; 4]| i != 3 && (j >= 20 || (i + h) % 2 == 0) && (i + j) % 3 != 0;
        c.rules.attn_mask = Some(HostData::of([1, 4, 7, 67], keep));
    });
    // The largest scores are in one part or the other.
    let steep = plain.clone().with(|c| {
        c.name += ", steep";
        c.k.iter_mut().enumerate().for_each(|(n, k)| *k *= 0.3 * (n / 12 % 67) as f32);
    });
    for profile in profiles() {
        for path in [Algorithm::Fused, Algorithm::Staged] {
            for dtypes in [
                [DType::F32, DType::F32],
                [DType::F16, DType::F16],
                [DType::F16, DType::F32],
                [DType::BF16, DType::BF16],
                [DType::BF16, DType::F32],
            ] {
                for case in [&plain, &dead, &steep] {
                    let stored = case.stored(dtypes[0], DType::F32);
                    for at in
                        [&[][..], &[1], &[20], &[66], &[20, 33], &[4, 20, 64], &[1, 2, 3, 4, 33, 64, 65]]
                    {
                        let cut = Cut { profile, path, dtypes, at };
                        let setup = format!("{}, {path:?}, {dtypes:?}, cut at {at:?}", profile.name);
                        // Narrow floats round every part, so only f32 chains meet the naive error.
                        // For bf16, the tolerance is the rounding of three parts.
                        let most = match dtypes[1] {
                            DType::F16 => 2,
                            DType::BF16 => 1,
                            _ => usize::MAX,
                        };
                        if at.len() > most {
                            continue;
                        }
                        report.record(&case.name, &setup, pollster::block_on(merged(&stored, &cut)));
                    }
                }
            }
        }
    }
    report.finish();
}

#[test]
fn the_reference_merges_exactly() {
    let shape = Shape::new(1, 2, 5, 3);
    let case = Case::random("merge, reference", Shape { kv_len: 9, ..shape });
    let whole = case.reference::<f64>();
    for at in 1..9 {
        let piece = |from: usize, to: usize| {
            let part = Shape { kv_len: to - from, ..case.shape };
            let cut = |x: &[f32]| -> Vec<f64> {
                x.chunks_exact(9 * 3).flat_map(|head| widen::<f64>(&head[from * 3..to * 3])).collect()
            };
            let options = case.options();
            reference::attention(&widen(&case.q), &cut(&case.k), &cut(&case.v), part, &options).expect("fits")
        };
        let (a, b) = (piece(0, at), piece(at, 9));
        let (out, lse) = reference::merge(&[(&a.out, &a.lse), (&b.out, &b.lse)], 3).expect("equal rows");
        let near =
            |a: &[f64], b: &[f64]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-14);
        assert!(near(&out, &whole.out) && near(&lse, &whole.lse), "cut at {at}");
    }
}

#[test]
fn empty_parts_have_no_weight() {
    let gpu = &full().gpu;
    let upload = |x: &[f32]| gpu.upload(x).expect("upload");
    let none = f32::NEG_INFINITY;
    // Rows: both parts; only the second, with garbage in the first; neither; a NaN in the sum.
    let outs = [upload(&[1.0, f32::NAN, f32::NAN, 5.0]), upload(&[3.0, 4.0, 7.0, 6.0])];
    let lses = [upload(&[0.0, none, none, f32::NAN]), upload(&[0.0, 2.0, none, 1.0])];
    let (out, lse) = (gpu.buffer(16).expect("out"), gpu.buffer(16).expect("lse"));
    fn view(buffer: &wgpu_attention::wgpu::Buffer) -> wgpu_attention::TensorView<'_> {
        wgpu_attention::TensorView::new(buffer, DType::F32, [1, 1, 4, 1])
    }
    let parts = [0, 1].map(|n| Partial { out: view(&outs[n]), lse: view(&lses[n]) });
    let into = Partial { out: view(&out), lse: view(&lse) };
    let merge = Merge::new(gpu.device());
    gpu.submit(|e| merge.forward(e, &MergeForward::new(&parts, into))).expect("a merge");
    let out: Vec<f32> = gpu.download(&out, 4).expect("out");
    let lse: Vec<f32> = gpu.download(&lse, 4).expect("lse");
    assert!((out[0] - 2.0).abs() < 1e-6 && (lse[0] - 2f32.ln()).abs() < 1e-6, "{out:?} {lse:?}");
    assert_eq!((out[1], lse[1], out[2], lse[2]), (4.0, 2.0, 0.0, none), "{out:?} {lse:?}");
    assert!(out[3].is_nan() && lse[3].is_nan(), "{out:?} {lse:?}");
}

#[test]
fn bad_parts_are_errors() {
    let gpu = &full().gpu;
    let buffers: Vec<_> = (0..4).map(|_| gpu.buffer(64).expect("a buffer")).collect();
    let view = |n: usize, shape| wgpu_attention::TensorView::new(&buffers[n], DType::F32, shape);
    let good = [
        Partial { out: view(0, [1, 1, 2, 4]), lse: view(1, [1, 1, 2, 1]) },
        Partial { out: view(2, [1, 1, 2, 4]), lse: view(3, [1, 1, 2, 1]) },
    ];
    let [part, into] = good;
    let short = Partial { out: view(0, [1, 1, 1, 4]), ..part };
    let wrong =
        Partial { lse: wgpu_attention::TensorView::new(&buffers[1], DType::U32, [1, 1, 2, 1]), ..part };
    let merge = Merge::with_pipelines(gpu.pipelines());
    let refused = |parts: &[Partial], into: Partial, words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error =
            merge.forward(&mut encoder, &MergeForward::new(parts, into)).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{error}");
    };
    refused(&[], into, &["parts"]);
    refused(&[short], into, &["parts.out", "length"]);
    refused(&[wrong], into, &["parts.lse", "F32", "U32"]);
    refused(&[part, into], into, &["out", "parts.out"]);
    refused(&[part], Partial { lse: into.out, ..into }, &["lse"]);
    let count = |n: usize| wgpu_attention::TensorView::new(&buffers[n], DType::U32, [1, 1, 2, 4]);
    refused(&[part], Partial { out: count(2), ..into }, &["`out`", "F32, F16 or BF16", "U32"]);
    refused(&[Partial { out: count(0), ..part }], into, &["`parts.out`", "F32, F16 or BF16", "U32"]);
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    assert!(merge.forward(&mut encoder, &MergeForward::new(&[part], into)).is_ok());
}
