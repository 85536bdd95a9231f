//! The gradients of `TransformerEncoder`.

use wgpu_attention::layers::{EncoderBackward, EncoderForward};
use wgpu_attention::matmul::Activation;
use wgpu_attention::position::{Rope, RopeConfig, RowPositions};
use wgpu_attention::reference::compare::compare;
use wgpu_attention::reference::{self, LinearGradients, Real, widen};
use wgpu_attention::rows::{NormConfig, NormGradients};
use wgpu_attention::{DType, Error, KernelOptions, Scratch, TensorView};

use super::data::Stack;
use super::encoder::{Setup, drawn, vector};
use super::judge::{Gradients, expect_slopes};
use crate::harness::rotary::RotaryData;
use crate::harness::run::{Layout, Placed, PlacedRules};
use crate::harness::{FORMS, Judged, Report, Rng, Rules, Values, defaults, full, rest, stored};

const VECTOR: &str = "encoder_bwd_1layer";

/// Names of the parts of a layer, in the order of [`Stack::layers`], and the vectors' names of
/// weight and bias.
const PARTS: [(&str, [&str; 2]); 8] = [
    ("query", ["w_q", "b_q"]),
    ("key", ["w_k", "b_k"]),
    ("value", ["w_v", "b_v"]),
    ("out", ["w_o", "b_o"]),
    ("up", ["w_1", "b_1"]),
    ("down", ["w_2", "b_2"]),
    ("first norm", ["ln1_w", "ln1_b"]),
    ("second norm", ["ln2_w", "ln2_b"]),
];
/// Names of the further parts, by their number.
const MORE: [&[&str]; 5] = [
    &[],
    &["gate"],
    &["q norm", "k norm"],
    &["q norm", "k norm", "gate"],
    &["q norm", "k norm", "output gate", "gate"],
];

/// Returns d_x, then the gradients of all weights, in the order of
/// [`super::data::PlacedStack::tensors`].
fn flat<R: Real>(stack: &Stack, got: reference::EncoderGradients<R>) -> Vec<Vec<R>> {
    let mut all = vec![got.d_x];
    for (n, (layer, parts)) in got.layers.into_iter().zip(&stack.layers).enumerate() {
        let linear = |g: LinearGradients<R>| (g.d_weight, g.d_bias);
        let reference::MultiHeadGradients { query, key, value, out, qk_norm, gate: of_heads, .. } =
            layer.attention;
        let reference::FeedForwardGradients { up, gate, down, .. } = layer.feed_forward;
        let mut own: Vec<(Vec<R>, Option<Vec<R>>)> = [query, key, value, out, up, down].map(linear).into();
        own.extend(layer.norms.map(|norm| (norm.d_weight, Some(norm.d_bias))));
        own.extend(qk_norm.into_iter().flatten().map(|norm| (norm.d_weight, Some(norm.d_bias))));
        own.extend(of_heads.map(linear));
        own.extend(gate.map(linear));
        assert_eq!(own.len(), parts.len());
        for (k, ((weight, bias), part)) in own.into_iter().zip(parts).enumerate() {
            if stack.lender(n, k).is_some() {
                assert!(weight.is_empty(), "gradients in a layer that reads other keys");
                continue;
            }
            all.push(weight);
            all.extend(bias.filter(|_| part.bias.is_some()));
        }
    }
    if let (Some(last), Some(part)) = (got.final_norm, &stack.final_norm) {
        all.push(last.d_weight);
        all.extend(part.bias.is_some().then_some(last.d_bias));
    }
    all
}

/// Returns the weights in the same order, with names.
fn weights(stack: &Stack) -> Vec<(String, Vec<f32>)> {
    let mut all = Vec::new();
    let layers = stack.layers.iter().enumerate().flat_map(|(n, parts)| {
        let names = PARTS.iter().map(|(name, _)| name).chain(MORE[parts.len() - PARTS.len()]);
        let own = (0..parts.len()).filter(move |k| stack.lender(n, *k).is_none());
        let named: Vec<_> = parts.iter().zip(names).collect();
        own.map(move |k| (format!("layer {n}, {}", named[k].1), named[k].0))
    });
    for (name, part) in layers.chain(stack.final_norm.iter().map(|part| ("final norm".to_string(), part))) {
        all.push((format!("{name}, weight"), part.weight.clone()));
        all.extend(part.bias.iter().map(|bias| (format!("{name}, bias"), bias.clone())));
    }
    all
}

/// Returns the reference's gradients.
pub fn reference_of<R: Real>(stack: &Stack, d_out: &[f32]) -> Vec<Vec<R>> {
    let got = stack.on_host::<R, _>(|x, layers, last| {
        let rows = [stack.batch, stack.length];
        let d_out = widen::<R>(d_out);
        if stack.each.is_empty() {
            let (config, options) = (stack.config(DType::F32), stack.options());
            reference::encoder_backward(x, rows, &config, layers, last, &options, &d_out)
        } else {
            reference::encoder_by_layer_backward(x, rows, &stack.calls(), layers, last, &d_out)
        }
    });
    flat(stack, got.expect("the stack fits the reference"))
}

/// The options of a backward call.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    /// True if the forward call saves the layers' outputs.
    pub keeps: bool,
    pub accumulates: bool,
    pub gradient: DType,
}

pub fn run(stack: &Stack, d_out: &[f32], setup: &Setup, ask: Ask) -> Result<Vec<Vec<f64>>, String> {
    let Setup { profile, form, dtypes: [dtype, weight], layout } = *setup;
    profile.tidy();
    let refused = |e: Error| e.to_string();
    let placed = stack.place(profile, weight);
    let encoder = placed.encoder_of(profile, &stack.configs(dtype)).map_err(refused)?;
    let encoder = encoder.kernel_options(KernelOptions::new().target(form));
    let shape = stack.shape();
    let many = [stack.kept().max(1) * shape[0], 1, shape[2], shape[3]];
    let [x_at, out_at, d_out_at, d_x_at, hidden_at] = layout.places([shape, shape, shape, shape, many]);
    let input = |data: &[f32], at| Placed::input(profile, Values::Floats(data), dtype, at);
    let (x, d_out) = (input(&stack.x, x_at), input(d_out, d_out_at));
    let out = Placed::output(profile, dtype, out_at);
    let hidden = (ask.keeps && stack.kept() > 0).then(|| Placed::output(profile, dtype, hidden_at));
    let d_x = if ask.accumulates {
        Placed::holding(profile, &stack.x, ask.gradient, d_x_at)
    } else {
        Placed::output(profile, ask.gradient, d_x_at)
    };
    let gradients = stack.place_gradients(profile, ask.gradient, ask.accumulates, layout);
    let rules = PlacedRules::new(profile, &stack.rules, DType::F32, layout);
    let rotary = stack.rotary.as_ref().map(|rotary| rotary.place(profile));
    let each: Vec<_> = stack.each.iter().map(|layer| layer.place(profile, layout)).collect();
    let calls: Vec<_> = each.iter().map(|layer| layer.call(None)).collect();
    let forward = EncoderForward::new(x.view(), out.view()).hidden(hidden.as_ref().map(Placed::view));
    let mut forward =
        if calls.is_empty() { forward.mask(rules.mask()) } else { forward.layer_calls(&calls[..]) };
    if let Some(rotary) = rotary.as_ref().filter(|_| calls.is_empty()) {
        forward = forward.rotary(rotary.rotation(), rotary.at());
    }
    let d_layers = gradients.gradients();
    let call = EncoderBackward::new(forward, d_out.view())
        .d_x(d_x.view())
        .d_layers(&d_layers)
        .d_final_norm(gradients.final_gradients())
        .accumulate(ask.accumulates);
    let size = encoder.scratch_size(&forward).map_err(refused)?;
    let size = size.max(encoder.backward_scratch_size(&call).map_err(refused)?);
    let mut scratch = Scratch::new(profile.gpu.device(), size).map_err(refused)?;
    let recorded = profile.gpu.submit(|e| {
        encoder.forward(e, &forward, &mut scratch)?;
        encoder.backward(e, &call, &mut scratch)
    });
    recorded.map_err(refused)?;
    let read = |t: &Placed| pollster::block_on(t.download_async("a gradient", profile));
    std::iter::once(&d_x).chain(gradients.tensors()).map(read).collect()
}

#[test]
fn reference_matches_gradient_vectors() {
    let (stack, vector) = vector(VECTOR);
    let got = reference_of::<f64>(&stack, &vector.f32("dout"));
    let mut got = got.into_iter();
    let mut check = |what: &str| {
        let (want, tolerance) = vector.expected(what).unwrap_or_else(|| panic!("no {what}"));
        compare(&got.next().expect("a gradient"), &want, tolerance).unwrap_or_else(|e| panic!("{what}: {e}"));
    };
    check("dx");
    for (_, names) in &PARTS[..8] {
        names.iter().for_each(|name| check(&format!("dl0.{name}")));
    }
    assert!(got.next().is_none());
}

#[test]
fn every_target_matches_gradient_vectors() {
    crate::harness::in_turn!();
    let mut report = Report::new("encoder backward, vector");
    let (stack, vector) = vector(VECTOR);
    let d_out = vector.f32("dout");
    for profile in [full(), defaults()] {
        for (form, layout) in FORMS.into_iter().zip([Layout::Dense, Layout::Window(5)]) {
            let setup = Setup { profile, form, dtypes: [DType::F32; 2], layout };
            if profile.name != "full" && !rest(&format!("encoder backward {setup}")) {
                continue;
            }
            let ask = Ask { keeps: false, accumulates: false, gradient: DType::F32 };
            let judged = run(&stack, &d_out, &setup, ask).and_then(|got| {
                let names = PARTS[..8].iter().flat_map(|(_, names)| names.map(|name| format!("dl0.{name}")));
                let mut worst: f64 = 0.0;
                for (name, got) in std::iter::once("dx".to_string()).chain(names).zip(&got) {
                    let (want, tolerance) = vector.expected(&name).ok_or("not in the vector")?;
                    let judged = Judged { want, tolerance }.judge(got);
                    worst = worst.max(judged.map_err(|e| format!("{name}: {e}"))?);
                }
                Ok(worst)
            });
            report.record(VECTOR, &setup, judged);
        }
    }
    report.finish();
}

/// Returns the largest error over tolerance, against the reference. Two runs must have the same
/// bits.
pub fn outcome(stack: &Stack, setup: &Setup, ask: Ask, seed: u64) -> Result<f64, String> {
    let [dtype, weight] = setup.dtypes;
    let own = stack.stored(dtype, weight);
    let count = own.x.len();
    let d_out = stored(&Rng::new(seed ^ 0xd007).normals(count), dtype);
    let got = run(&own, &d_out, setup, ask)?;
    if got != run(&own, &d_out, setup, ask)? {
        return Err("other numbers the second time".into());
    }
    let exact = reference_of::<f64>(&own, &d_out);
    let naive = reference_of::<f32>(&own, &d_out);
    let before = std::iter::once(("d_x".to_string(), own.x.clone())).chain(weights(&own)).collect();
    Gradients {
        before,
        exact: &exact,
        naive: &naive,
        dtype,
        gradient: ask.gradient,
        accumulates: ask.accumulates,
    }
    .judge(&got)
}

#[test]
fn gradients_of_random_stacks_equal_the_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("random encoders backward");
    for n in 0..40 {
        // Case 38 has activations of half the gradients' size, without surrounding elements.
        if n >= 6 && n != 38 && !rest(&format!("random encoders backward {n}")) {
            continue;
        }
        let (mut stack, keeps) = drawn(n);
        let rng = &mut Rng::new(n ^ 0xbacc);
        let profile = if rng.chance(0.3) { defaults() } else { full() };
        let dtype = match n % 5 {
            2 => DType::F16,
            3 => DType::BF16,
            _ => DType::F32,
        };
        // If rounding moves the input of a ReLU over its kink, gradients jump.
        if dtype != DType::F32 && stack.activation == Activation::Relu {
            stack.activation = Activation::Gelu;
        }
        let weight = if rng.chance(0.5) { dtype } else { DType::F32 };
        let layout = if rng.chance(0.5) { Layout::Dense } else { Layout::Window(rng.word()) };
        let setup = Setup { profile, form: FORMS[(n / 2) as usize % 2], dtypes: [dtype, weight], layout };
        let ask = Ask { keeps, accumulates: n % 3 == 1, gradient: DType::F32 };
        report.record(&format!("stack {n}"), &format!("{setup}, {ask:?}"), outcome(&stack, &setup, ask, n));
    }
    report.finish();
}

/// Central differences check the reference's gradients of each kind of stack.
#[test]
fn reference_gradients_match_finite_differences() {
    for n in 0..12 {
        let (stack, _) = drawn(n);
        let rng = &mut Rng::new(n ^ 0xd1ff);
        // ReLU has a kink. The other activations are smooth.
        let rotary = RotaryData::random(rng, [1, 3, stack.features / stack.heads]);
        let stack = Stack { batch: 1, length: 3, rules: Rules::default(), rotary, ..stack };
        let stack = Stack::random(rng, stack.layers.len(), stack.final_norm.is_some(), stack);
        if stack.activation == Activation::Relu {
            continue;
        }
        let d_out = rng.normals(stack.x.len());
        let loss =
            |stack: &Stack| stack.exact().out.iter().zip(&d_out).map(|(out, d)| out * f64::from(*d)).sum();
        let gradients = |stack: &Stack| reference_of::<f64>(stack, &d_out);
        let tensors = |stack: &mut Stack, visit: &mut dyn FnMut(&mut Vec<f32>)| {
            let parts = stack.layers.iter_mut().flatten().chain(&mut stack.final_norm);
            let tensors = parts.flat_map(|p| std::iter::once(&mut p.weight).chain(&mut p.bias));
            std::iter::once(&mut stack.x).chain(tensors).for_each(visit);
        };
        expect_slopes(&format!("stack {n}"), &stack, rng, loss, gradients, tensors);
    }
}

#[test]
fn bad_backward_calls_are_errors() {
    let gpu = &full().gpu;
    let (mut stack, _) = drawn(0);
    (stack.batch, stack.length, stack.rules, stack.rotary) = (1, 3, Rules::default(), None);
    stack.norm = NormConfig::layer();
    let stack = Stack::random(&mut Rng::new(3), 2, false, stack);
    let e = stack.features;
    let placed = stack.place(full(), DType::F32);
    let encoder = placed.encoder(full(), stack.config(DType::F32)).expect("a stack");
    let buffers: Vec<_> = (0..6).map(|_| gpu.buffer(4 * 8 * e).expect("a buffer")).collect();
    let rows = |n: usize| TensorView::sequence(&buffers[n], DType::F32, [1, 3, e]);
    let forward = EncoderForward::new(rows(0), rows(1));
    let refused = |call: EncoderBackward, words: &[&str]| {
        let mut encoding = gpu.device().create_command_encoder(&Default::default());
        let mut scratch = Scratch::new(gpu.device(), Default::default()).expect("a scratch");
        let error = encoder.backward(&mut encoding, &call, &mut scratch).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoding.begin_compute_pass(&Default::default());
        assert!(encoder.backward(&mut pass, &call, &mut scratch).is_err());
        assert!(encoder.prepare_backward(&call, &mut scratch).is_err());
    };
    let call = EncoderBackward::new(forward, rows(2));
    refused(call, &["no gradient is requested"]);
    refused(call.d_x(rows(2)), &["`d_x`", "`d_out`"]);
    refused(call.d_x(rows(0)), &["`d_x`", "`x`"]);
    refused(
        call.d_x(TensorView::sequence(&buffers[3], DType::F32, [1, 2, e])),
        &["`d_x`", "length must be 3"],
    );
    refused(EncoderBackward::new(forward, rows(2).slice(2, 0, 2)).d_x(rows(3)), &["`d_out`", "must be 3"]);
    refused(
        call.d_final_norm(NormGradients {
            weight: Some(TensorView::vector(&buffers[3], DType::F32, e)),
            bias: None,
        }),
        &["d_final_norm", "without it"],
    );
    let one = [wgpu_attention::layers::EncoderLayerGradients::default()];
    refused(call.d_x(rows(3)).d_layers(&one), &["`d_layers`", "2", "1"]);
    let mut two = [wgpu_attention::layers::EncoderLayerGradients::default(); 2];
    two[1].norms[0].weight = Some(TensorView::vector(&buffers[4], DType::F32, e + 1));
    refused(call.d_layers(&two), &["`d_norm.weight`", &format!("must be {e}")]);
    two[1].norms[0].weight = Some(TensorView::vector(&buffers[4], DType::F32, e));
    two[0].norms[0].weight = two[1].norms[0].weight;
    refused(call.d_layers(&two), &["overlap"]);
    let rope = Rope::new(gpu.device(), RopeConfig::new(e + 2)).expect("a rope");
    let turned = forward.rotary(&rope, RowPositions::Start(0));
    refused(EncoderBackward::new(turned, rows(2)).d_x(rows(3)), &["`q`", "`rotary_dim` of the rope"]);
    let rope = Rope::new(gpu.device(), RopeConfig::new(2)).expect("a rope");
    let places = TensorView::new(&buffers[3], DType::U32, [1, 1, 3, 1]);
    let turned = forward.rotary(&rope, RowPositions::Tensor(places));
    refused(EncoderBackward::new(turned, rows(2)).d_x(rows(3)), &["`d_x`", "`positions`"]);
    refused(call.d_x(rows(3)), &["scratch"]);
}
