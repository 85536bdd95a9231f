//! Stacks whose layers differ in mask, rotation, scale and softcap.

use wgpu_attention::cache::Tokens;
use wgpu_attention::layers::{EncoderBackward, EncoderForward, LayerCall, MultiHeadConfig, NormOrder};
use wgpu_attention::mask::DeviceMask;
use wgpu_attention::matmul::Activation;
use wgpu_attention::position::{Rope, RopeConfig, RowPositions};
use wgpu_attention::reference;
use wgpu_attention::reference::Options;
use wgpu_attention::reference::compare::max_error;
use wgpu_attention::{Cache, CacheConfig, DType, Error, Scratch, TensorView};

use super::backward::{self, Ask};
use super::data::Stack;
use super::encoder::{Setup, drawn};
use super::judge::expect_slopes;
use super::steps::steps_of;
use super::{decoder_backward, decoder_data};
use crate::harness::rotary::{PlacedRotary, RotaryData};
use crate::harness::run::{Layout, PlacedRules};
use crate::harness::{FORMS, HostData, Profile, Report, Rng, Rules, defaults, full, rest};

/// The options of one layer.
#[derive(Clone, Debug, Default)]
pub struct LayerData {
    pub rules: Rules,
    pub rotary: Option<RotaryData>,
    pub scale: Option<f64>,
    pub softcap: Option<f64>,
    /// The layer whose keys this layer reads.
    pub keys_of: Option<usize>,
}

impl LayerData {
    /// Alternates windows, causal masks and sinks, with different rotary bases. Every fifth layer
    /// does not rotate.
    pub fn random(rng: &mut Rng, n: usize, [heads, head_dim]: [usize; 2]) -> Self {
        let sinks = HostData::new(rng.normals(heads), [1, heads, 1, 1]);
        let rules = Rules {
            causal: true,
            window: (n.is_multiple_of(2)).then(|| [rng.between(1, 3), 0]),
            sinks: (n % 3 == 1).then_some(sinks),
            ..Default::default()
        };
        let base = if n.is_multiple_of(2) { 100.0 } else { 1e6 };
        let pairs = head_dim / 2;
        let rotates = pairs > 0 && n % 5 != 4;
        let rope = |pairs: usize| RopeConfig::new(2 * pairs).base(base);
        let rotary = rotates.then(|| {
            let pairs = if n.is_multiple_of(2) { pairs } else { pairs.div_ceil(2) };
            RotaryData { rope: rope(pairs), at: RowPositions::Start(0), tables: false }
        });
        let softcap = (n % 2 == 1).then_some(2.0 + n as f64);
        LayerData { rules, rotary, scale: n.is_multiple_of(3).then_some(0.2), softcap, keys_of: None }
    }

    /// Makes the second half of the layers read keys of the first half. Each reads those of the
    /// last layer of the same kind, like Gemma.
    pub fn share_keys(each: &mut [LayerData]) {
        let first = (each.len() / 2).max(1);
        for n in first..each.len() {
            let source = (0..first).rev().find(|source| source % 2 == n % 2).unwrap_or(first - 1);
            each[n].keys_of = Some(source);
            each[n].rotary = each[source].rotary.clone();
        }
    }

    pub fn attention(&self, config: MultiHeadConfig) -> MultiHeadConfig {
        config.scale(self.scale).softcap(self.softcap)
    }

    pub fn options(&self) -> Options<'_> {
        let options = Options::new().mask(self.rules.host());
        self.rotary.as_ref().map_or(options, |rotary| rotary.options(options))
    }

    pub fn place(&self, profile: &'static Profile, layout: Layout) -> PlacedLayer {
        PlacedLayer {
            rules: PlacedRules::new(profile, &self.rules, DType::F32, layout),
            rotary: self.rotary.as_ref().map(|rotary| rotary.place(profile)),
        }
    }
}

/// The mask and the rotation of one layer on the device.
pub struct PlacedLayer {
    rules: PlacedRules,
    rotary: Option<PlacedRotary>,
}

impl PlacedLayer {
    /// Returns the call of the layer. With a cache, the rows' positions begin at `starts`.
    pub fn call<'a>(&'a self, starts: Option<TensorView<'a>>) -> LayerCall<'a> {
        let call = LayerCall::new(self.rules.mask());
        match &self.rotary {
            Some(rotary) => call.rotary(rotary.rotation(), starts.map_or(rotary.at(), RowPositions::Tensor)),
            None => call,
        }
    }
}

/// Returns a stack of [`drawn`](super::encoder::drawn) whose layers differ, and true if a call
/// saves the layers' outputs.
fn differing(n: u64) -> (Stack, bool) {
    let (stack, keeps) = drawn(n);
    let rng = &mut Rng::new(n ^ 0xa17e);
    let layers = 2 + n as usize % 4;
    let head_dim = stack.features / stack.heads;
    let mut each: Vec<_> = (0..layers).map(|n| LayerData::random(rng, n, [stack.heads, head_dim])).collect();
    if !n.is_multiple_of(3) {
        LayerData::share_keys(&mut each);
    }
    let last = stack.final_norm.is_some();
    let stack = Stack { rules: Rules::default(), rotary: None, each, ..stack };
    (Stack::random(rng, layers, last, stack), keeps)
}

fn setup_of(rng: &mut Rng, n: u64) -> Setup {
    let profile = if rng.chance(0.3) { defaults() } else { full() };
    let dtype = match n % 4 {
        2 => DType::F16,
        3 => DType::BF16,
        _ => DType::F32,
    };
    let layout = if rng.chance(0.5) { Layout::Dense } else { Layout::Window(rng.word()) };
    Setup { profile, form: FORMS[(n / 2) as usize % 2], dtypes: [dtype; 2], layout }
}

/// Returns a stack of two layers. One has a window of three rows and base 10 000. The other is
/// causal with base 1 000 000.
fn smallest() -> Stack {
    let layer = |window, base| LayerData {
        rules: Rules { causal: true, window, ..Default::default() },
        rotary: Some(RotaryData {
            rope: RopeConfig::new(4).base(base),
            at: RowPositions::Start(0),
            tables: false,
        }),
        ..Default::default()
    };
    let (stack, _) = drawn(2);
    assert!(stack.gated && stack.order == NormOrder::Pre, "as Llama has them");
    let stack = Stack {
        batch: 1,
        length: 5,
        heads: 4,
        kv_heads: 2,
        features: 16,
        hidden: 24,
        rules: Rules::default(),
        rotary: None,
        each: vec![layer(Some([2, 0]), 1e4), layer(None, 1e6)],
        ..stack
    };
    Stack::random(&mut Rng::new(34), 2, true, stack)
}

#[test]
fn reference_by_layer_chains_single_layers() {
    for stack in [smallest(), differing(3).0, differing(6).0] {
        let exact = stack.exact();
        let chained = stack.on_host::<f64, _>(|x, layers, last| {
            let count = layers.len();
            let mut x = x.to_vec();
            for (n, (layer, (config, options))) in layers.iter().zip(stack.calls()).enumerate() {
                let last = last.filter(|_| n + 1 == count);
                let rows = [stack.batch, stack.length];
                let got = reference::encoder(&x, rows, &config, std::slice::from_ref(layer), last, &options);
                x = got.expect("a layer").out;
            }
            x
        });
        assert_eq!(exact.out, chained);
        let alike = Stack { each: vec![stack.each[0].clone(); stack.layers.len()], ..stack };
        assert!(max_error(&alike.exact().out, &exact.out) > 1e-3, "layers do not differ");
    }
}

#[test]
fn window_and_full_layers_share_cache() {
    let mut report = Report::new("the smallest stack of layers that differ");
    let stack = smallest();
    for (form, layout) in FORMS.into_iter().zip([Layout::Dense, Layout::Window(5)]) {
        let setup = Setup { profile: full(), form, dtypes: [DType::F32; 2], layout };
        report.record("at once", &setup, stack.outcome(&setup, None, true));
        report.record("one at a time", &setup, stack.outcome(&setup, Some(&[1; 5]), true));
        report.record("in steps", &setup, stack.outcome(&setup, Some(&[3, 1, 1]), false));
    }
    report.finish();
}

/// A mask has more tensors than an attention kernel can bind by WebGPU's default limits. Its layer
/// has scores in the scratch.
#[test]
fn staged_and_fused_layers_share_scratch() {
    crate::harness::in_turn!();
    let mut report = Report::new("layers on other paths");
    let mut stack = smallest();
    let pairs = HostData::of([1, 1, 5, 5], |[_, _, i, j]| i != j || i % 2 == 0);
    stack.each[1].rules = Rules {
        attn_mask: Some(pairs),
        key_padding_mask: Some(HostData::of([1, 1, 1, 5], |[_, _, _, j]| j != 1)),
        lengths: Some(HostData::new(vec![4], [1, 1, 1, 1])),
        bias: Some(HostData::new(Rng::new(5).normals(100), [1, 4, 5, 5])),
        slopes: Some(HostData::new(vec![0.1, 0.2, 0.3, 0.4], [1, 4, 1, 1])),
        sinks: Some(HostData::new(vec![0.5; 4], [1, 4, 1, 1])),
        ..Default::default()
    };
    for profile in [full(), defaults()] {
        let setup = Setup { profile, form: FORMS[0], dtypes: [DType::F32; 2], layout: Layout::Dense };
        // Without attention weights, which only the staged path has.
        report.record("few tensors first", &setup, stack.outcome(&setup, None, false));
    }
    stack.each.reverse();
    let setup = Setup { profile: defaults(), form: FORMS[1], dtypes: [DType::F32; 2], layout: Layout::Dense };
    report.record("many tensors first", &setup, stack.outcome(&setup, None, false));
    report.finish();
}

#[test]
fn differing_layers_equal_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("encoders by layer");
    for n in 0..24 {
        if n >= 6 && !rest(&format!("encoders by layer {n}")) {
            continue;
        }
        let (stack, keeps) = differing(n);
        let rng = &mut Rng::new(n ^ 0x5e71);
        let setup = setup_of(rng, n);
        report.record(&format!("stack {n}"), &setup, stack.outcome(&setup, None, keeps));
        let steps = steps_of(stack.length, rng);
        let judged = stack.outcome(&setup, Some(&steps), keeps);
        report.record(&format!("stack {n} in {steps:?}"), &setup, judged);
    }
    report.finish();
}

#[test]
fn differing_layers_gradients_equal_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("encoders by layer, backward");
    for n in 0..16 {
        if n >= 4 && !rest(&format!("encoders by layer, backward {n}")) {
            continue;
        }
        let (mut stack, keeps) = differing(n);
        let rng = &mut Rng::new(n ^ 0xbacd);
        let setup = setup_of(rng, n);
        // If rounding moves the input of a ReLU over its kink, gradients jump.
        if setup.dtypes[0] != DType::F32 && stack.activation == Activation::Relu {
            stack.activation = Activation::Gelu;
        }
        let ask = Ask { keeps, accumulates: n % 3 == 1, gradient: DType::F32 };
        let judged = backward::outcome(&stack, &setup, ask, n);
        report.record(&format!("stack {n}"), &format!("{setup}, {ask:?}"), judged);
    }
    report.finish();
}

#[test]
fn reference_by_layer_gradients_match_differences() {
    for n in [1, 2, 5] {
        let (stack, _) = differing(n);
        let rng = &mut Rng::new(n ^ 0xd1fe);
        let layers = stack.layers.len();
        let stack = Stack { batch: 1, length: 4, activation: Activation::Silu, ..stack };
        let stack = Stack::random(rng, layers, true, stack);
        let d_out = rng.normals(stack.x.len());
        let loss =
            |stack: &Stack| stack.exact().out.iter().zip(&d_out).map(|(out, d)| out * f64::from(*d)).sum();
        let gradients = |stack: &Stack| backward::reference_of::<f64>(stack, &d_out);
        let tensors = |stack: &mut Stack, visit: &mut dyn FnMut(&mut Vec<f32>)| {
            let own: Vec<Vec<bool>> = (0..stack.layers.len())
                .map(|n| (0..stack.layers[n].len()).map(|k| stack.lender(n, k).is_none()).collect())
                .collect();
            let parts = stack.layers.iter_mut().flatten().zip(own.into_iter().flatten());
            let parts = parts.filter(|(_, own)| *own).map(|(part, _)| part).chain(&mut stack.final_norm);
            let tensors = parts.flat_map(|p| std::iter::once(&mut p.weight).chain(&mut p.bias));
            std::iter::once(&mut stack.x).chain(tensors).for_each(visit);
        };
        expect_slopes(&format!("stack {n}"), &stack, rng, loss, gradients, tensors);
    }
}

/// Self-attention of decoders. All layers share the memory's mask.
#[test]
fn decoders_with_differing_layers_equal_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("decoders by layer");
    for n in 0..12 {
        if n >= 3 && !rest(&format!("decoders by layer {n}")) {
            continue;
        }
        let rng = &mut Rng::new(n ^ 0xa17f);
        let stack = decoder_data::drawn(n, false);
        let layers = 2 + n as usize % 3;
        let head_dim = stack.features / stack.heads;
        let mut each: Vec<_> =
            (0..layers).map(|n| LayerData::random(rng, n, [stack.heads, head_dim])).collect();
        if !n.is_multiple_of(3) {
            LayerData::share_keys(&mut each);
        }
        // At a ReLU's kink, rounding makes gradients jump.
        let activation = Activation::Gelu;
        let stack = decoder_data::Stack { each, rotary: None, activation, ..stack };
        let stack = decoder_data::Stack::random(rng, layers, n.is_multiple_of(2), stack);
        let setup = setup_of(rng, n);
        report.record(&format!("stack {n}"), &setup, stack.outcome(&setup, None, true));
        let steps = steps_of(stack.length, rng);
        let judged = stack.outcome(&setup, Some(&steps), false);
        report.record(&format!("stack {n} in {steps:?}"), &setup, judged);
        let ask = decoder_backward::Ask { keeps: n.is_multiple_of(2), ..decoder_backward::ALL };
        let judged = decoder_backward::outcome(&stack, &setup, ask, n);
        report.record(&format!("gradients of stack {n}"), &setup, judged);
    }
    report.finish();
}

/// Returns the error of a call whose second layer has a mask of four keys instead of five.
pub fn mask_of_other_keys() -> Error {
    let gpu = &full().gpu;
    let stack = smallest();
    let placed = stack.place(full(), DType::F32);
    let encoder = placed.encoder(full(), stack.config(DType::F32)).expect("a stack");
    let buffers: Vec<_> = (0..3).map(|_| gpu.buffer(4096).expect("a buffer")).collect();
    let rows = |n: usize| TensorView::new(&buffers[n], DType::F32, [1, 1, 5, 16]);
    let pairs = TensorView::new(&buffers[2], DType::Bool, [1, 1, 5, 4]);
    let calls = [DeviceMask::causal(), DeviceMask::none().attn_mask(pairs)].map(LayerCall::new);
    let call = EncoderForward::new(rows(0), rows(1)).layer_calls(&calls[..]);
    encoder.scratch_size(&call).expect_err("an error")
}

#[test]
fn bad_layer_calls_are_errors() {
    let gpu = &full().gpu;
    let stack = smallest();
    let placed = stack.place(full(), DType::F32);
    let encoder = placed.encoder(full(), stack.config(DType::F32)).expect("a stack");
    let buffers: Vec<_> = (0..5).map(|_| gpu.buffer(4096).expect("a buffer")).collect();
    let typed = |n: usize, dtype, shape| TensorView::new(&buffers[n], dtype, shape);
    let rows = |n: usize| typed(n, DType::F32, [1, 1, 5, 16]);
    let config = CacheConfig::new(2, 4, 9).layers(2);
    let mut cache = Cache::with_pipelines(gpu.pipelines(), config).expect("a cache");
    gpu.submit(|e| cache.advance(e, Tokens::All(5))).expect("an advance");
    let refused = |call: EncoderForward, words: &[&str]| {
        let mut commands = gpu.device().create_command_encoder(&Default::default());
        let mut scratch = Scratch::new(gpu.device(), Default::default()).expect("a scratch");
        let error = encoder.forward(&mut commands, &call, &mut scratch).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = commands.begin_compute_pass(&Default::default());
        assert!(encoder.forward(&mut pass, &call, &mut scratch).is_err());
        assert!(encoder.prepare(&call, &mut scratch).is_err());
    };
    let both = |call: EncoderForward, words: &[&str]| {
        refused(call, words);
        let backward = EncoderBackward::new(call, rows(3)).d_x(rows(4));
        let error = encoder.backward_scratch_size(&backward).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
    };
    let plain = EncoderForward::new(rows(0), rows(1));
    let causal = LayerCall::new(DeviceMask::causal());
    let two = |second| [LayerCall::new(DeviceMask::causal().window(2, 0)), second];
    let fits = two(causal);
    refused(plain.layer_calls(&fits[..]), &["scratch"]);
    for count in [0, 1, 3] {
        let calls = vec![causal; count];
        both(plain.layer_calls(&calls[..]), &["`layer_calls`", "2 elements expected", &count.to_string()]);
    }
    both(plain.mask(DeviceMask::causal()).layer_calls(&fits[..]), &["`mask` or `rotary` with `layer_calls`"]);
    let rope = Rope::new(gpu.device(), RopeConfig::new(4)).expect("a rope");
    let start = RowPositions::Start(0);
    both(plain.layer_calls(&fits[..]).rotary(&rope, start), &["`mask` or `rotary` with `layer_calls`"]);
    let of_pairs = |n: usize, keys| typed(n, DType::Bool, [1, 1, 5, keys]);
    let calls = two(LayerCall::new(DeviceMask::none().attn_mask(of_pairs(2, 4))));
    both(plain.layer_calls(&calls[..]), &["`layer_calls[1]`: `attn_mask`", "must be"]);
    let wide = Rope::new(gpu.device(), RopeConfig::new(6)).expect("a rope");
    let calls = two(causal.rotary(&wide, start));
    both(plain.layer_calls(&calls[..]), &["`layer_calls[1]`: `q`", "`rotary_dim` of the rope"]);
    // A tensor of the last layer shares its buffer with an output.
    let calls = two(LayerCall::new(DeviceMask::none().attn_mask(of_pairs(1, 5))));
    refused(plain.layer_calls(&calls[..]), &["`out`", "`attn_mask`"]);
    let places = |n: usize| RowPositions::Tensor(typed(n, DType::U32, [1, 1, 5, 1]));
    let calls = two(causal.rotary(&rope, places(1)));
    refused(plain.layer_calls(&calls[..]), &["`out`", "`positions`"]);
    let calls = two(causal.rotary(&rope, places(4)));
    let backward = EncoderBackward::new(plain.layer_calls(&calls[..]), rows(3)).d_x(rows(4));
    let error = encoder.backward_scratch_size(&backward).expect_err("an error").to_string();
    assert!(error.contains("`d_x`") && error.contains("`positions`"), "{error}");
    let calls = two(LayerCall::new(DeviceMask::none()));
    refused(plain.layer_calls(&calls[..]).cache(&cache), &["`layer_calls[1]`: several rows", "and_causal()"]);
    let calls = two(causal.rotary(&rope, start));
    refused(plain.layer_calls(&calls[..]).cache(&cache), &["`layer_calls[1]`: rotary positions", "starts()"]);
    refused(plain.layer_calls(&fits[..]).cache(&cache), &["scratch"]);
    let error = placed.encoder_of(full(), &[stack.config(DType::F32)]).expect_err("one configuration");
    assert!(error.to_string().contains("`configs`: 2 elements expected, got 1"), "{error}");
    let configs = [stack.config(DType::F32), stack.config(DType::F32).activation(Activation::Relu)];
    let error = placed.encoder_of(full(), &configs).expect_err("other activations").to_string();
    assert!(
        error.contains("may differ only in `MultiHeadConfig::scale`, `MultiHeadConfig::softcap`"),
        "{error}"
    );
    let negative = LayerData { softcap: Some(-1.0), ..Default::default() };
    let stack = Stack { each: vec![LayerData::default(), negative], ..stack };
    let error = placed.encoder_of(full(), &stack.configs(DType::F32)).expect_err("a negative softcap");
    assert!(error.to_string().contains("`softcap` is -1"), "{error}");
}

/// Returns `smallest` with three more layers, which read the keys of the second, first and second
/// layer.
fn sharing() -> Stack {
    let stack = smallest();
    let layer = |source: usize| LayerData { keys_of: Some(source), ..stack.each[source].clone() };
    let each = vec![stack.each[0].clone(), stack.each[1].clone(), layer(1), layer(0), layer(1)];
    Stack::random(&mut Rng::new(35), 5, true, Stack { each, ..stack })
}

/// Five layers use the keys of the first two. The test runs all rows at once, then a cache of two
/// layers, then gradients.
#[test]
fn layers_share_keys_of_earlier_layers() {
    crate::harness::in_turn!();
    let mut report = Report::new("layers that share keys");
    let stack = sharing();
    for (form, layout) in FORMS.into_iter().zip([Layout::Dense, Layout::Window(5)]) {
        let setup = Setup { profile: full(), form, dtypes: [DType::F32; 2], layout };
        report.record("at once", &setup, stack.outcome(&setup, None, true));
        report.record("one at a time", &setup, stack.outcome(&setup, Some(&[1; 5]), true));
        let first = form == FORMS[0];
        let ask = Ask { keeps: first, accumulates: first, gradient: DType::F32 };
        report.record("gradients", &setup, backward::outcome(&stack, &setup, ask, 4));
    }
    report.finish();
    let mut alone = stack.clone();
    alone.each.iter_mut().for_each(|layer| layer.keys_of = None);
    assert!(max_error(&alone.exact().out, &stack.exact().out) > 1e-3, "no keys are shared");
}

#[test]
fn bad_shared_keys_are_errors() {
    let gpu = &full().gpu;
    let stack = sharing();
    let placed = stack.place(full(), DType::F32);
    let configs = stack.configs(DType::F32);
    let refused = |sources: [Option<usize>; 5], words: &[&str]| {
        let configs: Vec<_> = configs.iter().zip(sources).map(|(config, of)| config.keys_of(of)).collect();
        let error = placed.encoder_of(full(), &configs).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
    };
    refused([Some(0), None, None, None, None], &["`keys_of` is 0", "an earlier layer"]);
    refused([None, Some(2), None, None, None], &["`keys_of` is 2", "an earlier layer"]);
    refused([None, None, Some(1), Some(2), None], &["`keys_of` is 2", "an earlier layer without `keys_of`"]);
    refused([None, Some(0), None, None, None], &["different key weights", "`key`, `value`"]);

    let encoder = placed.encoder_of(full(), &configs).expect("a stack");
    let buffers: Vec<_> = (0..6).map(|_| gpu.buffer(4096).expect("a buffer")).collect();
    let rows = |n: usize| TensorView::new(&buffers[n], DType::F32, [1, 1, 5, 16]);
    let each: Vec<_> = stack.each.iter().map(|layer| layer.place(full(), Layout::Dense)).collect();
    let calls: Vec<_> = each.iter().map(|layer| layer.call(None)).collect();
    let forward = EncoderForward::new(rows(0), rows(1));
    let check = |call: EncoderForward, words: &[&str]| {
        let error = encoder.scratch_size(&call).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
    };
    let with = |n: usize, call: LayerCall<'static>| {
        let mut calls: Vec<LayerCall> = calls.clone();
        calls[n] = call;
        calls
    };
    let unrotated = with(2, LayerCall::new(DeviceMask::causal()));
    check(forward.layer_calls(&unrotated[..]), &["layer_calls[2]", "a different rotation"]);
    let swapped = [calls[0], calls[1], calls[0], calls[1], calls[1]];
    check(forward.layer_calls(&swapped[..]), &["layer_calls[2]", "a different rotation"]);
    let cache = |layers: usize| {
        let config = CacheConfig::new(2, 4, 9).layers(layers);
        Cache::with_pipelines(gpu.pipelines(), config).expect("a cache")
    };
    let five = cache(5);
    check(forward.layer_calls(&calls[..]).cache(&five), &["`cache.layers` is 5"]);

    let mut asked = placed.gradients();
    asked[2].attention.key = asked[1].attention.key;
    let call = EncoderBackward::new(forward.layer_calls(&calls[..]), rows(2)).d_layers(&asked);
    let error = encoder.backward_scratch_size(&call).expect_err("an error").to_string();
    assert!(
        error.contains("gradients of keys and values in a layer with `TransformerLayerConfig::keys_of`"),
        "{error}"
    );
}
