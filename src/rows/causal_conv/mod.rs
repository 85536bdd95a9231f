//! The causal convolution operator: short depthwise convolutions along the rows of sequences, with
//! states for generation, and their gradients.

mod backward;
pub(crate) mod dispatch;
pub(crate) mod kernels;
pub(crate) mod reference;

pub use backward::CausalConvBackward;
use dispatch::{CausalConvOp, WrittenState};
use kernels::causal_conv::{MOST_COLUMNS, Sequences};

use std::sync::Arc;

use crate::device::DeviceFacts;
use crate::kernel::{BindingCache, Dispatches, KernelOptions, Pipelines, Prepared, Recorder};
use crate::matmul::Activation;
use crate::matmul::projection::check_summed_rows;
use crate::tensor::{CallTensors, DType, Element, Error, TensorView, expect};

/// One call of a causal convolution. Each channel has a filter of `width` numbers, 1 to 8:
///
/// ```text
/// out[i, c] = f(bias[c] + Σ weight[c, j] · x[i − width + 1 + j, c])        over j
/// ```
///
/// The last column of the weight meets the current row. Rows before `x` are zero, or the rows of a
/// state. A state is the last `width − 1` rows, the oldest first, before any activation. Calls that
/// pass a state on give the same results as one call for all rows.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct CausalConvForward<'a> {
    x: TensorView<'a>,
    weight: TensorView<'a>,
    out: TensorView<'a>,
    bias: Option<TensorView<'a>>,
    activation: Option<Activation>,
    initial_state: Option<TensorView<'a>>,
    final_state: Option<TensorView<'a>>,
    state: Option<TensorView<'a>>,
    slots: Option<TensorView<'a>>,
    lengths: Option<TensorView<'a>>,
    packed: Option<TensorView<'a>>,
}

impl<'a> CausalConvForward<'a> {
    /// Convolves the rows of `x` with `weight` and writes the results to `out`. `x` and `out` are
    /// `[batch, 1, length, channels]`, see [`TensorView::sequence`]. `weight` is `[1, 1, channels,
    /// width]`, see [`TensorView::matrix`]. Each is F32, F16 or BF16, with any strides: storage
    /// `[batch, channels, length]` is a transposed view.
    pub fn new(x: TensorView<'a>, weight: TensorView<'a>, out: TensorView<'a>) -> Self {
        CausalConvForward {
            x,
            weight,
            out,
            bias: None,
            activation: None,
            initial_state: None,
            final_state: None,
            state: None,
            slots: None,
            lengths: None,
            packed: None,
        }
    }

    /// Adds `bias`, `[channels]` as [`TensorView::vector`]; F32, F16 or BF16.
    pub fn bias(mut self, bias: impl Into<Option<TensorView<'a>>>) -> Self {
        self.bias = bias.into();
        self
    }

    /// Applies an activation to the sums. Mamba has [`Activation::Silu`].
    pub fn activation(mut self, activation: impl Into<Option<Activation>>) -> Self {
        self.activation = activation.into();
        self
    }

    /// Sets the rows before `x`, `[sequences, 1, width − 1, channels]`; F32, F16 or BF16. They are
    /// zero otherwise. Each batch entry is a sequence, unless the rows are packed.
    pub fn initial_state(mut self, initial_state: impl Into<Option<TensorView<'a>>>) -> Self {
        self.initial_state = initial_state.into();
        self
    }

    /// Writes the last `width − 1` rows of each sequence, with the shape of
    /// [`initial_state`](Self::initial_state); F32, F16 or BF16. A sequence with fewer rows keeps
    /// rows of its initial state.
    pub fn final_state(mut self, final_state: impl Into<Option<TensorView<'a>>>) -> Self {
        self.final_state = final_state.into();
        self
    }

    /// Reads the initial state from `state` and overwrites it with the final state. Use it to
    /// generate: a call of up to 16 rows is then one dispatch. `state` has the shape of
    /// [`initial_state`](Self::initial_state), and replaces both other states. With
    /// [`slots`](Self::slots) it is `[states, 1, width − 1, channels]`.
    #[doc(alias = "conv_state")]
    pub fn state(mut self, state: impl Into<Option<TensorView<'a>>>) -> Self {
        self.state = state.into();
        self
    }

    /// The index of each sequence's state in [`state`](Self::state): `[sequences, 1, 1, 1]`, U32. A
    /// sequence whose index is out of range begins with zeros, and its state is dropped. No two
    /// sequences of a call may have the same index: then the state has rows of any of them.
    #[doc(alias = "conv_state_indices")]
    pub fn slots(mut self, slots: impl Into<Option<TensorView<'a>>>) -> Self {
        self.slots = slots.into();
        self
    }

    /// The number of rows of each batch entry: `[batch, 1, 1, 1]`, U32. Rows past it give 0. A
    /// length above the number of rows means all rows.
    pub fn lengths(mut self, lengths: impl Into<Option<TensorView<'a>>>) -> Self {
        self.lengths = lengths.into();
        self
    }

    /// Packs sequences one after the other in a batch of one. Sequence n has rows `starts[n]` to
    /// `starts[n + 1]`. `starts` is `[1, 1, 1, sequences + 1]`, U32, and must not decrease. Rows
    /// outside all sequences give 0.
    #[doc(alias = "cu_seqlens")]
    pub fn packed(mut self, starts: impl Into<Option<TensorView<'a>>>) -> Self {
        self.packed = starts.into();
        self
    }

    fn state_shape(&self, sequences: usize) -> [usize; 4] {
        let [.., width] = self.weight.shape();
        [sequences, 1, width.saturating_sub(1), self.x.shape()[3]]
    }

    /// Refuses states of a width of 1, which has none.
    fn check_has_states(&self) -> Result<(), Error> {
        if self.weight.shape()[3] > 1 {
            return Ok(());
        }
        let why = "the weight has one column, so no row depends on earlier rows; omit the state";
        Err(Error::Unsupported { what: "a state", why })
    }

    /// Checks the tensors that forward and backward calls read.
    fn check_inputs<'d>(
        &self,
        device: &'d DeviceFacts,
    ) -> Result<(CallTensors<'a, 'd>, CausalConvOp<'a>), Error> {
        let CausalConvForward { x, weight, bias, activation, lengths, packed, .. } = *self;
        let mut tensors = CallTensors::new(device);
        let [batch, _, length, channels] = x.shape();
        tensors.read("x", x, Element::Float, [batch, 1, length, channels])?;
        check_summed_rows("x", &x, 1)?;
        let [.., width] = weight.shape();
        tensors.read("weight", weight, Element::Float, [1, 1, channels, width])?;
        if width > MOST_COLUMNS {
            let expected = "from 1 to 8: the columns of the weight";
            return Err(Error::Option { option: "width", value: width as f64, expected });
        }
        tensors.read("bias", bias, Element::Float, [1, 1, 1, channels])?;
        let (rows, numbers, sequences) = match (lengths, packed) {
            (Some(_), Some(_)) => {
                let why = "packed sequences have no other lengths; set one of them";
                return Err(Error::Unsupported { what: "`lengths` with `packed`", why });
            }
            (Some(t), None) => {
                tensors.read("lengths", t, DType::U32, [batch, 1, 1, 1])?;
                (Sequences::Lengths, Some(t), batch)
            }
            (None, Some(t)) => {
                let starts = t.shape()[3].max(2);
                tensors.read("cu_seqlens", t, DType::U32, [1, 1, 1, starts])?;
                expect("x", x.shape(), 0, 1)?;
                (Sequences::Packed, Some(t), starts - 1)
            }
            (None, None) => (Sequences::All, None, batch),
        };
        if self.initial_state.is_some() {
            self.check_has_states()?;
        }
        let initial = self.initial_state;
        tensors.read("initial_state", initial, Element::Float, self.state_shape(sequences))?;
        let op = CausalConvOp { x, weight, bias, initial, rows, numbers, sequences, activation };
        Ok((tensors, op))
    }

    /// Checks the state that the call writes.
    fn check_state(
        &self,
        tensors: &mut CallTensors<'a, '_>,
        sequences: usize,
    ) -> Result<Option<WrittenState<'a>>, Error> {
        let CausalConvForward { initial_state, final_state, state, slots, .. } = *self;
        if slots.is_some() && state.is_none() {
            let why = "they are indices of states; set `state` too";
            return Err(Error::Unsupported { what: "`slots` without `state`", why });
        }
        if state.is_some() && (initial_state.is_some() || final_state.is_some()) {
            let why = "`state` replaces both; omit them";
            return Err(Error::Unsupported { what: "`state` with `initial_state` or `final_state`", why });
        }
        if state.is_some() || final_state.is_some() {
            self.check_has_states()?;
        }
        tensors.write("final_state", final_state, Element::Float, self.state_shape(sequences))?;
        tensors.read("slots", slots, DType::U32, [sequences, 1, 1, 1])?;
        if let Some(state) = state {
            let states = if slots.is_some() { state.shape()[0] } else { sequences };
            tensors.write("state", state, Element::Float, self.state_shape(states))?;
        }
        let in_place = state.is_some();
        Ok(state.or(final_state).map(|state| WrittenState { state, in_place, slots }))
    }
}

/// A causal convolution of each channel along the rows of sequences, and its gradients. It comes
/// before the recurrent states of Mamba (Gu and Dao 2023) and of Kimi Linear (Kimi Team 2025). It
/// also comes before those of gated DeltaNet (Yang, Kautz and Hatamizadeh 2024). It is
/// `causal_conv1d` of Mamba and `CausalConvWithState` of ONNX.
///
/// ```no_run
/// # use wgpu_attention::{Error, TensorView, wgpu};
/// # use wgpu_attention::matmul::Activation;
/// # use wgpu_attention::rows::{CausalConv, CausalConvForward};
/// # fn f(device: &wgpu::Device, encoder: &mut wgpu::CommandEncoder, tensors: [TensorView; 5]) -> Result<(), Error> {
/// # let [x, weight, bias, state, out] = tensors;
/// let conv = CausalConv::new(device);
/// let call = CausalConvForward::new(x, weight, out).bias(bias).activation(Activation::Silu);
/// conv.forward(encoder, &call.state(state))
/// # }
/// ```
///
/// Sums are computed in f32. A call is one dispatch, and a second one for the state if `x` has more
/// than 16 rows. `cu_seqlens` is clamped to the number of rows. If it decreases, the result is
/// undefined. Nothing outside the tensors is read or written.
///
/// The operator stores the bindings of recent forward calls, so that a repeated call creates
/// nothing. The bindings keep some buffers alive: see [`forget`](Self::forget). The scratch stores
/// the bindings of backward calls.
#[doc(alias = "causal_conv1d")]
#[doc(alias = "depthwise")]
#[derive(Clone, Debug)]
pub struct CausalConv {
    pipelines: Pipelines,
    bindings: Arc<BindingCache>,
    kernel_options: KernelOptions,
}

impl CausalConv {
    /// Creates the operator with separate pipelines.
    pub fn new(device: &wgpu::Device) -> Self {
        Self::with_pipelines(&Pipelines::new(device))
    }

    /// Creates the operator with pipelines that other operators of the device share.
    pub fn with_pipelines(pipelines: &Pipelines) -> Self {
        CausalConv {
            pipelines: pipelines.clone(),
            bindings: Arc::default(),
            kernel_options: KernelOptions::new(),
        }
    }

    /// The pipelines of the operator, to share with other operators.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// Drops the bindings of past forward calls, and with them the references to their buffers.
    /// Clones share the bindings.
    ///
    /// Without this call, unused bindings are dropped after a few calls, at most 64. Until then,
    /// the buffers that only these bindings keep alive are limited. They have at most twice the
    /// bytes of the last call's buffers, or 8 MiB if that is more.
    pub fn forget(&self) {
        self.bindings.clear();
    }

    /// Sets the class of kernels. The other [`KernelOptions`] do not apply to this operator.
    pub fn kernel_options(mut self, kernel_options: KernelOptions) -> Self {
        self.kernel_options = kernel_options;
        self
    }

    /// Records `call` into an encoder or a pass.
    ///
    /// # Errors
    /// Shapes that do not match, a width above 8, and written tensors that overlap other tensors.
    /// [`Error::Unsupported`] for options that exclude each other. Every other [`Error`] of
    /// tensors. After an error nothing has been recorded.
    pub fn forward(&self, into: &mut impl Recorder, call: &CausalConvForward) -> Result<(), Error> {
        self.prepare(call)?.record(into);
        Ok(())
    }

    /// Checks `call`, then compiles and binds its kernels. [`Prepared::record`] can then record it
    /// any number of times.
    ///
    /// # Errors
    /// See [`forward`](Self::forward).
    pub fn prepare(&self, call: &CausalConvForward) -> Result<Prepared, Error> {
        let dispatches = self.dispatches(call)?;
        self.pipelines.bind("causal convolution", &dispatches, &self.bindings)
    }

    fn dispatches<'a>(&self, call: &CausalConvForward<'a>) -> Result<Dispatches<'a>, Error> {
        let device = &self.pipelines.facts();
        let (mut tensors, op) = call.check_inputs(device)?;
        tensors.write("out", call.out, Element::Float, call.x.shape())?;
        let written = call.check_state(&mut tensors, op.sequences)?;
        tensors.finish()?;
        Ok(op.forward(call.out, written, &self.kernel_options, device))
    }
}
