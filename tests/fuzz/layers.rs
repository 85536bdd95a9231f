//! Layers and their gradients.

use wgpu_attention::layers::{
    LinearGradients, MultiHeadBackward, MultiHeadForward, MultiHeadGradients, MultiHeadWeights, OutputGate,
};
use wgpu_attention::reference::{self, HostLinear, HostNorm, HostWeights, MultiHeadShape, Options, Real};
use wgpu_attention::rows::{NormConfig, NormGradients, NormWeights};
use wgpu_attention::tuning::{Algorithm, Target};
use wgpu_attention::{DType, KernelOptions, Linear, MultiHeadAttention, Scratch, TensorView};

use crate::arena::{Buf, Window, view};
use crate::attention::DropSpec;
use crate::call::{
    How, MOST_WORK, Memory, faults, float, judge, largest, outputs, refused_alike, scratch_for, settle,
};
use crate::choices::Choices;
use crate::gradients::at;
use crate::layer_options::LayerOptions;
use crate::masks::MaskSpec;
use crate::world::{Outcome, World, refused};

/// A layer's weights and biases: query, key, value, out.
#[derive(Clone, Debug)]
struct LayerSpec {
    config: LayerOptions,
    weights: [Window; 4],
    biases: [Option<Window>; 4],
    appended: Option<[Window; 2]>,
    /// The weights of the norms of queries and keys.
    norms: Option<[Window; 2]>,
    /// The weight and bias of the gate of the heads' outputs.
    gate: Option<[Option<Window>; 2]>,
    /// The tensors query, key, value, out.
    tensors: [Window; 4],
    lse: Option<Window>,
    map: Option<Window>,
    mask: MaskSpec,
    dropout: Option<DropSpec>,
}

impl LayerSpec {
    fn new(f: &mut Choices, c: &mut Choices) -> Self {
        let types = [0; 3].map(|_| float(f));
        let kv_heads = f.between(1, 2);
        let mut config = LayerOptions::new(8, kv_heads * f.between(1, 2));
        config.kv_heads = kv_heads;
        config.head_dim = f.pick(&[4, 3]);
        config.value_dim = f.pick(&[4, 5]);
        let heads = config.heads;
        [config.query_features, config.out_features] = [8, c.between(1, 12)];
        config.key_features = f.pick(&[8, 4]);
        config.value_features = f.pick(&[8, 4]);
        config.narrow = f.one_in(4) && heads == kv_heads;
        config.add_zero_attn = f.one_in(4);
        config.dtype = types[0];
        config.softcap = f.one_in(6).then_some(5.0);
        let (batch, q_len, kv_len) = (c.between(1, 2), c.between(1, 9), c.between(1, 9));
        let sides = [
            (heads, config.head_dim, config.query_features),
            (kv_heads, config.head_dim, config.key_features),
            (kv_heads, config.value_dim, config.value_features),
        ];
        let weight = |(heads, dim, features): (usize, usize, usize)| match config.narrow {
            true => [1, heads, dim, features / heads],
            false => [1, 1, heads * dim, features],
        };
        let [q, k, v] = sides.map(weight);
        let width = heads * config.value_dim;
        let shapes = [q, k, v, [1, 1, config.out_features, width]];
        let weights = shapes.map(|s| Window::input(c, types[1], s, false));
        let biased = f.one_in(2);
        let biases =
            shapes.map(|s| biased.then(|| Window::input(c, types[2], [1, 1, 1, s[1] * s[2]], false)));
        let appended = f.one_in(3).then(|| {
            [config.head_dim, config.value_dim]
                .map(|d| Window::input(c, types[1], [1, 1, 1, kv_heads * d], false))
        });
        config.qk_norm = f.one_in(3).then(|| f.pick(&[NormConfig::rms(), NormConfig::layer()]).eps(0.1));
        let weighted = config.qk_norm.is_some() && f.one_in(2);
        let norms =
            weighted.then(|| [0; 2].map(|_| Window::input(c, types[2], [1, 1, 1, config.head_dim], false)));
        config.output_gate = f.one_in(3).then(|| f.pick(&[OutputGate::Elementwise, OutputGate::Headwise]));
        let gate = config.output_gate.map(|kind| {
            let dim = if kind == OutputGate::Headwise { 1 } else { config.value_dim };
            let shape = weight((heads, dim, config.query_features));
            let bias = [1, 1, 1, heads * dim];
            [
                Some(Window::input(c, types[0], shape, false)),
                biased.then(|| Window::input(c, types[2], bias, false)),
            ]
        });
        let keys = kv_len + usize::from(appended.is_some()) + usize::from(config.add_zero_attn);
        let pairs = [batch, if f.one_in(2) { 1 } else { heads }, q_len, keys];
        let outs = [
            (config.dtype, [batch, 1, q_len, config.out_features]),
            (DType::F32, [batch, heads, q_len, 1]),
            (DType::F32, pairs),
        ];
        let [out, lse, mut map] = outputs(c, outs, false);
        map.buf = Buf::OutC;
        let inputs =
            [(q_len, config.query_features), (kv_len, config.key_features), (kv_len, config.value_features)];
        let [query, key, value] =
            inputs.map(|(l, e)| Window::input(c, config.dtype, [batch, 1, l, e], false));
        let shape = config.shape(batch, q_len, kv_len, 0);
        LayerSpec {
            config,
            weights,
            biases,
            appended,
            norms,
            gate,
            tensors: [query, key, value, out],
            lse: f.one_in(2).then_some(lse),
            map: f.one_in(4).then_some(map),
            mask: if f.one_in(2) { MaskSpec::new(f, c, &shape) } else { MaskSpec::default() },
            dropout: DropSpec::new(f, c, [batch, heads, q_len, keys]),
        }
    }

    fn spoil(&mut self, c: &mut Choices) {
        let config = &mut self.config;
        match c.below(18) {
            0 => config.heads = c.size(),
            1 => config.kv_heads = c.size(),
            2 => *[&mut config.head_dim, &mut config.value_dim][c.below(2)] = c.size(),
            3 => {
                *[&mut config.query_features, &mut config.key_features, &mut config.value_features]
                    [c.below(3)] = c.size()
            }
            4 => config.out_features = c.size(),
            5 => config.narrow = !config.narrow,
            6 => config.add_zero_attn = !config.add_zero_attn,
            7 => config.scale = Some(c.float().into()),
            8 => config.softcap = Some(c.float().into()),
            9 => config.dtype = c.pick(&[DType::F32, DType::F16, DType::BF16, DType::U32, DType::Bool]),
            10 => self.mask.spoil(c),
            11 => config.qk_norm = (!c.one_in(3)).then(|| NormConfig::rms().eps(c.float().into())),
            12 => {
                config.output_gate =
                    c.pick(&[None, Some(OutputGate::Elementwise), Some(OutputGate::Headwise)])
            }
            _ => {
                let mut all = self.windows();
                let n = c.below(all.len());
                all[n].spoil(c);
            }
        }
    }

    fn windows(&mut self) -> Vec<&mut Window> {
        let biases = self.biases.iter_mut().flatten();
        let dropout = self.dropout.as_mut().and_then(DropSpec::window);
        let owned = self.weights.iter_mut().chain(biases).chain(self.appended.iter_mut().flatten());
        let owned = owned.chain(self.norms.iter_mut().flatten());
        let owned = owned.chain(self.gate.iter_mut().flatten().flatten());
        owned
            .chain(&mut self.tensors)
            .chain(&mut self.lse)
            .chain(&mut self.map)
            .chain(self.mask.windows())
            .chain(dropout)
            .collect()
    }

    /// # Errors
    /// Like `MultiHeadAttention::with_pipelines`.
    fn made(
        &self,
        world: &World,
        buffers: &[wgpu::Buffer],
    ) -> Result<MultiHeadAttention, wgpu_attention::Error> {
        let linear = |n: usize| Linear {
            weight: view(buffers, &self.weights[n]),
            bias: self.biases[n].as_ref().map(|b| view(buffers, b)),
        };
        let bias_kv = self.appended.as_ref().map(|pair| pair.each_ref().map(|w| view(buffers, w)));
        let weights = MultiHeadWeights {
            query: linear(0),
            key: linear(1),
            value: linear(2),
            out: linear(3),
            bias_kv,
            qk_norm: self.norms.as_ref().map(|pair| {
                pair.each_ref().map(|w| NormWeights { weight: Some(view(buffers, w)), bias: None })
            }),
            gate: self.gate.as_ref().and_then(|[weight, bias]| {
                let weight = view(buffers, weight.as_ref()?);
                Some(Linear { weight, bias: bias.as_ref().map(|b| view(buffers, b)) })
            }),
        };
        MultiHeadAttention::with_pipelines(world.gpu.pipelines(), self.config.config(), &weights)
    }

    fn call<'a>(&'a self, buffers: &'a [wgpu::Buffer]) -> MultiHeadForward<'a> {
        let [query, key, value, out] = self.tensors.each_ref().map(|w| view(buffers, w));
        MultiHeadForward::new(query, key, value, out)
            .mask(self.mask.device(buffers))
            .lse(self.lse.as_ref().map(|w| view(buffers, w)))
            .weights(self.map.as_ref().map(|w| view(buffers, w)))
            .dropout(self.dropout.as_ref().map(|d| d.device(buffers)))
    }

    /// Returns the multiply-adds of a call whose tensors are `all`.
    fn work(&self, all: &[Window]) -> f64 {
        let [query, key, ..] = self.tensors;
        let shape = self.config.shape(query.shape[0], query.shape[2], key.shape[2], 2);
        let rows = query.shape[0] as f64 * query.shape[2].max(key.shape[2]) as f64;
        shape.flops()
            + rows * (self.config.heads * 9) as f64 * all.iter().map(|w| w.shape[3] as f64).sum::<f64>()
    }

    /// Returns the largest product of the output projection, or its largest bias.
    fn largest_term(&self, world: &World) -> Result<f64, wgpu_attention::Error> {
        let bytes = &world.arena.before;
        let width = self.config.heads * self.config.value_dim;
        let identity: Vec<f64> = (0..width * width).map(|n| f64::from(n % (width + 1) == 0)).collect();
        let mut spec = self.clone();
        (spec.config.out_features, spec.biases[3]) = (width, None);
        let context = spec.exact(world, Some(identity))?;
        let weight = self.weights[3].wide::<f64>(bytes);
        let products = context.chunks_exact(width).flat_map(|row| {
            weight.chunks_exact(width).flat_map(move |weights| row.iter().zip(weights).map(|(x, w)| x * w))
        });
        let bias = self.biases[3].map_or(Vec::new(), |bias| bias.wide::<f64>(bytes));
        Ok(products.chain(bias).fold(0.0, |most, x| x.abs().max(most)))
    }

    /// Runs the reference, with `out` as the weight of the output projection if it is given.
    fn exact<R: Real>(&self, world: &World, out: Option<Vec<R>>) -> Result<Vec<R>, wgpu_attention::Error> {
        let bytes = &world.arena.before;
        let mut weights = self.weights.map(|w| w.wide::<R>(bytes));
        if let Some(out) = out {
            weights[3] = out;
        }
        let biases = self.biases.map(|b| b.map(|b| b.wide::<R>(bytes)));
        let appended = self.appended.map(|pair| pair.map(|w| w.wide::<R>(bytes)));
        let norms = self.norms.map(|pair| pair.map(|w| w.wide::<R>(bytes)));
        let gate = self.gate.map(|parts| parts.map(|part| part.map(|w| w.wide::<R>(bytes))));
        let linear = |n: usize| HostLinear { weight: &weights[n][..], bias: biases[n].as_deref() };
        let host = HostWeights {
            query: linear(0),
            key: linear(1),
            value: linear(2),
            out: linear(3),
            bias_kv: appended.as_ref().map(|pair| pair.each_ref().map(|x| &x[..])),
            qk_norm: norms
                .as_ref()
                .map(|pair| pair.each_ref().map(|x| HostNorm { weight: Some(&x[..]), bias: None })),
            gate: gate.as_ref().and_then(|[weight, bias]| {
                Some(HostLinear { weight: weight.as_deref()?, bias: bias.as_deref() })
            }),
        };
        let [query, key, value, _] = self.tensors;
        let inputs = [query, key, value].map(|w| w.wide::<R>(bytes));
        let shape = MultiHeadShape { batch: query.shape[0], q_len: query.shape[2], kv_len: key.shape[2] };
        let rules = self.mask.rules(bytes);
        let options = Options::new().mask(rules.host());
        reference::multi_head(
            inputs.each_ref().map(|x| &x[..]),
            shape,
            &self.config.config(),
            &host,
            &options,
        )
        .map(|heads| heads.out)
    }
}

pub fn layer(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let mut spec = LayerSpec::new(f, c);
    let form = f.pick(&[Target::Software, Target::Gpu]);
    let path = if f.one_in(3) { Algorithm::Staged } else { Algorithm::Auto };
    let (how, memory) = (How::new(c), Memory::new(c));
    for _ in 0..faults(c) {
        spec.spoil(c);
    }
    *said = format!("{spec:?}, {form:?}, {path:?}, {how:?}, {memory:?}");
    let all: Vec<Window> = spec.windows().into_iter().map(|w| *w).collect();
    let buffers = world.arena.buffers.clone();
    let layer = match spec.made(world, &buffers) {
        Ok(layer) => layer.kernel_options(KernelOptions::new().target(form).algorithm(path)),
        Err(e) => return world.works(&mut world.scratch()).map(|()| refused(&e)),
    };
    let call = spec.call(&buffers);
    let size = layer.scratch_size(&call);
    let (memory, mut scratch) = scratch_for(world, memory, &size)?;
    let mut encoder = world.encoder();
    let result = match how {
        How::Prepare => layer.prepare(&call, &mut scratch).map(drop),
        How::Pass => layer.forward(&mut encoder.begin_compute_pass(&Default::default()), &call, &mut scratch),
        _ => layer.forward(&mut encoder, &call, &mut scratch),
    };
    if memory == Memory::Foreign && result.is_err() {
        scratch = world.scratch();
    }
    let work = spec.work(&all);
    let writes: Vec<_> = [Some(spec.tensors[3]), spec.lse, spec.map].into_iter().flatten().collect();
    let read: Vec<_> = spec
        .weights
        .iter()
        .chain(spec.biases.iter().flatten())
        .chain(spec.appended.iter().flatten())
        .chain(&spec.tensors[..3])
        .collect();
    let tame = result.is_ok()
        && read.into_iter().all(Window::is_tame)
        && writes.iter().all(Window::is_watched)
        && spec.mask.is_tame(&world.arena.before)
        && spec.config.softcap.is_none_or(|s| s == 5.0)
        && spec.config.scale.is_none();
    let run = work < MOST_WORK && !matches!(how, How::Prepare | How::Dropped);
    let outcome = settle(world, result, encoder, &mut scratch, &all, &writes, [run, tame])?;
    // A projection in f16 has another naive error.
    if matches!(outcome, Outcome::Judged) && spec.config.dtype == DType::F32 && spec.dropout.is_none() {
        let refuses = |e| format!("the reference refuses it: {e}");
        let naive = spec.exact::<f32>(world, None).map_err(refuses)?;
        let want = spec.exact::<f64>(world, None).map_err(refuses)?;
        // One output can be the small sum of large terms.
        let magnitude = largest(&want).max(spec.largest_term(world).map_err(refuses)?);
        judge("out", world, &spec.tensors[3], &naive, &want, magnitude)?;
    }
    Ok(outcome)
}

/// A layer's gradients: of inputs, weights and biases, the appended key and value, and the mask's
/// tensors.
#[derive(Clone, Debug)]
struct BackwardSpec {
    layer: LayerSpec,
    /// The outputs `context` and `lse` that the forward call saves.
    kept: [Option<Window>; 2],
    d_out: Window,
    d_lse: Option<Window>,
    inputs: [Option<Window>; 3],
    weights: [Option<Window>; 4],
    biases: [Option<Window>; 4],
    appended: Option<[Window; 2]>,
    norms: Option<[Window; 2]>,
    gate: [Option<Window>; 2],
    added: [Option<Window>; 4],
    accumulates: bool,
}

/// Places of gradients, each with room for its kind.
const INPUT_PLACES: [(Buf, usize); 3] = [(Buf::OutB, 0), (Buf::OutB, 2048), (Buf::OutB, 4096)];
const WEIGHT_PLACES: [(Buf, usize); 4] =
    [(Buf::OutC, 0), (Buf::OutC, 2048), (Buf::OutC, 4096), (Buf::OutC, 6144)];
const BIAS_PLACES: [(Buf, usize); 4] =
    [(Buf::OutC, 8192), (Buf::OutC, 8704), (Buf::OutC, 9216), (Buf::OutC, 9728)];
const APPENDED_PLACES: [(Buf, usize); 2] = [(Buf::OutC, 10240), (Buf::OutC, 10752)];
const NORM_PLACES: [(Buf, usize); 2] = [(Buf::OutC, 11264), (Buf::OutC, 11776)];
const GATE_PLACES: [(Buf, usize); 2] = [(Buf::OutB, 8192), (Buf::OutB, 10240)];
const ADDED_PLACES: [(Buf, usize); 4] =
    [(Buf::OutB, 6144), (Buf::OutC, 12288), (Buf::OutC, 13312), (Buf::OutC, 15360)];

impl BackwardSpec {
    fn new(f: &mut Choices, c: &mut Choices) -> Self {
        let mut layer = LayerSpec::new(f, c);
        (layer.lse, layer.map) = (None, None);
        let LayerSpec { config, tensors, .. } = &layer;
        let (dtype, [batch, _, q_len, _]) = (config.dtype, tensors[0].shape);
        let rows = [batch, config.heads, q_len, 1];
        let kept = if f.one_in(2) {
            let context = [batch, 1, q_len, config.heads * config.value_dim];
            [
                Some(at(c, (Buf::OutA, 4096), dtype, context, false)),
                Some(at(c, (Buf::OutA, 12288), DType::F32, rows, false)),
            ]
        } else {
            [None; 2]
        };
        layer.lse = kept[1];
        layer.tensors[3] = at(c, (Buf::OutA, 0), dtype, layer.tensors[3].shape, false);
        let of = float(f);
        let mut gradient = |place, window: Option<&Window>, wanted: bool| {
            window.filter(|_| wanted).map(|window| at(c, place, of, window.shape, false))
        };
        let wanted = f.pick(&[[true; 3], [true; 3], [true, false, false], [false, true, true], [false; 3]]);
        let [of_weights, of_mask] = [f.one_in(2) || wanted == [false; 3], f.one_in(2)];
        let inputs = [0, 1, 2].map(|n| gradient(INPUT_PLACES[n], Some(&layer.tensors[n]), wanted[n]));
        let weights = [0, 1, 2, 3].map(|n| gradient(WEIGHT_PLACES[n], Some(&layer.weights[n]), of_weights));
        let biases = [0, 1, 2, 3].map(|n| gradient(BIAS_PLACES[n], layer.biases[n].as_ref(), of_weights));
        let appended = layer.appended.filter(|_| of_weights);
        let appended =
            appended.map(|pair| [0, 1].map(|n| at(c, APPENDED_PLACES[n], of, pair[n].shape, false)));
        let norms = layer.norms.filter(|_| of_weights);
        let norms = norms.map(|pair| [0, 1].map(|n| at(c, NORM_PLACES[n], of, pair[n].shape, false)));
        let gate = layer.gate.filter(|_| of_weights).unwrap_or_default();
        let gate = [0, 1].map(|n| gate[n].map(|w| at(c, GATE_PLACES[n], of, w.shape, false)));
        let own = layer.mask.added();
        let added = [0, 1, 2, 3].map(|n| {
            let own = own[n].filter(|_| of_mask)?;
            Some(at(c, ADDED_PLACES[n], DType::F32, own.shape, false))
        });
        BackwardSpec {
            kept,
            d_out: Window::input(c, dtype, layer.tensors[3].shape, false),
            d_lse: f.one_in(2).then(|| Window::input(c, DType::F32, rows, false)),
            inputs,
            weights,
            biases,
            appended,
            norms,
            gate,
            added,
            accumulates: c.one_in(6),
            layer,
        }
    }

    fn gradients(&mut self) -> impl Iterator<Item = &mut Window> {
        let BackwardSpec { inputs, weights, biases, appended, norms, gate, added, .. } = self;
        let optional = inputs.iter_mut().chain(weights).chain(biases).chain(gate).chain(added).flatten();
        optional.chain(appended.iter_mut().flatten()).chain(norms.iter_mut().flatten())
    }

    fn spoil(&mut self, c: &mut Choices) {
        match c.below(10) {
            0..3 => self.layer.spoil(c),
            3 => self.d_out.spoil(c),
            4 => self.d_lse.iter_mut().for_each(|w| w.spoil(c)),
            5 => {
                // One gradient moves to the place of another, or one is missing.
                let (n, m) = (c.below(4), c.below(3));
                self.added[n] = self.inputs[m].take();
            }
            6 => {
                let n = c.below(2);
                self.kept[n] = None;
                self.layer.lse = self.kept[1];
            }
            _ => {
                let mut all: Vec<_> = self.gradients().collect();
                if !all.is_empty() {
                    let n = c.below(all.len());
                    all[n].spoil(c);
                }
            }
        }
    }
}

/// Runs a layer's gradients, after a forward call if that saves activations.
pub fn backward(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let mut spec = BackwardSpec::new(f, c);
    let form = f.pick(&[Target::Software, Target::Gpu]);
    let (how, memory) = (How::new(c), Memory::new(c));
    for _ in 0..faults(c) {
        spec.spoil(c);
    }
    *said = format!("{spec:?}, {form:?}, {how:?}, {memory:?}");
    let mut writes: Vec<Window> = spec.gradients().map(|w| *w).collect();
    let mut all: Vec<Window> = spec.layer.windows().into_iter().map(|w| *w).collect();
    all.extend(writes.iter().chain([&spec.d_out]).chain(&spec.d_lse).chain(spec.kept.iter().flatten()));
    let buffers = world.arena.buffers.clone();
    let layer = match spec.layer.made(world, &buffers) {
        Ok(layer) => layer.kernel_options(KernelOptions::new().target(form)),
        Err(e) => return world.works(&mut world.scratch()).map(|()| refused(&e)),
    };
    let viewed = |w: &Option<Window>| w.as_ref().map(|w| view(&buffers, w));
    let forward = spec.layer.call(&buffers).context(viewed(&spec.kept[0]));
    let linear =
        |n: usize| LinearGradients { weight: viewed(&spec.weights[n]), bias: viewed(&spec.biases[n]) };
    let weights = MultiHeadGradients {
        query: linear(0),
        key: linear(1),
        value: linear(2),
        out: linear(3),
        bias_kv: spec.appended.as_ref().map(|pair| pair.each_ref().map(|w| view(&buffers, w))),
        qk_norm: [0, 1].map(|n| NormGradients {
            weight: spec.norms.as_ref().map(|pair| view(&buffers, &pair[n])),
            bias: None,
        }),
        gate: LinearGradients { weight: viewed(&spec.gate[0]), bias: viewed(&spec.gate[1]) },
    };
    let [d_query, d_key, d_value] = spec.inputs.each_ref().map(viewed);
    let [d_bias, d_slopes, d_relative, d_sinks]: [Option<TensorView>; 4] = spec.added.each_ref().map(viewed);
    let call = MultiHeadBackward::new(forward, view(&buffers, &spec.d_out))
        .d_lse(viewed(&spec.d_lse))
        .d_query(d_query)
        .d_key(d_key)
        .d_value(d_value)
        .d_weights(weights)
        .d_bias(d_bias)
        .d_slopes(d_slopes)
        .d_relative(d_relative)
        .d_sinks(d_sinks)
        .accumulate(spec.accumulates);

    let size = layer.backward_scratch_size(&call);
    let (memory, mut scratch) = scratch_for(world, memory, &size)?;
    let small = 4.0 * spec.layer.work(&all) < MOST_WORK;
    let mut encoder = world.encoder();
    let result = match how {
        // Longer calls have many dispatches to bind.
        _ if !small => layer.backward_scratch_size(&call).map(drop),
        How::Prepare => layer.prepare_backward(&call, &mut scratch).map(drop),
        How::Pass => {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            layer.backward(&mut pass, &call, &mut scratch)
        }
        _ => layer.backward(&mut encoder, &call, &mut scratch),
    };
    refused_alike(&size, &result)?;
    if memory == Memory::Foreign && result.is_err() {
        scratch = world.scratch();
    }
    let run = small && !matches!(how, How::Prepare | How::Dropped);
    if run && result.is_ok() && !all.iter().any(|w| w.buf.fails()) {
        let mut first = world.encoder();
        let size = layer.scratch_size(&forward).ok().filter(|size| size.total() < 1 << 24);
        let mut scratch =
            Scratch::new(world.device(), size.unwrap_or_default()).map_err(|e| e.to_string())?;
        if layer.forward(&mut first, &forward, &mut scratch).is_ok() {
            // A fault may have moved `lse` elsewhere.
            writes.extend(spec.kept[0].iter().chain(&spec.layer.lse).chain([&spec.layer.tensors[3]]));
        }
        world.gpu.queue().submit([first.finish()]);
    }
    settle(world, result, encoder, &mut scratch, &all, &writes, [run, false])
}
