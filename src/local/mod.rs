//! The operator: softmax over a window around a position, times a Gaussian, times the values.

mod call;
mod config;
pub(crate) mod dispatch;
pub(crate) mod kernels;
mod predictor;
pub(crate) mod reference;

pub use call::{LocalBackward, LocalForward};
pub use config::LocalConfig;
use dispatch::{LocalGradientViews, LocalProblem};
pub use predictor::{PositionPredictor, PredictorBackward, PredictorForward};

use crate::device::DeviceFacts;
use crate::kernel::{Pipelines, Prepared, Recorder, Scratch, ScratchSize, Slot};
use crate::tensor::{Access, CallTensors, DType, Error, Shape, TensorView, expect_broadcast};

/// Luong's local-p attention (Luong et al. 2015, "Effective approaches to attention-based neural
/// machine translation", equations 7 to 10). Use it if each query should see only the keys near a
/// position. The position p need not be a whole number, and the window has the keys j with
/// `|j − floor(p + ½)| ≤ D`. The weights are the softmax of `scale · q · k` over the window, times
/// `exp(−(j − p)² / 2σ²)`. They are not normalised after the Gaussian. The backward pass includes
/// the gradient of positions.
///
/// [`PositionPredictor`] computes positions from hidden states. For Luong's `dot` scores, pass
/// queries unchanged. For `general`, first multiply them by `Wᵀ` with a
/// [`Projection`](crate::Projection). [`AttentionalVector`](crate::layers::AttentionalVector) takes
/// the output. If the window is around the query's row (local-m), use
/// [`Mask::local_m`](crate::Mask::local_m), which every attention accepts. For local-m around other
/// positions, use this operator without [`sigma`](LocalConfig::sigma).
///
/// Work and memory of a forward call grow with `q_len · (2D + 1)`, for any `kv_len`. For the
/// gradients of keys and values the kernels test every query against every key.
///
/// ```no_run
/// # fn f(device: &wgpu::Device, queue: &wgpu::Queue, q: &wgpu::Buffer, kv: &wgpu::Buffer, p: &wgpu::Buffer,
/// #      out: &wgpu::Buffer) -> Result<(), wgpu_attention::Error> {
/// use wgpu_attention::{DType, Scratch, TensorView};
/// use wgpu_attention::local::{LocalAttention, LocalConfig, LocalForward};
///
/// let attention = LocalAttention::new(device, LocalConfig::new(1, 512, 10))?;
/// let view = |buffer, length, dim| TensorView::new(buffer, DType::F32, [8, 1, length, dim]);
/// let (q, kv) = (view(q, 1, 512), view(kv, 50, 512));
/// let call = LocalForward::new([q, kv, kv], view(p, 1, 1), view(out, 1, 512));
/// let mut scratch = Scratch::new(device, attention.scratch_size(&call)?)?;
///
/// let mut encoder = device.create_command_encoder(&Default::default());
/// attention.forward(&mut encoder, &call, &mut scratch)?; // records only
/// queue.submit([encoder.finish()]);
/// # Ok(()) }
/// ```
#[doc(alias = "local-p")]
#[doc(alias = "luong")]
#[derive(Clone, Debug)]
pub struct LocalAttention {
    pipelines: Pipelines,
    config: LocalConfig,
}

impl LocalAttention {
    /// Creates the operator with new pipelines.
    ///
    /// # Errors
    /// A configuration that no call could satisfy, or a missing feature.
    pub fn new(device: &wgpu::Device, config: LocalConfig) -> Result<Self, Error> {
        Self::with_pipelines(&Pipelines::new(device), config)
    }

    /// Creates the operator with pipelines that other operators on the device share.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_pipelines(pipelines: &Pipelines, config: LocalConfig) -> Result<Self, Error> {
        config.check(&pipelines.facts())?;
        Ok(LocalAttention { pipelines: pipelines.clone(), config })
    }

    /// Returns the pipelines, for other operators to share.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// Returns the temporary memory that `call` needs: 4 bytes for each query and each key of the
    /// widest possible window.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn scratch_size(&self, call: &LocalForward) -> Result<ScratchSize, Error> {
        let device = &self.pipelines.facts();
        let problem = self.check(call, device)?;
        Ok(ScratchSize::default().with(Slot::Scores, problem.band_bytes(false, device)?))
    }

    /// Records `call` into an encoder or a pass. It submits, copies and reads back nothing.
    ///
    /// # Errors
    /// Any error that [`Error`] lists for tensors and scratch. The encoder is then unchanged.
    pub fn forward(
        &self,
        into: &mut impl Recorder,
        call: &LocalForward,
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
    pub fn prepare(&self, call: &LocalForward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        let problem = self.check(call, device)?;
        scratch.check(self.scratch_size(call)?)?;
        let dispatches = problem.forward(call.out, call.weights, scratch.buffer(Slot::Scores)?, device);
        self.pipelines.bind("local attention", &dispatches, scratch.bindings())
    }

    /// Checks the tensors that forward and backward calls share. `out` is the output or its
    /// gradient.
    fn problem<'a>(
        &self,
        call: &LocalForward<'a>,
        out: (&'static str, TensorView<'a>, Access),
        tensors: &mut CallTensors<'a, '_>,
    ) -> Result<LocalProblem<'a>, Error> {
        let LocalConfig { heads, kv_heads, head_dim, value_dim, dtype, half_window, sigma, scale } =
            self.config;
        let LocalForward { q, k, v, positions, lengths, .. } = *call;
        let dims = [heads, kv_heads, head_dim, value_dim];
        let shape = Shape::of(tensors, dtype, dims, [q, k, v], out)?;
        let Shape { batch, q_len, .. } = shape;
        tensors.read("positions", positions, DType::F32, [batch, positions.shape()[1], q_len, 1])?;
        expect_broadcast("positions", positions.shape(), shape.lse())?;
        tensors.read_broadcast("lengths", lengths, DType::U32, [batch, 1, 1, 1])?;
        Ok(LocalProblem { shape, q, k, v, positions, lengths, half_window, sigma, scale })
    }

    fn check<'a>(&self, call: &LocalForward<'a>, device: &DeviceFacts) -> Result<LocalProblem<'a>, Error> {
        let mut tensors = CallTensors::new(device);
        let problem = self.problem(call, ("out", call.out, Access::Write), &mut tensors)?;
        tensors.write("weights", call.weights, DType::F32, problem.shape.weights())?;
        tensors.finish()?;
        Ok(problem)
    }
}

/// The backward pass. It uses no atomics: the same inputs on the same device give the same bits.
impl LocalAttention {
    /// Returns the temporary memory that `call` needs: twice the memory of the forward call.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn backward_scratch_size(&self, call: &LocalBackward) -> Result<ScratchSize, Error> {
        let device = &self.pipelines.facts();
        let problem = self.check_backward(call, device)?;
        Ok(ScratchSize::default().with(Slot::Scores, problem.band_bytes(true, device)?))
    }

    /// Records the gradients of a forward call into an encoder or a pass.
    ///
    /// # Errors
    /// Any error that [`Error`] lists for tensors and scratch, and [`Error::Unsupported`] if the
    /// call requests no gradient. The encoder is then unchanged.
    pub fn backward(
        &self,
        into: &mut impl Recorder,
        call: &LocalBackward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.prepare_backward(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles its kernels and binds its tensors. [`Prepared::record`] then records
    /// it any number of times.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn prepare_backward(&self, call: &LocalBackward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        let problem = self.check_backward(call, device)?;
        scratch.check(self.backward_scratch_size(call)?)?;
        let LocalBackward { d_out, d_q, d_k, d_v, d_positions, accumulates, .. } = *call;
        let gradients = LocalGradientViews { d_out, d_q, d_k, d_v, d_positions, accumulates };
        let dispatches = problem.backward(&gradients, scratch.buffer(Slot::Scores)?, device);
        self.pipelines.bind("local attention backward", &dispatches, scratch.bindings())
    }

    fn check_backward<'a>(
        &self,
        call: &LocalBackward<'a>,
        device: &DeviceFacts,
    ) -> Result<LocalProblem<'a>, Error> {
        let LocalBackward { forward, d_out, d_q, d_k, d_v, d_positions, .. } = *call;
        let LocalForward { q, k, v, positions, .. } = forward;
        let mut tensors = CallTensors::new(device);
        let problem = self.problem(&forward, ("d_out", d_out, Access::Read), &mut tensors)?;
        tensors.gradient("d_q", d_q, q.dtype(), q.shape())?;
        tensors.gradient("d_k", d_k, k.dtype(), k.shape())?;
        tensors.gradient("d_v", d_v, v.dtype(), v.shape())?;
        tensors.gradient("d_positions", d_positions, positions.dtype(), positions.shape())?;
        tensors.require_gradients("no gradient is requested; set `d_q`, `d_k`, `d_v` or `d_positions`")?;
        tensors.check_aliasing()?;
        Ok(problem)
    }
}
