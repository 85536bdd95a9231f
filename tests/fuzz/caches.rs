//! Caches: any operations in any order.

use wgpu_attention::cache::{Append, CacheLayout, CacheRead, CacheStorage, Keep, ScaleGroup, Tokens};
use wgpu_attention::position::{Rope, RopeConfig, RowPositions};
use wgpu_attention::tuning::Target;
use wgpu_attention::{Attention, Cache, CacheConfig, Config, DType, Error, Forward, KernelOptions, Shape};

use crate::arena::{Buf, Window, view};
use crate::call::float;
use crate::choices::Choices;
use crate::masks::MaskSpec;
use crate::positions::width;
use crate::world::{Outcome, World, refused};

/// The size in bytes from which on a case does not make a cache, even a valid one.
const MOST_BYTES: usize = 1 << 24;

#[derive(Clone, Copy, Debug)]
struct Kind {
    batch: usize,
    kv_heads: usize,
    head_dim: usize,
    value_dim: usize,
    capacity: usize,
    layers: usize,
    storage: CacheStorage,
    value_storage: CacheStorage,
    layout: CacheLayout,
    hadamard: Option<usize>,
    compacts: bool,
}

impl Kind {
    fn new(f: &mut Choices, c: &mut Choices) -> Self {
        let group = if f.one_in(2) { ScaleGroup::Row } else { ScaleGroup::Of(32) };
        let rotated = f.one_in(5);
        let storages = [
            CacheStorage::F32,
            CacheStorage::F16,
            CacheStorage::BF16,
            CacheStorage::Q8(group),
            CacheStorage::Q4(group),
            CacheStorage::Q8_0,
            CacheStorage::Q4_0,
            CacheStorage::E4M3(group),
            CacheStorage::E5M2(group),
            CacheStorage::Gaussian4(group),
        ];
        let storage = f.pick(&storages);
        let layout = f.below(3);
        Kind {
            batch: c.between(1, 3),
            kv_heads: c.between(1, 2),
            head_dim: if rotated { 64 } else { f.pick(&[4, 8, 5]) },
            value_dim: if rotated { 32 } else { f.pick(&[4, 8]) },
            capacity: c.pick(&[1, 5, 16, 20, 40, 64]),
            layers: c.between(1, 2),
            storage,
            value_storage: if f.one_in(4) { f.pick(&storages) } else { storage },
            hadamard: rotated.then_some(32),
            compacts: f.one_in(3) && layout != 1,
            layout: match layout {
                0 => CacheLayout::Contiguous,
                1 => CacheLayout::Ring { sink_tokens: 0 },
                _ => CacheLayout::Paged { page: c.pick(&[16, 32]), pages: c.between(1, 8) },
            },
        }
    }

    fn spoil(&mut self, c: &mut Choices) {
        match c.below(10) {
            0 => self.batch = c.size(),
            1 => self.kv_heads = c.size(),
            2 => self.head_dim = c.size(),
            3 => self.value_dim = c.size(),
            4 => self.capacity = c.size(),
            5 => self.layers = c.size(),
            7 => self.compacts = !self.compacts,
            9 => self.hadamard = Some(c.size()),
            6 => self.storage = CacheStorage::Q8(ScaleGroup::Of(c.size())),
            _ => match &mut self.layout {
                CacheLayout::Contiguous => self.capacity = c.size(),
                CacheLayout::Ring { sink_tokens: sinks } => *sinks = c.size(),
                CacheLayout::Paged { page, pages } => *[page, pages][c.below(2)] = c.size(),
                layout => unreachable!("{layout:?} is new"),
            },
        }
    }

    fn config(&self) -> CacheConfig {
        CacheConfig::new(self.kv_heads, self.head_dim, self.capacity)
            .batch(self.batch)
            .value_dim(self.value_dim)
            .layers(self.layers)
            .storage(self.storage)
            .value_storage(self.value_storage)
            .layout(self.layout)
            .hadamard(self.hadamard)
            .compacts(self.compacts)
    }

    /// Returns the bytes of a layer.
    fn bytes(&self) -> usize {
        let tokens = match self.layout {
            CacheLayout::Paged { page, pages } => page.saturating_mul(pages),
            _ => self.batch.saturating_mul(self.capacity),
        };
        self.config().token_bytes().saturating_mul(tokens)
    }

    /// True if the cache is too large to make in a case, if it can be made at all.
    fn is_large(&self) -> bool {
        let table = self.batch.saturating_mul(self.capacity);
        self.bytes().saturating_mul(self.layers).max(table) > MOST_BYTES || self.layers > 100
    }

    /// True if no device accepts it.
    fn is_hopeless(&self) -> bool {
        let Kind { batch, kv_heads, head_dim, value_dim, capacity, layers, .. } = *self;
        let sizes = [batch, kv_heads, head_dim, value_dim, capacity, layers];
        sizes.iter().any(|n| *n >= 1 << 29) || layers <= 100 && self.bytes() > 1 << 34
    }
}

/// Returns the host's state of a cache.
fn state(cache: &Cache, batch: usize) -> (Vec<Option<[usize; 2]>>, usize) {
    ((0..batch.min(64)).map(|s| cache.len_bounds(s)).collect(), cache.free_pages())
}

pub fn cache(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let mut kind = Kind::new(f, c);
    if let CacheLayout::Ring { sink_tokens: sinks } = &mut kind.layout {
        *sinks = c.below(kind.capacity.min(4));
    }
    for _ in 0..c.pick(&[0, 0, 0, 0, 0, 1, 2]) {
        kind.spoil(c);
    }
    *said = format!("{kind:?}");
    if kind.is_large() && !kind.is_hopeless() {
        return Ok(Outcome::Accepted);
    }
    let mut cache = match Cache::with_pipelines(world.gpu.pipelines(), kind.config()) {
        Ok(cache) => cache,
        Err(e) => return world.works(&mut world.scratch()).map(|()| refused(&e)),
    };
    let form = f.pick(&[Target::Software, Target::Gpu]);
    let group = f.between(1, 2);
    let dtype = float(f);
    let of_rows = float(f);
    let most = f.pick(&[1, 2, 4, 7]);
    let (with_lse, rotates) = (f.one_in(2), f.one_in(2));
    let config = Config::new(kind.kv_heads * group, kind.head_dim)
        .kv_heads(kind.kv_heads)
        .value_dim(kind.value_dim)
        .dtype(dtype)
        .kernel_options(KernelOptions::new().target(form));
    let attention = Attention::with_pipelines(world.gpu.pipelines(), config).map_err(|e| e.to_string())?;
    let rope =
        Rope::new(world.device(), RopeConfig::new(if c.one_in(9) { width(c).clamp(2, 20) & !1 } else { 2 }))
            .map_err(|e| e.to_string())?;
    let foreign = Cache::with_pipelines(world.foreign.pipelines(), CacheConfig::new(1, 4, 8))
        .map_err(|e| e.to_string())?;
    let buffers = world.arena.buffers.clone();
    // The family decides the mask's kernels. The mask's tensors fit the first call.
    let heads = kind.kv_heads * group;
    let longest = if matches!(kind.layout, CacheLayout::Ring { .. }) { 1 } else { kind.capacity };
    let shape = Shape {
        batch: kind.batch,
        heads,
        kv_heads: kind.kv_heads,
        q_len: most,
        kv_len: longest,
        head_dim: kind.head_dim,
        value_dim: kind.value_dim,
    };
    let mask = MaskSpec::new(f, c, &shape);
    let mut scratch = world.scratch();
    let mut encoders = vec![world.encoder()];
    let mut writes: Vec<Window> = Vec::new();
    let (mut refusals, mut accepted, mut fails) = (0, 0, false);
    let mut last = None;
    let operations = c.between(2, 9);
    let mut advanced = 0;
    for _ in 0..operations {
        let before = state(&cache, kind.batch);
        let sequence = if c.one_in(12) { c.size() } else { c.below(kind.batch) };
        let amount = if c.one_in(8) { c.size() } else { c.below(most + 1) };
        let encoder = encoders.last_mut().ok_or("no encoder")?;
        let operation = c.below(24);
        use std::fmt::Write;
        let _ = write!(said, "; {operation} {sequence} {amount}");
        let result: Result<(), Error> = match operation {
            0..=6 => {
                let each: Vec<usize> = (0..kind.batch.min(100)).map(|_| c.below(most + 1)).collect();
                let mut counts = Window::new(c, Buf::Numbers, DType::U32, [kind.batch, 1, 1, 1], false);
                if c.one_in(10) {
                    counts.spoil(c);
                    fails |= counts.buf.fails();
                }
                let rows = match c.below(5) {
                    0 => Tokens::Each(&each),
                    1 => Tokens::Device { counts: view(&buffers, &counts), most: amount },
                    _ => Tokens::All(amount.max(usize::from(!c.one_in(4)))),
                };
                let _ = match rows {
                    Tokens::Device { most, .. } => write!(said, " at most {most} of {counts:?}"),
                    _ => write!(said, " {rows:?}"),
                };
                let back = operation == 6;
                let done = if back { cache.rewind(encoder, rows) } else { cache.advance(encoder, rows) };
                if done.is_ok() {
                    advanced = match rows {
                        _ if back => 0,
                        Tokens::All(n) | Tokens::Device { most: n, .. } => n,
                        Tokens::Each(each) => each.iter().copied().max().unwrap_or(0),
                        _ => unreachable!("{rows:?} is new"),
                    };
                }
                done
            }
            7..11 => {
                let rows = if c.one_in(10) { amount } else { advanced };
                let mut pair = [kind.head_dim, kind.value_dim].map(|dim| {
                    Window::input(c, of_rows, [kind.batch, kind.kv_heads, rows.min(1 << 20), dim], false)
                });
                if c.one_in(8) {
                    pair[c.below(2)].spoil(c);
                    fails |= pair.iter().any(|w| w.buf.fails());
                }
                let [k, v] = pair.each_ref().map(|w| view(&buffers, w));
                let append = Append::new(k, v).rope(rotates.then_some(&rope));
                let layer = if c.one_in(12) { c.size() } else { c.below(kind.layers) };
                if c.one_in(3) {
                    let mut pass = encoder.begin_compute_pass(&Default::default());
                    cache.append(&mut pass, layer, &append)
                } else {
                    cache.append(encoder, layer, &append)
                }
            }
            11..15 => {
                let rows = if c.one_in(3) || advanced == 0 { most } else { advanced };
                let of = [kind.batch, heads, rows.min(1 << 20)];
                let mut q = Window::input(c, dtype, [of[0], of[1], of[2], kind.head_dim], false);
                let mut out = Window::new(c, Buf::OutA, dtype, [of[0], of[1], of[2], kind.value_dim], false);
                let lse = Window::new(c, Buf::OutB, DType::F32, [of[0], of[1], of[2], 1], false);
                let mut mask = mask.clone();
                if c.one_in(6) {
                    q.spoil(c);
                }
                if c.one_in(6) {
                    out.spoil(c);
                }
                if c.one_in(6) {
                    mask.spoil(c);
                }
                let of_cache = if c.one_in(30) { &foreign } else { &cache };
                let mut call = Forward::with_cache(view(&buffers, &q), of_cache, view(&buffers, &out))
                    .mask(mask.device(&buffers))
                    .lse(with_lse.then(|| view(&buffers, &lse)));
                let at_end = rows != advanced || c.one_in(5);
                if at_end {
                    call = call.at_end();
                }
                let layer = if c.one_in(12) { c.size() } else { c.below(kind.layers) };
                let call = call.layer(layer);
                let size = attention.scratch_size(&call);
                let mut own;
                let memory = match &size {
                    Ok(size) if size.total() > 0 => {
                        own =
                            wgpu_attention::Scratch::new(world.device(), *size).map_err(|e| e.to_string())?;
                        &mut own
                    }
                    _ => &mut scratch,
                };
                let done = match c.below(4) {
                    0 => attention.prepare(&call, memory).map(drop),
                    1 => {
                        attention.forward(&mut encoder.begin_compute_pass(&Default::default()), &call, memory)
                    }
                    _ => attention.forward(encoder, &call, memory),
                };
                let _ = write!(said, " {q:?} to {out:?}, {mask:?}");
                if done.is_ok() {
                    let tensors = mask.windows().map(|w| *w).chain([q, out]);
                    fails |= tensors.into_iter().any(|w| w.buf.fails());
                    writes.extend([Some(out), with_lse.then_some(lse)].into_iter().flatten());
                } else if size.is_ok()
                    && !matches!(
                        done,
                        Err(Error::Unsupported { .. }
                            | Error::Refused { .. }
                            | Error::Limit { .. }
                            | Error::OtherDevice { .. })
                    )
                {
                    return Err(format!("scratch_size says {size:?}, the call {done:?}"));
                }
                done
            }
            15 => cache.truncate(sequence, amount),
            16 => cache.clear(sequence),
            17 => cache.fork(sequence, c.below(kind.batch)),
            18 => cache.reserve(sequence, amount),
            20..24 => {
                let is_read = operation < 22;
                let rows = amount.clamp(usize::from(!c.one_in(12)), 1 << 20);
                let mut pair = [kind.head_dim, kind.value_dim].map(|dim| {
                    let shape = [kind.batch, kind.kv_heads, rows, dim];
                    match is_read {
                        true => Window::new(c, Buf::OutA, of_rows, shape, false),
                        false => Window::input(c, of_rows, shape, false),
                    }
                });
                if is_read {
                    pair[1].buf = Buf::OutB;
                }
                let mut shape = [kind.batch, 1, rows, 1];
                [0, 2].iter().filter(|_| c.one_in(2)).for_each(|axis| shape[*axis] = 1);
                let mut tensor = Window::input(c, DType::U32, shape, false);
                if c.one_in(8) {
                    pair[c.below(2)].spoil(c);
                }
                if c.one_in(12) {
                    tensor.spoil(c);
                }
                let start = if c.one_in(8) { c.size() as u32 } else { c.below(most) as u32 };
                // The family decides the kernels.
                let at = match with_lse {
                    true => RowPositions::Tensor(view(&buffers, &tensor)),
                    false => RowPositions::Start(start),
                };
                let _ = write!(said, " {pair:?} at {start} or {tensor:?}");
                let [k, v] = pair.each_ref().map(|w| view(&buffers, w));
                let layer = if c.one_in(12) { c.size() } else { c.below(kind.layers) };
                let done = if !is_read {
                    let append = Append::new(k, v).rope(rotates.then_some(&rope));
                    cache.overwrite(encoder, layer, &append, at)
                } else {
                    let read = CacheRead::new(k, v).at(at);
                    match c.below(3) {
                        0 => cache.read(&mut encoder.begin_compute_pass(&Default::default()), layer, &read),
                        _ => cache.read(encoder, layer, &read),
                    }
                };
                if done.is_ok() {
                    fails |= pair.iter().any(|w| w.buf.fails()) || with_lse && tensor.buf.fails();
                    writes.extend(pair.into_iter().filter(|_| is_read));
                }
                done
            }
            19 if kind.compacts && c.one_in(2) => {
                let batch = kind.batch.min(100);
                let stored = |s: usize| cache.stored(s).unwrap_or(amount).min(1 << 10);
                let mut lists = Vec::new();
                for s in 0..batch {
                    let mut list: Vec<_> = (0..stored(s)).filter(|_| !c.one_in(3)).collect();
                    list.extend(c.one_in(12).then(|| c.size()));
                    lists.push(list);
                }
                let lists: Vec<&[usize]> = lists.iter().map(|list| &list[..]).collect();
                let n = amount.min(1 << 16);
                let heads = if c.one_in(2) { 1 } else { kind.kv_heads };
                let shape = [kind.batch, heads, 1, n];
                let mut keep: Vec<Window> =
                    (0..kind.layers.min(9)).map(|_| Window::input(c, DType::U32, shape, false)).collect();
                if c.one_in(8) {
                    keep[0].spoil(c);
                }
                let views: Vec<_> = keep.iter().map(|w| view(&buffers, w)).collect();
                let on_host = c.one_in(2);
                let _ = write!(said, " {lists:?} or {keep:?}, on the host: {on_host}");
                let done = match on_host {
                    true => cache.compact(encoder, Keep::Each(&lists)),
                    false => cache.compact(encoder, Keep::Device(&views)),
                };
                if done.is_ok() {
                    advanced = 0;
                    fails |= !on_host && keep.iter().any(|w| w.buf.fails());
                }
                done
            }
            _ => match c.below(5) {
                4 => {
                    let count = if c.one_in(8) { c.below(kind.batch + 2) } else { kind.batch };
                    let mut parents: Vec<_> = (0..count.min(1 << 16)).map(|_| c.below(kind.batch)).collect();
                    if c.one_in(8)
                        && let Some(parent) = parents.first_mut()
                    {
                        *parent = c.size();
                    }
                    let done = cache.reorder(encoder, &parents);
                    if done.is_ok() {
                        advanced = 0;
                    }
                    done
                }
                0 => cache.set_known_len(sequence, amount),
                1 => {
                    // The recording is lost.
                    *encoder = world.encoder();
                    Ok(())
                }
                2 => {
                    encoders.push(world.encoder());
                    Ok(())
                }
                _ => cache.flush(encoder),
            },
        };
        if let Err(e) = &result {
            if state(&cache, kind.batch) != before {
                return Err(format!(
                    "refused ({e}), and the cache has changed from {before:?} to {:?}",
                    state(&cache, kind.batch)
                ));
            }
            refusals += 1;
            last = Some(refused(e));
        } else {
            accepted += 1;
        }
    }
    if encoders.len() > 1 && c.one_in(3) {
        encoders.reverse();
    }
    let encoder = encoders.pop().ok_or("no encoder")?;
    if fails {
        encoders.into_iter().try_for_each(|encoder| world.abandon(encoder))?;
        world.abandon(encoder)?;
        return Ok(Outcome::Accepted);
    }
    for encoder in encoders.into_iter().rev() {
        world.gpu.queue().submit([encoder.finish()]);
    }
    world.finish(encoder, &writes, false)?;
    world.works(&mut scratch)?;
    match last {
        Some(last) if refusals > accepted => Ok(last),
        _ => Ok(Outcome::Ran),
    }
}
