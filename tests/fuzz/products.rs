//! Projections, merges and layers.

use wgpu_attention::reference::{self, HostLinear, HostWeights, LayerShape, Options, Real};
use wgpu_attention::{
    DType, KernelForm, LayerForward, LayerWeights, Linear, MatrixUnits, Merge, MultiHeadAttention, Partial,
    Path, Projection, ProjectionForward, Tuning,
};

use crate::arena::{Buf, Window, view};
use crate::attention::DropSpec;
use crate::call::{How, MOST_WORK, Memory, faults, float, judge, largest, outputs, settle};
use crate::choices::Choices;
use crate::layer_options::LayerOptions;
use crate::masks::MaskSpec;
use crate::world::{Outcome, World, refused};

#[derive(Clone, Copy, Debug)]
struct Product {
    x: Window,
    weight: Window,
    bias: Option<Window>,
    out: Window,
    narrow: bool,
}

/// Of a projection to `heads` heads of `dim` features, of which a narrow one reads `read` each.
pub fn weight_shape(narrow: bool, shared: bool, heads: usize, dim: usize, read: usize) -> [usize; 4] {
    match (narrow, shared) {
        (true, true) => [1, 1, dim, read],
        (true, false) => [1, heads, dim, read],
        (false, _) => [1, 1, heads * dim, read],
    }
}

pub fn project(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let types = [0; 4].map(|_| float(f, world.f16));
    let (heads, narrow, biased, aligned) = (f.between(1, 3), f.one_in(3), f.one_in(2), f.one_in(2));
    let (dim, read, shared) = (f.pick(&[4, 5]), f.pick(&[4, 8, 3]), f.one_in(2));
    let form = f.pick(&[KernelForm::Cpu, KernelForm::Gpu]);
    let mut units = MatrixUnits::Auto;
    let (batch, length) = (c.between(1, 2), c.between(1, 9));
    let features = if narrow { heads * read } else { read };
    let count = f.between(1, 3);
    let mut products: Vec<_> = (0..count)
        .map(|n| {
            let weight = weight_shape(narrow, shared, heads, dim, read);
            let mut out = Window::new(c, Buf::OutA, types[3], [batch, heads, length, dim], aligned);
            out.offset = out.offset % 64 + n * (5120 / types[3].bytes());
            Product {
                x: Window::input(c, types[0], [batch, 1, length, features], aligned),
                weight: Window::input(c, types[1], weight, aligned),
                bias: biased.then(|| Window::input(c, types[2], [1, 1, 1, heads * dim], aligned)),
                out,
                narrow,
            }
        })
        .collect();
    let (pass, memory) = (c.one_in(3), Memory::new(c));
    for _ in 0..faults(c) {
        let n = c.below(products.len());
        let product = &mut products[n];
        match c.below(9) {
            0 | 1 => product.x.spoil(c),
            2 | 3 => product.weight.spoil(c),
            4 => product.bias.iter_mut().for_each(|b| b.spoil(c)),
            5 | 6 => product.out.spoil(c),
            7 => product.narrow = !product.narrow,
            _ => units = MatrixUnits::Always,
        }
    }
    if c.one_in(40) {
        products.clear();
    }
    *said = format!("{products:?}, {form:?}, {units:?}");
    let operator = Projection::with_pipelines(world.gpu.pipelines())
        .tuning(Tuning::new().form(form).matrix_units(units));
    let buffers = world.arena.buffers.clone();
    let calls: Vec<_> = products
        .iter()
        .map(|p| {
            ProjectionForward::new(
                view(&buffers, &p.x),
                Linear {
                    weight: view(&buffers, &p.weight),
                    bias: p.bias.as_ref().map(|b| view(&buffers, b)),
                },
                view(&buffers, &p.out),
            )
            .narrow(p.narrow)
        })
        .collect();
    let mut scratch = memory.scratch(world, Default::default()).map_err(|e| e.to_string())?;
    let mut encoder = world.encoder();
    let result = if pass {
        operator.forward_in_pass(&mut encoder.begin_compute_pass(&Default::default()), &calls)
    } else {
        operator.forward(&mut encoder, &calls)
    };
    let work = products.iter().map(|p| p.out.count() as f64 * p.x.shape[3] as f64).sum::<f64>();
    let all: Vec<_> =
        products.iter().flat_map(|p| [Some(p.x), Some(p.weight), p.bias, Some(p.out)]).flatten().collect();
    let writes: Vec<_> = products.iter().map(|p| p.out).collect();
    let reads_tame =
        products.iter().all(|p| p.x.is_tame() && p.weight.is_tame() && p.bias.is_none_or(|b| b.is_tame()));
    let tame = reads_tame && writes.iter().all(Window::is_watched);
    let outcome = settle(world, result, encoder, &mut scratch, &all, &writes, [work < MOST_WORK, tame])?;
    if matches!(outcome, Outcome::Judged) {
        for p in &products {
            let bytes = &world.arena.before;
            let want = projected::<f64>(p, bytes);
            judge("out", world, &p.out, &projected::<f32>(p, bytes), &want, largest(&want))?;
        }
    }
    Ok(outcome)
}

/// By the reference, head after head.
fn projected<R: Real>(p: &Product, bytes: &[Vec<u8>]) -> Vec<R> {
    let [batch, heads, length, dim] = p.out.shape;
    let features = p.x.shape[3];
    let (x, w) = (p.x.wide::<R>(bytes), p.weight.wide::<R>(bytes));
    let bias = p.bias.map(|b| b.wide::<R>(bytes));
    let read = if p.narrow { features / heads } else { features };
    let mut out = Vec::new();
    for b in 0..batch {
        for h in 0..heads {
            let of = if p.narrow && p.weight.shape[1] == 1 { 0 } else { h };
            let weight = &w[of * dim * read..][..dim * read];
            let first = if p.narrow { h * read } else { 0 };
            let rows = x[b * length * features..][..length * features].chunks_exact(features);
            let rows: Vec<R> = rows.flat_map(|row| &row[first..first + read]).copied().collect();
            let bias = bias.as_ref().map(|b| &b[h * dim..][..dim]);
            out.extend(reference::project(&rows, weight, bias, read, dim).expect("it fits"));
        }
    }
    out
}

pub fn merge(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let types = [0; 2].map(|_| float(f, world.f16));
    let shape = [c.between(1, 2), c.between(1, 3), c.between(1, 20), c.between(1, 9)];
    let [batch, heads, q_len, _] = shape;
    let rows = [batch, heads, q_len, 1];
    let count = f.between(1, 5);
    let mut parts: Vec<_> = (0..count)
        .map(|_| [Window::input(c, types[0], shape, false), Window::input(c, DType::F32, rows, false)])
        .collect();
    let [out, lse, _] = outputs(c, [(types[1], shape), (DType::F32, rows), (DType::F32, [1; 4])], false);
    let mut into = [out, lse];
    let pass = c.one_in(3);
    for _ in 0..faults(c) {
        let n = c.below(2);
        if c.one_in(2) {
            into[n].spoil(c);
        } else {
            let part = c.below(parts.len());
            parts[part][n].spoil(c);
        }
    }
    if c.one_in(40) {
        parts.clear();
    }
    *said = format!("{parts:?} into {into:?}");
    let buffers = world.arena.buffers.clone();
    let partial = |w: &[Window; 2]| Partial { out: view(&buffers, &w[0]), lse: view(&buffers, &w[1]) };
    let calls: Vec<_> = parts.iter().map(partial).collect();
    let (mut scratch, mut encoder) = (world.scratch(), world.encoder());
    let operator = Merge::with_pipelines(world.gpu.pipelines());
    let result = if pass {
        operator.forward_in_pass(
            &mut encoder.begin_compute_pass(&Default::default()),
            &calls,
            &partial(&into),
        )
    } else {
        operator.forward(&mut encoder, &calls, &partial(&into))
    };
    let all: Vec<_> = parts.iter().flatten().chain(&into).copied().collect();
    let tame = parts.iter().flatten().all(Window::is_tame) && into.iter().all(Window::is_watched);
    let small = into[0].count().saturating_mul(parts.len()) < 1 << 20;
    let outcome = settle(world, result, encoder, &mut scratch, &all, &into, [small, tame])?;
    // A merge in f16 rounds between every three parts.
    if matches!(outcome, Outcome::Judged) && into[0].dtype == DType::F32 {
        let bytes = &world.arena.before;
        let (naive, exact) = (merged::<f32>(&parts, bytes)?, merged::<f64>(&parts, bytes)?);
        let values = parts.iter().map(|[out, _]| largest(&out.wide(bytes))).fold(0.0, f64::max);
        judge("out", world, &into[0], &naive.0, &exact.0, values)?;
        judge("lse", world, &into[1], &naive.1, &exact.1, largest(&exact.1) + 1.0)?;
    }
    Ok(outcome)
}

fn merged<R: Real>(parts: &[[Window; 2]], bytes: &[Vec<u8>]) -> Result<(Vec<R>, Vec<R>), String> {
    let data: Vec<_> = parts.iter().map(|part| part.map(|w| w.wide::<R>(bytes))).collect();
    let slices: Vec<_> = data.iter().map(|[out, lse]| (&out[..], &lse[..])).collect();
    let value_dim = parts.first().map_or(1, |part| part[0].shape[3]);
    reference::merge(&slices, value_dim).map_err(|e| format!("the reference refuses it: {e}"))
}

/// A layer's weights and biases: query, key, value, out.
#[derive(Clone, Debug)]
struct LayerSpec {
    config: LayerOptions,
    weights: [Window; 4],
    biases: [Option<Window>; 4],
    appended: Option<[Window; 2]>,
    /// query, key, value, out.
    tensors: [Window; 4],
    lse: Option<Window>,
    map: Option<Window>,
    mask: MaskSpec,
    dropout: Option<DropSpec>,
}

impl LayerSpec {
    fn new(f: &mut Choices, c: &mut Choices, f16: bool) -> Self {
        let types = [0; 3].map(|_| float(f, f16));
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
            tensors: [query, key, value, out],
            lse: f.one_in(2).then_some(lse),
            map: f.one_in(4).then_some(map),
            mask: if f.one_in(2) { MaskSpec::new(f, c, &shape, f16) } else { MaskSpec::default() },
            dropout: DropSpec::new(f, c, [batch, heads, q_len, keys]),
        }
    }

    fn spoil(&mut self, c: &mut Choices) {
        let config = &mut self.config;
        match c.below(16) {
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
        owned
            .chain(&mut self.tensors)
            .chain(&mut self.lse)
            .chain(&mut self.map)
            .chain(self.mask.windows())
            .chain(dropout)
            .collect()
    }

    fn heads<R: Real>(&self, world: &World) -> Result<Vec<R>, wgpu_attention::Error> {
        let bytes = &world.arena.before;
        let weights = self.weights.map(|w| w.wide::<R>(bytes));
        let biases = self.biases.map(|b| b.map(|b| b.wide::<R>(bytes)));
        let appended = self.appended.map(|pair| pair.map(|w| w.wide::<R>(bytes)));
        let linear = |n: usize| HostLinear { weight: &weights[n][..], bias: biases[n].as_deref() };
        let host = HostWeights {
            query: linear(0),
            key: linear(1),
            value: linear(2),
            out: linear(3),
            bias_kv: appended.as_ref().map(|pair| pair.each_ref().map(|x| &x[..])),
        };
        let [query, key, value, _] = self.tensors;
        let inputs = [query, key, value].map(|w| w.wide::<R>(bytes));
        let shape = LayerShape { batch: query.shape[0], q_len: query.shape[2], kv_len: key.shape[2] };
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
    let mut spec = LayerSpec::new(f, c, world.f16);
    let form = f.pick(&[KernelForm::Cpu, KernelForm::Gpu]);
    let path = if f.one_in(3) { Path::Staged } else { Path::Auto };
    let (how, memory) = (How::new(c), Memory::new(c));
    for _ in 0..faults(c) {
        spec.spoil(c);
    }
    *said = format!("{spec:?}, {form:?}, {path:?}, {how:?}, {memory:?}");
    let all: Vec<Window> = spec.clone().windows().into_iter().map(|w| *w).collect();
    let buffers = world.arena.buffers.clone();
    let linear = |n: usize| Linear {
        weight: view(&buffers, &spec.weights[n]),
        bias: spec.biases[n].as_ref().map(|b| view(&buffers, b)),
    };
    let bias_kv = spec.appended.as_ref().map(|pair| pair.each_ref().map(|w| view(&buffers, w)));
    let weights =
        LayerWeights { query: linear(0), key: linear(1), value: linear(2), out: linear(3), bias_kv };
    let made = MultiHeadAttention::with_pipelines(world.gpu.pipelines(), spec.config.config(), &weights);
    let layer = match made {
        Ok(layer) => layer.tuning(Tuning::new().form(form).path(path)),
        Err(e) => return world.works(&mut world.scratch()).map(|()| refused(&e)),
    };
    let [query, key, value, out] = spec.tensors.each_ref().map(|w| view(&buffers, w));
    let call = LayerForward::new(query, key, value, out)
        .mask(spec.mask.device(&buffers))
        .lse(spec.lse.as_ref().map(|w| view(&buffers, w)))
        .weights(spec.map.as_ref().map(|w| view(&buffers, w)))
        .dropout(spec.dropout.as_ref().map(|d| d.device(&buffers)));
    let size = layer.scratch_size(&call);
    let fits = size.as_ref().is_ok_and(|size| size.total() < 1 << 24);
    let memory = if fits { memory } else { Memory::None };
    let mut scratch =
        memory.scratch(world, size.as_ref().copied().unwrap_or_default()).map_err(|e| e.to_string())?;
    let mut encoder = world.encoder();
    let result = match how {
        How::Prepare => layer.prepare(&call, &mut scratch),
        How::Pass => {
            layer.forward_in_pass(&mut encoder.begin_compute_pass(&Default::default()), &call, &mut scratch)
        }
        _ => layer.forward(&mut encoder, &call, &mut scratch),
    };
    if memory == Memory::Foreign && result.is_err() {
        scratch = world.scratch();
    }
    let [query, key, ..] = spec.tensors;
    let shape = spec.config.shape(query.shape[0], query.shape[2], key.shape[2], 2);
    let rows = query.shape[0] as f64 * query.shape[2].max(key.shape[2]) as f64;
    let work = shape.flops()
        + rows * (spec.config.heads * 9) as f64 * all.iter().map(|w| w.shape[3] as f64).sum::<f64>();
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
    // Projected in f16, its naive error is another.
    if matches!(outcome, Outcome::Judged) && spec.config.dtype == DType::F32 && spec.dropout.is_none() {
        let naive = spec.heads::<f32>(world).map_err(|e| format!("the reference refuses it: {e}"))?;
        let want = spec.heads::<f64>(world).map_err(|e| format!("the reference refuses it: {e}"))?;
        judge("out", world, &spec.tensors[3], &naive, &want, largest(&want))?;
    }
    Ok(outcome)
}
