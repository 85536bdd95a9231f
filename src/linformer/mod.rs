//! The operator: attention over keys and values that are projected along the length.

mod backward;
pub(crate) mod dispatch;
pub(crate) mod kernels;
pub(crate) mod reference;

pub use backward::LinformerBackward;
use dispatch::{LowRank, keep_rows};

use crate::attention::dispatch::{Chosen, Extras, Keys, Problem};
use crate::attention::{self, Config, check_extras};
use crate::device::DeviceFacts;
use crate::kernel::{
    Dispatches, KernelOptions, MatrixUnits, Pipelines, Prepared, Recorder, Scratch, ScratchSize, Slot,
    in_scratch,
};
use crate::mask::{DeviceMask, Dropout};
use crate::matmul::projection::dispatch_backward::Gradient;
use crate::tensor::{
    Access, CallTensors, DType, Element, Error, Shape, TensorView, check_sizes, count, expect_broadcast,
};

/// Attention whose keys and values are projected along the length, from `kv_len` to `rank` rows.
/// (Wang et al. 2020, "Linformer: self-attention with linear complexity".) It computes
/// `softmax(scale · q (E k)ᵀ) · (F v)`. Use it for long sequences: work and memory grow with
/// `q_len · rank` and `kv_len · rank`, not with `q_len · kv_len`.
///
/// E and F are tensors of the caller, as the weights of a layer are. All heads share them, or each
/// key/value head has one. For shorter sequences, [slice](TensorView::slice) a projection with more
/// columns. If keys and values share one projection, leave out F. There is no causal variant: every
/// projected key depends on all keys.
///
/// ```no_run
/// # use wgpu_attention::{Config, Error, Scratch, TensorView, wgpu};
/// # use wgpu_attention::linformer::{Linformer, LinformerForward};
/// # fn f(device: &wgpu::Device, encoder: &mut wgpu::CommandEncoder, [q, k, v, e, f, out]: [TensorView; 6]) -> Result<(), Error> {
/// let linformer = Linformer::new(device, Config::new(8, 64), 256)?; // 256 keys are left
/// let call = LinformerForward::new(q, k, v, e, out).f(f);
/// let mut scratch = Scratch::new(device, linformer.scratch_size(&call)?)?;
/// linformer.forward(encoder, &call, &mut scratch)
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Linformer {
    pipelines: Pipelines,
    config: Config,
    rank: usize,
}

/// One forward call: queries, keys, values, their projections and the output.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | `q` | `[batch, heads, q_len, head_dim]` | the configured |
/// | `k` | `[batch, kv_heads, kv_len, head_dim]` | the configured |
/// | `v` | `[batch, kv_heads, kv_len, value_dim]` | the configured |
/// | `e`, `f` | `[1, kv_heads or 1, rank, kv_len]` | F32, F16 or BF16 |
/// | `out` | `[batch, heads, q_len, value_dim]` | the configured |
/// | `key_mask` | `[batch or 1, 1, 1, kv_len]` | Bool |
/// | `lse` | `[batch, heads, q_len, 1]` | F32 |
/// | `weights` | `[batch, heads, q_len, rank]`, or one head for their mean | F32, F16 or BF16 |
///
/// Kernels round projected keys and values to the configured type.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct LinformerForward<'a> {
    pub(crate) q: TensorView<'a>,
    pub(crate) k: TensorView<'a>,
    pub(crate) v: TensorView<'a>,
    pub(crate) e: TensorView<'a>,
    pub(crate) f: Option<TensorView<'a>>,
    pub(crate) out: TensorView<'a>,
    pub(crate) key_mask: Option<TensorView<'a>>,
    pub(crate) lse: Option<TensorView<'a>>,
    pub(crate) weights: Option<TensorView<'a>>,
    pub(crate) dropout: Option<Dropout<TensorView<'a>>>,
}

impl<'a> LinformerForward<'a> {
    /// Reads queries, keys and values and writes `out`. `e` projects keys. It projects values too,
    /// unless [`f`](Self::f) is set.
    pub fn new(
        q: TensorView<'a>,
        k: TensorView<'a>,
        v: TensorView<'a>,
        e: TensorView<'a>,
        out: TensorView<'a>,
    ) -> Self {
        LinformerForward { q, k, v, e, f: None, out, key_mask: None, lse: None, weights: None, dropout: None }
    }

    /// The projection of values.
    pub fn f(mut self, f: impl Into<Option<TensorView<'a>>>) -> Self {
        self.f = f.into();
        self
    }

    /// The mask of the keys: true for keys that exist. The call replaces the other keys and values
    /// by zeros before it projects them.
    pub fn key_mask(mut self, key_mask: impl Into<Option<TensorView<'a>>>) -> Self {
        self.key_mask = key_mask.into();
        self
    }

    /// Writes the log-sum-exp of every query's scores to `lse`.
    pub fn lse(mut self, lse: impl Into<Option<TensorView<'a>>>) -> Self {
        self.lse = lse.into();
        self
    }

    /// Writes the attention weights, after dropout, to `weights`: of every head, or their mean if
    /// the tensor has one head.
    pub fn weights(mut self, weights: impl Into<Option<TensorView<'a>>>) -> Self {
        self.weights = weights.into();
        self
    }

    /// Applies dropout to the weights, by query and projected key.
    pub fn dropout(mut self, dropout: impl Into<Option<Dropout<TensorView<'a>>>>) -> Self {
        self.dropout = dropout.into();
        self
    }
}

/// The masked copies of keys and values, if there is a mask, and the projections of both.
struct Projected<'a> {
    kept: Option<[TensorView<'a>; 2]>,
    low: [LowRank<'a>; 2],
}

/// A checked forward call.
struct Plan {
    shape: Shape,
    chosen: Chosen,
    size: ScratchSize,
}

impl Linformer {
    /// Creates the operator with new pipelines, for `rank` projected keys and values. `config`
    /// describes the attention: its heads, channels, type, scale and softcap.
    ///
    /// # Errors
    /// A configuration that no call could satisfy, a rank of 0, or a missing feature.
    pub fn new(device: &wgpu::Device, config: Config, rank: usize) -> Result<Self, Error> {
        Self::with_pipelines(&Pipelines::new(device), config, rank)
    }

    /// Creates the operator with pipelines that other operators on the device share.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_pipelines(pipelines: &Pipelines, config: Config, rank: usize) -> Result<Self, Error> {
        config.check(&pipelines.facts())?;
        config.kernel_options.refuse_batch_invariant("`batch_invariant` with Linformer")?;
        check_sizes("config", &[("rank", rank)])?;
        Ok(Linformer { pipelines: pipelines.clone(), config, rank })
    }

    /// Returns the pipelines, for other operators to share.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// Returns the temporary memory that `call` needs. Projected keys and values need `batch ·
    /// kv_heads · rank · (head_dim + value_dim)` elements. A key mask needs copies of keys and
    /// values. Attention over `rank` keys needs the memory that
    /// [`Attention::scratch_size`](crate::Attention::scratch_size) describes.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn scratch_size(&self, call: &LinformerForward) -> Result<ScratchSize, Error> {
        Ok(self.check(call, &self.pipelines.facts())?.size)
    }

    /// Records `call` into an encoder or a pass.
    ///
    /// # Errors
    /// Any error that [`Error`] lists for tensors, options and scratch. The encoder is then
    /// unchanged.
    pub fn forward(
        &self,
        into: &mut impl Recorder,
        call: &LinformerForward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.prepare(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles its kernels and binds its tensors. [`Prepared::record`] then records
    /// it any number of times.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn prepare(&self, call: &LinformerForward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        let scratch: &Scratch = scratch;
        let Plan { shape, chosen, .. } = attention::dispatch::within(device, |device| {
            let plan = self.check(call, device)?;
            scratch.check(plan.size).map(|()| plan)
        })?;
        let projected = self.projected(call, &shape, |slot| scratch.buffer(slot))?;
        let mut dispatches = projected.dispatches(call, &self.config, device)?;
        let problem = self.problem(shape, call.q, &projected, call.extras());
        dispatches.extend(attention::dispatch::dispatches(&problem, chosen, chosen.memory(scratch)?, device));
        self.pipelines.bind("linformer", &dispatches, scratch.bindings())
    }

    /// Returns the attention over projected keys.
    fn problem<'a>(
        &self,
        shape: Shape,
        q: TensorView<'a>,
        projected: &Projected<'a>,
        extras: Extras<'a>,
    ) -> Problem<'a> {
        let [k, v] = projected.low.map(|low| low.low);
        self.config.problem(self.low(shape), q, Keys::Tensors { k, v }, extras)
    }

    /// Returns the shape of the attention over projected keys.
    fn low(&self, shape: Shape) -> Shape {
        Shape { kv_len: self.rank, ..shape }
    }

    /// Returns the masked and projected keys and values, in parts of the scratch.
    fn projected<'a>(
        &self,
        call: &LinformerForward<'a>,
        shape: &Shape,
        part: impl Fn(Slot) -> Result<&'a wgpu::Buffer, Error>,
    ) -> Result<Projected<'a>, Error> {
        let dtype = self.config.dtype;
        let low = self.low(*shape);
        let both = |slot, [k, v]: [[usize; 4]; 2], dtype: DType| -> Result<[TensorView<'a>; 2], Error> {
            let buffer = part(slot)?;
            Ok([in_scratch(buffer, dtype, k, 0), in_scratch(buffer, dtype, v, aligned(count(k)))])
        };
        let kept = call.key_mask.map(|_| both(Slot::Kept, [shape.k(), shape.v()], dtype)).transpose()?;
        let [low_k, low_v] = both(Slot::Projected, [low.k(), low.v()], dtype)?;
        let [k, v] = kept.unwrap_or([call.k, call.v]);
        let low = [
            LowRank { projection: call.e, x: k, low: low_k },
            LowRank { projection: call.f.unwrap_or(call.e), x: v, low: low_v },
        ];
        Ok(Projected { kept, low })
    }

    fn projected_size(&self, call: &LinformerForward, shape: &Shape) -> Result<ScratchSize, Error> {
        let low = self.low(*shape);
        let bytes = |k, v, dtype| self.bytes([k, v], dtype);
        let size = ScratchSize::default().with(Slot::Projected, bytes(low.k(), low.v(), self.config.dtype)?);
        match call.key_mask {
            Some(_) => Ok(size.with(Slot::Kept, bytes(shape.k(), shape.v(), self.config.dtype)?)),
            None => Ok(size),
        }
    }

    /// Returns the bytes of two tensors, one after the other.
    fn bytes(&self, [k, v]: [[usize; 4]; 2], dtype: DType) -> Result<u64, Error> {
        let elements = (count(k) as u64).saturating_add(count(v) as u64);
        let bytes = elements.saturating_mul(dtype.bytes() as u64);
        // Kernels count elements in 32 bits.
        if elements > u64::from(u32::MAX / 2) {
            let limit = self.pipelines.facts().max_binding_bytes;
            return Err(Error::BindingLimit { tensor: "scratch", bytes, limit });
        }
        Ok(((aligned(count(k)) + count(v)) as u64 * dtype.bytes() as u64).next_multiple_of(4))
    }

    /// Checks a call, before its pipelines are compiled.
    fn check(&self, call: &LinformerForward, device: &DeviceFacts) -> Result<Plan, Error> {
        let q = call.q;
        let mut tensors = CallTensors::new(device);
        let shape = self.check_tensors(call, Access::Write, &mut tensors)?;
        let extras = call.extras();
        check_extras(&extras, &self.low(shape), &mut tensors)?;
        tensors.finish()?;
        let size = self.projected_size(call, &shape)?;
        // There is no scratch yet. Plans read only layouts, so any buffer can stand in.
        let projected = self.projected(call, &shape, |_| Ok(q.buffer))?;
        let problem = self.problem(shape, q, &projected, extras);
        let chosen = attention::dispatch::choose(&problem.outline(), device)?;
        projected.dispatches(call, &self.config, device)?;
        Ok(Plan { shape, chosen, size: size.max(chosen.scratch_size()) })
    }

    /// Checks the inputs and the output. Returns the shape of the attention over all keys.
    fn check_tensors<'a>(
        &self,
        call: &LinformerForward<'a>,
        access: Access,
        tensors: &mut CallTensors<'a, '_>,
    ) -> Result<Shape, Error> {
        let LinformerForward { q, k, v, e, f, key_mask, out, .. } = *call;
        let out = ("out", out, access);
        let shape = Shape::of(tensors, self.config.dtype, self.config.dims(), [q, k, v], out)?;
        shape.check_lengths()?;
        let Shape { batch, kv_heads, kv_len, .. } = shape;
        for (tensor, view) in [("e", Some(e)), ("f", f)] {
            // One projection for all heads, or one for each head.
            let heads = if view.is_some_and(|view| view.shape()[1] == 1) { 1 } else { kv_heads };
            tensors.read(tensor, view, Element::Float, [1, heads, self.rank, kv_len])?;
        }
        if let Some(key_mask) = key_mask {
            tensors.read("key_mask", key_mask, DType::Bool, [key_mask.shape()[0], 1, 1, kv_len])?;
            expect_broadcast("key_mask", key_mask.shape(), [batch, 1, 1, kv_len])?;
        }
        Ok(shape)
    }
}

/// Returns the first element of a tensor after `elements` elements, for any type. Devices require
/// this distance between bindings.
fn aligned(elements: usize) -> usize {
    elements.next_multiple_of(128)
}

/// Returns the options of the projections. If the caller requires matrix units, only the attention
/// requires them.
fn product_tuning(config: &Config) -> KernelOptions {
    match config.kernel_options.matrix_units {
        MatrixUnits::Always => config.kernel_options.matrix_units(MatrixUnits::Auto),
        _ => config.kernel_options,
    }
}

impl<'a> LinformerForward<'a> {
    fn extras(&self) -> Extras<'a> {
        let LinformerForward { out, lse, weights, dropout, .. } = *self;
        Extras { out, mask: DeviceMask::none(), appended: 0, lse, weights, scores: None, dropout }
    }
}

impl<'a> Projected<'a> {
    /// Records the masking and the projection of keys and values.
    fn dispatches(
        &self,
        call: &LinformerForward<'a>,
        config: &Config,
        device: &DeviceFacts,
    ) -> Result<Dispatches<'a>, Error> {
        let mut dispatches = Dispatches::new();
        if let (Some(kept), Some(key_mask)) = (self.kept, call.key_mask) {
            for (x, view) in [call.k, call.v].into_iter().zip(kept) {
                dispatches.push(keep_rows(x, key_mask, Gradient { view, accumulates: false }, device));
            }
        }
        for low in &self.low {
            dispatches.extend(low.forward(&product_tuning(config), device)?);
        }
        Ok(dispatches)
    }
}
