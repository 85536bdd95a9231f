//! The operator: `softmax(scale · q kᵀ, masked) · v`.

mod cached;

pub use cached::CachedForward;

use crate::block_map::Blocks;
use crate::dropout::Dropout;
use crate::error::Error;
use crate::mask::DeviceMask;
use crate::path::{self, Keys, Problem};
use crate::plan::{MatrixUnits, Path, Tiling, Tuning};
use crate::problem::{Shape, check_options};
use crate::record::{Pipelines, dispatch, pass};
use crate::scratch::{Bound, Scratch, ScratchSize};
use crate::tensor::{
    Access, DType, DeviceFacts, LONGEST_AXIS, TensorView, check_aliasing, check_apart, expect,
    expect_broadcast,
};

/// What is fixed when an [`Attention`] is made.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
pub struct Config {
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) value_dim: usize,
    pub(crate) dtype: DType,
    pub(crate) scale: Option<f32>,
    pub(crate) softcap: Option<f32>,
    pub(crate) tuning: Tuning,
}

impl Config {
    /// `heads` query heads of `head_dim` channels; f32, scale `1 / √head_dim`, as many key/value heads.
    pub fn new(heads: usize, head_dim: usize) -> Self {
        Config {
            heads,
            kv_heads: heads,
            head_dim,
            value_dim: head_dim,
            dtype: DType::F32,
            scale: None,
            softcap: None,
            tuning: Tuning::default(),
        }
    }

    /// Key/value heads, a divisor of `heads`: query head `h` uses `h / (heads / kv_heads)`. One is multi-query
    /// (Shazeer 2019, "Fast transformer decoding"), several are grouped-query attention (Ainslie et al. 2023).
    pub fn kv_heads(mut self, kv_heads: usize) -> Self {
        self.kv_heads = kv_heads;
        self
    }

    /// Channels of values and of the output, `head_dim` unless set.
    pub fn value_dim(mut self, value_dim: usize) -> Self {
        self.value_dim = value_dim;
        self
    }

    /// Element type of q, k, v and out: F32 or F16. Sums are f32 either way.
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }

    /// Factor of `q·k` instead of `1 / √head_dim`.
    pub fn scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Bounds the scores: `softcap · tanh(score / softcap)` (Gemma 2, 2024).
    pub fn softcap(mut self, softcap: f32) -> Self {
        self.softcap = Some(softcap);
        self
    }

    /// Which class of kernels to use; for tests and measurements.
    pub fn tiling(mut self, tiling: Tiling) -> Self {
        self.tuning.tiling = tiling;
        self
    }

    /// Whether to use the device's matrix units.
    pub fn matrix_units(mut self, units: MatrixUnits) -> Self {
        self.tuning.matrix.units = units;
        self
    }

    /// Lets matrix units round F32 queries, keys and values to f16, which kernels without them do not: an error of 2⁻¹¹ of
    /// each, and infinity above 65504. Not set: F32 tensors are computed in f32.
    pub fn f16_operands(mut self, allowed: bool) -> Self {
        self.tuning.matrix.f16_operands = allowed;
        self
    }

    /// Which sequence of kernels to use; for tests and measurements.
    pub fn path(mut self, path: Path) -> Self {
        self.tuning.path = path;
        self
    }

    /// Most floating-point operations, masked ones counted, of one dispatch of the fused path: longer calls are
    /// cut into several, so that none runs into the time limit some systems set (Windows: two seconds). 2³⁷ unless
    /// set. The pieces give the same bits as one dispatch; a single workgroup is never cut.
    pub fn work_limit(mut self, flops: u64) -> Self {
        self.tuning.work = flops;
        self
    }

    /// Among how many workgroups the fused path splits the keys of a tile of queries; for tests and measurements. Unless
    /// set, as many as it takes to keep the device busy, which for many queries is one.
    pub fn splits(mut self, splits: usize) -> Self {
        self.tuning.splits = Some(splits);
        self
    }

    /// Features and limits to request of `adapter`: what this configuration needs, the largest buffers there
    /// are, which decide how long sequences may be, workgroup memory for large tiles, and subgroups. Everything else is
    /// wgpu's default: add what the rest of the application needs. A feature the adapter lacks is left out;
    /// [`Attention::new`] then says so.
    pub fn required(&self, adapter: &wgpu::Adapter) -> (wgpu::Features, wgpu::Limits) {
        let wanted =
            if self.dtype == DType::F16 { wgpu::Features::SHADER_F16 } else { wgpu::Features::empty() };
        let best = adapter.limits();
        let limits = wgpu::Limits {
            max_buffer_size: best.max_buffer_size,
            max_storage_buffer_binding_size: best.max_storage_buffer_binding_size,
            max_storage_buffers_per_shader_stage: best.max_storage_buffers_per_shader_stage,
            // What the largest tiles take.
            max_compute_workgroup_storage_size: best.max_compute_workgroup_storage_size.min(32768),
            ..wgpu::Limits::default()
        };
        ((wanted | wgpu::Features::SUBGROUP) & adapter.features(), limits)
    }

    pub(crate) fn scale_value(&self) -> f32 {
        self.scale.unwrap_or(1.0 / (self.head_dim as f32).sqrt())
    }

    pub(crate) fn check(&self, device: &DeviceFacts) -> Result<(), Error> {
        let Config { heads, kv_heads, head_dim, value_dim, .. } = *self;
        Shape { batch: 1, heads, kv_heads, q_len: 1, kv_len: 1, head_dim, value_dim }.check()?;
        check_dtype(self.dtype, device)?;
        check_options(self.scale.map(f64::from), self.softcap.map(f64::from))
    }
}

pub(crate) fn check_dtype(dtype: DType, device: &DeviceFacts) -> Result<(), Error> {
    match dtype {
        DType::F32 => Ok(()),
        DType::F16 if device.f16 => Ok(()),
        DType::F16 => Err(Error::MissingFeature {
            feature: wgpu::Features::SHADER_F16,
            needed_for: "tensors of dtype F16",
        }),
        got => Err(Error::Type { tensor: "config", expected: "F32 or F16".into(), got }),
    }
}

/// One forward call: tensors `[batch, heads, length, dim]` in any strides, mask, optional outputs.
///
/// Where the staged path computes it (weights, see [`Path`]), `batch · heads` may reach wgpu's limit of
/// workgroups, 65535 by default, and so may `q_len` on GPUs; the fused path has no such limit.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | `q` | `[batch, heads, q_len, head_dim]` | the configured |
/// | `k` | `[batch, kv_heads, kv_len, head_dim]` | the configured |
/// | `v` | `[batch, kv_heads, kv_len, value_dim]` | the configured |
/// | `out` | `[batch, heads, q_len, value_dim]` | the configured |
/// | `lse` | `[batch, heads, q_len, 1]` | F32 |
/// | `weights` | `[batch, heads, q_len, kv_len]`, or one head for their mean | F32 or F16 |
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Forward<'a> {
    /// Queries.
    pub q: TensorView<'a>,
    /// Keys.
    pub k: TensorView<'a>,
    /// Values.
    pub v: TensorView<'a>,
    /// Where the result goes. Its buffer may hold no input of the call.
    pub out: TensorView<'a>,
    /// Which keys a query may see, and the bias.
    pub mask: DeviceMask<'a>,
    /// Where `ln Σ exp(score)` over every query's permitted keys goes, if wanted: after scale, softcap and
    /// bias, before dropout.
    pub lse: Option<TensorView<'a>>,
    /// Where the attention weights go, if wanted: of every head, or averaged over heads. After dropout.
    pub weights: Option<TensorView<'a>>,
    /// Dropout on the weights.
    pub dropout: Option<Dropout<TensorView<'a>>>,
}

impl<'a> Forward<'a> {
    /// A call without mask, dropout or further outputs; set the fields that differ.
    pub fn new(q: TensorView<'a>, k: TensorView<'a>, v: TensorView<'a>, out: TensorView<'a>) -> Self {
        Forward { q, k, v, out, mask: DeviceMask::none(), lse: None, weights: None, dropout: None }
    }

    /// With a mask.
    pub fn mask(mut self, mask: DeviceMask<'a>) -> Self {
        self.mask = mask;
        self
    }

    /// Writes the log-sum-exp of every query's masked scores there.
    pub fn lse(mut self, lse: TensorView<'a>) -> Self {
        self.lse = Some(lse);
        self
    }

    /// Writes the attention weights there: of every head, or their mean if the tensor has one.
    pub fn weights(mut self, weights: TensorView<'a>) -> Self {
        self.weights = Some(weights);
        self
    }

    /// With dropout on the weights.
    pub fn dropout(mut self, dropout: Dropout<TensorView<'a>>) -> Self {
        self.dropout = Some(dropout);
        self
    }
}

/// Attention on one device: pipelines, shared and compiled once, and the checks before them.
///
/// ```no_run
/// # fn f(device: &wgpu::Device, queue: &wgpu::Queue, q: &wgpu::Buffer, k: &wgpu::Buffer, v: &wgpu::Buffer,
/// #      out: &wgpu::Buffer) -> Result<(), wgpu_attention::Error> {
/// use wgpu_attention::{Attention, Config, DType, Forward, Mask, Scratch, TensorView};
///
/// let attention = Attention::new(device, Config::new(8, 64))?;
/// let view = |buffer| TensorView::new(buffer, DType::F32, [1, 8, 512, 64]);
/// let call = Forward::new(view(q), view(k), view(v), view(out)).mask(Mask::causal());
/// let mut scratch = Scratch::new(device, attention.scratch_size(&call)?)?;
///
/// let mut encoder = device.create_command_encoder(&Default::default());
/// attention.forward(&mut encoder, &call, &mut scratch)?; // records only
/// queue.submit([encoder.finish()]);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Attention {
    pipelines: Pipelines,
    config: Config,
}

impl Attention {
    /// Attention with pipelines of its own.
    ///
    /// # Errors
    /// A configuration that no call could satisfy, or a missing feature.
    pub fn new(device: &wgpu::Device, config: Config) -> Result<Self, Error> {
        Self::with_pipelines(&Pipelines::new(device), config)
    }

    /// Attention that shares pipelines with other operators on the device.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_pipelines(pipelines: &Pipelines, config: Config) -> Result<Self, Error> {
        config.check(pipelines.facts())?;
        Ok(Attention { pipelines: pipelines.clone(), config })
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The pipelines, to share.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// The temporary memory that `call` needs. On the fused path none, or partial sums where few queries meet many keys
    /// and those are split among workgroups: at most 128 times the size of `out` in f32. On the staged one the score
    /// matrix, `4 · batch · heads · q_len · kv_len` bytes with `kv_len` rounded up to 4, or none if `weights` takes the
    /// weights of every head in F32.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn scratch_size(&self, call: &Forward) -> Result<ScratchSize, Error> {
        let problem = self.check(call)?;
        Ok(path::choose(&problem, self.pipelines.facts())?.scratch_size())
    }

    /// Records `call` into `encoder`, in a compute pass of its own. Nothing is submitted or copied.
    ///
    /// # Errors
    /// Everything that [`Error`] lists for tensors, masks, options and scratch; then nothing has been recorded.
    pub fn forward(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        call: &Forward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.record(&self.check(call)?, scratch, |bound| dispatch(&mut pass(encoder, "attention"), bound))
    }

    /// Records `call` into a compute pass of the caller's, which is left with another pipeline and bind group 0.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_in_pass(
        &self,
        pass: &mut wgpu::ComputePass,
        call: &Forward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.record(&self.check(call)?, scratch, |bound| dispatch(pass, bound))
    }

    /// Compiles and binds what `call` needs, so that its first recording does neither.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn prepare(&self, call: &Forward, scratch: &mut Scratch) -> Result<(), Error> {
        self.record(&self.check(call)?, scratch, |_| ())
    }

    /// Records what writes `mask`'s block map for `[batch, q_len, kv_len]` into `blocks.map`: U32,
    /// `[batch, heads, ⌈q_len / size[0]⌉, ⌈kv_len / size[1]⌉]`, batch and heads 1 where one map is to stand for all of
    /// them. Give it to [`Mask::blocks`](crate::Mask::blocks) beside the same mask: tiles in hidden blocks are then
    /// not loaded, and those in full ones cost no mask arithmetic. Blocks of 64 × 64 or more fit the kernels'
    /// tiles. `scratch` may be empty.
    ///
    /// # Errors
    /// A mask that does not fit, a map of another shape or type or in a buffer of the mask; then nothing has been
    /// recorded.
    pub fn classify(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        mask: &DeviceMask,
        lengths: [usize; 3],
        blocks: &Blocks<TensorView>,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.record_map(mask, lengths, blocks, scratch, |bound| {
            dispatch(&mut pass(encoder, "block map"), bound);
        })
    }

    /// [`classify`](Self::classify) into a compute pass of the caller's, which is left with another pipeline and bind
    /// group 0.
    ///
    /// # Errors
    /// As [`classify`](Self::classify).
    pub fn classify_in_pass(
        &self,
        pass: &mut wgpu::ComputePass,
        mask: &DeviceMask,
        lengths: [usize; 3],
        blocks: &Blocks<TensorView>,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.record_map(mask, lengths, blocks, scratch, |bound| dispatch(pass, bound))
    }

    fn record_map(
        &self,
        mask: &DeviceMask,
        [batch, q_len, kv_len]: [usize; 3],
        blocks: &Blocks<TensorView>,
        scratch: &mut Scratch,
        emit: impl FnOnce(&[(Bound, [u32; 3])]),
    ) -> Result<(), Error> {
        let device = self.pipelines.facts();
        let Config { heads, kv_heads, head_dim, value_dim, .. } = self.config;
        let shape = Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim };
        shape.check()?;
        // No tensor need bound these.
        for (option, n) in [("batch", batch), ("q_len", q_len), ("kv_len", kv_len)] {
            if n > LONGEST_AXIS {
                return Err(Error::Option { option, value: n as f64, expected: "below 2^29" });
            }
        }
        mask.check(&shape, device)?;
        // A map is checked as part of a mask is, but for axes of 1 that would repeat.
        let mapped = DeviceMask::none().blocks(*blocks);
        mapped.check(&shape, device)?;
        let of_blocks = [q_len.div_ceil(blocks.size[0]), kv_len.div_ceil(blocks.size[1])];
        (0..2).try_for_each(|n| expect("blocks", blocks.map.shape(), n + 2, of_blocks[n]))?;
        blocks.map.check("blocks", Access::Write, device)?;
        check_aliasing(&[("blocks", blocks.map)], &mask.tensors())?;
        let call = path::classify::call(mask, &shape, blocks, device);
        let bound = self.pipelines.bind(&[call], scratch)?;
        emit(&bound);
        Ok(())
    }

    fn record(
        &self,
        problem: &Problem,
        scratch: &mut Scratch,
        emit: impl FnOnce(&[(Bound, [u32; 3])]),
    ) -> Result<(), Error> {
        let device = self.pipelines.facts();
        let chosen = path::choose(problem, device)?;
        scratch.check(chosen.scratch_size())?;
        let memory = chosen.memory(scratch)?;
        let calls = path::calls(problem, chosen, memory.as_ref(), device);
        let bound = self.pipelines.bind(&calls, scratch)?;
        emit(&bound);
        Ok(())
    }

    /// Everything that can be said of a call before its pipelines.
    fn check<'a>(&self, call: &Forward<'a>) -> Result<Problem<'a>, Error> {
        let device = self.pipelines.facts();
        let Forward { q, k, v, out, mask, lse, weights, dropout } = *call;
        let config = &self.config;
        for (tensor, view, access) in [
            ("q", q, Access::Read),
            ("k", k, Access::Read),
            ("v", v, Access::Read),
            ("out", out, Access::Write),
        ] {
            if view.dtype() != config.dtype {
                let expected = format!("{:?}", config.dtype);
                return Err(Error::Type { tensor, expected, got: view.dtype() });
            }
            view.check(tensor, access, device)?;
        }
        expect("q", q.shape(), 1, config.heads)?;
        expect("q", q.shape(), 3, config.head_dim)?;
        expect("k", k.shape(), 1, config.kv_heads)?;
        expect("v", v.shape(), 3, config.value_dim)?;
        let shape = Shape::of(&q, &k, &v, &out)?;
        let problem = Problem {
            shape,
            q,
            keys: Keys::Tensors { k, v },
            out,
            mask,
            appended: 0,
            scale: config.scale_value(),
            softcap: config.softcap,
            lse,
            weights,
            dropout,
            tuning: config.tuning,
        };
        check_extras(&problem, device)?;
        let read: Vec<_> = [("q", q), ("k", k), ("v", v)].into_iter().chain(extra_inputs(&problem)).collect();
        check_aliasing(&outputs(&problem), &read)?;
        check_apart(&outputs(&problem), device)?;
        Ok(problem)
    }
}

/// Checks the mask, the optional outputs and the dropout of a problem, which operators share.
pub(crate) fn check_extras(problem: &Problem, device: &DeviceFacts) -> Result<(), Error> {
    let shape = &problem.shape;
    let masked = Shape { kv_len: shape.kv_len - problem.appended, ..*shape };
    problem.mask.check(&masked, device)?;
    if let Some(lse) = &problem.lse {
        if lse.dtype() != DType::F32 {
            return Err(Error::Type { tensor: "lse", expected: "F32".into(), got: lse.dtype() });
        }
        lse.check("lse", Access::Write, device)?;
        (0..4).try_for_each(|axis| expect("lse", lse.shape(), axis, shape.lse()[axis]))?;
    }
    if let Some(weights) = &problem.weights {
        if !weights.dtype().is_float() {
            return Err(Error::Type {
                tensor: "weights",
                expected: "F32 or F16".into(),
                got: weights.dtype(),
            });
        }
        weights.check("weights", Access::Write, device)?;
        check_weights(weights.shape(), shape)?;
        // They are the score matrix of the call: one dispatch writes them beside lse, the next reads them
        // and writes out.
        for (other, view) in [("out", Some(problem.out)), ("lse", problem.lse)] {
            if view.is_some_and(|view| view.buffer() == weights.buffer()) {
                return Err(Error::Alias { tensor: "weights", other });
            }
        }
    }
    if let Some(dropout) = &problem.dropout {
        dropout.check()?;
        if let Some(keep) = dropout.given() {
            if keep.dtype() != DType::Bool {
                return Err(Error::Type { tensor: "dropout", expected: "Bool".into(), got: keep.dtype() });
            }
            keep.check("dropout", Access::Read, device)?;
            expect_broadcast("dropout", keep.shape(), shape.weights())?;
        }
    }
    Ok(())
}

/// All heads, or one for their mean; the other axes exactly.
fn check_weights(got: [usize; 4], shape: &Shape) -> Result<(), Error> {
    let wanted = shape.weights();
    [0, 2, 3].into_iter().try_for_each(|axis| expect("weights", got, axis, wanted[axis]))?;
    let heads = if got[1] == 1 { 1 } else { wanted[1] };
    expect("weights", got, 1, heads)
}

/// The tensors that a problem writes.
pub(crate) fn outputs<'a>(problem: &Problem<'a>) -> Vec<(&'static str, TensorView<'a>)> {
    let mut outputs = vec![("out", problem.out)];
    outputs.extend(problem.lse.map(|t| ("lse", t)));
    outputs.extend(problem.weights.map(|t| ("weights", t)));
    outputs
}

/// The tensors that a problem reads besides q, k and v.
pub(crate) fn extra_inputs<'a>(
    problem: &Problem<'a>,
) -> impl Iterator<Item = (&'static str, TensorView<'a>)> {
    let keep = problem.dropout.as_ref().and_then(Dropout::given).copied();
    problem.mask.tensors().into_iter().chain(keep.map(|t| ("dropout", t)))
}
