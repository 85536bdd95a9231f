//! A workload with its tensors: how it is recorded, and whether a result is right.

use super::workload::{Kind, Workload};
use crate::attention::{Attention, Config, Forward, check_dtype};
use crate::cache::{Append, Cache, CacheConfig, CacheRead, CacheStorage, Tokens};
use crate::check::data::{Outcome, from_bits, halves_of, inputs, judge, noise, to_bits};
use crate::device::DeviceFacts;
use crate::error::Error;
use crate::gpu::Gpu;
use crate::mask::DeviceMask;
use crate::pipelines::Pipelines;
use crate::plan::{Tuning, candidates, product_candidates, with_other_splits};
use crate::problem::Shape;
use crate::projection::{Linear, Projection, ProjectionForward};
use crate::reference::{self, Options, widen};
use crate::scratch::Scratch;
use crate::tensor::{DType, TensorView, check_sizes, count};
use crate::tuned::{Class, Pick};

/// A workload's inputs and its output, on the device.
pub(super) struct Trial<'a> {
    gpu: &'a Gpu,
    workload: Workload,
    inputs: Inputs,
    out: wgpu::Buffer,
    wanted: Vec<Piece>,
}

enum Inputs {
    Attention {
        buffers: [wgpu::Buffer; 3],
        /// Boxed: much larger than the others.
        cache: Option<Box<Cache>>,
    },
    Products {
        x: wgpu::Buffer,
        weight: wgpu::Buffer,
    },
}

/// A piece of the output, from element `start` on: the truth, and what plain loops in f32 make of it.
struct Piece {
    start: usize,
    want: Vec<f64>,
    naive: Vec<f32>,
}

/// A workload as plans see it.
pub(super) enum Planned {
    Attention(Box<crate::plan::Outline>),
    Products(crate::plan::ProductOutline),
}

impl Planned {
    pub fn class(&self) -> Option<Class> {
        match self {
            Planned::Attention(outline) => outline.class(),
            Planned::Products(outline) => outline.class(),
        }
    }

    /// What to try first.
    pub fn candidates(&self, device: &DeviceFacts) -> Result<Vec<Pick>, Error> {
        match self {
            Planned::Attention(outline) => candidates(outline, device),
            Planned::Products(outline) => product_candidates(outline, device),
        }
    }

    /// What to try beside the best of those; that itself first.
    pub fn refined(&self, winner: Pick, device: &DeviceFacts) -> Result<Vec<Pick>, Error> {
        match self {
            Planned::Attention(outline) => with_other_splits(outline, winner, device),
            Planned::Products(_) => Ok(vec![winner]),
        }
    }
}

/// Numbers as `dtype` holds them, and the buffer that does.
fn upload(gpu: &Gpu, x: Vec<f32>, dtype: DType) -> Result<(Vec<f32>, wgpu::Buffer), Error> {
    if dtype.bytes() == 2 {
        let halves = to_bits(&x, dtype);
        return Ok((from_bits(&halves, dtype), gpu.upload(&halves)?));
    }
    let buffer = gpu.upload(&x)?;
    Ok((x, buffer))
}

impl<'a> Trial<'a> {
    /// # Errors
    /// Sizes that no call may have, [`Error::OutOfMemory`].
    pub async fn new(gpu: &'a Gpu, workload: Workload) -> Result<Self, Error> {
        let dtype = workload.dtype;
        check_dtype(dtype, &gpu.pipelines().facts())?;
        let (inputs, wanted, elements) = match workload.kind {
            Kind::Attention { shape, cache, masked } => {
                shape.check()?;
                let [q, k, v] = inputs(&shape);
                let (q, q_buffer) = upload(gpu, q, dtype)?;
                let (mut k, k_buffer) = upload(gpu, k, dtype)?;
                let (mut v, v_buffer) = upload(gpu, v, dtype)?;
                let buffers = [q_buffer, k_buffer, v_buffer];
                let cache = match cache {
                    Some(storage) => {
                        let (cache, kept) = filled(gpu, &shape, storage, dtype, &buffers).await?;
                        [k, v] = kept;
                        Some(Box::new(cache))
                    }
                    None => None,
                };
                let wanted = rows_of_attention(&shape, masked, [&q, &k, &v])?;
                (Inputs::Attention { buffers, cache }, wanted, count(shape.out()))
            }
            Kind::Products { count, rows, features, dim } => {
                check_sizes("x", &[("rows", rows), ("features", features), ("dim", dim)])?;
                let (x, x_buffer) = upload(gpu, noise(rows * features, 4), dtype)?;
                let (w, weight) = upload(gpu, noise(count * dim * features, 5), dtype)?;
                let wanted = rows_of_products([count, rows, features, dim], &x, &w)?;
                (Inputs::Products { x: x_buffer, weight }, wanted, count * rows * dim)
            }
        };
        let out = gpu.buffer(elements * dtype.bytes())?;
        Ok(Trial { gpu, workload, inputs, out, wanted })
    }

    fn tuning(&self) -> Tuning {
        Tuning::new().f16_operands(self.workload.f16_operands)
    }

    /// As plans see it, whatever was measured.
    pub fn planned(&self, pipelines: &Pipelines) -> Result<Planned, Error> {
        match &self.inputs {
            Inputs::Attention { .. } => {
                let attention = self.attention(pipelines)?;
                self.forward(|call| attention.outline(call))
                    .map(|outline| Planned::Attention(Box::new(outline)))
            }
            Inputs::Products { .. } => {
                let projection = Projection::with_pipelines(pipelines).tuning(self.tuning());
                Ok(Planned::Products(projection.outline(&self.products())))
            }
        }
    }

    fn attention(&self, pipelines: &Pipelines) -> Result<Attention, Error> {
        let Kind::Attention { shape, .. } = self.workload.kind else {
            return Err(Error::Unsupported { what: "this workload", why: "it is none of attention" });
        };
        let config =
            Config::new(shape.heads, shape.head_dim).kv_heads(shape.kv_heads).value_dim(shape.value_dim);
        Attention::with_pipelines(pipelines, config.dtype(self.workload.dtype).tuning(self.tuning()))
    }

    /// Does something with the call of attention.
    fn forward<T>(&self, with: impl FnOnce(&Forward) -> Result<T, Error>) -> Result<T, Error> {
        let (Kind::Attention { shape, masked, .. }, Inputs::Attention { buffers, cache }) =
            (self.workload.kind, &self.inputs)
        else {
            return Err(Error::Unsupported { what: "this workload", why: "it is none of attention" });
        };
        let view = |buffer, shape| TensorView::new(buffer, self.workload.dtype, shape);
        let [q, k, v] = buffers;
        let (q, out) = (view(q, shape.q()), view(&self.out, shape.out()));
        let call = match cache {
            Some(cache) => Forward::with_cache(q, cache, out).at_end(),
            None => Forward::new(q, view(k, shape.k()), view(v, shape.v()), out),
        };
        with(&if masked { call.mask(DeviceMask::causal()) } else { call })
    }

    fn products(&self) -> Vec<ProjectionForward<'_>> {
        let (Kind::Products { count, rows, features, dim }, Inputs::Products { x, weight }) =
            (self.workload.kind, &self.inputs)
        else {
            return Vec::new();
        };
        let dtype = self.workload.dtype;
        let product = |n| {
            let weights = TensorView::matrix(weight, dtype, [count * dim, features]);
            let linear = Linear { weight: weights.slice(2, n * dim, dim), bias: None };
            let out = TensorView::sequence(&self.out, dtype, [1, rows, dim]).with_offset(n * rows * dim);
            ProjectionForward::new(TensorView::sequence(x, dtype, [1, rows, features]), linear, out)
        };
        (0..count).map(product).collect()
    }

    /// What records it with the plans of `pipelines`, compiled. Temporary memory beyond `bytes` is refused.
    ///
    /// # Errors
    /// A plan that the device refuses.
    pub fn runner(&self, pipelines: &Pipelines, bytes: u64) -> Result<Runner<'_>, Error> {
        if let Inputs::Products { .. } = self.inputs {
            let projection = Projection::with_pipelines(pipelines).tuning(self.tuning());
            return Ok(Runner { trial: self, operator: Operator::Projection(projection) });
        }
        let attention = self.attention(pipelines)?;
        let size = self.forward(|call| attention.scratch_size(call))?;
        if size.total() > bytes {
            return Err(Error::OutOfMemory {
                what: "scratch",
                description: "more than tuning may take".into(),
            });
        }
        let mut scratch = Scratch::new(self.gpu.device(), size)?;
        self.forward(|call| attention.prepare(call, &mut scratch))?;
        Ok(Runner { trial: self, operator: Operator::Attention(Box::new((attention, scratch))) })
    }

    /// Empties the output, so that no result is taken for another's.
    pub fn forget_output(&self) -> Result<(), Error> {
        self.gpu.submit(|encoder| {
            encoder.clear_buffer(&self.out, 0, None);
            Ok(())
        })
    }

    /// Compares some rows of the output with the reference.
    pub async fn judge(&self) -> Result<Outcome, Error> {
        let Workload { dtype, f16_operands, .. } = self.workload;
        // Operands that are rounded are so first of all.
        let rounded = if f16_operands && dtype == DType::F32 { DType::F16 } else { dtype };
        let mut worst = 0.0f64;
        for Piece { start, want, naive } in &self.wanted {
            let got = self.piece(*start, want.len()).await?;
            match judge(&got, want, naive, rounded) {
                Ok(share) => worst = worst.max(share),
                Err(wrong) => return Ok(Err(wrong)),
            }
        }
        Ok(Ok(worst))
    }

    /// `n` elements of the output from `start` on.
    async fn piece(&self, start: usize, n: usize) -> Result<Vec<f32>, Error> {
        let bytes = self.workload.dtype.bytes();
        // Copies begin and end at words.
        let from = start * bytes / 4 * 4;
        let size = ((start + n) * bytes).next_multiple_of(4) - from;
        let copy = self.gpu.buffer(size)?;
        self.gpu.submit(|encoder| {
            encoder.copy_buffer_to_buffer(&self.out, from as u64, &copy, 0, size as u64);
            Ok(())
        })?;
        let skipped = start - from / bytes;
        if bytes == 2 {
            return Ok(halves_of(self.gpu, self.workload.dtype, &copy, skipped + n)
                .await?
                .split_off(skipped));
        }
        self.gpu.download_async(&copy, n).await
    }
}

/// The first and the last of so many.
fn ends(n: usize) -> impl Iterator<Item = usize> + Clone {
    [0, n - 1].into_iter().take(n)
}

/// The first and the last query of the first and the last head.
fn rows_of_attention(shape: &Shape, masked: bool, [q, k, v]: [&[f32]; 3]) -> Result<Vec<Piece>, Error> {
    let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = *shape;
    let rows = |x: &[f32], first: usize, dim: usize, n: usize| x[first * dim..][..n * dim].to_vec();
    let mut found = Vec::new();
    for (head, i) in ends(batch * heads).flat_map(|head| ends(q_len).map(move |i| (head, i))) {
        // The last query stands at the last key.
        let seen = kv_len.saturating_sub(if masked { q_len - 1 - i } else { 0 });
        let start = (head * q_len + i) * value_dim;
        if seen == 0 {
            found.push(Piece { start, want: vec![0.0; value_dim], naive: vec![0.0; value_dim] });
            continue;
        }
        let kv_head = head / heads * kv_heads + head % heads / shape.group();
        let q = rows(q, head * q_len + i, head_dim, 1);
        let k = rows(k, kv_head * kv_len, head_dim, seen);
        let v = rows(v, kv_head * kv_len, value_dim, seen);
        let one = Shape { batch: 1, heads: 1, kv_heads: 1, q_len: 1, kv_len: seen, ..*shape };
        let options = Options::new();
        let want = reference::attention::<f64>(&widen(&q), &widen(&k), &widen(&v), one, &options)?.out;
        found.push(Piece { start, want, naive: reference::attention::<f32>(&q, &k, &v, one, &options)?.out });
    }
    Ok(found)
}

/// Most columns at either end of a row that are compared: the reference of a whole large weight takes seconds.
const COLUMNS: usize = 64;

/// Of the first and the last row of the first and the last product, the first and the last columns.
fn rows_of_products(
    [count, rows, features, dim]: [usize; 4],
    x: &[f32],
    w: &[f32],
) -> Result<Vec<Piece>, Error> {
    let columns = dim.min(COLUMNS);
    let firsts = ends(dim.div_ceil(columns)).map(|n| if n == 0 { 0 } else { dim - columns });
    let places = ends(count).flat_map(|part| ends(rows).map(move |row| (part, row)));
    let mut found = Vec::new();
    for ((part, row), first) in places.flat_map(|place| firsts.clone().map(move |first| (place, first))) {
        let x = &x[row * features..][..features];
        let w = &w[(part * dim + first) * features..][..columns * features];
        found.push(Piece {
            start: (part * rows + row) * dim + first,
            want: reference::project::<f64>(&widen(x), &widen(w), None, features, columns)?,
            naive: reference::project::<f32>(x, w, None, features, columns)?,
        });
    }
    Ok(found)
}

/// A cache that is full, and what it has kept of keys and values.
async fn filled(
    gpu: &Gpu,
    shape: &Shape,
    storage: CacheStorage,
    dtype: DType,
    [_, k, v]: &[wgpu::Buffer; 3],
) -> Result<(Cache, [Vec<f32>; 2]), Error> {
    let config = CacheConfig::new(shape.kv_heads, shape.head_dim, shape.kv_len);
    let config = config.value_dim(shape.value_dim).batch(shape.batch).storage(storage);
    let mut cache = Cache::with_pipelines(gpu.pipelines(), config)?;
    let [kept_k, kept_v] = [shape.k(), shape.v()].map(|shape| gpu.buffer(4 * count(shape)));
    let (kept_k, kept_v) = (kept_k?, kept_v?);
    let rows = Append::new(TensorView::new(k, dtype, shape.k()), TensorView::new(v, dtype, shape.v()));
    let kept = CacheRead::new(
        TensorView::new(&kept_k, DType::F32, shape.k()),
        TensorView::new(&kept_v, DType::F32, shape.v()),
    );
    gpu.submit(|encoder| {
        cache.advance(encoder, Tokens::All(shape.kv_len))?;
        cache.append(encoder, 0, &rows)?;
        cache.read(encoder, 0, &kept)
    })?;
    let k = gpu.download_async(&kept_k, count(shape.k())).await?;
    let v = gpu.download_async(&kept_v, count(shape.v())).await?;
    Ok((cache, [k, v]))
}

enum Operator {
    Attention(Box<(Attention, Scratch)>),
    Projection(Projection),
}

/// A workload as one plan computes it.
pub(super) struct Runner<'a> {
    trial: &'a Trial<'a>,
    operator: Operator,
}

impl Runner<'_> {
    /// Records the workload so often.
    pub fn record(&mut self, pass: &mut wgpu::ComputePass, times: usize) -> Result<(), Error> {
        let Runner { trial, operator } = self;
        match operator {
            Operator::Attention(operator) => {
                let (attention, scratch) = &mut **operator;
                trial.forward(|call| {
                    (0..times).try_for_each(|_| attention.forward_in_pass(pass, call, scratch))
                })
            }
            Operator::Projection(projection) => {
                let products = trial.products();
                (0..times).try_for_each(|_| projection.forward_in_pass(pass, &products))
            }
        }
    }
}
