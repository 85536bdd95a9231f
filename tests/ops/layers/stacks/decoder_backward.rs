//! The gradients of `TransformerDecoder`.

use wgpu_attention::layers::{
    DecoderBackward, DecoderForward, DecoderLayerGradients, DecoderMemory, NormOrder,
};
use wgpu_attention::matmul::Activation;
use wgpu_attention::reference::compare::{Tolerance, compare, max_error};
use wgpu_attention::reference::{self, LinearGradients, Real, widen};
use wgpu_attention::rows::{NormConfig, NormGradients};
use wgpu_attention::{Cache, CacheConfig, DType, Error, KernelOptions, Scratch, TensorView};

use super::decoder_data::{Stack, Weights, drawn};
use super::encoder::Setup;
use super::judge::{Gradients, expect_slopes};
use crate::harness::case::largest;
use crate::harness::rotary::RotaryData;
use crate::harness::run::{Layout, Placed, PlacedRules};
use crate::harness::{FORMS, Report, Rng, Rules, Values, defaults, full, rest, stored};

/// Names of the parts of a layer, in the order of [`Stack::layers`].
const PARTS: [&str; 13] = [
    "query",
    "key",
    "value",
    "out",
    "memory query",
    "memory key",
    "memory value",
    "memory out",
    "up",
    "down",
    "first norm",
    "second norm",
    "third norm",
];
/// Names of the further parts, by their number.
const MORE: [&[&str]; 8] = [
    &[],
    &["gate"],
    &["appended", "memory appended"],
    &["appended", "memory appended", "gate"],
    &["q norm", "k norm", "memory q norm", "memory k norm"],
    &["q norm", "k norm", "memory q norm", "memory k norm", "gate"],
    &[],
    &["q norm", "k norm", "memory q norm", "memory k norm", "output gate", "memory output gate", "gate"],
];

/// Returns d_x and d_memory, then the gradients of all weights, in the order of
/// [`Weights::tensors`].
fn flat<R: Real>(stack: &Stack, got: reference::DecoderGradients<R>) -> Vec<Vec<R>> {
    let mut all = vec![got.d_x, got.d_memory];
    for (n, (layer, parts)) in got.layers.into_iter().zip(&stack.layers).enumerate() {
        let linear = |g: LinearGradients<R>| (g.d_weight, g.d_bias);
        let mut own: Vec<(Vec<R>, Option<Vec<R>>)> = Vec::new();
        let (mut appended, mut gates) = (Vec::new(), Vec::new());
        for attention in [layer.self_attention, layer.cross_attention] {
            let reference::MultiHeadGradients { query, key, value, out, d_bias_kv, qk_norm, gate, .. } =
                attention;
            gates.extend(gate.map(linear));
            own.extend([query, key, value, out].map(linear));
            appended.extend(d_bias_kv.map(|[key, value]| (key, Some(value))));
            appended.extend(qk_norm.into_iter().flatten().map(|norm| (norm.d_weight, Some(norm.d_bias))));
        }
        let reference::FeedForwardGradients { up, gate, down, .. } = layer.feed_forward;
        own.extend([up, down].map(linear));
        own.extend(layer.norms.map(|norm| (norm.d_weight, Some(norm.d_bias))));
        own.extend(appended.into_iter().chain(gates));
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

/// Returns the inputs that have gradients in the same order, with names.
fn inputs(stack: &Stack) -> Vec<(String, Vec<f32>)> {
    let mut all = vec![("d_x".to_string(), stack.x.clone()), ("d_memory".to_string(), stack.memory.clone())];
    let layers = stack.layers.iter().enumerate().flat_map(|(n, parts)| {
        let names = PARTS.iter().chain(MORE[parts.len() - PARTS.len()]);
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
fn reference_of<R: Real>(stack: &Stack, d_out: &[f32]) -> Vec<Vec<R>> {
    let got = stack.on_host::<R, _>(|inputs, layers, last| {
        let (config, [own, cross]) = (stack.config(DType::F32), &stack.options());
        let (shape, d_out) = (stack.shape(), widen::<R>(d_out));
        if !stack.each.is_empty() {
            return reference::decoder_by_layer_backward(inputs, shape, &stack.calls(), layers, last, &d_out);
        }
        reference::decoder_backward(inputs, shape, &config, layers, last, [own, cross], &d_out)
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
    /// The wanted gradients: of x, of the memory, of weights.
    pub wanted: [bool; 3],
}

pub const ALL: Ask = Ask { keeps: false, accumulates: false, gradient: DType::F32, wanted: [true; 3] };

/// Returns the wanted gradients of a call: d_x, d_memory, those of weights.
fn run(stack: &Stack, d_out: &[f32], setup: &Setup, ask: Ask) -> Result<Vec<Vec<f64>>, String> {
    let Setup { profile, form, dtypes: [dtype, weight], layout } = *setup;
    profile.tidy();
    let refused = |e: Error| e.to_string();
    let weights = Weights::new(stack, profile, weight);
    let decoder = weights.decoder_of(profile, &stack.configs(dtype)).map_err(refused)?;
    let decoder = decoder.kernel_options(KernelOptions::new().target(form));
    let Stack { batch, length, memory_len, heads, kv_heads, features, .. } = *stack;
    let rows = [batch, 1, length, features];
    let memory_rows = [batch, 1, memory_len, features];
    let layers = stack.kept();
    let [x_at, out_at, d_out_at, d_x_at, hidden_at, memory_at, d_memory_at] = layout.places([
        rows,
        rows,
        rows,
        rows,
        [layers.max(1) * batch, 1, length, features],
        memory_rows,
        memory_rows,
    ]);
    let length_of_keys = memory_len + stack.appended();
    let projected = [stack.layers.len() * batch, kv_heads, length_of_keys, features / heads];
    let [keys_at, values_at] = layout.places([projected; 2]);
    let input = |data: &[f32], at| Placed::input(profile, Values::Floats(data), dtype, at);
    let [x, memory, d_out] =
        [(&stack.x[..], x_at), (&stack.memory[..], memory_at), (d_out, d_out_at)].map(|(t, at)| input(t, at));
    let [out, keys, values] = [out_at, keys_at, values_at].map(|at| Placed::output(profile, dtype, at));
    let hidden = (ask.keeps && layers > 0).then(|| Placed::output(profile, dtype, hidden_at));
    let place = |before: &[f32], at| match ask.accumulates {
        true => Placed::holding(profile, before, ask.gradient, at),
        false => Placed::output(profile, ask.gradient, at),
    };
    let [wants_x, wants_memory, wants_weights] = ask.wanted;
    let d_x = wants_x.then(|| place(&stack.x, d_x_at));
    let d_memory = wants_memory.then(|| place(&stack.memory, d_memory_at));
    let gradients =
        wants_weights.then(|| Weights::gradients(stack, profile, ask.gradient, ask.accumulates, layout));
    let rules = stack.rules.each_ref().map(|r| PlacedRules::new(profile, r, DType::F32, layout));
    let projected = DecoderMemory { keys: keys.view(), values: values.view() };
    let rotary = stack.rotary.as_ref().map(|rotary| rotary.place(profile));
    let each: Vec<_> = stack.each.iter().map(|layer| layer.place(profile, layout)).collect();
    let calls: Vec<_> = each.iter().map(|layer| layer.call(None)).collect();
    let mut forward = DecoderForward::new(x.view(), projected, out.view())
        .memory_mask(rules[1].mask())
        .hidden(hidden.as_ref().map(Placed::view));
    forward = if calls.is_empty() { forward.mask(rules[0].mask()) } else { forward.layer_calls(&calls[..]) };
    if let Some(rotary) = rotary.as_ref().filter(|_| calls.is_empty()) {
        forward = forward.rotary(rotary.rotation(), rotary.at());
    }
    let d_layers = gradients.as_ref().map(Weights::layer_gradients).unwrap_or_default();
    let call = DecoderBackward::new(forward, memory.view(), d_out.view())
        .d_x(d_x.as_ref().map(Placed::view))
        .d_memory(d_memory.as_ref().map(Placed::view))
        .d_layers(&d_layers)
        .d_final_norm(gradients.as_ref().map(Weights::final_gradients).unwrap_or_default())
        .accumulate(ask.accumulates);
    let size = decoder.scratch_size(&forward).map_err(refused)?;
    let size = size.max(decoder.backward_scratch_size(&call).map_err(refused)?);
    let mut scratch = Scratch::new(profile.gpu.device(), size).map_err(refused)?;
    let recorded = profile.gpu.submit(|e| {
        decoder.project_memory(e, memory.view(), &projected, &mut scratch)?;
        decoder.forward(e, &forward, &mut scratch)?;
        decoder.backward(e, &call, &mut scratch)
    });
    recorded.map_err(refused)?;
    let read = |t: &Placed| pollster::block_on(t.download_async("a gradient", profile));
    d_x.iter().chain(&d_memory).chain(gradients.iter().flat_map(Weights::tensors)).map(read).collect()
}

/// Returns the largest error over tolerance, against the reference. Two runs must have the same
/// bits.
pub fn outcome(stack: &Stack, setup: &Setup, ask: Ask, seed: u64) -> Result<f64, String> {
    let [dtype, weight] = setup.dtypes;
    let own = stack.stored(dtype, weight);
    let d_out = stored(&Rng::new(seed ^ 0xd007).normals(own.x.len()), dtype);
    let got = run(&own, &d_out, setup, ask)?;
    if got != run(&own, &d_out, setup, ask)? {
        return Err("other numbers the second time".into());
    }
    let exact = reference_of::<f64>(&own, &d_out);
    let naive = reference_of::<f32>(&own, &d_out);
    let Ask { gradient, accumulates, .. } = ask;
    Gradients { before: inputs(&own), exact: &exact, naive: &naive, dtype, gradient, accumulates }.judge(&got)
}

#[test]
fn gradients_of_random_stacks_equal_the_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("random decoders backward");
    for n in 0..40 {
        if n >= 6 && !rest(&format!("random decoders backward {n}")) {
            continue;
        }
        let mut stack = drawn(n, true);
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
        let ask = Ask { keeps: rng.chance(0.5), accumulates: n % 3 == 1, ..ALL };
        report.record(&format!("stack {n}"), &format!("{setup}, {ask:?}"), outcome(&stack, &setup, ask, n));
    }
    report.finish();
}

/// A gradient depends neither on the other wanted gradients, nor on saved outputs of layers. The
/// gradient of x alone comes from other variants of kernels, which a driver may round differently.
#[test]
fn single_gradients_equal_joint_ones() {
    crate::harness::in_turn!();
    for (n, order) in [(4, NormOrder::Pre), (5, NormOrder::Post)] {
        let stack = Stack { order, ..drawn(n, true) };
        let stack = Stack::random(&mut Rng::new(n), 2, true, stack);
        let d_out = Rng::new(7).normals(stack.x.len());
        let setup = Setup { profile: full(), form: FORMS[0], dtypes: [DType::F32; 2], layout: Layout::Dense };
        let all = run(&stack, &d_out, &setup, ALL).expect("all gradients");
        let kept = run(&stack, &d_out, &setup, Ask { keeps: true, ..ALL }).expect("all gradients");
        assert!(all == kept, "{order:?}: of what was kept");
        let parts = [
            (0..1, [true, false, false]),
            (1..2, [false, true, false]),
            (2..all.len(), [false, false, true]),
        ];
        for (range, wanted) in parts {
            let some = run(&stack, &d_out, &setup, Ask { wanted, ..ALL }).expect("some gradients");
            for (n, some) in range.zip(some) {
                let ulps = if wanted[0] { 4.0 } else { 0.0 };
                let absolute = ulps * f64::from(f32::EPSILON) * largest(all[n].clone());
                compare(&some, &all[n], Tolerance { absolute })
                    .unwrap_or_else(|e| panic!("{order:?}, {wanted:?}, {n}: {e}"));
            }
        }
    }
}

fn smooth(n: u64) -> Option<(Stack, Rng)> {
    let mut rng = Rng::new(n ^ 0xd1ff);
    let rng_of_data = &mut rng;
    let stack = Stack { batch: 1, length: 3, memory_len: 4, ..drawn(n, true) };
    let causal = Rules { causal: true, ..Default::default() };
    let rotary = RotaryData::random(rng_of_data, [1, 3, stack.features / stack.heads]);
    let stack = Stack { rules: [causal, Rules::default()], rotary, ..stack };
    let (layers, last) = (stack.layers.len(), stack.final_norm.is_some());
    let stack = Stack::random(rng_of_data, layers, last, stack);
    // ReLU has a kink. The other activations are smooth.
    (stack.activation != Activation::Relu).then_some((stack, rng))
}

/// Central differences check the reference's gradients of each kind of stack.
#[test]
fn reference_gradients_match_finite_differences() {
    for n in 0..12 {
        let Some((stack, mut rng)) = smooth(n) else { continue };
        let d_out = rng.normals(stack.x.len());
        let loss = |stack: &Stack| {
            let out = stack.reference::<f64>().out;
            out.iter().zip(&d_out).map(|(out, d)| out * f64::from(*d)).sum()
        };
        let gradients = |stack: &Stack| reference_of::<f64>(stack, &d_out);
        let tensors = |stack: &mut Stack, visit: &mut dyn FnMut(&mut Vec<f32>)| {
            let parts = stack.layers.iter_mut().flatten().chain(&mut stack.final_norm);
            let tensors = parts.flat_map(|p| std::iter::once(&mut p.weight).chain(&mut p.bias));
            [&mut stack.x, &mut stack.memory].into_iter().chain(tensors).for_each(visit);
        };
        expect_slopes(&format!("stack {n}"), &stack, &mut rng, loss, gradients, tensors);
    }
}

/// With pre-norm and a memory whose attention gives zero, a decoder equals an encoder, forward and
/// in its gradients.
#[test]
fn reference_without_memory_equals_encoder() {
    for n in [2, 6, 10] {
        let Some((mut stack, mut rng)) = smooth(n) else { continue };
        assert_eq!(stack.order, NormOrder::Pre);
        for parts in &mut stack.layers {
            parts[7].weight.fill(0.0);
            parts[7].bias.iter_mut().for_each(|bias| bias.fill(0.0));
        }
        let d_out = rng.normals(stack.x.len());
        let got = reference_of::<f64>(&stack, &d_out);
        let want = stack.on_host::<f64, _>(|[x, _], layers, last| {
            let layers: Vec<_> = layers
                .iter()
                .map(|layer| reference::HostEncoderLayer {
                    attention: layer.self_attention,
                    feed_forward: layer.feed_forward,
                    norms: [layer.norms[0], layer.norms[2]],
                })
                .collect();
            let (config, [own, _]) = (stack.config(DType::F32), &stack.options());
            let (rows, d_out) = ([stack.batch, stack.length], widen(&d_out));
            reference::encoder_backward(x, rows, &config, &layers, last, own, &d_out)
        });
        let want = want.expect("the stack fits the reference");
        let scale = largest(want.d_x.iter().copied());
        assert!(max_error(&got[0], &want.d_x) < 1e-12 * scale, "stack {n}: d_x");
        assert!(got[1].iter().all(|d| *d == 0.0), "stack {n}: d_memory");
        let query = &want.layers[0].attention.query.d_weight;
        assert!(max_error(&got[2], query) < 1e-12 * largest(query.iter().copied()), "stack {n}: d_W");
    }
}

#[test]
fn bad_backward_calls_are_errors() {
    let gpu = &full().gpu;
    let mut stack = drawn(0, true);
    (stack.batch, stack.length, stack.memory_len) = (1, 3, 4);
    (stack.heads, stack.kv_heads, stack.features, stack.appends) = (2, 2, 16, [false; 2]);
    (stack.norm, stack.rules, stack.rotary) = (NormConfig::layer(), Default::default(), None);
    let stack = Stack::random(&mut Rng::new(3), 2, false, stack);
    let weights = Weights::new(&stack, full(), DType::F32);
    let decoder = weights.decoder(full(), stack.config(DType::F32)).expect("a stack");
    let buffers: Vec<_> = (0..9).map(|_| gpu.buffer(4096).expect("a buffer")).collect();
    let typed = |n: usize, shape| TensorView::new(&buffers[n], DType::F32, shape);
    let (rows, of_memory) = (|n: usize| typed(n, [1, 1, 3, 16]), |n: usize| typed(n, [1, 1, 4, 16]));
    let projected = DecoderMemory { keys: typed(2, [2, 2, 4, 8]), values: typed(3, [2, 2, 4, 8]) };
    let forward = DecoderForward::new(rows(0), projected, rows(1));
    let refused = |call: DecoderBackward, words: &[&str]| {
        let mut encoding = gpu.device().create_command_encoder(&Default::default());
        let mut scratch = Scratch::new(gpu.device(), Default::default()).expect("a scratch");
        let error = decoder.backward(&mut encoding, &call, &mut scratch).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoding.begin_compute_pass(&Default::default());
        assert!(decoder.backward(&mut pass, &call, &mut scratch).is_err());
        assert!(decoder.prepare_backward(&call, &mut scratch).is_err());
    };
    let call = DecoderBackward::new(forward, of_memory(4), rows(5));
    refused(call, &["no gradient is requested"]);
    refused(call.d_x(rows(5)), &["`d_x`", "`d_out`"]);
    refused(call.d_x(rows(2)), &["`d_x`", "`memory.keys`"]);
    refused(call.d_memory(of_memory(4)), &["`d_memory`", "`memory`"]);
    refused(call.d_x(rows(6)).d_memory(of_memory(6)), &["overlap"]);
    refused(call.d_memory(rows(6)), &["`d_memory`", "length must be 4"]);
    refused(DecoderBackward::new(forward, rows(4), rows(5)).d_x(rows(6)), &["`memory`", "length must be 4"]);
    refused(
        DecoderBackward::new(forward, of_memory(4), of_memory(5)).d_x(rows(6)),
        &["`d_out`", "must be 3"],
    );
    let half = TensorView::new(&buffers[4], DType::BF16, [1, 1, 4, 16]);
    refused(DecoderBackward::new(forward, half, rows(5)).d_x(rows(6)), &["`memory`", "F32"]);
    let vector = TensorView::vector(&buffers[7], DType::F32, 16);
    refused(
        call.d_final_norm(NormGradients { weight: Some(vector), bias: None }),
        &["d_final_norm", "without it"],
    );
    let one = [DecoderLayerGradients::default()];
    refused(call.d_x(rows(6)).d_layers(&one), &["`d_layers`", "2", "1"]);
    let mut two = [DecoderLayerGradients::default(); 2];
    two[1].norms[2].weight = Some(TensorView::vector(&buffers[7], DType::F32, 17));
    refused(call.d_layers(&two), &["`d_norm.weight`", "must be 16"]);
    two[1].norms[2].weight = Some(vector);
    two[0].cross_attention.query.bias = Some(vector);
    refused(call.d_layers(&two), &["overlap"]);
    two[0].cross_attention.query.bias = Some(TensorView::vector(&buffers[8], DType::F32, 15));
    refused(call.d_layers(&two), &["`d_bias.query`", "must be 16"]);
    two[0].cross_attention = Default::default();
    two[0].cross_attention.bias_kv = Some([vector; 2]);
    refused(call.d_layers(&two), &["d_bias_k", "without it"]);
    let cached =
        Cache::with_pipelines(gpu.pipelines(), CacheConfig::new(2, 8, 9).layers(2)).expect("a cache");
    let cached = DecoderBackward::new(forward.cache(&cached), of_memory(4), rows(5));
    refused(cached.d_x(rows(6)), &["with a cache", "all rows at once"]);
    let kept = forward.hidden(typed(8, [2, 1, 3, 16]));
    refused(DecoderBackward::new(kept, of_memory(4), rows(5)).d_x(rows(6)), &["`hidden`", "batch must be 1"]);
    let kept = forward.hidden(rows(8));
    refused(DecoderBackward::new(kept, of_memory(4), rows(5)).d_x(rows(8)), &["`d_x`", "`hidden`"]);
    refused(call.d_x(rows(6)), &["scratch"]);
}
