//! The operator: `φ(q) (φ(k)ᵀ v)`, divided by the norm.

mod call;
mod config;
pub(crate) mod dispatch;
pub(crate) mod feature_map;
pub(crate) mod kernels;
pub(crate) mod plan;
pub(crate) mod reference;

use call::LinearKeys;
pub use call::{LinearBackward, LinearForward, LinearState};
pub use config::LinearConfig;
use dispatch::{LinearGradientViews, LinearProblem, LinearStateViews, Random};
pub use feature_map::{FeatureMap, RandomFeatures, UpdateRule, random_features};
use kernels::linear::Phi;
use plan::LinearTiles;

use crate::kernel::{Pipelines, Prepared, Recorder, Scratch, ScratchSize, Target};
use crate::tensor::{
    Access, CallTensors, DType, Element, Error, Shape, TensorView, check_apart, expect, expect_broadcast,
};

/// Linear attention on one device (Katharopoulos et al. 2020, "Transformers are RNNs"):
/// `φ(qᵢ) Σⱼ φ(kⱼ)ᵀ vⱼ / φ(qᵢ) Σⱼ φ(kⱼ)ᵀ`. Its cost grows linearly with the length.
///
/// Without causality it computes two products: the state of all keys, then every query with that
/// state. Causal attention works on chunks of 64 rows. It computes the pairs within a chunk, and
/// uses a state for all earlier rows. For generation the state stays on the device
/// ([`LinearForward::state`]). All variants give the same results.
///
/// ```no_run
/// # fn f(device: &wgpu::Device, queue: &wgpu::Queue, q: &wgpu::Buffer, k: &wgpu::Buffer, v: &wgpu::Buffer,
/// #      out: &wgpu::Buffer) -> Result<(), wgpu_attention::Error> {
/// use wgpu_attention::{DType, Scratch, TensorView};
/// use wgpu_attention::linear_attention::{LinearAttention, LinearConfig, LinearForward};
///
/// let attention = LinearAttention::new(device, LinearConfig::new(8, 64).causal(true))?;
/// let view = |buffer| TensorView::new(buffer, DType::F32, [1, 8, 65536, 64]);
/// let call = LinearForward::new(view(q), view(k), view(v), view(out));
/// let mut scratch = Scratch::new(device, attention.scratch_size(&call)?)?;
///
/// let mut encoder = device.create_command_encoder(&Default::default());
/// attention.forward(&mut encoder, &call, &mut scratch)?; // records only
/// queue.submit([encoder.finish()]);
/// # Ok(()) }
/// ```
#[doc(alias = "DeltaNet")]
#[doc(alias = "Performer")]
#[derive(Clone, Debug)]
pub struct LinearAttention {
    pipelines: Pipelines,
    config: LinearConfig,
}

impl LinearAttention {
    /// Creates the operator with new pipelines.
    ///
    /// # Errors
    /// A configuration that no call could satisfy, or a missing feature.
    pub fn new(device: &wgpu::Device, config: LinearConfig) -> Result<Self, Error> {
        Self::with_pipelines(&Pipelines::new(device), config)
    }

    /// Creates the operator with pipelines that other operators on the device share.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_pipelines(pipelines: &Pipelines, config: LinearConfig) -> Result<Self, Error> {
        config.check(&pipelines.facts())?;
        Ok(LinearAttention { pipelines: pipelines.clone(), config })
    }

    /// Returns the pipelines, for other operators to share.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// Returns the temporary memory that `call` needs: the states of chunks and the products within
    /// them. Each takes at most 32 MiB, for any length and any number of heads. Heads that need
    /// more are computed in groups, one after the other. Each head of a group also needs a state
    /// for each sequence, and its random features. The bound is exceeded only if the state or
    /// products of a single key/value head are larger.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn scratch_size(&self, call: &LinearForward) -> Result<ScratchSize, Error> {
        Ok(self.check(call)?.scratch_size())
    }

    /// Records `call` into an encoder or a pass. It submits, copies and reads back nothing.
    ///
    /// # Errors
    /// Any error that [`Error`] lists for tensors, options and scratch. The encoder is then
    /// unchanged.
    pub fn forward(
        &self,
        into: &mut impl Recorder,
        call: &LinearForward,
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
    pub fn prepare(&self, call: &LinearForward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        let problem = self.check(call)?;
        let dispatches = dispatch::dispatches(&problem, scratch, &self.pipelines.facts())?;
        self.pipelines.bind("linear attention", &dispatches, scratch.bindings())
    }

    /// Returns the temporary memory that the gradients of `call` need. It is the memory of the
    /// forward call and the products of gradients (at most 32 MiB). Each query of each head of a
    /// group needs 16 bytes more. The gradients of random features need as much as the features,
    /// and 16 bytes more for each row.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn backward_scratch_size(&self, call: &LinearBackward) -> Result<ScratchSize, Error> {
        Ok(self.check_backward(call)?.0.backward_scratch_size())
    }

    /// Records the gradients of a forward call into an encoder or a pass. It recomputes the states,
    /// for queries from the first chunk to the last. For keys and values the order is reversed.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), and [`Error::Unsupported`] if the call requests no gradient.
    pub fn backward(
        &self,
        into: &mut impl Recorder,
        call: &LinearBackward,
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
    pub fn prepare_backward(&self, call: &LinearBackward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        let (problem, gradients) = self.check_backward(call)?;
        let dispatches =
            dispatch::backward_dispatches(&problem, &gradients, scratch, &self.pipelines.facts())?;
        self.pipelines.bind("linear attention backward", &dispatches, scratch.bindings())
    }

    /// Checks the tensors that forward and backward calls share, and returns the problem.
    fn problem<'a>(
        &self,
        [q, k, v, out]: [TensorView<'a>; 4],
        out_access: Access,
        keys: &LinearKeys<'a>,
        tensors: &mut CallTensors<'a, '_>,
    ) -> Result<LinearProblem<'a>, Error> {
        let (config, device) = (&self.config, tensors.device);
        let dims = [config.heads, config.kv_heads, config.head_dim, config.value_dim];
        let shape = Shape::of(tensors, config.dtype, dims, [q, k, v], ("out", out, out_access))?;
        if config.causal || keys.packed.is_some() {
            // The query of each row is at the position of the key of that row.
            expect("k", k.shape(), 2, shape.q_len)?;
        }
        let Shape { batch, kv_heads, kv_len, .. } = shape;
        if let Some(key_mask) = keys.key_mask {
            tensors.read_broadcast("key_mask", key_mask, DType::Bool, [batch, kv_heads, 1, kv_len])?;
            // A broadcast axis would hide or show all keys together.
            expect("key_mask", key_mask.shape(), 3, kv_len)?;
        }
        tensors.read_broadcast("lengths", keys.lengths, DType::U32, [batch, kv_heads, 1, 1])?;
        if let Some(starts) = keys.packed {
            tensors.read("packed", starts, DType::U32, [1, 1, 1, starts.shape()[3].max(2)])?;
            expect("q", q.shape(), 0, 1)?;
            if keys.lengths.is_some() {
                let why = "the starts define the length of each sequence; omit `lengths`";
                return Err(Error::Unsupported { what: "`lengths` with packed sequences", why });
            }
        }
        let random = self.random(keys, kv_heads, tensors)?;
        let phi = match config.map {
            FeatureMap::Elu => Phi::Elu,
            FeatureMap::Relu => Phi::Relu,
            FeatureMap::Custom(own) => Phi::Custom(own.0),
            _ => Phi::Identity,
        };
        let cpu = match config.kernel_options.target {
            Target::Auto => device.software,
            form => form == Target::Software,
        };
        let eps = if config.normalised { config.eps.unwrap_or(config.map.usual_eps()) } else { 0.0 };
        Ok(LinearProblem {
            shape,
            features: config.features(),
            phi,
            random,
            causal: config.causal,
            normalised: config.normalised,
            eps: eps as f32,
            scale: config.scale as f32,
            q,
            k,
            v,
            out,
            key_mask: keys.key_mask,
            lengths: keys.lengths,
            starts: keys.packed,
            state: None,
            rule: config.rule,
            decay: None,
            beta: None,
            tiles: LinearTiles::of(cpu, device),
            most_heads: device.max_workgroups as usize,
        })
    }

    /// Returns the directions of random features, if φ has any.
    fn random<'a>(
        &self,
        keys: &LinearKeys<'a>,
        kv_heads: usize,
        tensors: &mut CallTensors<'a, '_>,
    ) -> Result<Option<Random<'a>>, Error> {
        match (self.config.map, keys.directions) {
            (FeatureMap::Random { kind, directions: count }, Some(directions)) => {
                let [_, heads, _, _] = directions.shape();
                let head_dim = self.config.head_dim;
                tensors.read("directions", directions, DType::F32, [1, heads, count, head_dim])?;
                expect_broadcast("directions", directions.shape(), [1, kv_heads, count, head_dim])?;
                Ok(Some(Random { kind, directions }))
            }
            (FeatureMap::Random { .. }, None) => {
                let why = "set `directions` of the call";
                Err(Error::Unsupported { what: "random features without directions", why })
            }
            (_, Some(_)) => {
                let why = "only `FeatureMap::Random` has directions; omit them";
                Err(Error::Unsupported { what: "`directions` for this feature map", why })
            }
            (_, None) => Ok(None),
        }
    }

    fn check<'a>(&self, call: &LinearForward<'a>) -> Result<LinearProblem<'a>, Error> {
        let device = &self.pipelines.facts();
        let LinearForward { q, k, v, out, keys, state, begins, decay, beta } = *call;
        let mut tensors = CallTensors::new(device);
        let problem = self.problem([q, k, v, out], Access::Write, &keys, &mut tensors)?;
        if let Some(LinearState { state, norm, log_scale }) = state {
            let sequences = keys.packed.map_or(problem.shape.batch, |starts| starts.shape()[3] - 1);
            let (heads, features) = (self.config.kv_heads, self.config.features());
            let of_state = [sequences, heads, features, self.config.value_dim];
            tensors.write("state.state", state, DType::F32, of_state)?;
            tensors.write("state.norm", norm, DType::F32, [sequences, heads, features, 1])?;
            tensors.write("state.log_scale", log_scale, DType::F32, [sequences, heads, 1, 1])?;
            if log_scale.is_some() != self.config.map.is_scaled() {
                let why = "set it for exponential random features, and only for them";
                return Err(Error::Unsupported { what: "`log_scale` of the state", why });
            }
            check_apart(&tensors.written()[1..], device)?;
        } else if begins {
            let why = "without a `state`, every call begins; omit `begins` or set a `state`";
            return Err(Error::Unsupported { what: "`begins`", why });
        }
        let rule = self.config.rule;
        let Shape { batch, kv_heads, kv_len, .. } = problem.shape;
        for (tensor, view, has) in [("decay", decay, rule.has_decay()), ("beta", beta, rule.has_beta())] {
            let Some(view) = view else {
                if has {
                    let why = "set it in the call";
                    return Err(Error::Unsupported { what: missing(tensor), why });
                }
                continue;
            };
            if !has {
                let why = "this update rule does not use it; see `LinearConfig::update_rule`";
                return Err(Error::Unsupported { what: tensor, why });
            }
            let channels = match (tensor, rule) {
                ("decay", UpdateRule::Gated | UpdateRule::GatedDelta) if view.shape()[3] != 1 => {
                    self.config.features()
                }
                _ => 1,
            };
            tensors.read(tensor, view, Element::Float, [batch, kv_heads, kv_len, channels])?;
        }
        if rule != UpdateRule::Linear
            && (keys.key_mask.is_some() || keys.lengths.is_some() || keys.packed.is_some())
        {
            let why = "update rules process every token; exclude tokens through their `decay` and `beta`";
            return Err(Error::Unsupported { what: "masks and packed sequences with an update rule", why });
        }
        tensors.check_aliasing()?;
        let state = state.map(|state| LinearStateViews {
            state: state.state,
            norm: state.norm,
            log: state.log_scale,
            given: !begins,
        });
        Ok(LinearProblem { state, decay, beta, ..problem })
    }

    fn check_backward<'a>(
        &self,
        call: &LinearBackward<'a>,
    ) -> Result<(LinearProblem<'a>, LinearGradientViews<'a>), Error> {
        let device = &self.pipelines.facts();
        let LinearBackward { forward, d_out, d_q, d_k, d_v, accumulates } = *call;
        let LinearForward { q, k, v, out, keys, state, begins, .. } = forward;
        let (dtype, mut tensors) = (self.config.dtype, CallTensors::new(device));
        let problem = self.problem([q, k, v, out], Access::Read, &keys, &mut tensors)?;
        tensors.read("d_out", d_out, dtype, problem.shape.out())?;
        tensors.gradient("d_q", d_q, dtype, problem.shape.q())?;
        tensors.gradient("d_k", d_k, dtype, problem.shape.k())?;
        tensors.gradient("d_v", d_v, dtype, problem.shape.v())?;
        tensors.require_gradients("no gradient is requested; set `d_q`, `d_k` or `d_v`")?;
        if self.config.rule != UpdateRule::Linear {
            let why = "use `RecurrentAttention`, which has gradients of rules, or `UpdateRule::Linear`";
            return Err(Error::Unsupported { what: "the backward pass of an update rule", why });
        }
        if state.is_some() && !begins {
            let why = "the state has no gradient; pass all tokens in one call and set `begins(true)`";
            return Err(Error::Unsupported {
                what: "the backward pass of a call that continues from a `state`",
                why,
            });
        }
        if let FeatureMap::Custom(own) = self.config.map {
            own.check_slope()?;
        }
        tensors.check_aliasing()?;
        Ok((problem, LinearGradientViews { d_out, d_q, d_k, d_v, accumulates }))
    }
}

fn missing(tensor: &str) -> &'static str {
    if tensor == "decay" { "an update rule without `decay`" } else { "an update rule without `beta`" }
}
