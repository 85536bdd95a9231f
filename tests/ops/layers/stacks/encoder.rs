//! `TransformerEncoder`.

use std::fmt;

use wgpu_attention::cache::Tokens;
use wgpu_attention::layers::{EncoderBackward, EncoderForward, NormOrder, OutputGate};
use wgpu_attention::mask::DeviceMask;
use wgpu_attention::matmul::Activation;
use wgpu_attention::reference::compare::{EPSILON_BF16, EPSILON_F16, EPSILON_F32, Tolerance, compare};
use wgpu_attention::rows::NormConfig;
use wgpu_attention::tuning::Target;
use wgpu_attention::{Cache, CacheConfig, DType, KernelOptions, Scratch, TensorView, presets};

use super::FAMILY;
use super::data::Stack;
use super::steps::{cache_of, keep_last, steps_of};
use crate::harness::case::{largest, widened};
use crate::harness::layer::LinearData;
use crate::harness::rotary::RotaryData;
use crate::harness::run::{Layout, Placed, PlacedRules};
use crate::harness::{
    FORMS, HostData, Judged, Profile, Report, Rng, Rules, Values, Vector, defaults, full, rest,
};

pub const NAMES: &[&str] = &[
    "encoder_bwd_1layer",
    "encoder_post_key_mask",
    "encoder_post_relu",
    "encoder_pre_final_norm_causal",
    "encoder_pre_gelu_1layer",
];
pub const D2L: &[&str] = &["d2l_encoder_1block"];

/// The device, target, types and layout of a run.
#[derive(Clone, Copy)]
pub struct Setup {
    pub profile: &'static Profile,
    pub form: Target,
    /// The types of activations and of weights.
    pub dtypes: [DType; 2],
    pub layout: Layout,
}

impl fmt::Display for Setup {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Setup { profile, form, dtypes, layout } = self;
        write!(f, "{}, {form:?}, {dtypes:?}, {layout:?}", profile.name)
    }
}

/// Returns the stack of a vector, and the expected results.
pub fn vector(name: &str) -> (Stack, Vector) {
    let vector = Vector::load(if D2L.contains(&name) { "d2l" } else { FAMILY }, name);
    let d2l = D2L.contains(&name);
    let layers = vector.size(if d2l { "blocks" } else { "layers" });
    let features = vector.size(if d2l { "num_hiddens" } else { "embed_dim" });
    let linear = |layer: usize, weight: &str, bias: &str| {
        let [weight, bias] = [weight, bias].map(|t| format!("l{layer}.{t}"));
        LinearData { weight: vector.f32(&weight), bias: vector.has(&bias).then(|| vector.f32(&bias)) }
    };
    let parts = [
        ["w_q", "b_q"],
        ["w_k", "b_k"],
        ["w_v", "b_v"],
        ["w_o", "b_o"],
        ["w_1", "b_1"],
        ["w_2", "b_2"],
        ["ln1_w", "ln1_b"],
        ["ln2_w", "ln2_b"],
    ];
    let (x, [batch, length]) = if d2l {
        embedded(&vector)
    } else {
        let [_, batch, length, _] = vector.shape4("x");
        (vector.f32("x"), [batch, length])
    };
    let key_mask = vector.has("key_mask").then(|| vector.bools("key_mask").data);
    let lengths = vector.has("valid_lens").then(|| vector.integers("valid_lens"));
    let stack = Stack {
        batch,
        length,
        heads: vector.size("num_heads"),
        kv_heads: vector.size("num_heads"),
        features,
        hidden: vector.size("ffn_dim"),
        activation: match vector.attrs["activation"].as_str() {
            Some("gelu_erf") => Activation::Gelu,
            Some("relu") => Activation::Relu,
            other => panic!("{other:?} is new"),
        },
        gated: false,
        biased: true,
        rotary: None,
        each: Vec::new(),
        order: if vector.attrs["norm"] == "pre" { NormOrder::Pre } else { NormOrder::Post },
        norm: NormConfig::layer().eps(vector.number("ln_eps").expect("ln_eps")),
        qk_norm: None,
        output_gate: None,
        rules: Rules {
            attn_mask: vector.has("mask").then(|| vector.bools("mask")),
            key_padding_mask: key_mask.map(|data| HostData::new(data, [batch, 1, 1, length])),
            lengths: lengths
                .map(|n| HostData::new(n.into_iter().map(|n| n as u32).collect(), [batch, 1, 1, 1])),
            ..Default::default()
        },
        layers: (0..layers).map(|n| parts.iter().map(|[w, b]| linear(n, w, b)).collect()).collect(),
        final_norm: vector.has("lnf_w").then(|| LinearData {
            weight: vector.f32("lnf_w"),
            bias: vector.has("lnf_b").then(|| vector.f32("lnf_b")),
        }),
        transposed: false,
        x,
    };
    (stack, vector)
}

/// Returns the scaled embeddings of the vector's tokens with sinusoidal positions, rounded once.
fn embedded(vector: &Vector) -> (Vec<f32>, [usize; 2]) {
    let [_, _, batch, length] = vector.shape4("tokens");
    let table = vector.f64("embedding");
    let features = vector.shape("embedding")[1];
    let scale = vector.number("embed_scale").expect("embed_scale");
    let mut x = Vec::new();
    for (n, token) in vector.integers("tokens").into_iter().enumerate() {
        let position = (n % length) as f64;
        for d in 0..features {
            let angle = position / 10000f64.powf((d / 2 * 2) as f64 / features as f64);
            let encoding = if d % 2 == 0 { angle.sin() } else { angle.cos() };
            x.push((scale * table[token * features + d] + encoding) as f32);
        }
    }
    (x, [batch, length])
}

/// The results of a run: the output, and if saved, the layers' outputs and the attention weights of
/// their heads.
pub struct Got {
    pub out: Vec<f64>,
    hidden: Option<Vec<f64>>,
    weights: Option<Vec<f64>>,
}

impl Stack {
    pub fn shape(&self) -> [usize; 4] {
        [self.batch, 1, self.length, self.features]
    }

    /// Returns the number of layers' outputs that a call can save.
    pub fn kept(&self) -> usize {
        self.layers.len() - usize::from(self.final_norm.is_none())
    }

    /// Runs it all at once, or in steps of these lengths with a cache. With `keeps`, it also
    /// returns the layers' outputs and, all at once, the attention weights.
    pub fn run(&self, setup: &Setup, steps: Option<&[usize]>, keeps: bool) -> Result<Got, String> {
        let Setup { profile, form, dtypes: [dtype, weight], layout } = *setup;
        profile.tidy();
        let refused = |e: wgpu_attention::Error| e.to_string();
        let placed = self.place(profile, weight);
        let stack = placed.encoder_of(profile, &self.configs(dtype)).map_err(refused)?;
        let stack = stack.kernel_options(KernelOptions::new().target(form));
        let [_, _, length, features] = self.shape();
        let many = [self.kept().max(1) * self.batch, 1, length, features];
        let maps = [self.layers.len() * self.batch, self.heads, length, length];
        let [x_at, out_at, hidden_at, maps_at] = layout.places([self.shape(), self.shape(), many, maps]);
        let x = Placed::input(profile, Values::Floats(&self.x), dtype, x_at);
        let out = Placed::output(profile, dtype, out_at);
        let hidden = (keeps && self.kept() > 0).then(|| Placed::output(profile, dtype, hidden_at));
        let maps = (keeps && steps.is_none()).then(|| Placed::output(profile, DType::F32, maps_at));
        let rules = PlacedRules::new(profile, &self.rules, DType::F32, layout);
        let rotary = self.rotary.as_ref().map(|rotary| rotary.place(profile));
        let each: Vec<_> = self.each.iter().map(|layer| layer.place(profile, layout)).collect();
        let sizes = [self.batch, self.kv_heads, features / self.heads, length];
        let window = self.rules.window.filter(|_| self.each.is_empty());
        let mut cache =
            cache_of(profile, self.layers_with_keys(), sizes, dtype, window.is_some()).map_err(refused)?;
        let whole = [length];
        let mut first = 0;
        for rows in steps.unwrap_or(&whole) {
            let [x, out] = [x.view(), out.view()].map(|t| t.slice(2, first, *rows));
            if steps.is_some() {
                profile.gpu.submit(|e| cache.advance(e, Tokens::All(*rows))).map_err(refused)?;
            }
            let starts = steps.map(|_| cache.starts());
            let calls: Vec<_> = each.iter().map(|layer| layer.call(starts)).collect();
            let mut call = EncoderForward::new(x, out)
                .cache(steps.map(|_| &cache))
                .hidden(hidden.as_ref().map(|t| t.view().slice(2, first, *rows)))
                .weights(maps.as_ref().map(Placed::view));
            call = if calls.is_empty() { call.mask(rules.mask()) } else { call.layer_calls(&calls[..]) };
            if let Some(rotary) = rotary.as_ref().filter(|_| calls.is_empty()) {
                call = call.rotary(rotary.rotation(), rotary.step(starts, [first, *rows]));
            }
            let size = stack.scratch_size(&call).map_err(refused)?;
            let mut scratch = Scratch::new(profile.gpu.device(), size).map_err(refused)?;
            profile.gpu.submit(|e| stack.forward(e, &call, &mut scratch)).map_err(refused)?;
            first += rows;
            if let Some([before, _]) = window.filter(|_| steps.is_some()) {
                keep_last(profile, &mut cache, self.batch, before).map_err(refused)?;
            }
        }
        let read = |t: &Placed| pollster::block_on(t.download_async("a result", profile));
        let read_if = |t: &Option<Placed>| t.as_ref().map(read).transpose();
        Ok(Got { out: read(&out)?, hidden: read_if(&hidden)?, weights: read_if(&maps)? })
    }

    /// Returns the largest error over tolerance, against the reference.
    pub fn outcome(&self, setup: &Setup, steps: Option<&[usize]>, keeps: bool) -> Result<f64, String> {
        let [dtype, weight] = setup.dtypes;
        let own = self.stored(dtype, weight);
        let got = own.run(setup, steps, keeps)?;
        let exact = own.exact();
        let naive = own.naive(dtype);
        // Intermediates are rounded too, so a stack may be off by several spacings of their type.
        let epsilon = match dtype {
            DType::F16 => EPSILON_F16,
            DType::BF16 => EPSILON_BF16,
            _ => EPSILON_F32,
        };
        let all: Vec<f64> = exact.hidden.concat();
        let magnitude = largest(exact.out.iter().chain(&all).copied());
        let judge = |what: &str, got: &[f64], naive: &[f64], want: &[f64], magnitude: f64| {
            let tolerance = Tolerance::from_naive(naive, want, magnitude, epsilon);
            let judged = Judged { want: want.to_vec(), tolerance };
            judged.judge(got).map_err(|e| format!("{what}: {e}"))
        };
        let mut worst = judge("out", &got.out, &widened(&naive.out, dtype), &exact.out, magnitude)?;
        if let Some(hidden) = &got.hidden {
            let n = hidden.len();
            let naive = widened(&naive.hidden.concat()[..n], dtype);
            worst = worst.max(judge("hidden", hidden, &naive, &all[..n], magnitude)?);
        }
        if let Some(weights) = &got.weights {
            let naive = widened(&naive.weights.concat(), DType::F32);
            worst = worst.max(judge("weights", weights, &naive, &exact.weights.concat(), 1.0)?);
        }
        Ok(worst)
    }
}

#[test]
fn reference_matches_vectors() {
    for name in NAMES.iter().chain(D2L) {
        let (stack, vector) = vector(name);
        let got = stack.exact();
        let check = |what: &str, got: &[f64]| {
            let Some((want, tolerance)) = vector.expected(what) else { return false };
            compare(got, &want, tolerance).unwrap_or_else(|e| panic!("{name}: the reference's {what}: {e}"));
            true
        };
        assert!(check("out", &got.out), "{name}: nothing to compare with");
        for (n, hidden) in got.hidden.iter().enumerate() {
            check(&format!("h{}", n + 1), hidden);
        }
    }
}

#[test]
fn every_target_matches_vectors() {
    let mut report = Report::new("encoder");
    for name in NAMES.iter().chain(D2L) {
        let (stack, vector) = vector(name);
        for (form, layout) in FORMS.into_iter().zip([Layout::Dense, Layout::Window(5)]) {
            let setup = Setup { profile: full(), form, dtypes: [DType::F32; 2], layout };
            let judged = stack.run(&setup, None, true).and_then(|got| {
                let judge = |what: &str, got: &[f64]| match vector.expected(what) {
                    Some((want, tolerance)) => Judged { want, tolerance }.judge(got),
                    None => Ok(0.0),
                };
                let mut worst = judge("out", &got.out)?;
                let rows = stack.shape().iter().product();
                for (n, hidden) in got.hidden.iter().flat_map(|h| h.chunks_exact(rows)).enumerate() {
                    worst = worst.max(judge(&format!("h{}", n + 1), hidden)?);
                }
                let maps = stack.batch * stack.heads * stack.length * stack.length;
                for (n, weights) in got.weights.iter().flat_map(|w| w.chunks_exact(maps)).enumerate() {
                    worst = worst.max(judge(&format!("weights{n}"), weights)?);
                }
                Ok(worst)
            });
            report.record(name, &setup, judged);
        }
    }
    report.finish();
}

/// Returns a stack with a mixture of options, by its number.
pub fn drawn(n: u64) -> (Stack, bool) {
    let rng = &mut Rng::new(n ^ 0x57ac_0e0c);
    let heads = rng.pick(&[1, 2, 4]);
    let (batch, length) = (rng.pick(&[1, 2, 3]), rng.pick(&[1, 7, 18, 33]));
    let gated = n % 3 == 2;
    let rules = match n % 4 {
        0 => Rules::default(),
        1 => Rules { causal: true, ..Default::default() },
        2 => Rules {
            key_padding_mask: Some(HostData::of([batch, 1, 1, length], |[b, _, _, j]| j + b < length)),
            ..Default::default()
        },
        _ => {
            let starts = HostData::new(vec![0, length as u32 / 3, length as u32], [1, 1, 1, 3]);
            Rules { packed: Some([starts.clone(), starts]), ..Default::default() }
        }
    };
    let batch = if n % 4 == 3 { 1 } else { batch };
    let (layers, final_norm, keeps) = (1 + n as usize % 3, rng.chance(0.5), rng.chance(0.5));
    // Norms of four features magnify rounding from layer to layer.
    let head_dim = if heads == 1 { 16 } else { rng.pick(&[4, 5, 16]) };
    let qk_norm = if n % 6 == 1 && head_dim > 8 { NormConfig::layer() } else { NormConfig::rms() };
    let headwise = heads > 1 && !n.is_multiple_of(2);
    let output_gate = if headwise { OutputGate::Headwise } else { OutputGate::Elementwise };
    let stack = Stack {
        batch,
        length,
        heads,
        // Gated stacks are like Llama: some have grouped heads and rotary positions, and none has
        // biases.
        kv_heads: if gated { heads.div_ceil(2) } else { heads },
        biased: !gated,
        rotary: if n.is_multiple_of(3) { None } else { RotaryData::random(rng, [batch, length, head_dim]) },
        each: Vec::new(),
        features: heads * head_dim,
        hidden: rng.pick(&[7, 24, 64]),
        activation: Activation::ALL[n as usize % 4],
        gated,
        order: if n.is_multiple_of(2) { NormOrder::Pre } else { NormOrder::Post },
        norm: if gated { NormConfig::rms() } else { NormConfig::layer() },
        qk_norm: (gated || n % 4 == 1).then_some(qk_norm),
        output_gate: (gated && !n.is_multiple_of(4)).then_some(output_gate),
        rules,
        layers: Vec::new(),
        final_norm: None,
        transposed: false,
        x: Vec::new(),
    };
    (Stack::random(rng, layers, final_norm, stack), keeps)
}

#[test]
fn random_stacks_equal_the_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("random encoders");
    for n in 0..40 {
        if n >= 8 && !rest(&format!("random encoders {n}")) {
            continue;
        }
        let (stack, keeps) = drawn(n);
        let rng = &mut Rng::new(n ^ 0x5e70);
        let profile = if rng.chance(0.3) { defaults() } else { full() };
        let dtype = match n % 4 {
            2 => DType::F16,
            3 => DType::BF16,
            _ => DType::F32,
        };
        let weight = if rng.chance(0.5) { dtype } else { DType::F32 };
        let layout = if rng.chance(0.5) { Layout::Dense } else { Layout::Window(rng.word()) };
        let setup = Setup { profile, form: FORMS[(n / 2) as usize % 2], dtypes: [dtype, weight], layout };
        report.record(&format!("stack {n}"), &setup, stack.outcome(&setup, None, keeps));
    }
    report.finish();
}

/// Causal stacks, some with rotary positions and grouped heads like Llama. Some have positions on
/// three axes like Qwen2-VL. Some have a window, and the cache drops the tokens that are before it.
#[test]
fn random_stacks_in_steps_equal_the_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("random encoders in steps");
    for n in 0..24 {
        if n >= 6 && !rest(&format!("random encoders in steps {n}")) {
            continue;
        }
        let (stack, keeps) = drawn(n);
        let head_dim = stack.features / stack.heads;
        let turns = n.is_multiple_of(2) && head_dim.is_multiple_of(2);
        let rotary = turns.then(|| match n % 4 {
            0 => RotaryData::of_image([stack.batch, stack.length, head_dim]),
            _ => RotaryData::in_order(head_dim),
        });
        let window = n.is_multiple_of(3).then_some([2, 0]);
        let rules = Rules { causal: true, window, ..Default::default() };
        let stack = Stack { rules, rotary, ..stack };
        let rng = &mut Rng::new(n ^ 0x57e9);
        let profile = if rng.chance(0.3) { defaults() } else { full() };
        let dtype = match n % 4 {
            1 => DType::F16,
            3 => DType::BF16,
            _ => DType::F32,
        };
        let layout = if rng.chance(0.5) { Layout::Dense } else { Layout::Window(rng.word()) };
        let setup = Setup { profile, form: FORMS[(n / 2) as usize % 2], dtypes: [dtype; 2], layout };
        let steps = steps_of(stack.length, rng);
        let judged = stack.outcome(&setup, Some(&steps), keeps);
        report.record(&format!("stack {n} in {steps:?}"), &setup, judged);
    }
    report.finish();
}

#[test]
fn caches_that_do_not_fit_are_refused() {
    let gpu = &full().gpu;
    let (stack, _) = drawn(1);
    let stack = Stack { heads: 2, kv_heads: 2, features: 16, batch: 1, length: 3, rotary: None, ..stack };
    let stack = Stack::random(&mut Rng::new(3), 2, false, stack);
    let placed = stack.place(full(), DType::F32);
    let encoder = placed.encoder(full(), stack.config(DType::F32)).expect("a stack");
    let buffers: Vec<_> = (0..3).map(|_| gpu.buffer(4096).expect("a buffer")).collect();
    let rows = |n: usize| TensorView::new(&buffers[n], DType::F32, [1, 1, 3, 16]);
    let filled_by = |config, count| {
        let mut cache = Cache::with_pipelines(gpu.pipelines(), config).expect("a cache");
        gpu.submit(|e| cache.advance(e, Tokens::All(count))).expect("an advance");
        cache
    };
    let filled = |config| filled_by(config, 3);
    let refused = |call: EncoderForward, words: &str| {
        let mut commands = gpu.device().create_command_encoder(&Default::default());
        let mut scratch = Scratch::new(gpu.device(), Default::default()).expect("a scratch");
        let error = encoder.forward(&mut commands, &call, &mut scratch).expect_err("an error").to_string();
        assert!(error.contains(words), "{words}: {error}");
        let mut pass = commands.begin_compute_pass(&Default::default());
        assert!(encoder.forward(&mut pass, &call, &mut scratch).is_err());
    };
    let plain = EncoderForward::new(rows(0), rows(1));
    let call = plain.mask(DeviceMask::causal());
    let fits = filled(CacheConfig::new(2, 8, 9).layers(2));
    refused(call.cache(&fits), "scratch");
    let words = TensorView::new(&buffers[2], DType::U32, [1; 4]);
    // Masks of keys alone do not order rows.
    let of_keys = |dtype| TensorView::new(&buffers[2], dtype, [1, 1, 1, 9]);
    for mask in [
        DeviceMask::none(),
        DeviceMask::none().exclude_self().lengths(words).prefix(words),
        DeviceMask::none().attn_mask(of_keys(DType::Bool)),
        DeviceMask::none().bias(of_keys(DType::F32)),
        DeviceMask::none().key_padding_mask(of_keys(DType::Bool)),
    ] {
        refused(plain.mask(mask).cache(&fits), "no causal rule: rows would see later rows");
    }
    // Tensors that depend on pairs or on single rows of queries.
    let of_pairs = TensorView::new(&buffers[2], DType::Bool, [1, 1, 3, 9]);
    let each = TensorView::new(&buffers[2], DType::U32, [1, 1, 3, 1]);
    for mask in [
        DeviceMask::none().window(usize::MAX, usize::MAX),
        DeviceMask::none().attn_mask(of_pairs),
        DeviceMask::none().key_padding_mask(of_pairs),
        DeviceMask::none().lengths(each),
        DeviceMask::none().mask_mod(&presets::causal().expect("a preset")),
    ] {
        refused(plain.mask(mask).cache(&fits), "scratch");
    }
    let alone = EncoderForward::new(rows(0).slice(2, 0, 1), rows(1).slice(2, 0, 1));
    assert!(encoder.scratch_size(&alone.cache(&fits)).is_ok());
    let two = EncoderForward::new(rows(0).slice(2, 0, 2), rows(1).slice(2, 0, 2));
    refused(two.cache(&filled_by(CacheConfig::new(2, 8, 9).layers(2), 2)), "no causal rule");
    refused(call.cache(&filled(CacheConfig::new(2, 8, 9))), "`cache.layers` is 1");
    refused(call.cache(&filled(CacheConfig::new(2, 12, 9).layers(2))), "`cache.head_dim` is 12");
    refused(call.cache(&filled(CacheConfig::new(2, 8, 9).layers(2).batch(2))), "`cache.batch` is 2");
    let new = Cache::with_pipelines(gpu.pipelines(), CacheConfig::new(2, 8, 9).layers(2)).expect("a cache");
    refused(call.cache(&new), "rows of `x` that differ");
    let maps = TensorView::new(&buffers[2], DType::F32, [2, 2, 3, 3]);
    refused(call.cache(&fits).weights(maps), "attention weights with a cache");
    let backward = EncoderBackward::new(call.cache(&fits), rows(1)).d_x(rows(2));
    let error = encoder.backward_scratch_size(&backward).expect_err("an error").to_string();
    assert!(error.contains("a forward call with a cache"), "{error}");
}
