//! The operator: `softmax(scale · q kᵀ, masked) · v`.

mod backward;
mod call;
mod config;
pub(crate) mod dispatch;
pub(crate) mod kernels;
pub(crate) mod merge;
pub(crate) mod options;
pub(crate) mod plan;
pub(crate) mod reference;

pub use backward::Backward;
pub use call::Forward;
pub(crate) use call::KeyInput;
pub use config::Config;
pub(crate) use config::check_dtype;
use dispatch::{Extras, Keys, Problem};
pub use merge::{Merge, MergeBackward, MergeForward, PartGradients, Partial};
pub use options::ScoreStage;
pub(crate) use options::{check_options, scale_in_f32};
use plan::Outline;

use std::sync::Arc;

use crate::cache::Cache;
use crate::kernel::{BindingCache, Pipelines, Prepared, Recorder, Scratch, ScratchSize};
use crate::mask::{Blocks, DeviceMask, Id, check_whole_map, classify};
use crate::tensor::{Access, CallTensors, DType, Element, Error, Shape, TensorView, check_aliasing};

/// Attention on one device. It checks calls and records them; each kernel is compiled once.
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
#[doc(alias = "FlashAttention")]
#[doc(alias = "flash_attn")]
#[doc(alias = "scaled_dot_product_attention")]
#[doc(alias = "sdpa")]
#[doc(alias = "flex_attention")]
#[derive(Clone, Debug)]
pub struct Attention {
    pipelines: Pipelines,
    config: Config,
    /// The bindings of block maps. The bindings of other calls are in the scratch.
    bindings: Arc<BindingCache>,
}

impl Attention {
    /// Creates the operator with new pipelines.
    ///
    /// # Errors
    /// Returns an error if no call could satisfy the configuration, or if the device lacks a
    /// feature.
    pub fn new(device: &wgpu::Device, config: Config) -> Result<Self, Error> {
        Self::with_pipelines(&Pipelines::new(device), config)
    }

    /// Creates the operator with pipelines that other operators on the device share.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new).
    pub fn with_pipelines(pipelines: &Pipelines, config: Config) -> Result<Self, Error> {
        config.check(&pipelines.facts())?;
        Ok(Attention { pipelines: pipelines.clone(), config, bindings: Arc::default() })
    }

    /// The pipelines, to share.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// Drops the bindings of [`classify`](Self::classify) and their references to buffers. Clones
    /// share the bindings.
    ///
    /// Without this call, unused bindings are dropped after a few calls, at most 64 calls. Until
    /// then they can keep buffers alive. These buffers have at most twice the bytes of the last
    /// call's buffers, or 8 MiB if that is more.
    pub fn forget(&self) {
        self.bindings.clear();
    }

    /// The temporary memory that `call` needs.
    ///
    /// The fused path needs none, or partial sums if few queries meet many keys. The plan then
    /// splits the keys among workgroups. The sums take at most 128 times the size of `out` in f32.
    /// With a cache, the size does not depend on the cache's length. A cache that stores products
    /// ([`CacheConfig::hadamard`](crate::CacheConfig::hadamard)) needs `q` and `out` in f32.
    ///
    /// The staged path needs the score matrix: `4 · batch · heads · q_len · kv_len` bytes with
    /// `kv_len` rounded up to 4. It needs none if `weights` takes the weights of every head in F32.
    ///
    /// # Errors
    /// The errors of [`forward`](Self::forward).
    pub fn scratch_size(&self, call: &Forward) -> Result<ScratchSize, Error> {
        let problem = self.check(call)?;
        Ok(dispatch::choose(&problem.outline(), &self.pipelines.facts())?.scratch_size())
    }

    /// The facts of `call` that plans use.
    pub(crate) fn outline(&self, call: &Forward) -> Result<Outline, Error> {
        Ok(self.check(call)?.outline())
    }

    /// Records `call` into an encoder or a pass. It submits, copies and reads back nothing.
    ///
    /// # Errors
    /// Returns the errors that [`Error`] lists for tensors, masks, options and scratch. A cache
    /// with other dimensions, on another device or with unrecorded changes is an error too.
    /// [`Error::Unsupported`] names an option that tensors or caches do not support. After an
    /// error, nothing has been recorded.
    pub fn forward(
        &self,
        into: &mut impl Recorder,
        call: &Forward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        let problem = self.check_recorded(call)?;
        self.bind(&problem, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call`, and compiles and binds its kernels. [`Prepared::record`] then records it any
    /// number of times.
    ///
    /// # Errors
    /// The errors of [`forward`](Self::forward).
    pub fn prepare(&self, call: &Forward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        self.bind(&self.check(call)?, scratch)
    }

    /// Records the kernel that writes `mask`'s block map for `[batch, q_len, kv_len]` into
    /// `blocks.map`. The map is a U32 tensor `[batch, heads, ⌈q_len / size[0]⌉, ⌈kv_len /
    /// size[1]⌉]`. Batch and heads are 1 if one map stands for all of them.
    ///
    /// Pass the map to [`Mask::blocks`](crate::Mask::blocks) together with the same mask. Kernels
    /// then do not load tiles in hidden blocks, and they do no mask arithmetic in full blocks.
    /// Blocks of 64 × 64 or more fit the kernels' tiles.
    ///
    /// # Errors
    /// Returns an error if the mask does not fit, or if the map has another shape or type. The map
    /// may not overlap the mask. After an error, nothing has been recorded.
    pub fn classify(
        &self,
        into: &mut impl Recorder,
        mask: &DeviceMask,
        lengths: [usize; 3],
        blocks: &Blocks<TensorView>,
    ) -> Result<(), Error> {
        self.prepare_classify(mask, lengths, blocks)?.record(into);
        Ok(())
    }

    /// Checks a block map, and compiles and binds its kernel. [`Prepared::record`] then records it
    /// any number of times.
    ///
    /// # Errors
    /// The errors of [`classify`](Self::classify).
    pub fn prepare_classify(
        &self,
        mask: &DeviceMask,
        [batch, q_len, kv_len]: [usize; 3],
        blocks: &Blocks<TensorView>,
    ) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        let Config { heads, kv_heads, head_dim, value_dim, .. } = self.config;
        let shape = Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim };
        shape.check()?;
        shape.check_lengths()?;
        mask.check(&shape, device)?;
        // The mask's own check would accept axes of 1 that repeat; `check_whole_map` refuses them.
        let mapped = DeviceMask::none().blocks(*blocks);
        mapped.check(&shape, device)?;
        check_whole_map(blocks.map.shape(), &shape, blocks.size)?;
        blocks.map.check("blocks", Access::Write, device)?;
        check_aliasing(&[("blocks", blocks.map)], &mask.tensors(), device)?;
        let call = classify::call(mask, &shape, blocks, device);
        self.pipelines.bind("block map", &[call], &self.bindings)
    }

    fn bind(&self, problem: &Problem, scratch: &Scratch) -> Result<Prepared, Error> {
        self.pipelines.with_fallbacks(|| {
            let device = &self.pipelines.facts();
            let chosen = dispatch::choose_within(&problem.outline(), device, scratch)?;
            let memory = chosen.memory(scratch)?;
            let dispatches = dispatch::dispatches(problem, chosen, memory, device);
            self.pipelines.bind("attention", &dispatches, scratch.bindings())
        })
    }

    /// Runs [`check`](Self::check), and checks that a cache's changes are on the device.
    fn check_recorded<'a>(&self, call: &Forward<'a>) -> Result<Problem<'a>, Error> {
        if let KeyInput::Cache(cache) = call.keys {
            cache.check_recorded()?;
        }
        self.check(call)
    }

    /// Checks everything about a call that does not need its pipelines.
    pub(crate) fn check<'a>(&self, call: &Forward<'a>) -> Result<Problem<'a>, Error> {
        let device = &self.pipelines.facts();
        let Forward { q, keys, out, mask, lse, weights, scores, dropout, layer, at_end } = *call;
        let mut tensors = CallTensors::new(device);
        let (shape, keys) = match keys {
            KeyInput::Tensors { k, v } => {
                if layer.is_some() || at_end {
                    let why = "keys and values are tensors; use `Forward::with_cache`";
                    return Err(Error::Unsupported { what: "`layer` and `at_end` without a cache", why });
                }
                let Config { dtype, .. } = self.config;
                let out = ("out", out, Access::Write);
                let shape = Shape::of(&mut tensors, dtype, self.config.dims(), [q, k, v], out)?;
                (shape, Keys::Tensors { k, v })
            }
            KeyInput::Cache(cache) => {
                let layer = layer.unwrap_or(0);
                let shape = self.check_cache(call, cache, &mut tensors)?;
                let source = cache.source(layer, !at_end)?;
                tensors.read_checked(cache.tensors(layer).chain([("cache", cache.lengths())]));
                (shape, Keys::Cache(source))
            }
        };
        let extras = Extras { out, mask, appended: 0, lse, weights, scores, dropout };
        let problem = self.config.problem(shape, q, keys, extras);
        check_extras(&problem.extras, &shape, &mut tensors)?;
        tensors.finish()?;
        Ok(problem)
    }

    fn check_cache<'a>(
        &self,
        call: &Forward<'a>,
        cache: &Cache,
        tensors: &mut CallTensors<'a, '_>,
    ) -> Result<Shape, Error> {
        let Forward { q, out, mask, weights, scores, dropout, at_end, .. } = *call;
        let config = &self.config;
        if cache.device() != self.pipelines.device() {
            let why = "create it with `Cache::with_pipelines` and the pipelines of the attention";
            return Err(Error::Unsupported { what: "a cache on another device", why });
        }
        let of_cache = cache.config();
        let sizes = [
            ("cache.kv_heads", config.kv_heads, of_cache.kv_heads),
            ("cache.head_dim", config.head_dim, of_cache.head_dim),
            ("cache.value_dim", config.value_dim, of_cache.value_dim),
        ];
        for (option, wanted, got) in sizes {
            if wanted != got {
                let expected = "the same as in the attention's `Config`";
                return Err(Error::Option { option, value: got as f64, expected });
            }
        }
        if !at_end && cache.advanced() == 0 {
            let why = "no tokens were advanced since the cache was made, rewound or reordered; call `Cache::advance` or `at_end`";
            return Err(Error::Unsupported { what: "the queries of a cache's last advance", why });
        }
        let shape = Shape {
            batch: of_cache.batch,
            heads: config.heads,
            kv_heads: config.kv_heads,
            q_len: if at_end { q.shape()[2] } else { cache.advanced() },
            kv_len: of_cache.longest(),
            head_dim: config.head_dim,
            value_dim: config.value_dim,
        };
        tensors.read("q", q, config.dtype, shape.q())?;
        tensors.write("out", out, config.dtype, shape.out())?;
        mask.check_for_cache()?;
        if weights.is_some() || dropout.is_some() {
            let why = "generation needs neither; pass keys and values as tensors";
            return Err(Error::Unsupported { what: "attention weights and dropout with a cache", why });
        }
        if scores.is_some() {
            let why = "only the staged path stores scores, and only the fused path reads a cache; pass keys and values as tensors";
            return Err(Error::Unsupported { what: "scores with a cache", why });
        }
        Ok(shape)
    }
}

/// Returns the log-sum-exp that a forward call has written. The backward pass reads it.
pub(crate) fn required_lse(lse: Option<TensorView>) -> Result<TensorView, Error> {
    let why = "the backward pass reads it; call `.lse(…)` on the forward call";
    lse.ok_or(Error::Unsupported { what: "the backward pass of a call without `lse`", why })
}

/// Checks the mask, the optional outputs and the dropout of a call. Several operators use it.
pub(crate) fn check_extras<'a>(
    extras: &Extras<'a>,
    shape: &Shape,
    tensors: &mut CallTensors<'a, '_>,
) -> Result<(), Error> {
    let masked = Shape { kv_len: shape.kv_len - extras.appended, ..*shape };
    extras.mask.check(&masked, tensors.device)?;
    tensors.read_checked(extras.mask.tensors());
    tensors.write("lse", extras.lse, DType::F32, shape.lse())?;
    if let Some(weights) = extras.weights {
        // All heads, or one head for the mean.
        let heads = if weights.shape()[1] == 1 { 1 } else { shape.heads };
        tensors.write("weights", weights, Element::Float, Shape { heads, ..*shape }.weights())?;
        // The weights are the score matrix of the call. One dispatch writes the matrix and lse; the
        // next reads the matrix and writes out.
        let others = [Some(("out", extras.out)), extras.lse.map(|lse| ("lse", lse))];
        let others: Vec<_> = others.into_iter().flatten().collect();
        check_aliasing(&[("weights", weights)], &others, tensors.device)?;
    }
    if let Some((scores, stage)) = extras.scores {
        let moved = extras.mask.has(Id::Packed) || extras.mask.has(Id::Documents);
        if stage == ScoreStage::Softcapped && extras.mask.mods().score.is_some() && moved {
            let why = "a `score_mod` may depend on the sequence index; request `ScoreStage::Biased`";
            return Err(Error::Unsupported {
                what: "softcapped scores of packed sequences or documents",
                why,
            });
        }
        tensors.write("scores", scores, Element::Float, shape.weights())?;
        // One dispatch reads the score matrix, which can be the weights, and writes the scores.
        if let Some(weights) = extras.weights {
            check_aliasing(&[("scores", scores)], &[("weights", weights)], tensors.device)?;
        }
    }
    match &extras.dropout {
        Some(dropout) => dropout.check_for(shape.weights(), tensors),
        None => Ok(()),
    }
}
