//! A multi-head attention layer: project → attend → project.

pub(crate) mod backward;
mod cached;
mod call;
pub(crate) mod config;
mod gate;
pub(crate) mod reference;
pub(crate) mod reference_backward;

pub use backward::{LinearGradients, MultiHeadBackward, MultiHeadGradients};
pub(crate) use cached::CachedPlan;
pub use call::{MultiHeadForward, MultiHeadWeights};
use config::{MultiHeadConfig, Side};

use crate::attention::dispatch::{Chosen, Extras, Keys, Problem};
use crate::attention::kernels::append_keys::{self, AppendKeysCall};
use crate::attention::plan::{KeyLayout, Outline};
use crate::attention::{self, Config, check_dtype, check_extras, scale_in_f32};
use crate::device::DeviceFacts;
use crate::kernel::{
    Dispatch, Dispatches, KernelOptions, Pipelines, Prepared, Recorder, Scratch, ScratchSize, Slot, View,
    in_scratch,
};
use crate::matmul::projection::{self, OwnedLinear, check_vector, check_weight};
use crate::rows::norm::OwnedNorm;
use crate::rows::norm::dispatch::NormOp;
use crate::tensor::{
    Access, CallTensors, DType, Error, Layout, Shape, Tensor, TensorView, check_aliasing, check_apart, count,
    same_dtype,
};

/// A multi-head attention layer on one device. It covers all of `nn.MultiheadAttention`, and its
/// gradients ([`backward`](Self::backward)).
///
/// The layer keeps its weights' buffers alive, and reads the weights without a copy. Source:
/// Vaswani et al. 2017, "Attention is all you need", section 3.2.2.
///
/// The example uses the parameters of `nn.MultiheadAttention(e, heads)`, with its packed
/// `in_proj_weight` as three windows:
///
/// ```no_run
/// # fn f(device: &wgpu::Device, queue: &wgpu::Queue, in_proj_weight: &wgpu::Buffer, in_proj_bias: &wgpu::Buffer,
/// #      out_proj_weight: &wgpu::Buffer, out_proj_bias: &wgpu::Buffer, x: &wgpu::Buffer, y: &wgpu::Buffer)
/// # -> Result<(), wgpu_attention::Error> {
/// use wgpu_attention::{DType, Linear, Mask, MultiHeadAttention};
/// use wgpu_attention::layers::{MultiHeadConfig, MultiHeadForward, MultiHeadWeights};
/// use wgpu_attention::{Scratch, TensorView};
///
/// let (e, heads) = (512, 8);
/// let weight = TensorView::matrix(in_proj_weight, DType::F32, [3 * e, e]);
/// let bias = TensorView::vector(in_proj_bias, DType::F32, 3 * e);
/// let part = |n| Linear { weight: weight.slice(2, n * e, e), bias: Some(bias.slice(3, n * e, e)) };
/// let out = Linear {
///     weight: TensorView::matrix(out_proj_weight, DType::F32, [e, e]),
///     bias: Some(TensorView::vector(out_proj_bias, DType::F32, e)),
/// };
/// let weights = MultiHeadWeights { query: part(0), key: part(1), value: part(2), out, bias_kv: None, qk_norm: None, gate: None };
/// let layer = MultiHeadAttention::new(device, MultiHeadConfig::new(e, heads), &weights)?;
///
/// let sequence = |buffer| TensorView::sequence(buffer, DType::F32, [1, 128, e]); // batch, length, features
/// let call = MultiHeadForward::self_attention(sequence(x), sequence(y)).mask(Mask::causal());
/// let mut scratch = Scratch::new(device, layer.scratch_size(&call)?)?;
/// let mut encoder = device.create_command_encoder(&Default::default());
/// layer.forward(&mut encoder, &call, &mut scratch)?;
/// queue.submit([encoder.finish()]);
/// # Ok(()) }
/// ```
#[doc(alias = "MHA")]
#[derive(Clone, Debug)]
pub struct MultiHeadAttention {
    pipelines: Pipelines,
    config: MultiHeadConfig,
    kernel_options: KernelOptions,
    query: OwnedLinear,
    key: OwnedLinear,
    value: OwnedLinear,
    out: OwnedLinear,
    appended: Option<[Tensor; 2]>,
    /// The norms of queries and of keys.
    norms: [OwnedNorm; 2],
    /// The projection of the gate of the heads' outputs.
    gate: Option<OwnedLinear>,
}

/// The names, in errors, of the weights and biases of the norms of queries and of keys.
pub(crate) const NORMS: [[&str; 2]; 2] = [["q_norm.weight", "q_norm.bias"], ["k_norm.weight", "k_norm.bias"]];

/// The plan of a checked call: the attention inside the layer, without its tensors in scratch.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    pub shape: Shape,
    appended: usize,
    chosen: Chosen,
    pub size: ScratchSize,
}

impl MultiHeadAttention {
    /// Makes a layer with its own pipelines.
    ///
    /// # Errors
    /// Weights that do not have the shapes of `config`, and everything that [`Error`] lists for
    /// tensors.
    pub fn new(
        device: &wgpu::Device,
        config: MultiHeadConfig,
        weights: &MultiHeadWeights,
    ) -> Result<Self, Error> {
        Self::with_pipelines(&Pipelines::new(device), config, weights)
    }

    /// Makes a layer that shares pipelines with other operators on the device.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_pipelines(
        pipelines: &Pipelines,
        config: MultiHeadConfig,
        weights: &MultiHeadWeights,
    ) -> Result<Self, Error> {
        let device = &pipelines.facts();
        config.check()?;
        inner(&config).check(device)?;
        check_dtype(config.dtype, device)?;
        let side = |side| config.side(side);
        let width = config.heads * config.value_dim;
        let mut linears = vec![
            ("weights.query", "bias.query", &weights.query, side(Side::Query).weight()),
            ("weights.key", "bias.key", &weights.key, side(Side::Key).weight()),
            ("weights.value", "bias.value", &weights.value, side(Side::Value).weight()),
            ("weights.out", "bias.out", &weights.out, [1, 1, config.out_features, width]),
        ];
        config.check_gate(weights.gate.is_some())?;
        if let Some((gate, side)) = weights.gate.as_ref().zip(config.gate_side()) {
            linears.push(("weights.gate", "bias.gate", gate, side.weight()));
        }
        for (weight, bias, linear, shape) in linears {
            check_weight(weight, &linear.weight, shape, Access::Read, device)?;
            if let Some(tensor) = &linear.bias {
                check_vector(bias, tensor, shape[1] * shape[2], Access::Read, device)?;
            }
        }
        if let Some([k, v]) = &weights.bias_kv {
            check_vector("bias_k", k, config.kv_heads * config.head_dim, Access::Read, device)?;
            check_vector("bias_v", v, config.kv_heads * config.value_dim, Access::Read, device)?;
            same_dtype("bias_v", v, k.dtype())?;
        }
        if weights.qk_norm.is_some() && config.qk_norm.is_none() {
            let why = "the layer does not normalise queries and keys; set `MultiHeadConfig::qk_norm`";
            return Err(Error::Unsupported { what: "`qk_norm` of the weights without the option", why });
        }
        let [q_norm, k_norm] = weights.qk_norm.unwrap_or_default();
        let norm = |n: usize, norm| OwnedNorm::new(NORMS[n], &norm, config.head_dim, device);
        let norms = [norm(0, q_norm)?, norm(1, k_norm)?];
        for (tensor, linear) in [("weights.key", &weights.key), ("weights.value", &weights.value)] {
            same_dtype(tensor, &linear.weight, weights.query.weight.dtype())?;
        }
        let biases =
            [("bias.query", &weights.query), ("bias.key", &weights.key), ("bias.value", &weights.value)];
        let mut first = None;
        for (name, bias) in biases.into_iter().filter_map(|(name, l)| l.bias.map(|b| (name, b))) {
            same_dtype(name, &bias, *first.get_or_insert(bias.dtype()))?;
        }
        Ok(MultiHeadAttention {
            pipelines: pipelines.clone(),
            config,
            kernel_options: KernelOptions::default(),
            query: OwnedLinear::new(&weights.query),
            key: OwnedLinear::new(&weights.key),
            value: OwnedLinear::new(&weights.value),
            out: OwnedLinear::new(&weights.out),
            appended: weights.bias_kv.map(|pair| pair.map(TensorView::to_owned)),
            norms,
            gate: weights.gate.as_ref().map(OwnedLinear::new),
        })
    }

    /// Sets the options that select kernels. They may change the rounding of the result; see
    /// [`KernelOptions`].
    pub fn kernel_options(mut self, kernel_options: KernelOptions) -> Self {
        self.kernel_options = kernel_options;
        self
    }

    /// Returns the pipelines, to share them.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// The type of inputs, outputs and intermediate tensors.
    pub(crate) fn dtype(&self) -> DType {
        self.config.dtype
    }

    /// The number of keys that the layer appends to every sequence.
    pub(crate) fn appended_keys(&self) -> usize {
        usize::from(self.appended.is_some()) + usize::from(self.config.add_zero_attn)
    }

    /// Returns the size of the temporary memory that `call` needs. It holds:
    ///
    /// - the memory of [`Attention::scratch_size`](crate::Attention::scratch_size),
    /// - the projected queries, keys and values,
    /// - the heads' outputs, unless [`context`](MultiHeadForward::context) is set,
    /// - with a gate, its logits and the gated heads' outputs.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn scratch_size(&self, call: &MultiHeadForward) -> Result<ScratchSize, Error> {
        Ok(self.check(call, &self.pipelines.facts())?.size)
    }

    /// Records `call` into an encoder or a pass. It submits and copies nothing.
    ///
    /// # Errors
    /// Everything that [`Error`] lists for tensors, masks, options and scratch. On an error the
    /// call records nothing.
    pub fn forward(
        &self,
        into: &mut impl Recorder,
        call: &MultiHeadForward,
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
    pub fn prepare(&self, call: &MultiHeadForward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        let scratch: &Scratch = scratch;
        self.pipelines.with_fallbacks(|| {
            let device = &self.pipelines.facts();
            let plan = attention::dispatch::within(device, |device| {
                let plan = self.check(call, device)?;
                scratch.check(plan.size).map(|()| plan)
            })?;
            self.pipelines.bind(
                "multi-head attention",
                &self.dispatches(call, &plan, scratch, device)?,
                scratch.bindings(),
            )
        })
    }

    /// Returns the dispatches of a checked call.
    pub(crate) fn dispatches<'a>(
        &'a self,
        call: &MultiHeadForward<'a>,
        plan: &Plan,
        scratch: &'a Scratch,
        device: &DeviceFacts,
    ) -> Result<Dispatches<'a>, Error> {
        let Plan { shape, appended, chosen, .. } = *plan;
        let dtype = self.config.dtype;
        let projected = self.projected(call, &shape, scratch.buffer(Slot::Projected)?);
        let context = match call.context {
            Some(context) => context,
            None => in_scratch(scratch.buffer(Slot::Context)?, dtype, joined_heads(&shape), 0),
        };
        let memory = chosen.memory(scratch)?;
        let mut dispatches = self.project(call, &shape, appended, (projected, [None; 2]), device)?;
        let extras = call.extras(heads_of(context, &shape), appended);
        dispatches.extend(attention::dispatch::dispatches(
            &self.problem(shape, projected, extras),
            chosen,
            memory,
            device,
        ));
        dispatches.extend(self.finish(call, &shape, context, scratch, device)?);
        Ok(dispatches)
    }

    /// The tensors of queries, keys and values in `buffer`. If the call has other places for keys
    /// and values, these replace them.
    fn projected<'a>(
        &self,
        call: &MultiHeadForward<'a>,
        shape: &Shape,
        buffer: &'a wgpu::Buffer,
    ) -> [TensorView<'a>; 3] {
        let dtype = self.config.dtype;
        let mut layouts = projected_layouts(shape, call.projects(), dtype);
        if call.rotary.is_some() && call.projects() == [true; 3] && shape.q_len == shape.kv_len {
            layouts = with_joined_heads(shape, layouts);
        }
        let [q, k, v] = layouts.map(|layout| TensorView::with_layout(buffer, dtype, layout));
        let [k, v] = call.keys.outside().unwrap_or([k, v]);
        [q, k, v]
    }

    /// Projects queries, and keys and values if they are not projected yet. Then it normalises and
    /// rotates queries and keys, and appends keys and values. `unnormed` are the places of a
    /// backward pass for queries and keys before their norm.
    fn project<'a>(
        &'a self,
        call: &MultiHeadForward<'a>,
        shape: &Shape,
        appended: usize,
        ([q, k, v], unnormed): ([TensorView<'a>; 3], [Option<TensorView<'a>>; 2]),
        device: &DeviceFacts,
    ) -> Result<Dispatches<'a>, Error> {
        let narrow = self.config.narrow;
        let given = |t: TensorView<'a>| t.slice(2, 0, shape.kv_len - appended);
        let mut products = vec![self.query.product(call.query, unnormed[0].unwrap_or(q), narrow)];
        let before = call.keys.are_given();
        if !before || unnormed[1].is_some() {
            products.push(self.key.product(call.key, given(unnormed[1].unwrap_or(k)), narrow));
        }
        if !before {
            products.push(self.value.product(call.value, given(v), narrow));
        }
        let mut dispatches = projection::dispatch::dispatches(&products, &self.kernel_options, device)?;
        dispatches.extend(self.normed(0, unnormed[0].unwrap_or(q), q, device));
        if !before {
            dispatches.extend(self.normed(1, given(unnormed[1].unwrap_or(k)), given(k), device));
        }
        if let Some(rotary) = call.rotary {
            let both = if before { None } else { joined_qk(q, given(k)) };
            dispatches.push(rotary.dispatch(both.unwrap_or(q), false, device)?);
            if !before && both.is_none() {
                dispatches.push(rotary.dispatch(given(k), false, device)?);
            }
        }
        if appended > 0 && !before {
            // Both tensors lie in one buffer, which is bound as a whole.
            let end = v.offset() + count(v.shape());
            let whole = in_scratch(v.buffer, self.config.dtype, [1, 1, 1, end], 0);
            let views = [k, v].map(|t| Some(View::from(t.layout)));
            dispatches.push(self.append((whole, views), shape, appended, device));
        }
        Ok(dispatches)
    }

    /// The norm of queries or keys `x`, if the layer has one.
    fn norm_of<'a>(&'a self, side: usize, x: TensorView<'a>) -> Option<NormOp<'a>> {
        Some(self.norms[side].op(self.config.qk_norm?, x, None))
    }

    /// Normalises queries or keys `x` into `out`, which may be `x`, if the layer has norms.
    fn normed<'a>(
        &'a self,
        side: usize,
        x: TensorView<'a>,
        out: TensorView<'a>,
        device: &DeviceFacts,
    ) -> Option<Dispatch<'a>> {
        Some(self.norm_of(side, x)?.forward(out, None, &self.kernel_options, device))
    }

    /// The attention inside the layer.
    fn problem<'a>(&self, shape: Shape, [q, k, v]: [TensorView<'a>; 3], extras: Extras<'a>) -> Problem<'a> {
        Problem {
            shape,
            q,
            keys: Keys::Tensors { k, v },
            extras,
            scale: scale_in_f32(self.config.scale, shape.head_dim),
            softcap: self.config.softcap.map(|c| c as f32),
            score_vector: None,
            lists: None,
            kernel_options: self.kernel_options,
        }
    }

    /// Writes the appended keys and values into a buffer. The buffer has both tensors, or one of
    /// them.
    fn append<'a>(
        &'a self,
        (kv, [k, v]): (TensorView<'a>, [Option<View>; 2]),
        shape: &Shape,
        appended: usize,
        device: &DeviceFacts,
    ) -> Dispatch<'a> {
        let [bias_k, bias_v] = [0, 1].map(|n| self.appended.as_ref().map(|pair| pair[n].view()));
        let place = |bias: Option<TensorView>| {
            let layout = bias.map(|bias| bias.window(device).layout);
            layout.map_or([0; 2], |layout| [layout.offset as u32, layout.strides[3] as u32])
        };
        let call = AppendKeysCall {
            kv,
            bias_k,
            bias_v,
            k: k.unwrap_or_default(),
            v: v.unwrap_or_default(),
            kv_heads: shape.kv_heads as u32,
            head_dim: k.map_or(0, |_| shape.head_dim as u32),
            value_dim: v.map_or(0, |_| shape.value_dim as u32),
            start: (shape.kv_len - appended) as u32,
            bias_k_at: place(bias_k),
            bias_v_at: place(bias_v),
        };
        let channels = shape.head_dim.max(shape.value_dim);
        let groups = channels.div_ceil(append_keys::WORKGROUP);
        call.dispatch([groups, appended, shape.batch * shape.kv_heads], device)
    }

    fn check(&self, call: &MultiHeadForward, device: &DeviceFacts) -> Result<Plan, Error> {
        let mut tensors = CallTensors::new(device);
        let shape = self.check_tensors(call, ("out", call.out, Access::Write), &mut tensors)?;
        let extras = call.extras(call.out, self.appended_keys());
        check_extras(&extras, &shape, &mut tensors)?;
        if let Some(context) = call.context {
            tensors.write("context", context, self.config.dtype, joined_heads(&shape))?;
            // The output projection reads `context` while it writes `out`. Attention writes
            // `context` next to `lse`, and may read `weights` in the same dispatch.
            let others = [Some(("out", call.out)), call.weights.map(|weights| ("weights", weights))];
            let others: Vec<_> = others.into_iter().flatten().collect();
            check_aliasing(&[("context", context)], &others, device)?;
            let together = [Some(("context", context)), call.lse.map(|lse| ("lse", lse))];
            check_apart(&together.into_iter().flatten().collect::<Vec<_>>(), device)?;
        }
        tensors.check_aliasing()?;
        self.plan(call, shape, &extras, device)
    }

    /// Makes the plan of a checked call.
    fn plan(
        &self,
        call: &MultiHeadForward,
        shape: Shape,
        extras: &Extras,
        device: &DeviceFacts,
    ) -> Result<Plan, Error> {
        let mut size = self.projected_size(&shape, call.projects(), self.config.dtype, Slot::Projected)?;
        if call.context.is_none() {
            size = size.with(Slot::Context, self.context_bytes(&shape));
        }
        size = size.max(self.gate_size(&shape));
        if extras.appended > 0 {
            // Appended keys come after the longest sequence of the batch.
            let what = "`batch_invariant` with `bias_kv` or `add_zero_attn`";
            self.kernel_options.refuse_batch_invariant(what)?;
        }
        let chosen = attention::dispatch::choose(&self.outline(call, &shape, extras), device)?;
        Ok(Plan { shape, appended: extras.appended, chosen, size: size.max(chosen.scratch_size()) })
    }

    /// The shape of the attention inside the layer. Its keys are the `kv_len` keys of the input and
    /// the appended keys.
    pub(crate) fn shape_of(&self, [batch, q_len, kv_len]: [usize; 3]) -> Shape {
        self.config.shape(batch, q_len, kv_len, self.appended_keys())
    }

    /// Makes the plan of a call whose inputs are in the scratch of a stack. It checks the mask and
    /// the weights only.
    pub(crate) fn plan_of(
        &self,
        call: &MultiHeadForward,
        dims: [usize; 3],
        device: &DeviceFacts,
    ) -> Result<Plan, Error> {
        let shape = self.shape_of(dims);
        let tensors = &mut CallTensors::new(device);
        self.check_rotary(call, &shape, tensors)?;
        let extras = call.extras(call.out, self.appended_keys());
        check_extras(&Extras { lse: None, ..extras }, &shape, tensors)?;
        self.plan(call, shape, &extras, device)
    }

    /// Returns the outline of the attention inside, from which a plan is chosen. The layout of keys
    /// and values decides how kernels load them.
    fn outline(&self, call: &MultiHeadForward, shape: &Shape, extras: &Extras) -> Outline {
        let dtype = self.config.dtype;
        let [_, k, v] = projected_layouts(shape, [true; 3], dtype);
        let [k, v] = call.keys.outside().map_or([k, v], |keys| keys.map(|t| t.layout));
        extras.outline(*shape, dtype, KeyLayout::Tensors { dtype, k, v }, self.kernel_options)
    }

    /// Checks the inputs, and a tensor with the shape of the output. Returns the shape of the
    /// attention inside.
    fn check_tensors<'a>(
        &'a self,
        call: &MultiHeadForward<'a>,
        (out, view, access): (&'static str, TensorView<'a>, Access),
        tensors: &mut CallTensors<'a, '_>,
    ) -> Result<Shape, Error> {
        let config = &self.config;
        let [batch, _, q_len, _] = call.query.shape();
        let kv_len = call.key.shape()[2];
        let dtype = config.dtype;
        tensors.read("query", call.query, dtype, [batch, 1, q_len, config.query_features])?;
        tensors.read("key", call.key, dtype, [batch, 1, kv_len, config.key_features])?;
        tensors.read("value", call.value, dtype, [batch, 1, kv_len, config.value_features])?;
        tensors.add(access, out, view, dtype, [batch, 1, q_len, config.out_features])?;
        tensors.read_checked(self.weights());
        let shape = config.shape(batch, q_len, kv_len, self.appended_keys());
        self.check_rotary(call, &shape, tensors)?;
        Ok(shape)
    }

    fn check_rotary<'a>(
        &self,
        call: &MultiHeadForward<'a>,
        shape: &Shape,
        tensors: &mut CallTensors<'a, '_>,
    ) -> Result<(), Error> {
        let Some(rotary) = call.rotary else { return Ok(()) };
        if shape.kv_len - self.appended_keys() != shape.q_len {
            let why = "a layer rotates only self-attention; rotate the outputs of `Projection` with `Positions` instead";
            return Err(Error::Unsupported {
                what: "rotary positions with unequal numbers of queries and keys",
                why,
            });
        }
        rotary.check(shape.q(), tensors)
    }

    /// Returns the tensors of the layer's weights.
    pub(crate) fn weights(&self) -> Vec<(&'static str, TensorView<'_>)> {
        let mut linears = vec![
            ("weights.query", "bias.query", &self.query),
            ("weights.key", "bias.key", &self.key),
            ("weights.value", "bias.value", &self.value),
            ("weights.out", "bias.out", &self.out),
        ];
        linears.extend(self.gate.iter().map(|gate| ("weights.gate", "bias.gate", gate)));
        linears
            .iter()
            .map(|(name, _, linear)| (*name, linear.weight.view()))
            .chain(linears.iter().filter_map(|(_, name, linear)| Some((*name, linear.bias.as_ref()?.view()))))
            .chain(
                ["bias_k", "bias_v"]
                    .into_iter()
                    .zip(self.appended.iter().flatten())
                    .map(|(n, t)| (n, t.view())),
            )
            .chain(self.norms.iter().flat_map(OwnedNorm::tensors))
            .collect()
    }

    /// The temporary memory for the `wanted` ones of projected queries, keys and values.
    fn projected_size(
        &self,
        shape: &Shape,
        wanted: [bool; 3],
        dtype: DType,
        slot: Slot,
    ) -> Result<ScratchSize, Error> {
        let parts = [shape.q(), shape.k(), shape.v(), shape.out()];
        let total = parts.iter().fold(0u64, |sum, part| sum.saturating_add(count(*part) as u64));
        // Kernels count elements in 32 bits.
        if total > u64::from(u32::MAX / 2) {
            let bytes = total.saturating_mul(dtype.bytes() as u64);
            let limit = self.pipelines.facts().max_binding_bytes;
            return Err(Error::BindingLimit { tensor: "scratch", bytes, limit });
        }
        let ends =
            projected_layouts(shape, wanted, dtype).into_iter().zip(wanted).filter(|(_, wanted)| *wanted);
        let end = ends.map(|(layout, _)| layout.offset + count(layout.shape)).max().unwrap_or(0);
        Ok(ScratchSize::default().with(slot, (end as u64 * dtype.bytes() as u64).next_multiple_of(4)))
    }

    /// Bytes of the heads' outputs, or of their gradient. The shape was checked.
    pub(crate) fn context_bytes(&self, shape: &Shape) -> u64 {
        (count(shape.out()) as u64 * self.config.dtype.bytes() as u64).next_multiple_of(4)
    }
}

/// The configuration of the attention inside a layer.
fn inner(config: &MultiHeadConfig) -> Config {
    Config::new(config.heads, config.head_dim)
        .kv_heads(config.kv_heads)
        .value_dim(config.value_dim)
        .dtype(config.dtype)
        .scale(config.scale)
        .softcap(config.softcap)
}

/// The layouts of q, k and v in the scratch, `[batch, heads, length, dim]` each. The wanted tensors
/// lie one after the other.
fn projected_layouts(shape: &Shape, wanted: [bool; 3], dtype: DType) -> [Layout; 3] {
    // Every device can bind at these offsets. A window begins where its tensor does, except for
    // joined heads of k.
    let align = 256 / dtype.bytes();
    let mut offset = 0usize;
    let mut wanted = wanted.into_iter();
    [shape.q(), shape.k(), shape.v()].map(|shape| {
        let layout = Layout { offset, ..Layout::dense(shape) };
        if wanted.next() == Some(true) {
            offset = (offset + count(shape)).next_multiple_of(align);
        }
        layout
    })
}

/// The layouts with each sequence's heads of k after its heads of q. They take the same memory. A
/// device can bind it as a whole.
fn with_joined_heads(shape: &Shape, [q, k, v]: [Layout; 3]) -> [Layout; 3] {
    let [batch, heads, length, dim] = shape.q();
    let joined = Layout::dense([batch, heads + shape.kv_heads, length, dim]);
    let of = |first: usize, layout: Layout| Layout {
        offset: q.offset + first * joined.strides[1],
        shape: layout.shape,
        ..joined
    };
    [of(0, q), of(heads, k), v]
}

/// The heads of q, then those of k, as one tensor, if they lie so in memory.
fn joined_qk<'a>(q: TensorView<'a>, k: TensorView<'a>) -> Option<TensorView<'a>> {
    let [batch, heads, length, dim] = q.shape();
    let follows = k.buffer == q.buffer && k.offset() == q.offset() + heads * q.strides()[1];
    let same = k.strides() == q.strides() && k.shape()[2..] == q.shape()[2..];
    let shape = [batch, heads + k.shape()[1], length, dim];
    (follows && same).then_some(TensorView { layout: Layout { shape, ..q.layout }, ..q })
}

/// The layouts of keys and values in a separate buffer, and the element at which the next pair may
/// begin.
pub(crate) fn key_layouts(shape: &Shape, dtype: DType) -> ([Layout; 2], usize) {
    let [_, k, v] = projected_layouts(shape, [false, true, true], dtype);
    ([k, v], (v.offset + count(v.shape)).next_multiple_of(256 / dtype.bytes()))
}

/// The shape of the heads' outputs next to each other, as the output projection reads them.
pub(crate) fn joined_heads(shape: &Shape) -> [usize; 4] {
    [shape.batch, 1, shape.q_len, shape.heads.saturating_mul(shape.value_dim)]
}

/// The heads' outputs as `[batch, heads, q_len, value_dim]`, from `joined`.
fn heads_of<'a>(joined: TensorView<'a>, shape: &Shape) -> TensorView<'a> {
    let [batch, _, length, unit] = joined.strides();
    let strides = [batch, shape.value_dim.saturating_mul(unit), length, unit];
    TensorView { layout: Layout { shape: shape.out(), strides, ..joined.layout }, ..joined }
}
