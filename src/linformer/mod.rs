//! The operator: attention over keys and values that are projected along the length.

mod backward;
pub(crate) mod dispatch;
pub(crate) mod kernels;
pub(crate) mod reference;

pub use backward::LinformerBackward;
use dispatch::{LowRank, keep_rows};

use crate::attention::dispatch::{Chosen, Extras, Keys, Problem};
use crate::attention::{self, Config, check_extras, scale_in_f32};
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

/// Attention whose keys and values are projected along the length, from `kv_len` to `rank` of them
/// (Wang et al. 2020, "Linformer: self-attention with linear complexity"): `softmax(scale · q (E
/// k)ᵀ) · (F v)`. Work and memory grow with `q_len · rank` and `kv_len · rank`, not with `q_len ·
/// kv_len`.
///
/// E and F are the caller's tensors, as weights of a layer are: shared by all heads or one for each
/// key/value head, of more columns than `kv_len` if the view is [sliced](TensorView::slice). Where
/// keys and values share one, F is left out. There is no causal form: every projected key is made
/// of all keys.
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

/// One call: queries, keys, values, what projects them, the output.
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
/// Projected keys and values are rounded to the configured type.
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
    /// Queries, keys and values to `out`; `e` projects keys, and values too unless [`f`](Self::f)
    /// says otherwise.
    pub fn new(
        q: TensorView<'a>,
        k: TensorView<'a>,
        v: TensorView<'a>,
        e: TensorView<'a>,
        out: TensorView<'a>,
    ) -> Self {
        LinformerForward { q, k, v, e, f: None, out, key_mask: None, lse: None, weights: None, dropout: None }
    }

    /// Projects values.
    pub fn f(mut self, f: impl Into<Option<TensorView<'a>>>) -> Self {
        self.f = f.into();
        self
    }

    /// Which keys are there. The others are taken as rows of zeros before they are projected,
    /// whatever they hold.
    pub fn key_mask(mut self, key_mask: impl Into<Option<TensorView<'a>>>) -> Self {
        self.key_mask = key_mask.into();
        self
    }

    /// Writes the log-sum-exp of every query's scores there.
    pub fn lse(mut self, lse: impl Into<Option<TensorView<'a>>>) -> Self {
        self.lse = lse.into();
        self
    }

    /// Writes the attention weights there, after dropout: of every head, or their mean if the
    /// tensor has one.
    pub fn weights(mut self, weights: impl Into<Option<TensorView<'a>>>) -> Self {
        self.weights = weights.into();
        self
    }

    /// With dropout on the weights, by query and projected key.
    pub fn dropout(mut self, dropout: impl Into<Option<Dropout<TensorView<'a>>>>) -> Self {
        self.dropout = dropout.into();
        self
    }
}

/// Of keys and of values: where the rows that are there lie, and the projection of those.
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
    /// Attention to `rank` projected keys and values, with pipelines of its own. `config` is that
    /// of the attention: its heads, channels, type, scale and softcap.
    ///
    /// # Errors
    /// A configuration that no call could satisfy, a rank of 0, or a missing feature.
    pub fn new(device: &wgpu::Device, config: Config, rank: usize) -> Result<Self, Error> {
        Self::with_pipelines(&Pipelines::new(device), config, rank)
    }

    /// As [`new`](Self::new), with pipelines that other operators on the device share.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_pipelines(pipelines: &Pipelines, config: Config, rank: usize) -> Result<Self, Error> {
        config.check(&pipelines.facts())?;
        check_sizes("config", &[("rank", rank)])?;
        Ok(Linformer { pipelines: pipelines.clone(), config, rank })
    }

    /// The pipelines, to share.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// The temporary memory that `call` needs: projected keys and values, `batch · kv_heads · rank
    /// · (head_dim + value_dim)` elements; with a key mask, keys and values once more; and what
    /// [`Attention::scratch_size`](crate::Attention::scratch_size) says of `rank` keys.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn scratch_size(&self, call: &LinformerForward) -> Result<ScratchSize, Error> {
        Ok(self.check(call, &self.pipelines.facts())?.size)
    }

    /// Records `call` into an encoder or a pass.
    ///
    /// # Errors
    /// Everything that [`Error`] lists for tensors, options and scratch; then nothing has been recorded.
    pub fn forward(
        &self,
        into: &mut impl Recorder,
        call: &LinformerForward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.prepare(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles and binds what it needs. [`Prepared::record`] then records it as
    /// often as you like.
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

    /// The attention to projected keys.
    fn problem<'a>(
        &self,
        shape: Shape,
        q: TensorView<'a>,
        projected: &Projected<'a>,
        extras: Extras<'a>,
    ) -> Problem<'a> {
        let [k, v] = projected.low.map(|low| low.low);
        Problem {
            shape: self.low(shape),
            q,
            keys: Keys::Tensors { k, v },
            score_vector: None,
            extras,
            scale: scale_in_f32(self.config.scale, shape.head_dim),
            softcap: self.config.softcap.map(|c| c as f32),
            kernel_options: self.config.kernel_options,
        }
    }

    /// The shape of that attention.
    fn low(&self, shape: Shape) -> Shape {
        Shape { kv_len: self.rank, ..shape }
    }

    /// Where keys and values lie on their way, in `part`s of the scratch.
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

    /// Bytes of two tensors after each other.
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

    /// Everything that can be said of a call before its pipelines.
    fn check(&self, call: &LinformerForward, device: &DeviceFacts) -> Result<Plan, Error> {
        let q = call.q;
        let mut tensors = CallTensors::new(device);
        let shape = self.check_tensors(call, Access::Write, &mut tensors)?;
        let extras = call.extras();
        check_extras(&extras, &self.low(shape), &mut tensors)?;
        tensors.finish()?;
        let size = self.projected_size(call, &shape)?;
        // Where there is no scratch yet, any buffer stands for it: plans look at layouts.
        let projected = self.projected(call, &shape, |_| Ok(q.buffer))?;
        let problem = self.problem(shape, q, &projected, extras);
        let chosen = attention::dispatch::choose(&problem.outline(), device)?;
        projected.dispatches(call, &self.config, device)?;
        Ok(Plan { shape, chosen, size: size.max(chosen.scratch_size()) })
    }

    /// Checks the inputs and the output. Gives the shape of the attention over all keys.
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
            // One head, or all.
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

/// Where a tensor begins behind so many elements, whatever their type: as far as devices want
/// bindings apart.
fn aligned(elements: usize) -> usize {
    elements.next_multiple_of(128)
}

/// How keys and values are projected: whoever insists on matrix units has them for the attention
/// alone.
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
    /// Leaves out the keys that are not there, and projects.
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
