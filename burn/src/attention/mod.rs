//! Attention of tensors.

mod call;

use call::{Call, CapturedHandle, Saved};

use std::sync::Arc;

use burn::backend::DType as BurnDType;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, Int, Tensor};
use burn_cubecl::tensor::CubeTensor;
use wgpu_attention::mask::{MaskMod, ScoreMod};

use crate::cache::Cache;
use crate::device::shared;
use crate::error::{Error, Result};
use crate::graph::Parents;
use crate::mask;
use crate::tensor::{self, Float, dims, empty, on_device, untracked};

/// A mask whose tensors are Burn's: see [`wgpu_attention::Mask`] for the rules and the shapes.
///
/// In Burn's own functions `true` hides a pair. Here `true` is a pair or a key that is seen, as in
/// PyTorch. Numbers, such as lengths, are int tensors, and must not be negative.
pub type Mask = wgpu_attention::Mask<Tensor<4, Int>, Tensor<4, Bool>, Tensor<4>>;

/// A tensor that a score or mask function reads.
#[derive(Clone, Debug)]
pub enum CapturedTensor {
    /// For [`Captured::float`](wgpu_attention::mask::Captured::float). A score function's tensor
    /// has a gradient.
    Float(Tensor<4>),
    /// For [`Captured::number`](wgpu_attention::mask::Captured::number).
    Int(Tensor<4, Int>),
    /// For [`Captured::bool`](wgpu_attention::mask::Captured::bool).
    Bool(Tensor<4, Bool>),
}

/// One call of attention: queries, keys and values, a mask and options.
///
/// | tensor | shape |
/// |---|---|
/// | `query` | `[batch, heads, q_len, head_dim]` |
/// | `key` | `[batch, kv_heads, kv_len, head_dim]` |
/// | `value` | `[batch, kv_heads, kv_len, value_dim]` |
/// | result | `[batch, heads, q_len, value_dim]` |
///
/// `heads` is a multiple of `kv_heads`. Elements are f32, f16 or bf16, the same for all three.
/// Tensors may have any strides, for example those of `swap_dims`.
///
/// ```no_run
/// use burn::tensor::Tensor;
/// use wgpu_attention_burn::{Attend, Mask};
///
/// # fn f(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> wgpu_attention_burn::Result<()> {
/// let out = Attend::new(q, k, v).mask(Mask::causal().window(127, 0)).softcap(50.0).forward()?;
/// # Ok(()) }
/// ```
///
/// On a device with autodiff, `backward` of a loss computes gradients of `query`, `key` and
/// `value`. The mask's float tensors and the score function's tensors have gradients too. No score
/// matrix is stored.
#[derive(Clone, Debug)]
#[must_use]
pub struct Attend {
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    mask: Mask,
    scale: Option<f64>,
    softcap: Option<f64>,
    dropout: Option<(f64, u64)>,
    score_mod: Option<(ScoreMod, Vec<CapturedTensor>, Vec<u8>)>,
    mask_mod: Option<(MaskMod, Vec<CapturedTensor>, Vec<u8>)>,
}

impl Attend {
    /// Attention of `query` to `key` and `value`, without a mask.
    pub fn new(query: Tensor<4>, key: Tensor<4>, value: Tensor<4>) -> Self {
        Attend {
            query,
            key,
            value,
            mask: Mask::none(),
            scale: None,
            softcap: None,
            dropout: None,
            score_mod: None,
            mask_mod: None,
        }
    }

    /// Sets the mask.
    pub fn mask(mut self, mask: Mask) -> Self {
        self.mask = mask;
        self
    }

    /// Sets the factor of the scores. The default is 1/√head_dim.
    pub fn scale(mut self, scale: impl Into<Option<f64>>) -> Self {
        self.scale = scale.into();
        self
    }

    /// Replaces scores by `softcap · tanh(score / softcap)`.
    pub fn softcap(mut self, softcap: impl Into<Option<f64>>) -> Self {
        self.softcap = softcap.into();
        self
    }

    /// Drops weights with probability `p`. The same `seed` drops the same pairs.
    pub fn dropout(mut self, p: f64, seed: u64) -> Self {
        self.dropout = Some((p, seed));
        self
    }

    /// Changes scores by a function in WGSL, as in FlexAttention. `captured` are the tensors of
    /// [`ScoreMod::capturing`], and `uniforms` the bytes of its struct `Uniforms`.
    pub fn score_mod(mut self, function: ScoreMod, captured: Vec<CapturedTensor>, uniforms: &[u8]) -> Self {
        self.score_mod = Some((function, captured, uniforms.to_vec()));
        self
    }

    /// Hides pairs by a function in WGSL.
    pub fn mask_mod(mut self, function: MaskMod, captured: Vec<CapturedTensor>, uniforms: &[u8]) -> Self {
        self.mask_mod = Some((function, captured, uniforms.to_vec()));
        self
    }

    /// Computes the result.
    ///
    /// # Errors
    /// See [`Error`]. They name the tensor at fault.
    pub fn forward(self) -> Result<Tensor<4>> {
        Ok(self.run(false)?.0)
    }

    /// Computes the result and `ln Σ exp(score)`, `[batch, heads, q_len, 1]` in f32. The second has
    /// no gradient.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_with_lse(self) -> Result<(Tensor<4>, Tensor<4>)> {
        let (out, lse) = self.run(true)?;
        Ok((out, untracked(lse.expect("lse was requested"))))
    }

    /// Appends `key` and `value` to a layer of a cache, and attends to all tokens of that layer.
    /// The rows of the call are the tokens of the last [`Cache::advance`].
    ///
    /// # Errors
    /// See [`Error`]. Dropout and tracked tensors are [`Error::Unsupported`].
    pub fn step(self, cache: &Cache, layer: usize) -> Result<Tensor<4>> {
        let (parents, call) = self.resolve()?;
        let unsupported = |what, why| Err(Error::Unsupported { what, why });
        if parents.any_tracked() {
            return unsupported(
                "attention to a cache",
                "cached keys and values have no gradient; detach the tensors",
            );
        }
        if call.dropout.is_some() {
            return unsupported("dropout", "attention to a cache has none");
        }
        if call.query().device != cache.device {
            let [device, first] = [&call.query().device, &cache.device].map(|device| format!("{device:?}"));
            return Err(Error::Devices { tensor: "query", device, first });
        }
        let [batch, heads, rows, _] = dims(call.query());
        let out = empty(call.query(), vec![batch, heads, rows, dims(call.value())[3]], call.query().dtype);
        on_device(call.query(), || call.step(cache, layer, &out))?;
        Ok(parents.untracked(out))
    }

    fn run(self, wants_lse: bool) -> Result<(Tensor<4>, Option<CubeTensor>)> {
        let (parents, call) = self.resolve()?;
        let shared = shared("query", &call.query().device)?;
        let [batch, heads, q_len, _] = dims(call.query());
        let [.., value_dim] = dims(call.value());
        let out = empty(call.query(), vec![batch, heads, q_len, value_dim], call.query().dtype);
        let lse = (wants_lse || parents.any_tracked())
            .then(|| empty(call.query(), vec![batch, heads, q_len, 1], BurnDType::F32));
        on_device(call.query(), || call.forward(&shared, &out, lse.as_ref()))?;
        let Some(lse) = lse else { return Ok((parents.untracked(out), None)) };
        let saved = Saved { call, out: out.clone(), lse: lse.clone(), shared };
        if parents.any_tracked() {
            saved.check(parents.tracked())?;
        }
        Ok((parents.finish(out, || Arc::new(saved)), Some(lse)))
    }

    /// Takes the handles of all tensors.
    fn resolve(self) -> Result<(Parents, Call)> {
        let mut floats = vec![
            ("query", Float::new("query", self.query)?),
            ("key", Float::new("key", self.key)?),
            ("value", Float::new("value", self.value)?),
        ];
        let mask = mask::handles(self.mask, &mut floats)?;
        let mut captured = |tensors: Vec<CapturedTensor>| {
            let one = |tensor| match tensor {
                CapturedTensor::Float(t) => {
                    floats.push(("captured", Float::new("captured", t)?));
                    Ok(CapturedHandle::Float(floats.len() - 1))
                }
                CapturedTensor::Int(t) => Ok(CapturedHandle::Other(Box::new(tensor::int("captured", t)?))),
                CapturedTensor::Bool(t) => Ok(CapturedHandle::Other(Box::new(tensor::bool("captured", t)?))),
            };
            tensors.into_iter().map(one).collect::<Result<Vec<_>>>()
        };
        let score_mod = match self.score_mod {
            Some((function, captures, bytes)) => Some((function, captured(captures)?, bytes)),
            None => None,
        };
        let mask_mod = match self.mask_mod {
            Some((function, captures, bytes)) => Some((function, captured(captures)?, bytes)),
            None => None,
        };
        let names = floats.iter().map(|(name, _)| *name).collect();
        let parents = Parents::new(floats)?;
        let call = Call {
            floats: parents.tensors.clone(),
            names,
            mask,
            score_mod,
            mask_mod,
            scale: self.scale,
            softcap: self.softcap,
            dropout: self.dropout,
        };
        call.check()?;
        Ok((parents, call))
    }
}

/// Burn's `burn::tensor::module::attention`, with the same arguments and meaning. `mask` is true
/// where a pair is hidden. `attn_bias` is added to the scores. Keys and values may have fewer heads
/// than queries. `is_causal` is aligned top-left, as in Burn.
///
/// A query whose keys are all hidden has the result 0. Burn's result is NaN.
///
/// ```no_run
/// # use burn::tensor::Tensor;
/// # fn f(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> wgpu_attention_burn::Result<()> {
/// // Before: burn::tensor::module::attention(q, k, v, None, None, Default::default());
/// let out = wgpu_attention_burn::attention(q, k, v, None, None, Default::default())?;
/// # Ok(()) }
/// ```
///
/// # Errors
/// See [`Error`](crate::Error). They name the tensor at fault.
pub fn attention(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    mask: Option<Tensor<4, Bool>>,
    attn_bias: Option<Tensor<4>>,
    options: AttentionModuleOptions,
) -> Result<Tensor<4>> {
    let mut rules = if options.is_causal { Mask::causal_top_left() } else { Mask::none() };
    if let Some(hidden) = mask {
        rules = rules.attn_mask(hidden.bool_not());
    }
    if let Some(bias) = attn_bias {
        rules = rules.bias(bias);
    }
    Attend::new(query, key, value).mask(rules).scale(options.scale).softcap(options.softcap).forward()
}
