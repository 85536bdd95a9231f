//! A workload with its tensors: records it, and checks its result.

use super::Workload;
use super::workload::Kind;
use crate::attention::plan::{Outline, candidates, product_candidates, with_other_splits};
use crate::attention::{Attention, Config, Forward, check_dtype};
use crate::cache::{Append, Cache, CacheConfig, CacheRead, Tokens};
use crate::check::data::{Outcome, from_bits, halves_of, inputs, judge, noise, to_bits};
use crate::device::DeviceFacts;
use crate::device::tuned::{Class, Pick};
use crate::gpu::Gpu;
use crate::kernel::guard::guarded;
use crate::kernel::{KernelOptions, Pipelines, Scratch, ScratchSize};
use crate::mask::DeviceMask;
use crate::matmul::plan::ProductOutline;
use crate::matmul::{Linear, Projection, ProjectionForward};
use crate::reference::{self, Options};
use crate::tensor::{DType, Error, Shape, TensorView, check_sizes, count, widen};

/// A workload with its tensors on the device.
pub(super) struct Trial<'a> {
    gpu: &'a Gpu,
    dtype: DType,
    f16_operands: bool,
    call: Call,
    out: wgpu::Buffer,
    wanted: Vec<Piece>,
}

enum Call {
    Attention {
        shape: Shape,
        masked: bool,
        buffers: [wgpu::Buffer; 3],
        /// Boxed, because it is much larger than the other variants.
        cache: Option<Box<Cache>>,
    },
    Products {
        count: usize,
        rows: usize,
        features: usize,
        dim: usize,
        buffers: [wgpu::Buffer; 2],
    },
}

/// A part of the output from element `start` on: the reference, and the result of plain loops in
/// f32.
struct Piece {
    start: usize,
    want: Vec<f64>,
    naive: Vec<f32>,
}

/// A workload as plans see it.
pub(super) enum Planned {
    Attention(Box<Outline>),
    Products(ProductOutline),
}

impl Planned {
    pub fn class(&self) -> Option<Class> {
        match self {
            Planned::Attention(outline) => outline.class(),
            Planned::Products(outline) => outline.class(),
        }
    }

    /// Returns the first picks to try.
    pub fn candidates(&self, device: &DeviceFacts) -> Result<Vec<Pick>, Error> {
        match self {
            Planned::Attention(outline) => candidates(outline, device),
            Planned::Products(outline) => product_candidates(outline, device),
        }
    }

    /// Returns variations of the winner to try next. The winner itself comes first.
    pub fn refined(&self, winner: Pick, device: &DeviceFacts) -> Result<Vec<Pick>, Error> {
        match self {
            Planned::Attention(outline) => with_other_splits(outline, winner, device),
            Planned::Products(_) => Ok(vec![winner]),
        }
    }
}

impl<'a> Trial<'a> {
    /// Creates the tensors without contents, which suffices to plan.
    ///
    /// # Errors
    /// Sizes that no call may have, and [`Error::OutOfMemory`].
    pub fn new(gpu: &'a Gpu, workload: Workload) -> Result<Self, Error> {
        let Workload { kind, dtype, f16_operands } = workload;
        check_dtype(dtype, &gpu.pipelines().facts())?;
        let buffer = |elements: usize| gpu.buffer(elements * dtype.bytes());
        let (call, elements) = match kind {
            Kind::Attention { shape, cache, masked } => {
                shape.check()?;
                let buffers =
                    [buffer(count(shape.q()))?, buffer(count(shape.k()))?, buffer(count(shape.v()))?];
                let cache = cache.map(|storage| {
                    let config = CacheConfig::new(shape.kv_heads, shape.head_dim, shape.kv_len)
                        .value_dim(shape.value_dim)
                        .batch(shape.batch)
                        .storage(storage);
                    Cache::with_pipelines(gpu.pipelines(), config).map(Box::new)
                });
                (Call::Attention { shape, masked, buffers, cache: cache.transpose()? }, count(shape.out()))
            }
            Kind::Products { count, rows, features, dim } => {
                check_sizes("x", &[("rows", rows), ("features", features), ("dim", dim)])?;
                let buffers = [buffer(rows * features)?, buffer(count * dim * features)?];
                (Call::Products { count, rows, features, dim, buffers }, count * rows * dim)
            }
        };
        Ok(Trial { gpu, dtype, f16_operands, call, out: buffer(elements)?, wanted: Vec::new() })
    }

    /// Fills the tensors with numbers, and computes the expected results.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], a device that is lost.
    pub async fn fill(&mut self) -> Result<(), Error> {
        let (gpu, dtype) = (self.gpu, self.dtype);
        self.wanted = match &mut self.call {
            Call::Attention { shape, masked, buffers, cache } => {
                let [q, k, v] = inputs(shape);
                let q = write(gpu, &buffers[0], q, dtype)?;
                let mut k = write(gpu, &buffers[1], k, dtype)?;
                let mut v = write(gpu, &buffers[2], v, dtype)?;
                if let Some(cache) = cache {
                    [k, v] = fill_cache(gpu, cache, shape, dtype, buffers).await?;
                }
                rows_of_attention(shape, *masked, [&q, &k, &v])?
            }
            Call::Products { count, rows, features, dim, buffers: [x_buffer, weight] } => {
                let x = write(gpu, x_buffer, noise(*rows * *features, 4), dtype)?;
                let w = write(gpu, weight, noise(*count * *dim * *features, 5), dtype)?;
                rows_of_products([*count, *rows, *features, *dim], &x, &w)?
            }
        };
        Ok(())
    }

    fn kernel_options(&self) -> KernelOptions {
        KernelOptions::new().f16_operands(self.f16_operands)
    }

    /// Returns the workload as plans see it, without measurements.
    pub fn planned(&self, pipelines: &Pipelines) -> Result<Planned, Error> {
        match self.operator(pipelines)? {
            Operator::Attention(attention, call) => {
                attention.outline(&call).map(|outline| Planned::Attention(Box::new(outline)))
            }
            Operator::Products(projection, products) => Ok(Planned::Products(projection.outline(&products))),
        }
    }

    /// Returns the operator that records the workload with the plans of `pipelines`.
    fn operator(&self, pipelines: &Pipelines) -> Result<Operator<'_>, Error> {
        let dtype = self.dtype;
        match &self.call {
            Call::Attention { shape, masked, buffers: [q, k, v], cache } => {
                let config = Config::of(shape).dtype(dtype).kernel_options(self.kernel_options());
                let view = |buffer, shape| TensorView::new(buffer, dtype, shape);
                let (q, out) = (view(q, shape.q()), view(&self.out, shape.out()));
                let call = match cache {
                    Some(cache) => Forward::with_cache(q, cache, out).at_end(),
                    None => Forward::new(q, view(k, shape.k()), view(v, shape.v()), out),
                };
                let call = if *masked { call.mask(DeviceMask::causal()) } else { call };
                let attention = Attention::with_pipelines(pipelines, config)?;
                Ok(Operator::Attention(Box::new(attention), Box::new(call)))
            }
            Call::Products { count, rows, features, dim, buffers: [x, weight] } => {
                let product = |n| {
                    let weights = TensorView::matrix(weight, dtype, [count * dim, *features]);
                    let linear = Linear { weight: weights.slice(2, n * dim, *dim), bias: None };
                    let out =
                        TensorView::sequence(&self.out, dtype, [1, *rows, *dim]).with_offset(n * rows * dim);
                    ProjectionForward::new(TensorView::sequence(x, dtype, [1, *rows, *features]), linear, out)
                };
                let projection = Projection::with_pipelines(pipelines).kernel_options(self.kernel_options());
                Ok(Operator::Products(projection, (0..*count).map(product).collect()))
            }
        }
    }

    /// Compiles the workload and allocates its scratch. Refuses scratch of more than `bytes`.
    ///
    /// # Errors
    /// A plan that the device refuses.
    pub fn runner(&self, pipelines: &Pipelines, bytes: u64) -> Result<Runner<'_>, Error> {
        let operator = self.operator(pipelines)?;
        let mut scratch = Scratch::new(self.gpu.device(), ScratchSize::default())?;
        if let Operator::Attention(attention, call) = &operator {
            let size = attention.scratch_size(call)?;
            if size.total() > bytes {
                let description = "the plan needs more bytes than `TuningBudget::memory`".into();
                return Err(Error::OutOfMemory { what: "scratch", description });
            }
            scratch = Scratch::new(self.gpu.device(), size)?;
            attention.prepare(call, &mut scratch)?;
        }
        Ok(Runner { operator, scratch })
    }

    /// Clears the output, so that no result of another plan is compared.
    pub fn forget_output(&self) -> Result<(), Error> {
        self.gpu.submit(|encoder| {
            encoder.clear_buffer(&self.out, 0, None);
            Ok(())
        })
    }

    /// Compares some rows of the output with the reference.
    pub async fn judge(&self) -> Result<Outcome, Error> {
        // The reference computes with the rounded operands.
        let rounded = if self.f16_operands && self.dtype == DType::F32 { DType::F16 } else { self.dtype };
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

    /// Reads `n` elements of the output from `start` on.
    async fn piece(&self, start: usize, n: usize) -> Result<Vec<f32>, Error> {
        let bytes = self.dtype.bytes();
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
            return Ok(halves_of(self.gpu, self.dtype, &copy, skipped + n).await?.split_off(skipped));
        }
        self.gpu.download_async(&copy, n).await
    }
}

/// The first and the last index below `n`.
fn ends(n: usize) -> impl Iterator<Item = usize> + Clone {
    [0, n - 1].into_iter().take(n)
}

/// Returns the first and the last query of the first and the last head.
fn rows_of_attention(shape: &Shape, masked: bool, [q, k, v]: [&[f32]; 3]) -> Result<Vec<Piece>, Error> {
    let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = *shape;
    let rows = |x: &[f32], first: usize, dim: usize, n: usize| x[first * dim..][..n * dim].to_vec();
    let mut found = Vec::new();
    for (head, i) in ends(batch * heads).flat_map(|head| ends(q_len).map(move |i| (head, i))) {
        // The last query is at the position of the last key.
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

/// Most columns that are compared at either end of a row. The reference of a whole large weight
/// takes seconds.
const COLUMNS: usize = 64;

/// Returns the first and the last columns, for the first and last row of the first and last
/// product.
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

/// Writes numbers as `dtype`, and returns them as rounded.
fn write(gpu: &Gpu, buffer: &wgpu::Buffer, x: Vec<f32>, dtype: DType) -> Result<Vec<f32>, Error> {
    let write =
        |bytes: &[u8]| guarded(gpu.device(), "an upload", || gpu.queue().write_buffer(buffer, 0, bytes));
    if dtype.bytes() == 4 {
        write(bytemuck::cast_slice(&x))?;
        return Ok(x);
    }
    let mut halves = to_bits(&x, dtype);
    let rounded = from_bits(&halves, dtype);
    // Writes end at words.
    halves.resize(halves.len().next_multiple_of(2), 0);
    write(bytemuck::cast_slice(&halves))?;
    Ok(rounded)
}

/// Fills a cache and returns the keys and values as the cache stores them.
async fn fill_cache(
    gpu: &Gpu,
    cache: &mut Cache,
    shape: &Shape,
    dtype: DType,
    [_, k, v]: &[wgpu::Buffer; 3],
) -> Result<[Vec<f32>; 2], Error> {
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
    Ok([k, v])
}

enum Operator<'a> {
    Attention(Box<Attention>, Box<Forward<'a>>),
    Products(Projection, Vec<ProjectionForward<'a>>),
}

/// A workload with the operator of one plan.
pub(super) struct Runner<'a> {
    operator: Operator<'a>,
    scratch: Scratch,
}

impl Runner<'_> {
    /// Records the workload `times` times.
    pub fn record(&mut self, pass: &mut wgpu::ComputePass, times: usize) -> Result<(), Error> {
        let Runner { operator, scratch } = self;
        (0..times).try_for_each(|_| match operator {
            Operator::Attention(attention, call) => attention.forward(pass, call, scratch),
            Operator::Products(projection, products) => projection.forward(pass, products),
        })
    }
}
