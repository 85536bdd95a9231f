//! Stacks of decoder layers, all at once and in steps.

use wgpu_attention::cache::{CacheLayout, CacheStorage, Tokens};
use wgpu_attention::layers::{DecoderForward, DecoderMemory};
use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance};
use wgpu_attention::reference::{HostLinear, MultiHeadShape, Options, Real};
use wgpu_attention::{Cache, CacheConfig, DType, Error, Scratch, reference};

use super::{Data, HostLayer, Stack, judge_moved, moves};
use crate::arena::{Buf, Window, view};
use crate::call::{Memory, faults, judge, largest, scratch_for, settle};
use crate::case::widened;
use crate::choices::Choices;
use crate::gradients::at;
use crate::layer_options::LayerOptions;
use crate::masks::MaskSpec;
use crate::operands::{record, recorded, refuses, small};
use crate::world::{Outcome, World, refused};

/// One call of a decoder.
#[derive(Clone, Debug)]
struct DecoderSpec {
    stack: Stack,
    x: Window,
    memory: Window,
    keys: Window,
    values: Window,
    out: Window,
    masks: [MaskSpec; 2],
}

impl DecoderSpec {
    /// Draws masks of any parts, or a causal mask for steps.
    fn new(f: &mut Choices, c: &mut Choices, in_steps: bool) -> Self {
        let stack = Stack::new(f, c, 2);
        let (batch, length, memory_len) = (c.between(1, 2), c.between(1, 6), c.between(1, 7));
        let LayerOptions { kv_heads, head_dim, value_dim, dtype, out_features, .. } = stack.attention;
        let rows = [batch, 1, length, out_features];
        let entries = stack.layers.len() * batch;
        let kept = [head_dim, value_dim].map(|dim| [entries, kv_heads, memory_len, dim]);
        let [masked, memory_masked] = [(); 2].map(|()| f.one_in(2));
        let shapes = [length, memory_len].map(|kv_len| stack.attention.shape(batch, length, kv_len, 0));
        let mask = match (in_steps, masked) {
            (true, _) => MaskSpec { causal: !f.one_in(4), ..Default::default() },
            (false, true) => MaskSpec::new(f, c, &shapes[0]),
            (false, false) => MaskSpec::default(),
        };
        // A mask with rows would have to be cut for each step.
        let memory_mask = match memory_masked && !in_steps {
            true => MaskSpec::new(f, c, &shapes[1]),
            false => MaskSpec::default(),
        };
        DecoderSpec {
            stack,
            x: Window::input(c, dtype, rows, false),
            memory: Window::input(c, dtype, [batch, 1, memory_len, out_features], false),
            keys: at(c, (Buf::OutB, 0), dtype, kept[0], false),
            values: at(c, (Buf::OutC, 0), dtype, kept[1], false),
            out: at(c, (Buf::OutA, 0), dtype, rows, false),
            masks: [mask, memory_mask],
        }
    }

    fn spoil(&mut self, c: &mut Choices) {
        match c.below(9) {
            0 | 1 => self.stack.spoil(c),
            2 => self.masks[c.below(2)].spoil(c),
            3 | 4 => self.x.spoil(c),
            5 => self.memory.spoil(c),
            6 => self.keys.spoil(c),
            7 => self.values.spoil(c),
            _ => self.out.spoil(c),
        }
    }

    fn memory_views<'a>(&self, buffers: &'a [wgpu::Buffer]) -> DecoderMemory<'a> {
        DecoderMemory { keys: view(buffers, &self.keys), values: view(buffers, &self.values) }
    }

    fn call<'a>(&self, buffers: &'a [wgpu::Buffer]) -> DecoderForward<'a> {
        let [x, out] = [&self.x, &self.out].map(|w| view(buffers, w));
        DecoderForward::new(x, self.memory_views(buffers), out)
            .mask(self.masks[0].device(buffers))
            .memory_mask(self.masks[1].device(buffers))
    }

    fn windows(&mut self) -> Vec<Window> {
        let stack: Vec<_> = self.stack.windows().into_iter().map(|w| *w).collect();
        let own = [self.x, self.memory, self.keys, self.values, self.out];
        let masks = self.masks.iter_mut().flat_map(MaskSpec::windows).map(|w| *w);
        stack.into_iter().chain(own).chain(masks).collect()
    }

    /// True if results can be judged, after the projection of the memory.
    fn is_tame(&mut self, bytes: &[Vec<u8>]) -> bool {
        self.stack.is_tame()
            && [self.x, self.memory].iter().all(Window::is_tame)
            && [self.keys, self.values, self.out].iter().all(|w| Buf::OUTS.contains(&w.buf))
            && self.masks.iter().all(|mask| mask.is_tame(bytes))
    }

    /// Returns the output, and all layers' outputs.
    fn reference<R: Real>(&self, data: &mut Data) -> Result<Vec<Vec<R>>, String> {
        let rules = self.masks.each_ref().map(|mask| mask.rules(data.bytes));
        let [own, cross] = rules.each_ref().map(|rules| Options::new().mask(rules.host()));
        let [batch, _, q_len, _] = self.x.shape;
        let shape = MultiHeadShape { batch, q_len, kv_len: self.memory.shape[2] };
        let inputs = [&self.x, &self.memory].map(|w| data.of::<R>(w));
        let inputs = inputs.each_ref().map(|x| &x[..]);
        let got = self.stack.on_host::<R, _>(data, |layers, last| {
            let layers: Vec<_> = layers.iter().map(HostLayer::decoder).collect();
            reference::decoder(inputs, shape, &self.stack.config(), &layers, last, [&own, &cross])
        });
        let got = got.map_err(refuses)?;
        Ok(vec![got.out, got.hidden.concat()])
    }

    fn judge(&self, world: &World) -> Result<(), String> {
        let bytes = &world.arena.before;
        let plain = || Data { bytes, nudged: None };
        let (naive, want) = (self.reference::<f32>(&mut plain())?, self.reference::<f64>(&mut plain())?);
        let moved = moves(bytes, &want, |data| self.reference(data))?;
        let most = largest(&want[0]).max(largest(&want[1]));
        let naive = widened(&naive[0], self.out.dtype);
        let own = Tolerance::from_naive(&naive, &want[0], most, EPSILON_F32);
        judge_moved("out", world, &self.out, (&want[0], own), moved[0])
    }

    /// Returns the keys or the values of all layers' attention to the memory.
    fn projected<R: Real>(&self, bytes: &[Vec<u8>], values: bool) -> Result<Vec<R>, String> {
        let LayerOptions { kv_heads, head_dim, value_dim, out_features, .. } = self.stack.attention;
        let (n, dim) = if values { (2, value_dim) } else { (1, head_dim) };
        let memory = self.memory.wide::<R>(bytes);
        self.stack.on_host::<R, _>(&mut Data { bytes, nudged: None }, |layers, _| {
            let each = |layer: &HostLayer<R>| {
                let HostLinear { weight, bias } = layer.attentions[1][n].linear();
                let flat = reference::project(&memory, weight, bias, out_features, kv_heads * dim)?;
                reference::split_heads(&flat, self.memory.shape[2], kv_heads, dim)
            };
            let all: Result<Vec<_>, Error> = layers.iter().map(each).collect();
            Ok(all.map_err(refuses)?.concat())
        })
    }
}

pub fn decoder(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let memory_alone = f.one_in(4);
    let mut spec = DecoderSpec::new(f, c, false);
    for _ in 0..faults(c) {
        spec.spoil(c);
    }
    *said = format!("{spec:?}, memory alone {memory_alone}");
    let buffers = world.arena.buffers.clone();
    let operator = match spec.stack.decoder(world, &buffers) {
        Ok(operator) => operator,
        Err(e) => return world.works(&mut world.scratch()).map(|()| refused(&e)),
    };
    let (memory, projected) = (view(&buffers, &spec.memory), spec.memory_views(&buffers));
    let all = spec.windows();
    let tame = spec.is_tame(&world.arena.before);
    if memory_alone {
        let writes = [spec.keys, spec.values];
        let size = Ok(Default::default());
        let record = |encoder: &mut wgpu::CommandEncoder, scratch: &mut Scratch, pass: bool| match pass {
            true => {
                let mut pass = encoder.begin_compute_pass(&Default::default());
                operator.project_memory(&mut pass, memory, &projected, scratch)
            }
            false => operator.project_memory(encoder, memory, &projected, scratch),
        };
        let outcome = recorded(world, c, size, (&all, &writes, tame), record)?;
        if matches!(outcome, Outcome::Judged) {
            for (window, values) in [(&spec.keys, false), (&spec.values, true)] {
                let bytes = &world.arena.before;
                let (naive, want) =
                    (spec.projected::<f32>(bytes, values)?, spec.projected::<f64>(bytes, values)?);
                judge("projected memory", world, window, &naive, &want, largest(&want))?;
            }
        }
        return Ok(outcome);
    }
    // The projection may be refused although the call that reads it is not.
    let projects = !c.one_in(6)
        && operator.project_memory(&mut world.encoder(), memory, &projected, &mut world.scratch()).is_ok();
    let call = spec.call(&buffers);
    let size = operator.scratch_size(&call);
    let mut writes = vec![spec.out];
    if projects {
        writes.extend([spec.keys, spec.values]);
    }
    let gpu = world.gpu.clone();
    let runs = projects && small(&all) && !all.iter().any(|w| w.buf.fails());
    let record = record!(operator, forward, &call);
    let outcome = recorded(world, c, size, (&all, &writes, tame && projects), |encoder, scratch, pass| {
        record(encoder, scratch, pass)?;
        // The call reads the projected memory, so it is written first.
        if runs {
            let mut scratch = Scratch::new(gpu.device(), Default::default())?;
            gpu.submit(|e| operator.project_memory(e, memory, &projected, &mut scratch))?;
        }
        Ok(())
    })?;
    if matches!(outcome, Outcome::Judged) {
        spec.judge(world)?;
    }
    Ok(outcome)
}

/// Draws a cache for the rows of a call, or one that almost fits.
fn cache_config(f: &mut Choices, c: &mut Choices, spec: &DecoderSpec) -> (CacheConfig, CacheStorage) {
    let LayerOptions { kv_heads, head_dim, value_dim, dtype, .. } = spec.stack.attention;
    let storage = match dtype {
        DType::F16 => CacheStorage::F16,
        DType::BF16 => f.pick(&[CacheStorage::BF16, CacheStorage::F32]),
        _ => CacheStorage::F32,
    };
    let [batch, _, length, _] = spec.x.shape;
    let [mut batch, mut layers, mut kv_heads, mut head_dim, mut capacity] =
        [batch, spec.stack.layers.len(), kv_heads, head_dim, length + c.below(4)];
    if c.one_in(6) {
        let of = [&mut batch, &mut layers, &mut kv_heads, &mut head_dim, &mut capacity];
        *of[c.below(5)] = c.between(1, 5);
    }
    let layout = match f.one_in(3) {
        true => CacheLayout::Paged { page: 16, pages: batch.min(8) + c.below(3) },
        false => CacheLayout::Contiguous,
    };
    let config = CacheConfig::new(kv_heads, head_dim, capacity).value_dim(value_dim).batch(batch);
    (config.layers(layers).storage(storage).layout(layout), storage)
}

/// Rows in steps of any lengths, with a cache of their keys and values.
pub fn decoder_steps(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let mut spec = DecoderSpec::new(f, c, true);
    let (config, storage) = cache_config(f, c, &spec);
    let [batch, _, length, _] = spec.x.shape;
    let mut steps = Vec::new();
    while steps.iter().sum::<usize>() < length {
        let left = length - steps.iter().sum::<usize>();
        steps.push(c.between(1, left.min(4)));
    }
    let planned = format!("{:?}", spec.masks);
    for _ in 0..faults(c) {
        spec.spoil(c);
    }
    // In steps, another mask has another meaning.
    let as_planned = planned == format!("{:?}", spec.masks);
    let misled = c.one_in(8);
    *said = format!("{spec:?}, {config:?}, {steps:?}, misled {misled}");
    // A spoiled window may have fewer rows than the steps use.
    let rows = [&spec.x, &spec.out].map(|w| w.shape[2]);
    if rows.iter().any(|n| *n < length) || spec.x.count() > 4000 || batch > 4 {
        return Ok(Outcome::Accepted);
    }
    let buffers = world.arena.buffers.clone();
    let operator = match spec.stack.decoder(world, &buffers) {
        Ok(operator) => operator,
        Err(e) => return world.works(&mut world.scratch()).map(|()| refused(&e)),
    };
    let foreign = c.one_in(16);
    let pipelines = if foreign { world.foreign.pipelines() } else { world.gpu.pipelines() };
    let mut cache = match Cache::with_pipelines(pipelines, config) {
        Ok(cache) => cache,
        Err(e) => return world.works(&mut world.scratch()).map(|()| refused(&e)),
    };
    let (memory, projected) = (view(&buffers, &spec.memory), spec.memory_views(&buffers));
    let all = spec.windows();
    let runs = small(&all) && !all.iter().any(|w| w.buf.fails());
    let projects = runs
        && operator.project_memory(&mut world.encoder(), memory, &projected, &mut world.scratch()).is_ok();
    let [x, out] = [&spec.x, &spec.out].map(|w| view(&buffers, w));
    let call = |first: usize, rows: usize| {
        let [x, out] = [x, out].map(|t| t.slice(2, first, rows));
        DecoderForward::new(x, projected, out)
            .mask(spec.masks[0].device(&buffers))
            .memory_mask(spec.masks[1].device(&buffers))
    };
    let longest = steps.iter().copied().max().unwrap_or(1);
    let size = operator.scratch_size(&call(0, longest).cache(&cache));
    let (memory_of, mut scratch) = scratch_for(world, Memory::new(c), &size)?;
    let mut encoder = world.encoder();
    let (mut first, mut result) = (0, Ok(()));
    for (n, rows) in steps.iter().enumerate() {
        // The cache was not advanced, or by another number of rows.
        let told = if misled { rows + n % 2 + 1 } else { *rows };
        if !(misled && c.one_in(2)) {
            let mut own = world.encoder();
            let target = if foreign {
                &mut world.foreign.device().create_command_encoder(&Default::default())
            } else if runs {
                &mut encoder
            } else {
                &mut own
            };
            result = cache.advance(target, Tokens::All(told));
        }
        let call = call(first, *rows).cache(&cache);
        result = result.and_then(|()| match c.one_in(3) {
            true => {
                let mut pass = encoder.begin_compute_pass(&Default::default());
                operator.forward(&mut pass, &call, &mut scratch)
            }
            false => operator.forward(&mut encoder, &call, &mut scratch),
        });
        if result.is_err() {
            break;
        }
        first += rows;
    }
    if result.is_ok() && (misled || foreign) {
        return Err("a cache that does not know the rows is accepted".into());
    }
    if result.is_ok() && memory_of == Memory::Foreign {
        world.abandon(encoder)?;
        return Ok(Outcome::Accepted);
    }
    if let (Err(e), true) = (&result, first > 0) {
        // The encoder holds earlier steps.
        let outcome = refused(e);
        drop(encoder);
        return world.works(&mut world.scratch()).map(|()| outcome);
    }
    if result.is_err() && memory_of == Memory::Foreign {
        scratch = world.scratch();
    }
    let mut writes = vec![spec.out];
    if result.is_ok() && projects {
        let mut scratch = world.scratch();
        let projected = world.gpu.submit(|e| operator.project_memory(e, memory, &projected, &mut scratch));
        projected.map_err(|e| format!("the memory is refused the second time: {e}"))?;
        writes.extend([spec.keys, spec.values]);
    }
    // Rows after the last step are not written.
    let whole = rows.iter().all(|n| *n == length);
    let tame = projects
        && whole
        && storage == CacheStorage::F32
        && as_planned
        && spec.masks[0].causal
        && spec.is_tame(&world.arena.before);
    let outcome = settle(world, result, encoder, &mut scratch, &all, &writes, [runs, tame])?;
    if matches!(outcome, Outcome::Judged) {
        spec.judge(world)?;
    }
    Ok(outcome)
}
