//! The gated DeltaNet layer: project → convolve → delta rule → gated norm → project.

mod backward;
mod call;
mod config;
mod dispatch;
pub(crate) mod kernels;
pub(crate) mod reference;
mod weights;

pub use call::{GatedDeltaNetBackward, GatedDeltaNetForward, GatedDeltaNetState};
pub use config::GatedDeltaNetConfig;
pub use weights::GatedDeltaNetWeights;

use crate::device::DeviceFacts;
use crate::kernel::{Pipelines, Prepared, Recorder, Scratch, ScratchSize};
use crate::matmul::projection::{check_summed_rows, check_vector, check_weight};
use crate::tensor::{Access, CallTensors, DType, Element, Error, Shape, Tensor, TensorView};

/// A gated DeltaNet layer on one device, with gradients: the linear attention of Qwen3-Next and
/// Qwen3.5. Source: Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks: Improving Mamba2 with
/// Delta Rule", <https://arxiv.org/abs/2412.06464>. It follows `Qwen3NextGatedDeltaNet` of
/// Hugging Face transformers.
///
/// For each token x:
///
/// ```text
/// q, k, v, z = in_proj_qkvz x         b, a = in_proj_ba x
/// q, k, v    = silu(conv1d(q, k, v))                a causal convolution of each channel
/// β          = sigmoid(b)             decay = −exp(A_log) · softplus(a + dt_bias)
/// o          = the gated delta rule of q / |q|, k / |k|, v, β and decay, with scale 1 / √head_dim
/// out        = out_proj (norm · rms_norm(o) · silu(z))         the norm is per value head
/// ```
///
/// The layer keeps its weights' buffers alive, and reads them without a copy. Rows of
/// `in_proj_qkvz` and `in_proj_ba` are in another order than in a checkpoint.
/// [`GatedDeltaNetWeights::from_checkpoint`] changes the order once, on the host.
///
/// ```no_run
/// # fn f(gpu: &wgpu_attention::Gpu, tensor: impl FnMut(&str) -> Option<Vec<f32>>,
/// #      [x, y, conv, recurrent]: [&wgpu::Buffer; 4]) -> Result<(), wgpu_attention::Error> {
/// use wgpu_attention::layers::{
///     GatedDeltaNet, GatedDeltaNetConfig, GatedDeltaNetForward, GatedDeltaNetState, GatedDeltaNetWeights,
/// };
/// use wgpu_attention::{DType, Scratch, TensorView};
///
/// // The layers of Qwen3-Next-80B-A3B.
/// let config = GatedDeltaNetConfig::new(2048, 16, 128).value_heads(32);
/// let host = GatedDeltaNetWeights::from_checkpoint(&config, tensor)?;
/// let buffers = host.as_ref().try_map(|values| gpu.upload(values))?;
/// let placed = buffers.as_ref().zip(config.weight_shapes());
/// let weights = placed.map(|(buffer, shape)| TensorView::new(buffer, DType::F32, shape));
/// let layer = GatedDeltaNet::with_pipelines(gpu.pipelines(), config, &weights)?;
///
/// let state = GatedDeltaNetState {
///     conv: TensorView::new(conv, DType::F32, config.conv_state_shape(1)),
///     recurrent: TensorView::new(recurrent, DType::F32, config.recurrent_state_shape(1)),
/// };
/// let sequence = |buffer, length| TensorView::sequence(buffer, DType::F32, [1, length, 2048]);
/// let prompt = GatedDeltaNetForward::new(sequence(x, 100), sequence(y, 100)).begin(state);
/// let mut scratch = Scratch::new(gpu.device(), layer.scratch_size(&prompt)?)?;
/// gpu.submit(|encoder| layer.forward(encoder, &prompt, &mut scratch))?;
/// // Then token by token.
/// let token = GatedDeltaNetForward::new(sequence(x, 1), sequence(y, 1)).state(state);
/// gpu.submit(|encoder| layer.forward(encoder, &token, &mut scratch))
/// # }
/// ```
#[doc(alias = "Qwen3NextGatedDeltaNet")]
#[doc(alias = "linear attention")]
#[derive(Clone, Debug)]
pub struct GatedDeltaNet {
    pipelines: Pipelines,
    config: GatedDeltaNetConfig,
    weights: GatedDeltaNetWeights<Tensor>,
}

impl GatedDeltaNet {
    /// Makes a layer with its own pipelines. The shapes of `weights` are
    /// [`GatedDeltaNetConfig::weight_shapes`]; each is F32, F16 or BF16.
    ///
    /// # Errors
    /// Weights that do not have the shapes of `config`. A configuration that no layer can have.
    /// Everything that [`Error`] lists for tensors.
    pub fn new(
        device: &wgpu::Device,
        config: GatedDeltaNetConfig,
        weights: &GatedDeltaNetWeights<TensorView>,
    ) -> Result<Self, Error> {
        Self::with_pipelines(&Pipelines::new(device), config, weights)
    }

    /// Makes a layer that shares pipelines with other operators on the device.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_pipelines(
        pipelines: &Pipelines,
        config: GatedDeltaNetConfig,
        weights: &GatedDeltaNetWeights<TensorView>,
    ) -> Result<Self, Error> {
        let device = &pipelines.facts();
        config.check_on(device)?;
        check_weights(&config, weights.map(Some), Access::Read, device)?;
        let weights = weights.map(TensorView::to_owned);
        Ok(GatedDeltaNet { pipelines: pipelines.clone(), config, weights })
    }

    /// Returns the pipelines, to share them.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// Returns the temporary memory that `call` needs: the projected, convolved and attended rows,
    /// and the memory of [`RecurrentAttention`](crate::recurrent::RecurrentAttention).
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn scratch_size(&self, call: &GatedDeltaNetForward) -> Result<ScratchSize, Error> {
        let device = &self.pipelines.facts();
        let shape = self.check(call, device)?;
        self.forward_size(call, shape, device)
    }

    /// Records `call` into an encoder or a pass. It submits and copies nothing.
    ///
    /// # Errors
    /// Everything that [`Error`] lists for tensors and scratch. On an error the call records
    /// nothing.
    pub fn forward(
        &self,
        into: &mut impl Recorder,
        call: &GatedDeltaNetForward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.prepare(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles its pipelines and binds its tensors. [`Prepared::record`] can then
    /// record it many times.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn prepare(&self, call: &GatedDeltaNetForward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        let scratch: &Scratch = scratch;
        self.pipelines.with_fallbacks(|| {
            let device = &self.pipelines.facts();
            let shape = self.check(call, device)?;
            scratch.check(self.forward_size(call, shape, device)?)?;
            let dispatches = self.dispatches(call, shape, scratch, device)?;
            self.pipelines.bind("gated DeltaNet", &dispatches, scratch.bindings())
        })
    }

    /// Returns the temporary memory that the gradients of `call` need. It has the memory of the
    /// forward call, and the gradients of the same tensors.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn backward_scratch_size(&self, call: &GatedDeltaNetBackward) -> Result<ScratchSize, Error> {
        let device = &self.pipelines.facts();
        let shape = self.check_backward(call, device)?;
        self.backward_size(call, shape, device)
    }

    /// Records the gradients of a forward call that begins with zeros. Sums over tokens are added
    /// in a fixed order, so the bits are the same on every run.
    ///
    /// # Errors
    /// As [`forward`](Self::forward). [`Error::Unsupported`] if the call requests no gradient, or
    /// if the forward call continues with a state.
    pub fn backward(
        &self,
        into: &mut impl Recorder,
        call: &GatedDeltaNetBackward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.prepare_backward(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles its pipelines and binds its tensors. [`Prepared::record`] can then
    /// record it many times.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn prepare_backward(
        &self,
        call: &GatedDeltaNetBackward,
        scratch: &mut Scratch,
    ) -> Result<Prepared, Error> {
        let scratch: &Scratch = scratch;
        self.pipelines.with_fallbacks(|| {
            let device = &self.pipelines.facts();
            let shape = self.check_backward(call, device)?;
            scratch.check(self.backward_size(call, shape, device)?)?;
            let dispatches = self.backward_dispatches(call, shape, scratch, device)?;
            self.pipelines.bind("gated DeltaNet backward", &dispatches, scratch.bindings())
        })
    }

    /// Checks the input and the lengths, and returns the shape of the recurrence.
    fn check_inputs<'a>(
        &'a self,
        call: &GatedDeltaNetForward<'a>,
        tensors: &mut CallTensors<'a, '_>,
    ) -> Result<Shape, Error> {
        let GatedDeltaNetConfig { features, heads, value_heads, head_dim, value_dim, dtype, .. } =
            self.config;
        let [batch, _, length, _] = call.x.shape();
        tensors.read("x", call.x, dtype, [batch, 1, length, features])?;
        check_summed_rows("x", &call.x, 1)?;
        tensors.read("lengths", call.lengths, DType::U32, [batch, 1, 1, 1])?;
        let shape = Shape {
            batch,
            heads: value_heads,
            kv_heads: heads,
            q_len: length,
            kv_len: length,
            head_dim,
            value_dim,
        };
        shape.check()?;
        tensors.read_checked(self.weights.as_ref().map(Tensor::view).named());
        Ok(shape)
    }

    fn check(&self, call: &GatedDeltaNetForward, device: &DeviceFacts) -> Result<Shape, Error> {
        let mut tensors = CallTensors::new(device);
        let shape = self.check_inputs(call, &mut tensors)?;
        tensors.write("out", call.out, self.config.dtype, call.x.shape())?;
        if let Some(GatedDeltaNetState { conv, recurrent }) = call.state {
            let of_conv = self.config.conv_state_shape(shape.batch);
            tensors.write("state.conv", conv, Element::Float, of_conv)?;
            let of_recurrent = self.config.recurrent_state_shape(shape.batch);
            tensors.write("state.recurrent", recurrent, DType::F32, of_recurrent)?;
        }
        tensors.check_aliasing()?;
        Ok(shape)
    }

    fn check_backward(&self, call: &GatedDeltaNetBackward, device: &DeviceFacts) -> Result<Shape, Error> {
        let mut tensors = CallTensors::new(device);
        if call.forward.state.is_some() && !call.forward.begins {
            let why = "the forward call has replaced its state; use calls without a state to train";
            return Err(Error::Unsupported { what: "the backward pass of a call with `state`", why });
        }
        let shape = self.check_inputs(&call.forward, &mut tensors)?;
        let x = call.forward.x.shape();
        tensors.read("d_out", call.d_out, Element::Float, x)?;
        tensors.write("d_x", call.d_x, Element::Float, x)?;
        check_weights(&self.config, call.d_weights, Access::Write, device)?;
        let written = call.d_weights.named();
        tensors.write_checked(written.into_iter().filter_map(|(name, view)| Some((name, view?))));
        tensors.require_gradients("no gradient is requested; set `d_x` or `d_weights`")?;
        tensors.check_aliasing()?;
        Ok(shape)
    }
}

/// Checks the types, the memory and the shapes of weights or of their gradients.
fn check_weights(
    config: &GatedDeltaNetConfig,
    weights: GatedDeltaNetWeights<Option<TensorView>>,
    access: Access,
    device: &DeviceFacts,
) -> Result<(), Error> {
    let shapes = config.weight_shapes().named();
    weights.named().into_iter().zip(shapes).try_for_each(|((name, view), (_, shape))| match view {
        Some(view) if shape[2] == 1 && view.shape()[2] == 1 => {
            check_vector(name, &view, shape[3], access, device)
        }
        Some(view) => check_weight(name, &view, shape, access, device),
        None => Ok(()),
    })
}
