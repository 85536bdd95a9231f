//! `TransformerDecoder`, all rows at once and step by step.

use wgpu_attention::reference::compare::{
    EPSILON_BF16, EPSILON_F16, EPSILON_F32, Tolerance, compare, max_error,
};
use wgpu_attention::reference::{
    self, HostDecoderLayer, HostFeedForward, HostNorm, HostWeights, LayerShape, Options, Real, widen,
};
use wgpu_attention::{
    Activation, BlockConfig, Cache, CacheConfig, CacheStorage, DType, DecoderForward, DecoderLayerWeights,
    DecoderMemory, Error, FeedForwardWeights, LayerConfig, LayerWeights, NormConfig, NormOrder, Scratch,
    TensorView, Tokens, TransformerDecoder, Tuning,
};

use super::FAMILY;
use super::data::{Part, PlacedPart};
use super::encoder::Setup;
use crate::harness::case::{largest, widened};
use crate::harness::layer::LinearData;
use crate::harness::run::{Layout, Placed, PlacedRules};
use crate::harness::{
    FORMS, HostData, Judged, Profile, Report, Rng, Rules, Values, Vector, defaults, full, rest, stored,
};

pub const NAMES: &[&str] = &["decoder_post_relu_1layer"];

/// The data of a stack and of a call.
#[derive(Clone)]
struct Stack {
    batch: usize,
    length: usize,
    memory_len: usize,
    heads: usize,
    features: usize,
    hidden: usize,
    activation: Activation,
    gated: bool,
    order: NormOrder,
    norm: NormConfig,
    /// Of self-attention, and of attention to the memory.
    rules: [Rules; 2],
    /// Of each layer: query, key, value, out of both attentions, up, down, three norms, and gate if it is gated.
    layers: Vec<Vec<LinearData>>,
    final_norm: Option<LinearData>,
    x: Vec<f32>,
    memory: Vec<f32>,
}

impl Stack {
    fn config(&self, dtype: DType) -> BlockConfig {
        BlockConfig::new(LayerConfig::new(self.features, self.heads).dtype(dtype), self.hidden)
            .activation(self.activation)
            .gated(self.gated)
            .order(self.order)
            .norm(self.norm)
    }

    /// Whether a part is a norm.
    fn is_norm(n: usize) -> bool {
        (10..13).contains(&n)
    }

    fn part_shapes(&self) -> Vec<[usize; 2]> {
        let (e, f) = (self.features, self.hidden);
        let mut shapes = vec![[e, e]; 8];
        shapes.extend([[f, e], [e, f], [1, e], [1, e], [1, e]]);
        shapes.extend(self.gated.then_some([f, e]));
        shapes
    }

    fn random(rng: &mut Rng, layers: usize, final_norm: bool, mut stack: Stack) -> Self {
        let e = stack.features;
        let mut part = |[out, from]: [usize; 2], norm: bool| {
            let scale = 1.0 / (from as f32).sqrt();
            let near = f32::from(u8::from(norm));
            let weight = rng.normals(out * from).iter().map(|w| w * scale + near).collect();
            let bias = rng.normals(if norm { from } else { out }).iter().map(|b| 0.3 * b).collect();
            LinearData { weight, bias: Some(bias) }
        };
        let shapes = stack.part_shapes();
        let layer = |part: &mut dyn FnMut([usize; 2], bool) -> LinearData| {
            shapes.iter().enumerate().map(|(n, shape)| part(*shape, Self::is_norm(n))).collect()
        };
        stack.layers = (0..layers).map(|_| layer(&mut part)).collect();
        stack.final_norm = final_norm.then(|| part([1, e], true));
        stack.x = rng.normals(stack.batch * stack.length * e);
        stack.memory = rng.normals(stack.batch * stack.memory_len * e);
        stack
    }

    /// What the types can hold.
    fn stored(&self, dtype: DType, weight: DType) -> Self {
        let part = |l: &LinearData| LinearData {
            weight: stored(&l.weight, weight),
            bias: l.bias.as_ref().map(|b| stored(b, weight)),
        };
        Stack {
            x: stored(&self.x, dtype),
            memory: stored(&self.memory, dtype),
            layers: self.layers.iter().map(|parts| parts.iter().map(part).collect()).collect(),
            final_norm: self.final_norm.as_ref().map(part),
            ..self.clone()
        }
    }

    fn reference<R: Real>(&self) -> reference::Encoded<R> {
        let parts: Vec<Vec<Part<R>>> =
            self.layers.iter().map(|parts| parts.iter().map(Part::of).collect()).collect();
        let layers: Vec<_> = parts
            .iter()
            .map(|p| {
                let weights = |n: usize| HostWeights {
                    query: p[n].linear(),
                    key: p[n + 1].linear(),
                    value: p[n + 2].linear(),
                    out: p[n + 3].linear(),
                    bias_kv: None,
                };
                HostDecoderLayer {
                    self_attention: weights(0),
                    cross_attention: weights(4),
                    feed_forward: HostFeedForward {
                        up: p[8].linear(),
                        gate: p.get(13).map(Part::linear),
                        down: p[9].linear(),
                    },
                    norms: [p[10].norm(), p[11].norm(), p[12].norm()],
                }
            })
            .collect();
        let last = self.final_norm.as_ref().map(Part::<R>::of);
        let last: Option<HostNorm<R>> = last.as_ref().map(Part::norm);
        let shape = LayerShape { batch: self.batch, q_len: self.length, kv_len: self.memory_len };
        let options = [0, 1].map(|n| Options::new().mask(self.rules[n].host()));
        let [own, cross] = &options;
        let (x, memory) = (widen::<R>(&self.x), widen::<R>(&self.memory));
        let config = self.config(DType::F32);
        let got = reference::decoder([&x, &memory], shape, &config, &layers, last.as_ref(), [own, cross]);
        got.expect("the stack fits the reference")
    }

    /// Runs it with rows in steps of these lengths by a cache, or all at once.
    fn run(&self, setup: &Setup, steps: Option<&[usize]>) -> Result<Vec<f64>, String> {
        let Setup { profile, form, dtypes: [dtype, weight], layout } = *setup;
        profile.tidy();
        let refused = |e: Error| e.to_string();
        let placed = Weights::new(self, profile, weight);
        let decoder = placed.decoder(profile, self.config(dtype)).map_err(refused)?;
        let decoder = decoder.tuning(Tuning::new().form(form));
        let Stack { batch, length, memory_len, heads, features, .. } = *self;
        let dim = features / heads;
        let rows = [batch, 1, length, features];
        let kept = [self.layers.len() * batch, heads, memory_len, dim];
        let [x_at, out_at, memory_at] = layout.places([rows, rows, [batch, 1, memory_len, features]]);
        let [keys_at, values_at] = layout.places([kept; 2]);
        let input = |data: &[f32], at| Placed::input(profile, Values::Floats(data), dtype, at);
        let (x, memory) = (input(&self.x, x_at), input(&self.memory, memory_at));
        let [out, keys, values] = [out_at, keys_at, values_at].map(|at| Placed::output(profile, dtype, at));
        let projected = DecoderMemory { keys: keys.view(), values: values.view() };
        let rules = self.rules.each_ref().map(|r| PlacedRules::new(profile, r, DType::F32, layout));
        let config = CacheConfig::new(heads, dim, length + 3).batch(batch).layers(self.layers.len()).storage(
            match dtype {
                DType::F16 => CacheStorage::F16,
                _ => CacheStorage::F32,
            },
        );
        let mut cache = Cache::with_pipelines(profile.gpu.pipelines(), config).map_err(refused)?;
        let whole = [length];
        let mut first = 0;
        for rows in steps.unwrap_or(&whole) {
            let [x, out] = [x.view(), out.view()].map(|t| t.slice(2, first, *rows));
            if steps.is_some() {
                profile.gpu.submit(|e| cache.advance(e, Tokens::All(*rows))).map_err(refused)?;
            }
            let call = DecoderForward::new(x, projected, out)
                .mask(rules[0].mask())
                .memory_mask(rules[1].mask())
                .cache(steps.map(|_| &cache));
            let size = decoder.scratch_size(&call).map_err(refused)?;
            let mut scratch = Scratch::new(profile.gpu.device(), size).map_err(refused)?;
            let recorded = profile.gpu.submit(|e| {
                if first == 0 {
                    decoder.project_memory(e, memory.view(), &projected, &mut scratch)?;
                }
                decoder.forward(e, &call, &mut scratch)
            });
            recorded.map_err(refused)?;
            first += rows;
        }
        pollster::block_on(out.download_async("out", profile))
    }

    fn outcome(&self, setup: &Setup, steps: Option<&[usize]>) -> Result<f64, String> {
        let [dtype, weight] = setup.dtypes;
        let own = self.stored(dtype, weight);
        let got = own.run(setup, steps)?;
        let exact = own.reference::<f64>();
        let naive = own.reference::<f32>();
        // Intermediates are rounded too: a stack may be off by some of their spacings.
        let epsilon = match dtype {
            DType::F16 => EPSILON_F16,
            DType::BF16 => EPSILON_BF16,
            _ => EPSILON_F32,
        };
        let magnitude = largest(exact.out.iter().chain(exact.hidden.iter().flatten()).copied());
        let tolerance = Tolerance::from_naive(&widened(&naive.out, dtype), &exact.out, magnitude, epsilon);
        Judged { want: exact.out, tolerance }.judge(&got)
    }
}

/// The weights of a stack on the device.
struct Weights {
    layers: Vec<Vec<PlacedPart>>,
    final_norm: Option<PlacedPart>,
}

impl Weights {
    fn new(stack: &Stack, profile: &'static Profile, dtype: DType) -> Self {
        let place = |data: &[f32], shape: [usize; 4]| {
            let [at] = Layout::Dense.places([shape]);
            Placed::input(profile, Values::Floats(data), dtype, at)
        };
        let part = |l: &LinearData, [out, from]: [usize; 2], norm: bool| PlacedPart {
            weight: place(&l.weight, [1, 1, out, from]),
            bias: l.bias.as_ref().map(|b| place(b, [1, 1, 1, if norm { from } else { out }])),
        };
        let shapes = stack.part_shapes();
        let layer = |parts: &Vec<LinearData>| {
            let parts = parts.iter().zip(&shapes).enumerate();
            parts.map(|(n, (l, shape))| part(l, *shape, Stack::is_norm(n))).collect()
        };
        Weights {
            layers: stack.layers.iter().map(layer).collect(),
            final_norm: stack.final_norm.as_ref().map(|l| part(l, [1, stack.features], true)),
        }
    }

    fn decoder(&self, profile: &Profile, config: BlockConfig) -> Result<TransformerDecoder, Error> {
        let layers: Vec<_> = self.layers.iter().map(|p| weights_of(p)).collect();
        let last = self.final_norm.as_ref().map(PlacedPart::norm);
        TransformerDecoder::with_pipelines(profile.gpu.pipelines(), config, &layers, last)
    }
}

fn weights_of(p: &[PlacedPart]) -> DecoderLayerWeights<'_> {
    let attention = |n: usize| LayerWeights {
        query: p[n].linear(),
        key: p[n + 1].linear(),
        value: p[n + 2].linear(),
        out: p[n + 3].linear(),
        bias_kv: None,
    };
    DecoderLayerWeights {
        self_attention: attention(0),
        cross_attention: attention(4),
        feed_forward: FeedForwardWeights {
            up: p[8].linear(),
            gate: p.get(13).map(PlacedPart::linear),
            down: p[9].linear(),
        },
        norms: [p[10].norm(), p[11].norm(), p[12].norm()],
    }
}

/// A stack of a vector.
fn vector(name: &str) -> (Stack, Vector) {
    let vector = Vector::load(FAMILY, name);
    let linear = |layer: usize, weight: &str, bias: &str| LinearData {
        weight: vector.f32(&format!("l{layer}.{weight}")),
        bias: Some(vector.f32(&format!("l{layer}.{bias}"))),
    };
    let parts = [
        ["w_q", "b_q"],
        ["w_k", "b_k"],
        ["w_v", "b_v"],
        ["w_o", "b_o"],
        ["x_w_q", "x_b_q"],
        ["x_w_k", "x_b_k"],
        ["x_w_v", "x_b_v"],
        ["x_w_o", "x_b_o"],
        ["w_1", "b_1"],
        ["w_2", "b_2"],
        ["ln1_w", "ln1_b"],
        ["ln2_w", "ln2_b"],
        ["ln3_w", "ln3_b"],
    ];
    let [_, batch, length, features] = vector.shape4("x");
    let memory_len = vector.shape4("memory")[2];
    assert_eq!((&vector.attrs["activation"], &vector.attrs["norm"]), (&"relu".into(), &"post".into()));
    let key_mask = HostData::new(vector.bools("memory_key_mask").data, [batch, 1, 1, memory_len]);
    let stack = Stack {
        batch,
        length,
        memory_len,
        heads: vector.size("num_heads"),
        features,
        hidden: vector.size("ffn_dim"),
        activation: Activation::Relu,
        gated: false,
        order: NormOrder::Post,
        norm: NormConfig::layer().eps(vector.number("ln_eps").expect("ln_eps")),
        rules: [
            Rules { attn_mask: Some(vector.bools("mask")), ..Default::default() },
            Rules { key_padding_mask: Some(key_mask), ..Default::default() },
        ],
        layers: (0..vector.size("layers"))
            .map(|n| parts.iter().map(|[w, b]| linear(n, w, b)).collect())
            .collect(),
        final_norm: None,
        x: vector.f32("x"),
        memory: vector.f32("memory"),
    };
    (stack, vector)
}

#[test]
fn the_reference_gives_the_vectors() {
    for name in NAMES {
        let (stack, vector) = vector(name);
        let got = stack.reference::<f64>();
        for (what, got) in [("out", &got.out), ("h1", &got.hidden[0])] {
            let (want, tolerance) = vector.expected(what).expect(what);
            compare(got, &want, tolerance).unwrap_or_else(|e| panic!("{name}: the reference's {what}: {e}"));
        }
    }
}

#[test]
fn every_form_gives_the_vectors() {
    let mut report = Report::new("decoder");
    for name in NAMES {
        let (stack, vector) = vector(name);
        for (form, layout) in FORMS.into_iter().zip([Layout::Dense, Layout::Window(5)]) {
            let setup = Setup { profile: full(), form, dtypes: [DType::F32; 2], layout };
            let judged = stack.run(&setup, None).and_then(|got| {
                let (want, tolerance) = vector.expected("out").ok_or("not in the vector")?;
                Judged { want, tolerance }.judge(&got)
            });
            report.record(name, &setup, judged);
        }
    }
    report.finish();
}

/// A stack that has something of everything, by its number.
fn drawn(n: u64) -> Stack {
    let rng = &mut Rng::new(n ^ 0xdec0_de0c);
    let heads = rng.pick(&[1, 2, 4]);
    let (batch, length, memory_len) = (rng.pick(&[1, 2, 3]), rng.pick(&[1, 7, 18]), rng.pick(&[1, 9, 40]));
    let gated = n % 3 == 2;
    let mask = HostData::of([batch, 1, 1, memory_len], |[b, _, _, j]| j + b < memory_len || j == 0);
    let padded = Rules { key_padding_mask: Some(mask), ..Default::default() };
    let stack = Stack {
        batch,
        length,
        memory_len,
        heads,
        features: heads * rng.pick(&[8, 16]),
        hidden: rng.pick(&[24, 64]),
        activation: Activation::ALL[n as usize % 4],
        gated,
        order: if n.is_multiple_of(2) { NormOrder::Pre } else { NormOrder::Post },
        norm: if gated { NormConfig::rms() } else { NormConfig::layer() },
        rules: [
            Rules { causal: true, ..Default::default() },
            if n % 4 < 2 { padded } else { Rules::default() },
        ],
        layers: Vec::new(),
        final_norm: None,
        x: Vec::new(),
        memory: Vec::new(),
    };
    let (layers, final_norm) = (1 + n as usize % 3, rng.chance(0.5));
    Stack::random(rng, layers, final_norm, stack)
}

/// Steps that make up `length`.
fn steps_of(length: usize, rng: &mut Rng) -> Vec<usize> {
    let mut steps = Vec::new();
    let mut left = length;
    while left > 0 {
        let step = rng.between(1, left.min(5));
        steps.push(step);
        left -= step;
    }
    steps
}

#[test]
fn random_stacks_equal_the_reference_at_once_and_in_steps() {
    let mut report = Report::new("random decoders");
    for n in 0..40 {
        if n >= 6 && !rest(&format!("random decoders {n}")) {
            continue;
        }
        let stack = drawn(n);
        let rng = &mut Rng::new(n ^ 0x5e70);
        let profile = if rng.chance(0.3) { defaults() } else { full() };
        let dtype = match n % 4 {
            2 if profile.f16 => DType::F16,
            3 => DType::BF16,
            _ => DType::F32,
        };
        let weight = if rng.chance(0.5) { dtype } else { DType::F32 };
        let layout = if rng.chance(0.5) { Layout::Dense } else { Layout::Window(rng.word()) };
        let setup = Setup { profile, form: FORMS[(n / 2) as usize % 2], dtypes: [dtype, weight], layout };
        report.record(&format!("stack {n}"), &setup, stack.outcome(&setup, None));
        let steps = steps_of(stack.length, rng);
        report.record(&format!("stack {n} in {steps:?}"), &setup, stack.outcome(&setup, Some(&steps)));
    }
    report.finish();
}

/// In steps the numbers are those of all rows at once, but for the order of sums.
#[test]
fn steps_give_what_all_rows_at_once_give() {
    let stack = Stack { length: 7, ..drawn(5) };
    let stack = Stack::random(&mut Rng::new(8), 2, true, stack);
    for form in FORMS {
        let setup = Setup { profile: full(), form, dtypes: [DType::F32; 2], layout: Layout::Dense };
        let whole = stack.run(&setup, None).expect("a run");
        let steps = stack.run(&setup, Some(&[1, 3, 1, 2])).expect("steps");
        let off = max_error(&steps, &whole);
        assert!(off < 1e-4 * largest(whole.iter().copied()), "{form:?}: {off}");
    }
}

#[test]
fn bad_calls_are_refused_before_anything_is_recorded() {
    let gpu = &full().gpu;
    let mut stack = drawn(0);
    (stack.batch, stack.length, stack.memory_len) = (1, 3, 4);
    (stack.heads, stack.features) = (2, 16);
    stack.rules = Default::default();
    let stack = Stack::random(&mut Rng::new(3), 2, false, stack);
    let weights = Weights::new(&stack, full(), DType::F32);
    let decoder = weights.decoder(full(), stack.config(DType::F32)).expect("a stack");
    let buffers: Vec<_> = (0..6).map(|_| gpu.buffer(4096).expect("a buffer")).collect();
    let typed = |n: usize, shape| TensorView::new(&buffers[n], DType::F32, shape);
    let rows = |n: usize| typed(n, [1, 1, 3, 16]);
    let memory = DecoderMemory { keys: typed(2, [2, 2, 4, 8]), values: typed(3, [2, 2, 4, 8]) };
    let refused = |call: DecoderForward, words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let mut scratch = Scratch::new(gpu.device(), Default::default()).expect("a scratch");
        let error = decoder.forward(&mut encoder, &call, &mut scratch).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(decoder.forward_in_pass(&mut pass, &call, &mut scratch).is_err());
    };
    let call = DecoderForward::new(rows(0), memory, rows(1));
    refused(call, &["scratch"]);
    refused(DecoderForward::new(rows(0), memory, rows(0)), &["`out`", "`x`"]);
    refused(DecoderForward::new(rows(0), memory, rows(2)), &["`out`", "`memory.keys`"]);
    refused(DecoderForward::new(rows(0), memory, typed(1, [1, 1, 2, 16])), &["`out`", "length must be 3"]);
    refused(DecoderForward::new(typed(0, [1, 1, 3, 15]), memory, rows(1)), &["`x`", "dim must be 16"]);
    let few = DecoderMemory { keys: typed(2, [1, 2, 4, 8]), ..memory };
    refused(DecoderForward::new(rows(0), few, rows(1)), &["`memory.keys`", "batch must be 2"]);
    let short = DecoderMemory { values: typed(3, [2, 2, 3, 8]), ..memory };
    refused(DecoderForward::new(rows(0), short, rows(1)), &["`memory.values`", "length must be 4"]);
    let cache = |config| Cache::with_pipelines(gpu.pipelines(), config).expect("a cache");
    let one = cache(CacheConfig::new(2, 8, 9));
    refused(call.cache(&one), &["rows that are not those"]);
    let mut other = cache(CacheConfig::new(2, 8, 9));
    gpu.submit(|e| other.advance(e, Tokens::All(3))).expect("an advance");
    refused(call.cache(&other), &["cache.layers is 1"]);
    let mut wide = cache(CacheConfig::new(2, 12, 9).layers(2));
    gpu.submit(|e| wide.advance(e, Tokens::All(3))).expect("an advance");
    refused(call.cache(&wide), &["cache.head_dim is 12"]);
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let mut scratch = Scratch::new(gpu.device(), Default::default()).expect("a scratch");
    let mut refused = |source, to: &DecoderMemory, words: &[&str]| {
        let error = decoder.project_memory(&mut encoder, source, to, &mut scratch);
        let error = error.expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
    };
    let source = typed(0, [1, 1, 4, 16]);
    refused(source, &short, &["`memory.values`", "length must be 4"]);
    refused(typed(2, [1, 1, 4, 16]), &memory, &["`memory.keys`", "`memory`"]);
    let same = DecoderMemory { values: memory.keys, ..memory };
    refused(source, &same, &["`memory.keys`", "`memory.values`"]);
    let appends =
        BlockConfig::new(LayerConfig::new(16, 2).add_zero_attn(true), stack.hidden).gated(stack.gated);
    let error = weights.decoder(full(), appends).expect_err("an error").to_string();
    assert!(error.contains("appended keys"), "{error}");
}
