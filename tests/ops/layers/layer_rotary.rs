//! Rotary positions of `MultiHeadAttention`: in the reference, on devices, in gradients, and
//! errors.

use wgpu_attention::layers::{MultiHeadBackward, MultiHeadForward, MultiHeadWeights};
use wgpu_attention::position::{Rope, RopeConfig, RopeOrder, RopeScaling, RowPositions};
use wgpu_attention::reference::compare::max_error;
use wgpu_attention::reference::{self, MultiHeadShape, Options, widen};
use wgpu_attention::{DType, Linear, MultiHeadAttention, Scratch, Shape, TensorView};

use crate::harness::layer::LayerCase;
use crate::harness::layer_backward::COUNT;
use crate::harness::layer_options::LayerOptions;
use crate::harness::rotary::RotaryData;
use crate::harness::{HostData, Report, Rules, full};

const SHAPE: MultiHeadShape = MultiHeadShape { batch: 2, q_len: 19, kv_len: 19 };

/// Layers of each kind of rotation and of positions, with grouped heads, other widths of values,
/// and appended keys.
fn cases() -> Vec<LayerCase> {
    let options = LayerOptions { kv_heads: 2, head_dim: 8, value_dim: 5, ..LayerOptions::new(24, 4) };
    let rows = HostData::new((0..38).map(|n| (n * 7 + n / 19) % 100).collect(), [2, 1, 19, 1]);
    let starts = HostData::new(vec![3, 70], [2, 1, 1, 1]);
    let rope = RopeConfig::new(8).base(100.0);
    let yarn = RopeScaling::Yarn {
        factor: 4.0,
        original_len: 32,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: None,
    };
    let image = RotaryData::of_image([2, 19, 8]);
    let kinds = [
        ("on three axes", image.rope.scaling(yarn), image.at, false, options),
        ("all channels, in order", rope, RowPositions::Start(0), false, options),
        (
            "neighbours, a part of the channels, of rows",
            RopeConfig::new(6).order(RopeOrder::Interleaved),
            RowPositions::Tensor(rows),
            false,
            LayerOptions { add_zero_attn: true, ..options },
        ),
        ("tables, from starts", rope, RowPositions::Tensor(starts), true, options),
        (
            "scaled, narrow",
            rope.scaling(yarn),
            RowPositions::Start(9),
            false,
            LayerOptions { narrow: true, ..options },
        ),
    ];
    let case = |(n, (name, rope, at, tables, options)): (usize, (&str, RopeConfig, _, _, LayerOptions))| {
        let mut case = LayerCase::random(name.into(), options, SHAPE, options.add_zero_attn);
        case.rotary = Some(RotaryData { rope, at, tables });
        case.rules = Rules { causal: n % 2 == 0, ..Default::default() };
        case
    };
    kinds.into_iter().enumerate().map(case).collect()
}

/// Computes each stage separately, in f64.
#[test]
fn reference_equals_its_stages() {
    for case in cases() {
        let rotary = case.rotary.as_ref().expect("they have one");
        let want = case.staged(|_, y, rows| rotary.turned(&y, rows, false));
        assert!(max_error(&case.exact().out, &want) < 1e-12, "{}", case.name);
        let without = LayerCase { rotary: None, ..case.clone() }.exact().out;
        assert!(max_error(&without, &want) > 1e-3, "{}: it makes no difference", case.name);
    }
}

#[test]
fn devices_match_the_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("rotary layers");
    cases().iter().for_each(|case| report.check_layer(case));
    report.finish();
}

#[test]
fn gradients_equal_the_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("gradients of rotary layers");
    report.check_layer_gradients(cases(), &[[true; COUNT]]);
    report.finish();
}

/// Slices in, a `Vec` out. Options of attention alone have no positions.
#[test]
fn slices_are_rotated_too() {
    crate::harness::in_turn!();
    let gpu = &full().gpu;
    let case = &cases()[2];
    let weights = case.wide_weights::<f32>();
    let inputs = case.inputs.each_ref().map(|x| &x[..]);
    for rotary in [0, 1, 2].map(|n| cases()[n].rotary.clone()) {
        let case = LayerCase { rotary, ..case.clone() };
        let options = case.options().weights(false);
        let config = case.config.config();
        let got = gpu.multi_head(inputs, SHAPE, &config, &weights.host(), &options).expect("an answer").out;
        let off = max_error(&widen::<f64>(&got), &case.exact().out);
        assert!(off < 1e-4, "{:?}: {off}", case.rotary);
    }
    let one = Shape::new(1, 1, 1, 2);
    let options = Options::new().rotary(RopeConfig::new(2), RowPositions::Start(0));
    let x = [1.0f32, 2.0];
    for error in [
        reference::attention(&x, &x, &x, one, &options).expect_err("refused"),
        gpu.attention(&x, &x, &x, one, &options).expect_err("refused"),
    ] {
        assert!(error.to_string().contains("rotary positions outside a layer"), "{error}");
    }
}

#[test]
fn bad_calls_are_errors() {
    let gpu = &full().gpu;
    let buffers: Vec<_> = (0..6).map(|_| gpu.buffer(4096).expect("a buffer")).collect();
    let linear = Linear { weight: TensorView::matrix(&buffers[5], DType::F32, [8, 8]), bias: None };
    let weights = MultiHeadWeights {
        query: linear,
        key: linear,
        value: linear,
        out: linear,
        bias_kv: None,
        qk_norm: None,
        gate: None,
    };
    let config = LayerOptions::new(8, 2).config();
    let layer = MultiHeadAttention::with_pipelines(gpu.pipelines(), config, &weights).expect("a layer");
    let rows = |n: usize, length| TensorView::sequence(&buffers[n], DType::F32, [2, length, 8]);
    let rope = |dim| Rope::new(gpu.device(), RopeConfig::new(dim)).expect("a rope");
    let (rope, wide) = (rope(4), rope(6));
    let start = RowPositions::Start(0);
    let places = |n: usize, shape| RowPositions::Tensor(TensorView::new(&buffers[n], DType::U32, shape));
    let refused = |call: MultiHeadForward, words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let mut scratch = Scratch::new(gpu.device(), Default::default()).expect("a scratch");
        let says = |error: wgpu_attention::Error| {
            let error = error.to_string();
            assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        };
        says(layer.forward(&mut encoder, &call, &mut scratch).expect_err("an error"));
        let back = MultiHeadBackward::new(call, rows(3, 3)).d_query(rows(4, 3));
        says(layer.backward(&mut encoder, &back, &mut scratch).expect_err("an error"));
    };
    let call = MultiHeadForward::self_attention(rows(0, 3), rows(1, 3));
    refused(call.rotary(&wide, start), &["`q`", "at least 6"]);
    refused(call.rotary(&rope, RowPositions::Start(u32::MAX)), &["start", "2^24"]);
    refused(call.rotary(&rope, places(2, [2, 1, 2, 1])), &["`positions`", "length must be 3"]);
    refused(call.rotary(&rope, places(2, [3, 1, 1, 1])), &["`positions`", "batch must be 2"]);
    refused(call.rotary(&rope, places(2, [2, 3, 3, 1])), &["`positions`", "axes must be 1", "sections"]);
    let floats = RowPositions::Tensor(TensorView::new(&buffers[2], DType::F32, [2, 1, 3, 1]));
    refused(call.rotary(&rope, floats), &["`positions`", "U32"]);
    let cross = MultiHeadForward::new(rows(0, 3), rows(2, 4), rows(2, 4), rows(1, 3));
    refused(cross.rotary(&rope, start), &["rotary positions with unequal numbers of queries and keys"]);
    refused(call.rotary(&rope, start), &["scratch"]);
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let mut scratch = Scratch::new(gpu.device(), Default::default()).expect("a scratch");
    let own = call.rotary(&rope, places(1, [2, 1, 3, 1]));
    let error = layer.forward(&mut encoder, &own, &mut scratch).expect_err("an error").to_string();
    assert!(error.contains("`out`") && error.contains("`positions`"), "{error}");
}
