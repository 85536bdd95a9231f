//! Recurrent attention: a state for each head, which decays and gains each token.

mod call;
mod config;
pub(crate) mod dispatch;
pub(crate) mod kernels;
pub(crate) mod plan;
pub(crate) mod reference;

pub use call::{RecurrentBackward, RecurrentForward};
pub use config::{Decay, RecurrentConfig};
use dispatch::{FEW, Gradients, Problem};

use crate::kernel::{Pipelines, Prepared, Recorder, Scratch, ScratchSize};
use crate::tensor::{CallTensors, DType, Element, Error, Shape, TensorView, check_apart, expect};

/// Recurrent attention on one device: linear attention with decay, and the delta rules. It is the
/// attention of Mamba-2, RetNet, lightning attention, gated linear attention, DeltaNet, gated
/// DeltaNet and KDA, forward and backward.
///
/// For each value head, token by token:
///
/// ```text
/// S = Diag(exp(decay)) S
/// S = S + k vᵀ               or, with the delta rule,  S = S + β k (v − Sᵀ k)ᵀ
/// out = scale · Sᵀ q
/// ```
///
/// Long calls work on chunks of 64 tokens, or 16 with a decay for each channel. The pairs within a
/// chunk are products of matrices, and a state stands for all earlier tokens. The delta rules solve
/// a triangular equation for each chunk. The source is Yang et al. 2024, "Parallelizing Linear
/// Transformers with the Delta Rule over Sequence Length". Calls of at most 16 tokens go token by
/// token. Both give the same results. A decay is the exponential of a sum of logarithms, never a
/// quotient, so that any decay is safe.
///
/// | layer of | call |
/// |---|---|
/// | Qwen3-Next, Qwen3.5, gated DeltaNet | `decay(PerHead)`, `delta(true)`, `normalize_qk(1e-6)` |
/// | Kimi Linear (KDA) | `decay(PerChannel)`, `delta(true)`, `normalize_qk(1e-6)` |
/// | DeltaNet | `delta(true)`, `normalize_qk(1e-6)` |
/// | Mamba-2 | `decay(PerHead)`, `scale(1.0)`; q, k, v are C, B and Δt · x, the decay is Δt · A |
/// | MiniMax, Ling (lightning attention), RetNet | `decay(PerHead)`, constant: `[1, heads, 1, 1]` |
/// | gated linear attention | `decay(PerChannel)` |
///
/// ```no_run
/// # use wgpu_attention::{Error, wgpu};
/// # fn f(device: &wgpu::Device, queue: &wgpu::Queue, buffers: [&wgpu::Buffer; 6]) -> Result<(), Error> {
/// use wgpu_attention::recurrent::{Decay, RecurrentAttention, RecurrentConfig, RecurrentForward};
/// use wgpu_attention::{DType, Scratch, TensorView};
///
/// let config = RecurrentConfig::new(16, 128).value_heads(32).decay(Decay::PerHead);
/// let attention = RecurrentAttention::new(device, config.delta(true).normalize_qk(1e-6))?;
/// let view = |n: usize, heads, channels| {
///     TensorView::new(buffers[n], DType::F32, [1, heads, 4096, channels])
/// };
/// let call = RecurrentForward::new(view(0, 16, 128), view(1, 16, 128), view(2, 32, 128), view(3, 32, 128))
///     .decay(view(4, 32, 1))
///     .beta(view(5, 32, 1));
/// let mut scratch = Scratch::new(device, attention.scratch_size(&call)?)?;
///
/// let mut encoder = device.create_command_encoder(&Default::default());
/// attention.forward(&mut encoder, &call, &mut scratch)?; // records only
/// queue.submit([encoder.finish()]);
/// # Ok(()) }
/// ```
#[doc(alias = "GatedDeltaNet")]
#[doc(alias = "KDA")]
#[doc(alias = "Mamba2")]
#[doc(alias = "RetNet")]
#[doc(alias = "GLA")]
#[derive(Clone, Debug)]
pub struct RecurrentAttention {
    pipelines: Pipelines,
    config: RecurrentConfig,
}

impl RecurrentAttention {
    /// Creates the operator with new pipelines.
    ///
    /// # Errors
    /// A configuration that no call could satisfy, or a missing feature.
    pub fn new(device: &wgpu::Device, config: RecurrentConfig) -> Result<Self, Error> {
        Self::with_pipelines(&Pipelines::new(device), config)
    }

    /// Creates the operator with pipelines that other operators on the device share.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_pipelines(pipelines: &Pipelines, config: RecurrentConfig) -> Result<Self, Error> {
        config.check(&pipelines.facts())?;
        Ok(RecurrentAttention { pipelines: pipelines.clone(), config })
    }

    /// Returns the pipelines, for other operators to share.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// Returns the temporary memory that `call` needs. The rows of a span of chunks take at most 96
    /// MiB, for any length and any number of heads. The states of sequences take as much as the
    /// caller's. Heads that need more are computed in groups, one after the other. The bounds are
    /// exceeded only if a single head with a single chunk needs more.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn scratch_size(&self, call: &RecurrentForward) -> Result<ScratchSize, Error> {
        self.check(call)?.scratch_size(&self.pipelines.facts())
    }

    /// Records `call` into an encoder or a pass. It submits, copies and reads back nothing.
    ///
    /// # Errors
    /// Any error that [`Error`] lists for tensors, options and scratch. The encoder is then
    /// unchanged.
    pub fn forward(
        &self,
        into: &mut impl Recorder,
        call: &RecurrentForward,
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
    pub fn prepare(&self, call: &RecurrentForward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        let problem = self.check(call)?;
        let dispatches = dispatch::dispatches(&problem, scratch, &self.pipelines.facts())?;
        self.pipelines.bind("recurrent attention", &dispatches, scratch.bindings())
    }

    /// Returns the temporary memory that the gradients of `call` need. The rows of a span take at
    /// most 96 MiB, as in the forward pass. The states of sequences and their gradients take twice
    /// as much as the caller's. If a call has several spans, each adds the states of its beginning.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn backward_scratch_size(&self, call: &RecurrentBackward) -> Result<ScratchSize, Error> {
        self.check_backward(call)?.scratch_size(&self.pipelines.facts())
    }

    /// Records the gradients of a forward call into an encoder or a pass. It computes the states
    /// again, and then goes from the last chunk to the first.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), and [`Error::Unsupported`] if the call requests no gradient.
    pub fn backward(
        &self,
        into: &mut impl Recorder,
        call: &RecurrentBackward,
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
    pub fn prepare_backward(
        &self,
        call: &RecurrentBackward,
        scratch: &mut Scratch,
    ) -> Result<Prepared, Error> {
        let problem = self.check_backward(call)?;
        let dispatches = dispatch::dispatches(&problem, scratch, &self.pipelines.facts())?;
        self.pipelines.bind("recurrent attention backward", &dispatches, scratch.bindings())
    }

    /// Checks the tensors that forward and backward calls share, and returns the problem.
    fn problem<'a>(
        &self,
        call: &RecurrentForward<'a>,
        tensors: &mut CallTensors<'a, '_>,
    ) -> Result<Problem<'a>, Error> {
        let (config, device) = (&self.config, tensors.device);
        let RecurrentForward { q, k, v, decay, beta, lengths, packed, slots, initial_slots, .. } = *call;
        let [batch, _, length, _] = q.shape();
        let RecurrentConfig { heads, value_heads, head_dim, value_dim, dtype, .. } = *config;
        let keys = [batch, heads, length, head_dim];
        tensors.read("q", q, dtype, keys)?;
        tensors.read("k", k, dtype, keys)?;
        tensors.read("v", v, dtype, [batch, value_heads, length, value_dim])?;
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
        let channels = if config.decay == Decay::PerChannel { head_dim } else { 1 };
        let given =
            [("decay", decay, config.decay != Decay::None, channels), ("beta", beta, config.delta, 1)];
        for (tensor, view, used, channels) in given {
            match (view, used) {
                (Some(view), true) => {
                    let to = [batch, value_heads, length, channels];
                    tensors.read_broadcast(tensor, view, Element::Float, to)?;
                    expect(tensor, view.shape(), 3, channels)?;
                }
                (None, true) => {
                    let what = if tensor == "decay" {
                        "a call without `decay`"
                    } else {
                        "a delta rule without `beta`"
                    };
                    return Err(Error::Unsupported { what, why: "set it in the call" });
                }
                (Some(_), false) => {
                    let why = "the configuration has no use for it; see `RecurrentConfig`";
                    return Err(Error::Unsupported { what: tensor, why });
                }
                (None, false) => {}
            }
        }
        tensors.read("lengths", lengths, DType::U32, [batch, 1, 1, 1])?;
        if let Some(starts) = packed {
            tensors.read("packed", starts, DType::U32, [1, 1, 1, starts.shape()[3].max(2)])?;
            expect("q", q.shape(), 0, 1)?;
            if lengths.is_some() {
                let why = "the starts define the length of each sequence; omit `lengths`";
                return Err(Error::Unsupported { what: "`lengths` with packed sequences", why });
            }
        }
        let sequences = self.sequences(call);
        tensors.read("slots", slots, DType::U32, [sequences, 1, 1, 1])?;
        tensors.read("initial_slots", initial_slots, DType::U32, [sequences, 1, 1, 1])?;
        for (names, state) in
            [(slots, call.final_state.or(call.initial_state)), (initial_slots, call.initial_state)]
        {
            if names.is_some() && state.is_none() {
                let why = "they name states; set `initial_state`, `final_state` or `state`";
                return Err(Error::Unsupported { what: "slots without a state", why });
            }
        }
        if initial_slots.is_some() && call.in_place {
            let why = "the states change in place; use `slots`, or separate states";
            return Err(Error::Unsupported { what: "`initial_slots` with `state`", why });
        }
        Ok(Problem {
            decay,
            beta,
            lengths,
            starts: packed,
            initial: call.initial_state,
            last: call.final_state,
            in_place: call.in_place,
            slots,
            initial_slots,
            ..config.problem(shape, [q, k, v], device)
        })
    }

    /// Returns the number of sequences of a call.
    fn sequences(&self, call: &RecurrentForward) -> usize {
        call.packed.map_or(call.q.shape()[0], |starts| starts.shape()[3].saturating_sub(1))
    }

    /// Returns the shape of states, of which there are `view`'s number if the call names them.
    fn states(&self, sequences: usize, view: Option<TensorView>, named: bool) -> [usize; 4] {
        let RecurrentConfig { value_heads, head_dim, value_dim, .. } = self.config;
        let count = view.filter(|_| named).map_or(sequences, |view| view.shape()[0]);
        [count, value_heads, head_dim, value_dim]
    }

    fn check<'a>(&self, call: &RecurrentForward<'a>) -> Result<Problem<'a>, Error> {
        let device = &self.pipelines.facts();
        let mut tensors = CallTensors::new(device);
        let problem = self.problem(call, &mut tensors)?;
        let RecurrentForward { out, initial_state, final_state, slots, initial_slots, states, .. } = *call;
        tensors.write("out", out, self.config.dtype, problem.shape.out())?;
        let sequences = self.sequences(call);
        if !call.in_place {
            let named = slots.or(initial_slots).is_some();
            let shape = self.states(sequences, initial_state, named);
            tensors.read("initial_state", initial_state, DType::F32, shape)?;
        }
        let shape = self.states(sequences, final_state, slots.is_some());
        tensors.write("final_state", final_state, DType::F32, shape)?;
        if let Some(states) = states {
            if problem.shape.q_len > FEW || problem.starts.is_some() {
                let why = "they are for draft tokens: at most 16, not packed";
                return Err(Error::Unsupported { what: "`states` of this call", why });
            }
            let count = problem.shape.batch.saturating_mul(problem.shape.q_len);
            tensors.write("states", states, DType::F32, self.states(count, None, false))?;
        }
        tensors.check_aliasing()?;
        check_apart(&tensors.written()[1..], device)?;
        Ok(Problem { out: Some(out), kept: states, ..problem })
    }

    fn check_backward<'a>(&self, call: &RecurrentBackward<'a>) -> Result<Problem<'a>, Error> {
        let device = &self.pipelines.facts();
        let mut tensors = CallTensors::new(device);
        let forward = &call.forward;
        let problem = self.problem(forward, &mut tensors)?;
        let RecurrentForward { initial_state, in_place, slots, initial_slots, .. } = *forward;
        if in_place {
            let why = "the forward call has replaced its state; use `initial_state` and `final_state`";
            return Err(Error::Unsupported { what: "the backward pass of a call with `state`", why });
        }
        if initial_slots.is_some() {
            let why = "several sequences may begin with one state; use `slots`";
            return Err(Error::Unsupported { what: "the backward pass with `initial_slots`", why });
        }
        let RecurrentBackward { d_out, d_final_state, d_q, d_k, d_v, d_decay, d_beta, .. } = *call;
        let (dtype, shape, sequences) = (self.config.dtype, problem.shape, self.sequences(forward));
        let of_states = |view| self.states(sequences, view, slots.is_some());
        tensors.read("initial_state", initial_state, DType::F32, of_states(initial_state))?;
        tensors.read("d_out", d_out, dtype, shape.out())?;
        tensors.read("d_final_state", d_final_state, DType::F32, of_states(d_final_state))?;
        let keys = [shape.batch, shape.kv_heads, shape.q_len, shape.head_dim];
        tensors.gradient("d_q", d_q, dtype, keys)?;
        tensors.gradient("d_k", d_k, dtype, keys)?;
        tensors.gradient("d_v", d_v, dtype, shape.out())?;
        let channels = if problem.form.by_channel { shape.head_dim } else { 1 };
        let rows = |channels| [shape.batch, shape.heads, shape.q_len, channels];
        for (tensor, view, input, channels) in
            [("d_decay", d_decay, forward.decay, channels), ("d_beta", d_beta, forward.beta, 1)]
        {
            if view.is_some() && input.is_none() {
                let why = "the forward call has no such tensor";
                return Err(Error::Unsupported { what: tensor, why });
            }
            tensors.write(tensor, view, Element::Float, rows(channels))?;
        }
        let d_initial = call.d_initial_state;
        tensors.write("d_initial_state", d_initial, DType::F32, of_states(d_initial))?;
        tensors.require_gradients("no gradient is requested; set `d_q`, `d_k` or another one")?;
        tensors.finish()?;
        let gradients = Gradients {
            d_out,
            d_last: d_final_state,
            d_q,
            d_k,
            d_v,
            d_decay,
            d_beta,
            d_initial,
            accumulates: call.accumulates,
        };
        Ok(Problem { gradients: Some(gradients), ..problem })
    }
}
