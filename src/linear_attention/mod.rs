//! The operator: `φ(q) (φ(k)ᵀ v)`, over the norm.

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

use crate::device::DeviceFacts;
use crate::kernel::{Pipelines, Prepared, Recorder, Scratch, ScratchSize, Target};
use crate::tensor::{
    Access, DType, Error, Shape, TensorView, check_aliasing, check_apart, check_float, expect,
    expect_broadcast, expect_shape,
};

/// Linear attention on one device: `φ(qᵢ) Σⱼ φ(kⱼ)ᵀ vⱼ / φ(qᵢ) Σⱼ φ(kⱼ)ᵀ` (Katharopoulos et al. 2020, "Transformers are RNNs"), whose cost grows with
/// the length and not with its square.
///
/// Without causality two products: the state of all keys, then every query's with it. Causal attention goes by chunks of 64 rows:
/// pairs within a chunk, a state for all that is before it. For generation the state stays on the device
/// ([`LinearForward::state`]). All give the same.
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
#[derive(Clone, Debug)]
pub struct LinearAttention {
    pipelines: Pipelines,
    config: LinearConfig,
}

impl LinearAttention {
    /// Linear attention with pipelines of its own.
    ///
    /// # Errors
    /// A configuration that no call could satisfy, or a missing feature.
    pub fn new(device: &wgpu::Device, config: LinearConfig) -> Result<Self, Error> {
        Self::with_pipelines(&Pipelines::new(device), config)
    }

    /// Linear attention that shares pipelines with other operators on the device.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_pipelines(pipelines: &Pipelines, config: LinearConfig) -> Result<Self, Error> {
        config.check(&pipelines.facts())?;
        Ok(LinearAttention { pipelines: pipelines.clone(), config })
    }

    /// The pipelines, to share.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// The temporary memory that `call` needs: states of chunks and products within them, at most 32 MiB each however long the sequences
    /// are and however many heads there are. Heads that need more are computed in groups, one after the other. Each head of a group also
    /// needs a state for each sequence, and its random features. Only a single key/value head whose state or products within a chunk are
    /// larger than that exceeds the bound.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn scratch_size(&self, call: &LinearForward) -> Result<ScratchSize, Error> {
        Ok(self.check(call)?.scratch_size())
    }

    /// Records `call` into an encoder or a pass. Nothing is submitted, copied or read back.
    ///
    /// # Errors
    /// Everything that [`Error`] lists for tensors, options and scratch. Then nothing has been recorded.
    pub fn forward(
        &self,
        into: &mut impl Recorder,
        call: &LinearForward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.prepare(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles and binds what it needs. [`Prepared::record`] then records it as often as you like.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn prepare(&self, call: &LinearForward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        let problem = self.check(call)?;
        let dispatches = dispatch::dispatches(&problem, scratch, &self.pipelines.facts())?;
        self.pipelines.bind("linear attention", &dispatches, scratch.bindings())
    }

    /// The temporary memory that the gradients of `call` need: the memory of the forward call, products of gradients (32 MiB at most), and
    /// 16 bytes for each query of each head of a group.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn backward_scratch_size(&self, call: &LinearBackward) -> Result<ScratchSize, Error> {
        Ok(self.check_backward(call)?.0.backward_scratch_size())
    }

    /// Records the gradients of a forward call into an encoder or a pass. States are computed again, from the
    /// first chunk to the last for queries, from the last to the first for keys and values.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), and [`Error::Unsupported`] if no gradient is asked for.
    pub fn backward(
        &self,
        into: &mut impl Recorder,
        call: &LinearBackward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.prepare_backward(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles and binds what it needs. [`Prepared::record`] then records it as often as you like.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn prepare_backward(&self, call: &LinearBackward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        let (problem, gradients) = self.check_backward(call)?;
        let dispatches =
            dispatch::backward_dispatches(&problem, &gradients, scratch, &self.pipelines.facts())?;
        self.pipelines.bind("linear attention backward", &dispatches, scratch.bindings())
    }

    /// What forward and backward calls have in common.
    fn problem<'a>(
        &self,
        [q, k, v, out]: [TensorView<'a>; 4],
        out_access: Access,
        keys: &LinearKeys<'a>,
        device: &DeviceFacts,
    ) -> Result<LinearProblem<'a>, Error> {
        let config = &self.config;
        for (tensor, view, access) in [
            ("q", &q, Access::Read),
            ("k", &k, Access::Read),
            ("v", &v, Access::Read),
            ("out", &out, out_access),
        ] {
            view.check_as(tensor, config.dtype, access, device)?;
        }
        expect("q", q.shape(), 1, config.heads)?;
        expect("q", q.shape(), 3, config.head_dim)?;
        expect("k", k.shape(), 1, config.kv_heads)?;
        expect("v", v.shape(), 3, config.value_dim)?;
        let shape = Shape::of(&q, &k, &v, &out)?;
        if config.causal || keys.packed.is_some() {
            // Each query stands at the key of its row.
            expect("k", k.shape(), 2, shape.q_len)?;
        }
        let Shape { batch, kv_heads, kv_len, .. } = shape;
        if let Some(key_mask) = keys.key_mask {
            key_mask.check_as("key_mask", DType::Bool, Access::Read, device)?;
            expect_broadcast("key_mask", key_mask.shape(), [batch, kv_heads, 1, kv_len])?;
            // Repeated keys would be one for all.
            expect("key_mask", key_mask.shape(), 3, kv_len)?;
        }
        if let Some(lengths) = keys.lengths {
            lengths.check_as("lengths", DType::U32, Access::Read, device)?;
            expect_broadcast("lengths", lengths.shape(), [batch, kv_heads, 1, 1])?;
        }
        if let Some(starts) = keys.packed {
            starts.check_as("packed", DType::U32, Access::Read, device)?;
            let count = starts.shape()[3];
            expect_shape("packed", starts.shape(), [1, 1, 1, count.max(2)])?;
            expect("q", q.shape(), 0, 1)?;
            if keys.lengths.is_some() {
                let why = "the starts say how long each sequence is";
                return Err(Error::Unsupported { what: "lengths of packed sequences", why });
            }
        }
        let random = self.random(keys, kv_heads, device)?;
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

    /// The directions of random features, where φ has any.
    fn random<'a>(
        &self,
        keys: &LinearKeys<'a>,
        kv_heads: usize,
        device: &DeviceFacts,
    ) -> Result<Option<Random<'a>>, Error> {
        match (self.config.map, keys.directions) {
            (FeatureMap::Random { kind, directions: count }, Some(directions)) => {
                directions.check_as("directions", DType::F32, Access::Read, device)?;
                let shape = [1, kv_heads, count, self.config.head_dim];
                expect_broadcast("directions", directions.shape(), shape)?;
                expect("directions", directions.shape(), 2, count)?;
                expect("directions", directions.shape(), 3, self.config.head_dim)?;
                Ok(Some(Random { kind, directions }))
            }
            (FeatureMap::Random { .. }, None) => {
                let why = "give the call its `directions`";
                Err(Error::Unsupported { what: "random features without directions", why })
            }
            (_, Some(_)) => {
                let why = "only random features have directions";
                Err(Error::Unsupported { what: "`directions` for this feature map", why })
            }
            (_, None) => Ok(None),
        }
    }

    fn check<'a>(&self, call: &LinearForward<'a>) -> Result<LinearProblem<'a>, Error> {
        let device = &self.pipelines.facts();
        let LinearForward { q, k, v, out, keys, state, begins, decay, beta } = *call;
        let problem = self.problem([q, k, v, out], Access::Write, &keys, device)?;
        let mut written = vec![("out", out)];
        if let Some(LinearState { state, norm, log_scale }) = state {
            let sequences = keys.packed.map_or(problem.shape.batch, |starts| starts.shape()[3] - 1);
            let shape = [sequences, self.config.kv_heads, self.config.features(), self.config.value_dim];
            let views = [
                Some(("state.state", state, shape)),
                Some(("state.norm", norm, [shape[0], shape[1], shape[2], 1])),
                log_scale.map(|log| ("state.log_scale", log, [shape[0], shape[1], 1, 1])),
            ];
            for (tensor, view, shape) in views.into_iter().flatten() {
                view.check_as(tensor, DType::F32, Access::Write, device)?;
                expect_shape(tensor, view.shape(), shape)?;
                written.push((tensor, view));
            }
            if log_scale.is_some() != self.config.map.is_scaled() {
                let why = "exponential random features have one, others have none";
                return Err(Error::Unsupported { what: "`log_scale` of the state", why });
            }
            check_apart(&written[1..], device)?;
        } else if begins {
            let why = "there is no `state` to begin with; without one every call begins";
            return Err(Error::Unsupported { what: "`begins`", why });
        }
        let mut read = inputs([("q", q), ("k", k), ("v", v)], &keys);
        let rule = self.config.rule;
        let Shape { batch, kv_heads, kv_len, .. } = problem.shape;
        for (tensor, view, has) in [("decay", decay, rule.has_decay()), ("beta", beta, rule.has_beta())] {
            let Some(view) = view else {
                if has {
                    let why = "give it to the call";
                    return Err(Error::Unsupported { what: missing(tensor), why });
                }
                continue;
            };
            if !has {
                let why = "the update rule has none; see `LinearConfig::update_rule`";
                return Err(Error::Unsupported { what: tensor, why });
            }
            check_float(tensor, &view)?;
            view.check(tensor, Access::Read, device)?;
            let channels = match (tensor, rule) {
                ("decay", UpdateRule::Gated | UpdateRule::GatedDelta) if view.shape()[3] != 1 => {
                    self.config.features()
                }
                _ => 1,
            };
            expect_shape(tensor, view.shape(), [batch, kv_heads, kv_len, channels])?;
            read.push((tensor, view));
        }
        if rule != UpdateRule::Linear
            && (keys.key_mask.is_some() || keys.lengths.is_some() || keys.packed.is_some())
        {
            let why =
                "update rules go through every token of a batch; set decay and beta of tokens to be left out";
            return Err(Error::Unsupported { what: "masks and packed sequences with an update rule", why });
        }
        check_aliasing(&written, &read)?;
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
        let LinearBackward { q, k, v, out, d_out, d_q, d_k, d_v, accumulates, keys } = *call;
        let problem = self.problem([q, k, v, out], Access::Read, &keys, device)?;
        d_out.check_as("d_out", self.config.dtype, Access::Read, device)?;
        expect_shape("d_out", d_out.shape(), problem.shape.out())?;
        let gradients: Vec<_> = call.gradients().collect();
        if gradients.is_empty() {
            let why = "nothing is asked for: give `d_q`, `d_k` or `d_v`";
            return Err(Error::Unsupported { what: "a backward pass without gradients", why });
        }
        for (tensor, view) in &gradients {
            let dtype = if view.dtype() == DType::F32 { DType::F32 } else { self.config.dtype };
            view.check_as(tensor, dtype, Access::Write, device)?;
            let wanted = match *tensor {
                "d_q" => problem.shape.q(),
                "d_k" => problem.shape.k(),
                _ => problem.shape.v(),
            };
            expect_shape(tensor, view.shape(), wanted)?;
        }
        if self.config.rule != UpdateRule::Linear {
            let why = "its gradients are not computed yet";
            return Err(Error::Unsupported { what: "the backward pass of an update rule", why });
        }
        if let FeatureMap::Custom(own) = self.config.map {
            own.check_slope()?;
        }
        let read = [("q", q), ("k", k), ("v", v), ("out", out), ("d_out", d_out)];
        check_aliasing(&gradients, &inputs(read, &keys))?;
        Ok((problem, LinearGradientViews { d_out, d_q, d_k, d_v, accumulates }))
    }
}

fn missing(tensor: &str) -> &'static str {
    if tensor == "decay" { "an update rule without its decay" } else { "an update rule without its beta" }
}

/// Everything that a call reads.
fn inputs<'a, const N: usize>(
    tensors: [(&'static str, TensorView<'a>); N],
    keys: &LinearKeys<'a>,
) -> Vec<(&'static str, TensorView<'a>)> {
    let LinearKeys { key_mask, lengths, packed, directions } = *keys;
    let others =
        [("key_mask", key_mask), ("lengths", lengths), ("packed", packed), ("directions", directions)];
    let others = others.into_iter().filter_map(|(name, view)| Some((name, view?)));
    tensors.into_iter().chain(others).collect()
}
