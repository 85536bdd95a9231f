//! Every error, provoked through the public API. Tests check its message, that nothing was
//! recorded, and that the next correct call works.

use std::collections::BTreeSet;
use std::io::Write;

use wgpu_attention::attention::ScoreStage;
use wgpu_attention::cache::{CacheStorage, ScaleGroup};
use wgpu_attention::layers::{MultiHeadConfig, MultiHeadForward, MultiHeadWeights};
use wgpu_attention::mask::{DeviceMask, HostMask};
use wgpu_attention::matmul::ProjectionForward;
use wgpu_attention::reference::compare::max_error;
use wgpu_attention::reference::{
    self, HostLinear, HostWeights, MultiHeadShape, Options, multi_head, project, widen,
};
use wgpu_attention::tuning::{Algorithm, Family, Target, Verdict};
use wgpu_attention::{
    Attention, Cache, CacheConfig, Config, DType, Dropout, Error, Forward, Gpu, HostTensor, KernelOptions,
    Linear, Mask, MultiHeadAttention, Pipelines, Projection, Scratch, ScratchSize, Shape, TensorView,
};

use crate::harness::device::{device, devices};
use crate::harness::layer_options::LayerOptions;
use crate::harness::random::noise;
use crate::harness::{defaults, full};

mod bench;
mod caches;
mod calls;
mod gradients;
mod host;
mod layer_gradients;
mod layers;
mod lost;
mod mask_gradients;
mod masks;
mod mods;
mod views;
mod zero;

use self::bench::*;
use self::caches::*;
use self::calls::*;
use self::gradients::*;
use self::host::*;
use self::layer_gradients::*;
use self::layers::*;
use self::mask_gradients::*;
use self::masks::*;
use self::mods::*;
use self::views::*;

/// Every dimension is a different number, so that no axis passes for another one.
const SHAPE: Shape =
    Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 3, kv_len: 5, head_dim: 8, value_dim: 6 };
const POISON: f32 = -12345.0;
/// Elements after every tensor, for shapes that are one too long.
const RESCALE_THRESHOLD: usize = 256;

fn count(shape: [usize; 4]) -> usize {
    shape.iter().product()
}

/// Checks that a message contains `words`, and returns the name of the error's variant.
fn read(context: &str, error: &Error, words: &[&str]) -> &'static str {
    let message = error.to_string();
    if let Some(file) = std::env::var_os("WGPU_ATTENTION_ERRORS_SNAPSHOT") {
        let mut file =
            std::fs::File::options().append(true).create(true).open(file).expect("the file of the snapshot");
        file.write_all(format!("{context}: {message}\n").as_bytes()).expect("the file can be written");
    }
    for word in words {
        assert!(message.contains(word), "{context}: no {word:?} in {message:?}");
    }
    variant(error)
}

/// Declares `variant`, which returns the name of an error's variant.
macro_rules! names {
    ($($name:ident)*) => {
        fn variant(error: &Error) -> &'static str {
            match error {
                $(Error::$name { .. } => stringify!($name),)*
                other => panic!("a variant without a name here: {other}"),
            }
        }
    };
}

names! {
    ZeroSize Slice Axis Shape NotDivisible Overlap Overflow OutOfBounds Alias SharedOverlap OutputsOverlap Usage Type BindingLimit CacheBindingLimit
    Limit Option Unsupported Layer Mod Disabled ScratchTooSmall CacheFull OutOfPages Length OtherDevice Refused OutOfMemory NoAdapter DeviceLost
}

/// Returns the names of the variants from the enum's source. A new variant without a case here
/// fails the last test.
fn variants() -> Vec<&'static str> {
    let text = include_str!("../../../src/tensor/error.rs");
    let body = text.split_once("pub enum Error {").expect("the enum").1;
    let names = body.lines().filter_map(|line| line.strip_prefix("    ")).filter_map(|line| {
        let name = line.split([' ', '(', ',']).next().unwrap_or_default();
        (name.starts_with(|c: char| c.is_ascii_uppercase())).then_some(name)
    });
    names.collect()
}

type Seen = BTreeSet<&'static str>;

/// Declares a test for each subject, which returns the variants that it provoked, and one test over
/// all of them.
macro_rules! subjects {
    ($($name:ident,)*) => {
        mod refused {
            $(#[test] fn $name() { assert!(!super::$name().is_empty()); })*
        }

        #[test]
        fn every_variant_has_a_case() {
            let mut seen = Seen::new();
            $(seen.extend($name());)*
            let all: Seen = variants().into_iter().collect();
            assert!(all.len() >= 17, "the enum's text was not understood: {all:?}");
            assert_eq!(seen, all);
        }
    };
}

subjects! {
    configurations, zero_sizes, mismatched_shapes, strides_and_offsets, wrong_views, memory_shared_with_an_output, unusable_buffers, dtypes, shapes_of_masks_and_outputs, tensors_of_masks, block_maps, slices_of_masks, mods, weights_on_the_fused_path, scores_as_an_output, dropout_probabilities, gradients, gradients_of_masks, gradients_of_layers, disabled_kernels, limits, scratch, slices, layers, layers_of_stacks, projections, caches_made, moves_of_caches, appends, rows_of_caches, attention_to_caches, reading_back, unprovoked_errors,
}

/// The reference refuses wrong lengths, too.
#[test]
fn layer_reference_refuses_wrong_lengths() {
    let config = MultiHeadConfig::new(4, 2);
    let (x, w) = (vec![0.5f64; 12], vec![0.25f64; 16]);
    let shape = MultiHeadShape { batch: 1, q_len: 3, kv_len: 3 };
    let linear = HostLinear { weight: &w[..], bias: None };
    let good = HostWeights {
        query: linear,
        key: linear,
        value: linear,
        out: linear,
        bias_kv: None,
        qk_norm: None,
        gate: None,
    };
    let run = |inputs, shape, weights: &HostWeights<f64>| {
        multi_head::<f64>(inputs, shape, &config, weights, &Options::default()).map(|heads| heads.out)
    };
    let error = |result: Result<Vec<f64>, Error>| result.expect_err("refused").to_string();
    assert_eq!(run([&x, &x, &x], shape, &good).expect("a correct call").len(), 12);
    assert!(error(run([&x[1..], &x, &x], shape, &good)).contains("12 elements expected, got 11"));
    assert!(error(run([&x, &x[1..], &x], shape, &good)).contains("12 elements expected, got 11"));
    let short = HostLinear { weight: &w[1..], bias: None };
    assert!(error(run([&x, &x, &x], shape, &HostWeights { key: short, ..good })).contains("16 elements"));
    assert!(error(run([&x, &x, &x], shape, &HostWeights { out: short, ..good })).contains("weights.out"));
    let biased = HostLinear { weight: &w, bias: Some(&x[..3]) };
    assert!(error(run([&x, &x, &x], shape, &HostWeights { value: biased, ..good })).contains("4 elements"));
    assert!(error(run([&x, &x, &x], shape, &HostWeights { out: biased, ..good })).contains("4 elements"));
    let appended = HostWeights { bias_kv: Some([&x[..4], &x[..3]]), ..good };
    assert!(error(run([&x, &x, &x], shape, &appended)).contains("4 elements"));
    let far = MultiHeadShape { batch: usize::MAX, ..shape };
    assert!(error(run([&x, &x, &x], far, &good)).contains("got 12"));
    assert_eq!(project(&x, &w, None, 4, 4).expect("a correct call").len(), 12);
}

/// Each stage of the reference refuses inputs that do not fit.
#[test]
fn reference_stages_refuse_bad_shapes() {
    let x = [0.5f64; 240];
    let far = Shape { batch: usize::MAX, ..SHAPE };
    let none = Shape { kv_heads: 0, ..SHAPE };
    let options = Options::default();
    let [q, k, v, w] = [SHAPE.q(), SHAPE.k(), SHAPE.v(), SHAPE.weights()].map(|shape| &x[..count(shape)]);
    let dropout = Dropout::Seeded { p: 0.5, seed: 1 };
    for (shape, words) in [(far, "elements expected"), (none, "kv_heads is 0")] {
        let errors = [
            reference::scores(q, k, shape, 1.0).map(drop),
            reference::softmax(w, shape, &options).map(drop),
            reference::weighted_sum(w, v, shape).map(drop),
            reference::dropout(&mut w.to_vec(), shape, &dropout),
        ];
        for e in errors {
            read("a stage", &e.expect_err("refused"), &[words]);
        }
    }
    let certain: Dropout<HostTensor<bool>> = Dropout::Seeded { p: 1.0, seed: 1 };
    let misfits = [
        reference::scores(&q[1..], k, SHAPE, 1.0).map(drop),
        reference::scores(q, &k[1..], SHAPE, 1.0).map(drop),
        reference::softmax(&w[1..], SHAPE, &options).map(drop),
        reference::weighted_sum(&w[1..], v, SHAPE).map(drop),
        reference::weighted_sum(w, &v[1..], SHAPE).map(drop),
        reference::dropout(&mut w[1..].to_vec(), SHAPE, &dropout),
        reference::dropout(&mut w.to_vec(), SHAPE, &certain),
        project(&x[..7], &x[..8], None, 4, 2).map(drop),
        project(&x[..8], &x[..7], None, 4, 2).map(drop),
        project(&x[..8], &x[..8], Some(&x[..1]), 4, 2).map(drop),
        project(&x[..8], &x[..8], None, 0, 2).map(drop),
        project::<f64>(&x[..8], &[], None, 4, 0).map(drop),
        reference::split_heads(&x[..7], 1, 2, 4).map(drop),
        reference::split_heads(&x[..8], 0, 2, 4).map(drop),
        reference::join_heads(&x[..8], usize::MAX, 2, 4).map(drop),
        reference::join_heads(&x[..8], 1, 2, 0).map(drop),
        reference::average_heads(&x[..8], 0, 1).map(drop),
        reference::average_heads(&x[..8], 3, 1).map(drop),
        reference::average_heads(&x[..8], usize::MAX, 2).map(drop),
        wgpu_attention::mask::block_map::big_bird(usize::MAX, 0, &[], &[]).map(drop),
        reference::classify(&Mask::none(), Shape { q_len: usize::MAX, ..SHAPE }, [1, 1], [1, 1]).map(drop),
    ];
    for (n, result) in misfits.into_iter().enumerate() {
        assert!(result.is_err(), "case {n}");
    }
    // A shape may be larger than its slice.
    let sparse = HostTensor::new(&[1u32, 2], [1, 1, usize::MAX, usize::MAX]);
    assert_eq!(sparse.at([0, 0, 0, 1]), Some(2));
    assert_eq!(sparse.at([0, 0, usize::MAX - 1, usize::MAX - 1]), None);
}

/// NaN and infinity in inputs take part in the computation. They are neither hidden nor refused.
#[test]
fn nan_and_infinity_reach_results() {
    let gpu = &full().gpu;
    for (path, form) in [
        (Algorithm::Staged, Target::Software),
        (Algorithm::Staged, Target::Gpu),
        (Algorithm::Fused, Target::Software),
        (Algorithm::Fused, Target::Gpu),
    ] {
        for (name, bad, at) in [
            ("q", f32::NAN, 0),
            ("k", f32::NAN, 1),
            ("v", f32::NAN, 2),
            ("q", f32::INFINITY, 0),
            ("v", f32::INFINITY, 2),
        ] {
            let mut data = [SHAPE.q(), SHAPE.k(), SHAPE.v()].map(|s| noise(count(s), 0.3));
            data[at][1] = bad;
            let [q, k, v] = data.each_ref().map(|x| widen::<f64>(x));
            let want =
                reference::attention::<f64>(&q, &k, &v, SHAPE, &Options::default()).expect("a truth").out;
            let buffers = data.each_ref().map(|x| gpu.upload(x).expect("an upload"));
            let out = gpu.upload(&vec![POISON; count(SHAPE.out())]).expect("an upload");
            let [bq, bk, bv] = &buffers;
            let call = parts([bq, bk, bv, &out]).forward();
            let config = Config::new(4, 8)
                .kv_heads(2)
                .value_dim(6)
                .kernel_options(KernelOptions::new().target(form).algorithm(path));
            let attention = Attention::with_pipelines(gpu.pipelines(), config).expect("an operator");
            let mut scratch =
                Scratch::new(gpu.device(), attention.scratch_size(&call).expect("a size")).expect("scratch");
            let mut encoder = gpu.device().create_command_encoder(&Default::default());
            attention.forward(&mut encoder, &call, &mut scratch).expect("bad numbers are numbers");
            gpu.queue().submit([encoder.finish()]);
            let got: Vec<f64> = widen(&gpu.download::<f32>(&out, want.len()).expect("a read-back"));
            assert!(want.iter().any(|x| !x.is_finite()), "the case has no effect");
            for (n, (got, want)) in got.iter().zip(&want).enumerate() {
                let same = if want.is_finite() { (got - want).abs() < 1e-5 } else { !got.is_finite() };
                assert!(same, "{path:?}, {form:?}, {bad} in {name}: element {n} is {got}, not {want}");
            }
        }
    }
}
