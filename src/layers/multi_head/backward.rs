//! The gradients of a layer. The projections are computed again, and the attention too if it was
//! not stored. Then the gradients go backwards through each stage.

use super::config::Side;
use super::gate::Gate;
use super::{MultiHeadAttention, MultiHeadForward, heads_of, joined_heads, projected_layouts};
use crate::attention::dispatch::backward::{self, BackwardPlans};
use crate::attention::dispatch::{self, AddedGradients, BackwardProblem, Chosen, Extras};
use crate::attention::plan::Added;
use crate::attention::{check_extras, scale_in_f32};
use crate::device::DeviceFacts;
use crate::kernel::{Dispatch, Dispatches, Prepared, Recorder, Scratch, ScratchSize, Slot, in_scratch};
use crate::matmul::projection::dispatch_backward::{self, Gradient, LinearBackward, column_sums};
use crate::matmul::projection::{GradientOf, Written, check_summed_rows};
use crate::rows::norm::NormGradients;
use crate::rows::norm::dispatch::{NormGradients as NormTargets, NormOp};
use crate::tensor::{Access, CallTensors, DType, Element, Error, Shape, TensorView, count};

/// Places for the gradients of a [`Linear`](crate::Linear). Each has the shape of its tensor, and
/// is F32, F16 or BF16.
#[derive(Clone, Copy, Debug, Default)]
pub struct LinearGradients<'a> {
    /// The gradient of the weight, as [`TensorView::matrix`]. For a narrow weight it is `[1, heads,
    /// dim, in / heads]`. If one matrix serves all heads, it has one head, with the sum over all
    /// heads.
    pub weight: Option<TensorView<'a>>,
    /// The gradient of the bias, as [`TensorView::vector`].
    pub bias: Option<TensorView<'a>>,
}

/// Places for the gradients of [`MultiHeadWeights`](crate::layers::MultiHeadWeights). By default no
/// gradient is written.
#[derive(Clone, Copy, Debug, Default)]
pub struct MultiHeadGradients<'a> {
    /// The gradients of the queries' projection.
    pub query: LinearGradients<'a>,
    /// The gradients of the keys' projection.
    pub key: LinearGradients<'a>,
    /// The gradients of the values' projection.
    pub value: LinearGradients<'a>,
    /// The gradients of the output projection.
    pub out: LinearGradients<'a>,
    /// The gradients of the appended key `[kv_heads · head_dim]` and value `[kv_heads ·
    /// value_dim]`. They are sums over the batch: F32, F16 or BF16.
    pub bias_kv: Option<[TensorView<'a>; 2]>,
    /// The gradients of the weights and biases of the norms of queries and of keys. They are
    /// `[head_dim]` each, and sums over all rows and heads.
    pub qk_norm: [NormGradients<'a>; 2],
    /// The gradients of [`MultiHeadWeights::gate`](super::MultiHeadWeights::gate): of its weight,
    /// and of its bias `[heads · value_dim]` or `[heads]`.
    pub gate: LinearGradients<'a>,
}

/// One backward call of a layer: the unchanged forward call, the gradient of its output, and places
/// for gradients. Inputs and their gradients are `[batch, 1, length, features]`, see
/// [`TensorView::sequence`].
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | `d_out` | `[batch, 1, q_len, out_features]` | the layer's |
/// | `d_lse` | `[batch, heads, q_len, 1]` | F32 |
/// | `d_query` | `[batch, 1, q_len, query_features]` | F32, F16 or BF16 |
/// | `d_key` | `[batch, 1, kv_len, key_features]` | F32, F16 or BF16 |
/// | `d_value` | `[batch, 1, kv_len, value_features]` | F32, F16 or BF16 |
/// | gradients of weights and biases | as the layer's tensor | F32, F16 or BF16 |
/// | `d_bias`, `d_slopes`, `d_relative`, `d_sinks` | as the mask's tensor | the tensor's, or F32 |
///
/// Gradients of the mask's tensors are summed over the axes of 1 of these tensors.
///
/// # Memory
///
/// The backward call reads the inputs of the forward call. It computes the projections and the gate
/// again, as the forward call does. It computes the attention weights from scores and lse, for each
/// pair of query and key.
///
/// If the forward call has both [`MultiHeadForward::context`] and [`MultiHeadForward::lse`], the
/// backward call reads them. They take `batch · q_len · heads · (value_dim · s + 4)` bytes, where
/// `s` is the bytes of an element of the layer's dtype. Without them the backward call computes
/// attention again, with as much more scratch.
///
/// The call does not read `context` or `lse` if only one of them is set. It never reads `out` and
/// `weights` of the forward call: a loss that depends on `weights` has no gradient here. Stored
/// tensors must still hold the values that the forward call wrote.
///
/// # Rounding
///
/// Sums are f32. The gradients of projected queries, keys and values are f32 too: many would be
/// below f16's smallest number. The gradient of the heads' outputs is in the layer's dtype, as the
/// outputs are. The gradient of gated outputs is f32.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct MultiHeadBackward<'a> {
    forward: MultiHeadForward<'a>,
    d_out: TensorView<'a>,
    d_lse: Option<TensorView<'a>>,
    /// The gradients of the inputs of queries, keys and values.
    d_inputs: [Option<TensorView<'a>>; 3],
    d_weights: MultiHeadGradients<'a>,
    d_added: AddedGradients<'a>,
    accumulates: bool,
    /// True if the gradient of queries' input, and of keys' and values', is added; `None` if
    /// `accumulates` decides.
    inputs_accumulate: Option<[bool; 2]>,
    /// True if the gradients of keys' and values' weights are added to their tensors, even if
    /// `accumulates` is false.
    keys_accumulate: bool,
}

/// The names of the gradients of the inputs of queries, keys and values.
const INPUTS: [&str; 3] = ["d_query", "d_key", "d_value"];
/// The names of the gradients of the weights and biases of queries, keys, values and output.
const WEIGHTS: [&str; 4] = ["d_weights.query", "d_weights.key", "d_weights.value", "d_weights.out"];
const BIASES: [&str; 4] = ["d_bias.query", "d_bias.key", "d_bias.value", "d_bias.out"];
const APPENDED: [&str; 2] = ["d_bias_k", "d_bias_v"];
/// The names of the gradients of the gate's weight and bias.
const GATE: [&str; 2] = ["d_weights.gate", "d_bias.gate"];
/// The names of the gradients of the weights of keys and values.
const OF_KEYS: [&str; 8] =
    [WEIGHTS[1], WEIGHTS[2], BIASES[1], BIASES[2], APPENDED[0], APPENDED[1], OF_NORMS[1][0], OF_NORMS[1][1]];
const OF_NORMS: [[&str; 2]; 2] = [["d_q_norm.weight", "d_q_norm.bias"], ["d_k_norm.weight", "d_k_norm.bias"]];

impl<'a> MultiHeadBackward<'a> {
    /// `forward` is the unchanged forward call. `d_out` is the gradient of its `out`, `[batch, 1,
    /// q_len, out_features]`. Only the gradients that you set are written.
    pub fn new(forward: MultiHeadForward<'a>, d_out: TensorView<'a>) -> Self {
        MultiHeadBackward {
            forward,
            d_out,
            d_lse: None,
            d_inputs: [None; 3],
            d_weights: MultiHeadGradients::default(),
            d_added: AddedGradients::default(),
            accumulates: false,
            inputs_accumulate: None,
            keys_accumulate: false,
        }
    }

    /// Sets the gradient of `lse`, if the loss depends on `lse` too.
    pub fn d_lse(mut self, d_lse: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_lse = d_lse.into();
        self
    }

    /// Writes the gradient of the queries' input to `d_query`. Several inputs may have the same
    /// view, as in self-attention. The view then receives their sum: queries, keys, values in this
    /// order, rounded to its type after each.
    pub fn d_query(mut self, d_query: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_inputs[0] = d_query.into();
        self
    }

    /// Writes the gradient of the keys' input to `d_key`; see [`d_query`](Self::d_query).
    pub fn d_key(mut self, d_key: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_inputs[1] = d_key.into();
        self
    }

    /// Writes the gradient of the values' input to `d_value`; see [`d_query`](Self::d_query).
    pub fn d_value(mut self, d_value: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_inputs[2] = d_value.into();
        self
    }

    /// Writes the gradients of the layer's weights to `d_weights`. Only the
    /// [`MultiHeadWeights`](crate::layers::MultiHeadWeights) of the layer have gradients. Several
    /// weights, or several biases, may have the same view: it receives their sum.
    pub fn d_weights(mut self, d_weights: MultiHeadGradients<'a>) -> Self {
        self.d_weights = d_weights;
        self
    }

    /// Writes the gradient of [`Mask::bias`](crate::Mask::bias) to `d_bias`, as
    /// [`Backward::d_bias`](crate::Backward::d_bias) describes. The next three methods work alike.
    /// Appended keys add nothing to this gradient.
    pub fn d_bias(self, d_bias: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_added(Added::Bias, d_bias.into())
    }

    /// Writes the gradient of the slopes of [`Mask::alibi`](crate::Mask::alibi) or of
    /// [`Mask::alibi_symmetric`](crate::Mask::alibi_symmetric) to `d_slopes`.
    pub fn d_slopes(self, d_slopes: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_added(Added::Slopes, d_slopes.into())
    }

    /// Writes the gradient of the table of [`Mask::relative`](crate::Mask::relative) to
    /// `d_relative`.
    pub fn d_relative(self, d_relative: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_added(Added::Relative, d_relative.into())
    }

    /// Writes the gradient of [`Mask::sink_logits`](crate::Mask::sink_logits) to `d_sinks`.
    pub fn d_sinks(self, d_sinks: impl Into<Option<TensorView<'a>>>) -> Self {
        self.d_added(Added::Sinks, d_sinks.into())
    }

    /// Writes the gradients of the tensors that the mask's [`ScoreMod`](crate::mask::ScoreMod)
    /// captures, in their order. Each gradient has the shape of its tensor: if an axis of 1
    /// repeats, its gradients are summed. An entry of `None` is not written. The derivatives come
    /// from the text of the `ScoreMod`, as the derivative with respect to the score does. Each 2048
    /// elements of a tensor cost a pass over all pairs of query and key.
    pub fn d_captured(mut self, d_captured: &[Option<TensorView<'a>>]) -> Self {
        self.d_added.set_captured(d_captured);
        self
    }

    fn d_added(mut self, of: Added, gradient: Option<TensorView<'a>>) -> Self {
        self.d_added.set(of, gradient);
        self
    }

    /// Adds the gradients to the values of their tensors instead of overwriting them. Each sum is
    /// rounded to the tensor's type: choose F32 for many sums.
    pub fn accumulate(mut self, accumulate: bool) -> Self {
        self.accumulates = accumulate;
        self
    }

    /// Sets whether the gradients of queries' input, and of keys' and values', are added to their
    /// tensors. It overrides [`accumulate`](Self::accumulate) for them.
    pub(crate) fn inputs_accumulate(mut self, accumulate: [bool; 2]) -> Self {
        self.inputs_accumulate = Some(accumulate);
        self
    }

    /// If `accumulate` is true, adds the gradients of the weights of keys and values to their
    /// tensors, even without [`accumulate`](Self::accumulate).
    pub(crate) fn keys_accumulate(mut self, accumulate: bool) -> Self {
        self.keys_accumulate = accumulate;
        self
    }

    /// The gradients of the projections of queries, keys, values and output.
    fn linears(&self) -> [LinearGradients<'a>; 4] {
        let MultiHeadGradients { query, key, value, out, .. } = self.d_weights;
        [query, key, value, out]
    }

    /// True for queries, keys and values if the call writes a gradient of their projection. These
    /// are gradients of its input, weight or bias.
    fn through_projections(&self) -> [bool; 3] {
        let linears = self.linears();
        std::array::from_fn(|n| {
            let LinearGradients { weight, bias } = linears[n];
            self.d_inputs[n].is_some() || weight.is_some() || bias.is_some()
        })
    }

    /// True if the call writes a gradient of the gate's projection: of its input, weight or bias.
    /// It assumes that the layer has a gate.
    fn through_gate(&self) -> bool {
        let LinearGradients { weight, bias } = self.d_weights.gate;
        self.d_inputs[0].is_some() || weight.is_some() || bias.is_some()
    }

    /// True for queries and keys if the call writes a gradient of their norm: of its input, weight
    /// or bias. It assumes that the layer has norms.
    fn through_norms(&self) -> [bool; 2] {
        let through = self.through_projections();
        std::array::from_fn(|n| {
            let NormGradients { weight, bias } = self.d_weights.qk_norm[n];
            through[n] || weight.is_some() || bias.is_some()
        })
    }

    /// True for queries, keys and values if the call needs the attention's gradient of them.
    fn through_sides(&self) -> [bool; 3] {
        let appended = self.d_weights.bias_kv.is_some();
        let ([q, k], [_, _, v]) = (self.through_norms(), self.through_projections());
        [q, k || appended, v || appended]
    }

    /// The gradients of the norms' weights and biases: name, view, and the indices of norm and
    /// tensor.
    fn norm_gradients(&self) -> impl Iterator<Item = (&'static str, Option<TensorView<'a>>, [usize; 2])> {
        let of = self.d_weights.qk_norm.map(|NormGradients { weight, bias }| [weight, bias]);
        let all = [[0, 0], [0, 1], [1, 0], [1, 1]];
        all.into_iter().map(move |[norm, n]| (OF_NORMS[norm][n], of[norm][n], [norm, n]))
    }

    /// True if gradients go through the attention.
    fn through_attention(&self) -> bool {
        self.through_sides().contains(&true) || !self.d_added.is_empty()
    }

    /// True if the gradient of the output projection's input is needed.
    fn through_out(&self) -> bool {
        self.through_attention() || self.through_gate()
    }

    fn reads_context(&self) -> bool {
        self.through_out() || self.d_weights.out.weight.is_some()
    }

    /// The context and the lse of the forward call, if it has stored both.
    fn kept(&self) -> Option<(TensorView<'a>, TensorView<'a>)> {
        self.forward.context.zip(self.forward.lse)
    }

    fn attends_again(&self) -> bool {
        self.reads_context() && self.kept().is_none()
    }
}

/// A checked backward call.
pub(crate) struct Plan {
    shape: Shape,
    appended: usize,
    /// The kernels that compute the attention again, if that is needed.
    again: Option<Chosen>,
    /// The kernels of the attention's gradients, if any are needed.
    gradients: Option<BackwardPlans>,
    pub size: ScratchSize,
}

/// The tensors between the stages of a call.
#[derive(Clone, Copy)]
struct Between<'a> {
    /// Queries, keys and values.
    projected: [TensorView<'a>; 3],
    /// `[batch, 1, q_len, heads · value_dim]`.
    context: TensorView<'a>,
    lse: TensorView<'a>,
    /// The shape of `context`.
    d_context: TensorView<'a>,
    gate: Option<BetweenGate<'a>>,
    /// The gradients of `projected`, in F32. Gradients that are not needed have no separate place.
    d_projected: [TensorView<'a>; 3],
    /// Queries and keys before their norm, with room for appended keys, if gradients go through
    /// that norm.
    unnormed: [Option<TensorView<'a>>; 2],
    /// The gradients of the projections' results, without appended keys: `d_projected`, or its
    /// gradient through the norms.
    d_sides: [TensorView<'a>; 3],
}

/// Tensors of the gate between the stages of a call.
#[derive(Clone, Copy)]
struct BetweenGate<'a> {
    gate: Gate<'a>,
    logits: TensorView<'a>,
    /// The heads' outputs times the gate.
    gated: TensorView<'a>,
    /// The gradients of `logits` and `gated`, in F32.
    d_logits: TensorView<'a>,
    d_gated: TensorView<'a>,
}

/// The gradients of the projections, in the order of their computation.
struct Products<'a> {
    out: LinearBackward<'a>,
    /// The gradients of the projections of queries, keys and values, and of the gate if the layer
    /// has one.
    sides: Vec<LinearBackward<'a>>,
    /// For the appended key and value: the rows to sum, and the place of the sum.
    appended_rows: Vec<(TensorView<'a>, Gradient<'a>)>,
    /// For the norms of queries and keys: their gradients, if any is wanted.
    norms: [Option<NormTargets<'a>>; 2],
    written: Written<'a>,
}

/// Gradients of all of `nn.MultiheadAttention`, without a score matrix and without atomics. The
/// same inputs on the same device with the same plan give the same bits.
impl MultiHeadAttention {
    /// Returns the size of the temporary memory that `call` needs. It grows with the lengths, not
    /// with their product. `s` is the bytes of an element of the layer's dtype, `q` is `q_len ·
    /// heads`, and `k` is `(kv_len + appended) · kv_heads`. For every sequence of the batch:
    ///
    /// | tensors | bytes |
    /// |---|---|
    /// | projected queries, keys, values | `(q · head_dim + k · (head_dim + value_dim)) · s` |
    /// | their gradients, in F32: only the needed ones | as many elements, 4 bytes each |
    /// | with `qk_norm`: queries and keys before their norm | as much as queries and keys |
    /// | their gradients, in F32 | as many elements, 4 bytes each |
    /// | the gradient of the heads' outputs | `q · value_dim · s` |
    /// | with `output_gate`: logits, gated outputs | `q · (gates of a head + value_dim) · s` |
    /// | their gradients, in F32 | as many elements, 4 bytes each |
    /// | numbers of each query in the backward pass | `16 · q` |
    /// | without stored `context` and `lse`: both | `q · (value_dim · s + 4)` |
    ///
    /// Without stored `context` and `lse` the memory of
    /// [`Attention::scratch_size`](crate::Attention::scratch_size) is added.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn backward_scratch_size(&self, call: &MultiHeadBackward) -> Result<ScratchSize, Error> {
        Ok(self.check_backward(call, &self.pipelines.facts())?.size)
    }

    /// Records the gradients of a forward call into an encoder or a pass.
    ///
    /// The example is a training step of self-attention, whose three inputs are one `x`:
    ///
    /// ```no_run
    /// # use wgpu_attention::{Error, MultiHeadAttention, TensorView, wgpu};
    /// # fn f(layer: &MultiHeadAttention, encoder: &mut wgpu::CommandEncoder, tensors: [TensorView; 6], d_weights: [TensorView; 4])
    /// # -> Result<(), Error> {
    /// # let [x, y, context, lse, d_y, d_x] = tensors;
    /// # let device = layer.pipelines().device();
    /// use wgpu_attention::{Mask, Scratch};
    /// use wgpu_attention::layers::{MultiHeadBackward, MultiHeadForward, MultiHeadGradients, LinearGradients};
    ///
    /// let forward = MultiHeadForward::self_attention(x, y).mask(Mask::causal()).context(context).lse(lse);
    /// let [query, key, value, out] =
    ///     d_weights.map(|weight| LinearGradients { weight: Some(weight), bias: None });
    /// let backward = MultiHeadBackward::new(forward, d_y)
    ///     .d_query(d_x) // one view: the sum over queries, keys and values
    ///     .d_key(d_x)
    ///     .d_value(d_x)
    ///     .d_weights(MultiHeadGradients { query, key, value, out, ..MultiHeadGradients::default() });
    /// let size = layer.scratch_size(&forward)?.max(layer.backward_scratch_size(&backward)?);
    /// let mut scratch = Scratch::new(device, size)?;
    /// layer.forward(encoder, &forward, &mut scratch)?;
    /// // … what gives d_y …
    /// layer.backward(encoder, &backward, &mut scratch)?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// - Everything that [`Error`] lists for tensors, masks, options and scratch.
    /// - Gradients that overlap an input, or that overlap and are not the same view.
    /// - [`Error::Unsupported`] if the call sets no gradient.
    /// - [`Error::Unsupported`] if a gradient's tensor is missing in the layer or the mask.
    /// - [`Error::Limit`] if the device cannot bind so many tensors of a mask with the other
    ///   tensors.
    ///
    /// On an error the call records nothing.
    pub fn backward(
        &self,
        into: &mut impl Recorder,
        call: &MultiHeadBackward,
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
        call: &MultiHeadBackward,
        scratch: &mut Scratch,
    ) -> Result<Prepared, Error> {
        let scratch: &Scratch = scratch;
        self.pipelines.with_fallbacks(|| {
            let device = &self.pipelines.facts();
            let plan = dispatch::within(device, |device| {
                let plan = self.check_backward(call, device)?;
                scratch.check(plan.size).map(|()| plan)
            })?;
            let dispatches = self.backward_dispatches(call, &plan, scratch, device)?;
            self.pipelines.bind("multi-head attention backward", &dispatches, scratch.bindings())
        })
    }

    /// Returns the dispatches of a checked call.
    pub(crate) fn backward_dispatches<'a>(
        &'a self,
        call: &MultiHeadBackward<'a>,
        plan: &Plan,
        scratch: &'a Scratch,
        device: &DeviceFacts,
    ) -> Result<Dispatches<'a>, Error> {
        let Plan { shape, appended, again, gradients, .. } = plan;
        let (shape, appended, again) = (*shape, *appended, *again);
        // A part that the scratch lacks is never used.
        let between = self.between(call, &shape, |slot| scratch.buffer(slot).unwrap_or(call.d_out.buffer));
        let mut dispatches = Dispatches::new();
        if again.is_some() || gradients.is_some() {
            let to = (between.projected, between.unnormed);
            dispatches = self.project(&call.forward, &shape, appended, to, device)?;
        }
        if let Some(chosen) = again {
            let problem = self.problem(shape, between.projected, attended(call, &between, &shape, appended));
            dispatches.extend(dispatch::dispatches(&problem, chosen, chosen.memory(scratch)?, device));
        }
        let Products { out, sides, appended_rows, norms, .. } =
            self.products(call, &between, &shape, appended);
        if let Some(gate) = between.gate.filter(|_| call.reads_context()) {
            dispatches.extend(self.gate_logits(&gate.gate, call.forward.query, gate.logits, device)?);
            if call.d_weights.out.weight.is_some() {
                dispatches.push(gate.gate.apply([gate.logits, between.context, gate.gated], device));
            }
        }
        dispatches.extend(dispatch_backward::dispatches(&[out], &self.kernel_options, device)?);
        dispatches.extend(between.gate.and_then(|gate| gate.backward(call, &between, device)));
        if let Some(plans) = gradients {
            let problem = self.attention_backward(call, &between, shape, appended);
            dispatches.extend(backward::dispatches(&problem, plans, plans.memory(scratch)?, device));
        }
        let given = shape.kv_len - appended;
        if let Some(rotary) = call.forward.rotary {
            let [d_q, d_k, _] = between.d_projected;
            let rotated = [d_q, d_k.slice(2, 0, given)];
            for (d, _) in rotated.into_iter().zip(call.through_sides()).filter(|(_, wanted)| *wanted) {
                dispatches.push(rotary.dispatch(d, true, device)?);
            }
        }
        for (side, gradients) in norms.iter().enumerate() {
            if let Some((norm, gradients)) = self.norm_before(side, &between, given).zip(gradients.as_ref()) {
                dispatches.extend(norm.backward(gradients, scratch, &self.kernel_options, device)?);
            }
        }
        dispatches.extend(dispatch_backward::dispatches(&sides, &self.kernel_options, device)?);
        for (rows, sum) in appended_rows {
            dispatches.push(column_sums(rows, sum, device));
        }
        Ok(dispatches)
    }

    /// The tensors between the stages. Each is in a `part` of the scratch, or is a stored tensor of
    /// the forward call.
    fn between<'a>(
        &'a self,
        call: &MultiHeadBackward<'a>,
        shape: &Shape,
        part: impl Fn(Slot) -> &'a wgpu::Buffer,
    ) -> Between<'a> {
        let dtype = self.config.dtype;
        let gradients = projected_layouts(shape, call.through_sides(), DType::F32);
        let buffer = part(Slot::ProjectedGradients);
        let d_projected = gradients.map(|layout| TensorView::with_layout(buffer, DType::F32, layout));
        let through = self.through_norms(call);
        let side = |slot: Slot, dtype, n: usize| {
            let layout = projected_layouts(shape, [through[0], through[1], false], dtype)[n];
            through.get(n)?.then(|| TensorView::with_layout(part(slot), dtype, layout))
        };
        let given = shape.kv_len - self.appended_keys();
        let d_sides = std::array::from_fn(|n| {
            let d = side(Slot::UnnormedGradients, DType::F32, n).unwrap_or(d_projected[n]);
            if n == 0 { d } else { d.slice(2, 0, given) }
        });
        let (context, lse) = call.kept().unwrap_or_else(|| {
            let context = in_scratch(part(Slot::Context), dtype, joined_heads(shape), 0);
            (context, in_scratch(part(Slot::Lse), DType::F32, shape.lse(), 0))
        });
        let of = |gate: Gate<'a>| BetweenGate {
            gate,
            logits: gate.logits(part(Slot::Gate), dtype),
            gated: in_scratch(part(Slot::Gated), dtype, joined_heads(shape), 0),
            d_logits: gate.logits(part(Slot::GateGradient), DType::F32),
            d_gated: in_scratch(part(Slot::GatedGradient), DType::F32, joined_heads(shape), 0),
        };
        Between {
            gate: self.gate(shape).map(of),
            projected: self.projected(&call.forward, shape, part(Slot::Projected)),
            context,
            lse,
            d_context: in_scratch(part(Slot::ContextGradient), dtype, joined_heads(shape), 0),
            d_projected,
            unnormed: [0, 1].map(|n| side(Slot::Unnormed, dtype, n)),
            d_sides,
        }
    }

    /// True for queries and keys if gradients go through their norm.
    fn through_norms(&self, call: &MultiHeadBackward) -> [bool; 2] {
        call.through_norms().map(|through| through && self.config.qk_norm.is_some())
    }

    /// The norm of queries or of keys, without appended keys, if gradients go through it.
    fn norm_before<'a>(&'a self, side: usize, between: &Between<'a>, given: usize) -> Option<NormOp<'a>> {
        let x = between.unnormed[side]?;
        self.norm_of(side, if side == 0 { x } else { x.slice(2, 0, given) })
    }

    /// The attention's backward call.
    fn attention_backward<'a>(
        &self,
        call: &MultiHeadBackward<'a>,
        between: &Between<'a>,
        shape: Shape,
        appended: usize,
    ) -> BackwardProblem<'a> {
        let [q, k, v] = between.projected;
        let wanted = call.through_sides();
        let gradient = |n: usize| wanted[n].then_some(between.d_projected[n]);
        BackwardProblem {
            shape,
            appended,
            q,
            k,
            v,
            out: heads_of(between.context, &shape),
            lse: between.lse,
            d_out: heads_of(between.d_context, &shape),
            d_lse: call.d_lse,
            d_q: gradient(0),
            d_k: gradient(1),
            d_v: gradient(2),
            d_added: call.d_added,
            accumulates: false,
            adds_to_added: call.accumulates,
            mask: call.forward.mask,
            dropout: call.forward.dropout,
            partial: false,
            lists: None,
            scale: scale_in_f32(self.config.scale, shape.head_dim),
            softcap: self.config.softcap.map(|c| c as f32),
            kernel_options: self.kernel_options,
        }
    }

    /// The gradients of the projections. The gradient of the output projection comes from `d_out`,
    /// the others from `between.d_sides`.
    fn products<'a>(
        &'a self,
        call: &MultiHeadBackward<'a>,
        between: &Between<'a>,
        shape: &Shape,
        appended: usize,
    ) -> Products<'a> {
        let MultiHeadBackward { forward, d_out, d_inputs, accumulates, .. } = *call;
        let linears = call.linears();
        let mut written = Written::default();
        let mut add = |of, name: &'static str, view: Option<TensorView<'a>>| {
            let [of_query, of_keys] = call.inputs_accumulate.unwrap_or([accumulates; 2]);
            let accumulates = match of {
                GradientOf::Input if name == INPUTS[0] => of_query,
                GradientOf::Input => of_keys,
                _ => accumulates || call.keys_accumulate && OF_KEYS.contains(&name),
            };
            Some(written.add(of, name, view?, accumulates))
        };
        let (heads, d_heads) =
            between.gate.map_or((between.context, between.d_context), |gate| (gate.gated, gate.d_gated));
        let d_heads = Gradient { view: d_heads, accumulates: false };
        let through = if between.gate.is_some() { call.through_out() } else { call.through_attention() };
        let out = LinearBackward {
            w: self.out.weight.view(),
            d_y: d_out,
            d_x: through.then_some(d_heads),
            d_w: add(GradientOf::Weight, WEIGHTS[3], linears[3].weight).map(|d_w| (heads, d_w)),
            d_b: add(GradientOf::Bias, BIASES[3], linears[3].bias),
            narrow: false,
        };
        let given = shape.kv_len - appended;
        let through = call.through_projections();
        let norms = std::array::from_fn(|n| {
            between.unnormed[n]?;
            let NormGradients { weight, bias } = call.d_weights.qk_norm[n];
            let [d_weight, d_bias] = OF_NORMS[n];
            let d_out = between.d_projected[n];
            Some(NormTargets {
                d_out: if n == 0 { d_out } else { d_out.slice(2, 0, given) },
                d_sum: None,
                d_x: through[n].then_some(Gradient { view: between.d_sides[n], accumulates: false }),
                d_gate: None,
                d_weight: add(GradientOf::NormWeight, d_weight, weight),
                d_bias: add(GradientOf::NormBias, d_bias, bias),
            })
        });
        let inputs = [forward.query, forward.key, forward.value];
        let own = [&self.query, &self.key, &self.value];
        let mut sides: Vec<_> = (0..3)
            .map(|n| LinearBackward {
                w: own[n].weight.view(),
                d_y: between.d_sides[n],
                d_x: add(GradientOf::Input, INPUTS[n], d_inputs[n]),
                d_w: add(GradientOf::Weight, WEIGHTS[n], linears[n].weight).map(|d_w| (inputs[n], d_w)),
                d_b: add(GradientOf::Bias, BIASES[n], linears[n].bias),
                narrow: self.config.narrow,
            })
            .collect();
        sides.extend(between.gate.map(|BetweenGate { gate, d_logits, .. }| LinearBackward {
            w: gate.linear.weight.view(),
            d_y: gate.projected(d_logits),
            d_x: add(GradientOf::Input, INPUTS[0], d_inputs[0]),
            d_w: add(GradientOf::Weight, GATE[0], call.d_weights.gate.weight).map(|d_w| (inputs[0], d_w)),
            d_b: add(GradientOf::Bias, GATE[1], call.d_weights.gate.bias),
            narrow: self.config.narrow,
        }));
        // Only the first of the appended keys is a weight: a key of zeros has no gradient.
        let mut appended_rows = Vec::new();
        for (n, view) in call.d_weights.bias_kv.into_iter().flatten().enumerate() {
            let rows = between.d_projected[n + 1].slice(2, given, 1);
            let sum = add(GradientOf::Appended, APPENDED[n], Some(view));
            appended_rows.extend(sum.map(|sum| (rows, sum)));
        }
        Products { out, sides, appended_rows, norms, written }
    }

    /// Checks a call as far as that is possible without its pipelines.
    fn check_backward(&self, call: &MultiHeadBackward, device: &DeviceFacts) -> Result<Plan, Error> {
        let MultiHeadBackward { forward, d_out, d_lse, .. } = *call;
        let mut tensors = CallTensors::new(device);
        let shape = self.check_tensors(&forward, ("d_out", d_out, Access::Read), &mut tensors)?;
        let appended = self.appended_keys();
        let unread = Extras { lse: None, weights: None, ..forward.extras(d_out, appended) };
        check_extras(&unread, &shape, &mut tensors)?;
        let (context, lse) = call.kept().unzip();
        tensors.read("context", context, self.config.dtype, joined_heads(&shape))?;
        tensors.read("lse", lse, DType::F32, shape.lse())?;
        tensors.read("d_lse", d_lse, DType::F32, shape.lse())?;
        self.check_gradients(call, &mut tensors)?;

        // This check comes before all layouts: it refuses lengths that are too large for them.
        self.projected_size(&shape, [true; 3], self.config.dtype, Slot::Projected)?;
        // There is no scratch yet, so any buffer replaces it: plans read layouts only.
        let between = self.between(call, &shape, |_| d_out.buffer);
        tensors.write_checked(self.products(call, &between, &shape, appended).written.views());
        let why = "no gradient is requested; set `d_query`, `d_key`, `d_value`, `d_weights` or a gradient of the mask";
        tensors.require_gradients(why)?;
        tensors.check_aliasing()?;
        self.plan_backward(call, shape, device)
    }

    /// Makes the plan of a call whose inputs and outputs are in the scratch of a stack. It checks
    /// the mask and the gradients of the weights.
    pub(crate) fn backward_plan_of(
        &self,
        call: &MultiHeadBackward,
        dims: [usize; 3],
        device: &DeviceFacts,
    ) -> Result<Plan, Error> {
        let shape = self.shape_of(dims);
        let extras = call.forward.extras(call.d_out, self.appended_keys());
        let tensors = &mut CallTensors::new(device);
        check_extras(&Extras { lse: None, weights: None, ..extras }, &shape, tensors)?;
        // The gradients of inputs are in scratch, and the buffer here may be smaller.
        self.check_gradients(&MultiHeadBackward { d_inputs: [None; 3], ..*call }, tensors)?;
        self.plan_backward(call, shape, device)
    }

    /// Returns the gradients of weights that a call writes.
    pub(crate) fn written_weights<'a>(
        &'a self,
        call: &MultiHeadBackward<'a>,
    ) -> Vec<(&'static str, TensorView<'a>)> {
        let linears = call.linears();
        let own = WEIGHTS.into_iter().zip(BIASES).zip(linears);
        let gate = call.d_weights.gate;
        own.flat_map(|((weight, bias), l)| [(weight, l.weight), (bias, l.bias)])
            .chain([(GATE[0], gate.weight), (GATE[1], gate.bias)])
            .filter_map(|(name, t)| Some((name, t?)))
            .chain(APPENDED.into_iter().zip(call.d_weights.bias_kv.into_iter().flatten()))
            .chain(call.norm_gradients().filter_map(|(name, t, _)| Some((name, t?))))
            .collect()
    }

    /// Makes the plan of a checked call.
    fn plan_backward(
        &self,
        call: &MultiHeadBackward,
        shape: Shape,
        device: &DeviceFacts,
    ) -> Result<Plan, Error> {
        let appended = self.appended_keys();
        let projects = call.forward.projects();
        let projected = self.projected_size(&shape, projects, self.config.dtype, Slot::Projected)?;
        let between = self.between(call, &shape, |_| call.d_out.buffer);
        let mut plan = Plan { shape, appended, again: None, gradients: None, size: ScratchSize::default() };
        if call.attends_again() {
            let extras = attended(call, &between, &shape, appended);
            let chosen = dispatch::choose(&self.outline(&call.forward, &shape, &extras), device)?;
            let lse = 4 * count(shape.lse()) as u64;
            let results = projected.with(Slot::Context, self.context_bytes(&shape)).with(Slot::Lse, lse);
            plan.size = results.max(chosen.scratch_size());
            plan.again = Some(chosen);
        }
        if let Some(BetweenGate { gate, .. }) = between.gate.filter(|_| call.reads_context()) {
            let d_gated = 4 * count(shape.out()) as u64;
            let gradients = ScratchSize::default()
                .with(Slot::GateGradient, gate.bytes(DType::F32))
                .with(Slot::GatedGradient, d_gated);
            plan.size = plan.size.max(self.gate_size(&shape)).max(gradients);
        }
        if call.through_attention() {
            let of_sides = call.through_sides();
            let of_sides = self.projected_size(&shape, of_sides, DType::F32, Slot::ProjectedGradients)?;
            let plans = backward::plan(&self.attention_backward(call, &between, shape, appended), device)?;
            let gradients = of_sides.with(Slot::ContextGradient, self.context_bytes(&shape));
            plan.size = plan.size.max(projected).max(gradients).max(plans.scratch_size());
            let [q, k] = self.through_norms(call);
            let of = |dtype, slot| self.projected_size(&shape, [q, k, false], dtype, slot);
            let unnormed = of(self.config.dtype, Slot::Unnormed)?;
            plan.size = plan.size.max(unnormed).max(of(DType::F32, Slot::UnnormedGradients)?);
            let given = shape.kv_len - appended;
            for (side, of) in call.d_weights.qk_norm.iter().enumerate() {
                let sums = of.weight.is_some() || of.bias.is_some();
                if let Some(norm) = self.norm_before(side, &between, given).filter(|_| sums) {
                    plan.size = plan.size.max(norm.sums_size());
                }
            }
            plan.gradients = Some(plans);
        }
        Ok(plan)
    }

    /// Checks all gradients. The gradients of the mask become tensors of the call; [`Written`]
    /// collects the others.
    fn check_gradients<'a>(
        &self,
        call: &MultiHeadBackward<'a>,
        tensors: &mut CallTensors<'a, '_>,
    ) -> Result<(), Error> {
        let MultiHeadForward { query, key, value, mask, .. } = call.forward;
        let device = tensors.device;
        let check = |name: &'static str, view: Option<TensorView>, own: Option<[usize; 4]>| {
            let Some(view) = view else { return Ok(()) };
            let Some(own) = own else { return Err(without(name)) };
            CallTensors::new(device).write(name, view, Element::Float, own)
        };
        let inputs = [("query", query, Side::Query), ("key", key, Side::Key), ("value", value, Side::Value)];
        for (n, (tensor, x, side)) in inputs.into_iter().enumerate() {
            check_summed_rows(tensor, &x, if self.config.narrow { self.config.side(side).heads } else { 1 })?;
            check(INPUTS[n], call.d_inputs[n], Some(x.shape()))?;
        }
        let own = [&self.query, &self.key, &self.value, &self.out];
        for (n, (own, LinearGradients { weight, bias })) in own.into_iter().zip(call.linears()).enumerate() {
            check(WEIGHTS[n], weight, Some(own.weight.layout.shape))?;
            check(BIASES[n], bias, own.bias.as_ref().map(|own| own.layout.shape))?;
        }
        let LinearGradients { weight, bias } = call.d_weights.gate;
        check(GATE[0], weight, self.gate.as_ref().map(|own| own.weight.layout.shape))?;
        let own = self.gate.as_ref().and_then(|own| own.bias.as_ref());
        check(GATE[1], bias, own.map(|own| own.layout.shape))?;
        for (n, name) in APPENDED.into_iter().enumerate() {
            let own = self.appended.as_ref().map(|own| own[n].layout.shape);
            check(name, call.d_weights.bias_kv.map(|pair| pair[n]), own)?;
        }
        for (name, view, own) in call.norm_gradients() {
            let own = self.norms[own[0]].tensor(own[1]).map(|own| own.layout.shape);
            check(name, view, own)?;
        }
        mask.mods().check_slope()?;
        call.d_added.check(&mask, tensors)
    }
}

impl<'a> BetweenGate<'a> {
    /// Computes, from the gradient of gated outputs, the gradients of the gate's logits and of the
    /// outputs that `call` needs.
    fn backward(
        &self,
        call: &MultiHeadBackward<'a>,
        between: &Between<'a>,
        device: &DeviceFacts,
    ) -> Option<Dispatch<'a>> {
        let BetweenGate { gate, logits, d_logits, d_gated, .. } = *self;
        let [d_logits, d_gated] = gate.aligned(d_logits, d_gated);
        let [_, d_context] = gate.aligned(logits, between.d_context);
        let d_logits = call.through_gate().then_some(d_logits);
        let d_context = call.through_attention().then_some(d_context);
        let op = gate.op(logits, between.context);
        call.through_out().then(|| op.backward(d_gated, d_logits, d_context, false, device))
    }
}

/// The options of the forward call's attention, which writes its results to `between`.
fn attended<'a>(
    call: &MultiHeadBackward<'a>,
    between: &Between<'a>,
    shape: &Shape,
    appended: usize,
) -> Extras<'a> {
    let extras = call.forward.extras(heads_of(between.context, shape), appended);
    Extras { lse: Some(between.lse), weights: None, ..extras }
}

/// The error for the gradient of a tensor that the layer does not have.
fn without(what: &'static str) -> Error {
    Error::Unsupported { what, why: "the layer was made without it; omit this gradient" }
}
