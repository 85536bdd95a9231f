//! A multi-head attention layer with the fields of Burn's.

mod call;

use call::{LayerCall, Saved};

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::backend::DType;
use burn::module::Module;
use burn::nn::attention::MhaOutput;
use burn::nn::{Dropout, Gelu, Linear, attention};
use burn::tensor::{Bool, Tensor};
use burn_cubecl::tensor::CubeTensor;

use crate::device::shared;
use crate::error::Result;
use crate::graph::Parents;
use crate::mask;
use crate::tensor::{Float, dims, empty, on_device, untracked};
use crate::{Error, Mask};

/// Burn's `burn::nn::attention::MultiHeadAttention` on the kernels of the library. A forward call
/// has three dispatches: the projections, attention and the output projection.
///
/// It has the fields of Burn's module, so it loads the record of Burn's module. Make it from Burn's
/// module with `from`:
///
/// ```no_run
/// use burn::nn::attention::MultiHeadAttentionConfig;
/// use burn::tensor::{Device, Tensor};
/// use wgpu_attention_burn::{MhaInput, MultiHeadAttention};
///
/// # fn f(device: &Device, x: Tensor<3>) -> wgpu_attention_burn::Result<()> {
/// let layer = MultiHeadAttention::from(MultiHeadAttentionConfig::new(512, 8).init(device));
/// let y = layer.forward(MhaInput::self_attn(x))?;
/// # Ok(()) }
/// ```
///
/// It differs from Burn's module in three points:
///
/// - Hidden pairs have weight 0. Burn's scores of hidden pairs are `min_float`. If all keys are
///   hidden, the context is 0 here, and the mean of all values in Burn.
/// - Dropout has another generator: each call of the process has another seed.
/// - Gradients do not flow through the returned weights.
#[derive(Module, Debug)]
pub struct MultiHeadAttention {
    /// The projection of queries, `[d_model, d_model]`.
    pub query: Linear,
    /// The projection of keys.
    pub key: Linear,
    /// The projection of values.
    pub value: Linear,
    /// The projection of the heads' outputs.
    pub output: Linear,
    /// Dropout of the weights, on devices with autodiff.
    pub dropout: Dropout,
    /// Burn's module has this field. Neither module uses it.
    pub activation: Gelu,
    /// The width of inputs and outputs.
    pub d_model: usize,
    /// The number of heads.
    pub n_heads: usize,
    /// The width of a head.
    pub d_k: usize,
    /// Burn's module has this field. Here hidden pairs have weight 0.
    pub min_float: f64,
    /// True if a weight is `exp(s) / (1 + Σ exp(s))`.
    pub quiet_softmax: bool,
}

impl From<attention::MultiHeadAttention> for MultiHeadAttention {
    fn from(burn: attention::MultiHeadAttention) -> Self {
        let attention::MultiHeadAttention { query, key, value, output, dropout, activation, .. } = burn;
        let attention::MultiHeadAttention { d_model, n_heads, d_k, min_float, quiet_softmax, .. } = burn;
        MultiHeadAttention {
            query,
            key,
            value,
            output,
            dropout,
            activation,
            d_model,
            n_heads,
            d_k,
            min_float,
            quiet_softmax,
        }
    }
}

/// The inputs of [`MultiHeadAttention`].
#[derive(Clone, Debug)]
#[must_use]
pub struct MhaInput {
    /// One input for queries, keys and values, or three.
    inputs: Vec<Tensor<3>>,
    mask_pad: Option<Tensor<2, Bool>>,
    mask_attn: Option<Tensor<3, Bool>>,
}

impl MhaInput {
    /// Takes queries, keys and values from `x`, `[batch, length, d_model]`.
    pub fn self_attn(x: Tensor<3>) -> Self {
        MhaInput { inputs: vec![x], mask_pad: None, mask_attn: None }
    }

    /// Takes queries from `query`, `[batch, q_len, d_model]`, and keys and values from tensors of
    /// `[batch, kv_len, d_model]`.
    pub fn new(query: Tensor<3>, key: Tensor<3>, value: Tensor<3>) -> Self {
        MhaInput { inputs: vec![query, key, value], mask_pad: None, mask_attn: None }
    }

    /// Sets the padding, `[batch, kv_len]`: true where a key is padding, as in Burn.
    pub fn mask_pad(mut self, mask_pad: Tensor<2, Bool>) -> Self {
        self.mask_pad = Some(mask_pad);
        self
    }

    /// Sets the hidden pairs, `[batch, q_len, kv_len]`: true where a pair is hidden, as in Burn.
    pub fn mask_attn(mut self, mask_attn: Tensor<3, Bool>) -> Self {
        self.mask_attn = Some(mask_attn);
        self
    }

    fn mask(&self) -> Mask {
        let mut mask = Mask::none();
        if let Some(padding) = &self.mask_pad {
            let [batch, keys] = padding.dims();
            mask = mask.key_padding_mask(padding.clone().bool_not().reshape([batch, 1, 1, keys]));
        }
        if let Some(hidden) = &self.mask_attn {
            let [batch, queries, keys] = hidden.dims();
            mask = mask.attn_mask(hidden.clone().bool_not().reshape([batch, 1, queries, keys]));
        }
        mask
    }
}

/// The seed of the next call with dropout.
static SEED: AtomicU64 = AtomicU64::new(0);

/// The names of the inputs, as in [`wgpu_attention::Error`].
const INPUTS: [&str; 3] = ["query", "key", "value"];

impl MultiHeadAttention {
    /// Computes the layer's result, `[batch, q_len, d_model]`.
    ///
    /// # Errors
    /// See [`Error`]. They name the tensor at fault.
    pub fn forward(&self, input: MhaInput) -> Result<Tensor<3>> {
        let mask = input.mask();
        Ok(self.run(input, mask, false)?.0)
    }

    /// Computes the layer's result with any rules of a mask, in addition to the input's masks.
    ///
    /// # Errors
    /// As [`forward`](Self::forward). A mask that is also set in `input` is replaced.
    pub fn forward_masked(&self, input: MhaInput, rules: impl FnOnce(Mask) -> Mask) -> Result<Tensor<3>> {
        let mask = rules(input.mask());
        Ok(self.run(input, mask, false)?.0)
    }

    /// Computes the result and the attention weights, as Burn's `forward`. The weights have no
    /// gradient.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_with_weights(&self, input: MhaInput) -> Result<MhaOutput> {
        let mask = input.mask();
        let (context, weights) = self.run(input, mask, true)?;
        match weights {
            Some(weights) => Ok(MhaOutput { context, weights: untracked(weights) }),
            None => Err(Error::Unsupported { what: "weights", why: "the call computed none" }),
        }
    }

    fn run(&self, input: MhaInput, mask: Mask, weighs: bool) -> Result<(Tensor<3>, Option<CubeTensor>)> {
        let (parents, call) = self.resolve(input, mask)?;
        let shared = shared("query", &call.query().device)?;
        let query = call.query();
        let [_, batch, rows, width] = dims(query);
        let keys = dims(call.key())[2];
        let out = empty(query, vec![batch, rows, width], query.dtype);
        let trains = parents.any_tracked();
        let stored = trains.then(|| {
            let lse = empty(query, vec![batch, self.n_heads, rows, 1], DType::F32);
            [empty(query, vec![batch, rows, width], query.dtype), lse]
        });
        let weights = weighs.then(|| empty(query, vec![batch, self.n_heads, rows, keys], query.dtype));
        on_device(query, || call.forward(&shared, &out, stored.as_ref(), weights.as_ref()))?;
        let Some(stored) = stored else { return Ok((parents.untracked(out), weights)) };
        let saved = Saved { call, out: out.clone(), stored, shared };
        saved.check(parents.tracked())?;
        Ok((parents.finish(out, || Arc::new(saved)), weights))
    }

    /// Takes the handles of all tensors.
    fn resolve(&self, input: MhaInput, mut mask: Mask) -> Result<(Parents, LayerCall)> {
        let x = &input.inputs[0];
        if self.quiet_softmax {
            mask = mask.sink_logits(Tensor::zeros([1, 1, 1, 1], &x.device().inner()));
        }
        let drops = self.dropout.training.is_enabled() && x.device().is_autodiff() && self.dropout.prob > 0.0;
        let dropout = drops.then(|| (self.dropout.prob, SEED.fetch_add(1, Ordering::Relaxed)));
        let mut floats = Vec::new();
        for (name, t) in INPUTS.into_iter().zip(input.inputs) {
            floats.push((name, Float::new(name, t)?));
        }
        let inputs = floats.len();
        let names = [
            ("weights.query", "bias.query"),
            ("weights.key", "bias.key"),
            ("weights.value", "bias.value"),
            ("weights.out", "bias.out"),
        ];
        let linears = [&self.query, &self.key, &self.value, &self.output];
        for (linear, (name, _)) in linears.into_iter().zip(names) {
            floats.push((name, Float::new(name, linear.weight.val())?));
        }
        let mut biases = [None; 4];
        for (n, (linear, (_, name))) in linears.into_iter().zip(names).enumerate() {
            if let Some(bias) = &linear.bias {
                biases[n] = Some(floats.len());
                floats.push((name, Float::new(name, bias.val())?));
            }
        }
        let mask = mask::handles(mask, &mut floats)?;
        let names = floats.iter().map(|(name, _)| *name).collect();
        let parents = Parents::new(floats)?;
        let floats = parents.tensors.clone();
        let call = LayerCall { floats, names, inputs, biases, mask, heads: self.n_heads, dropout };
        call.check()?;
        Ok((parents, call))
    }
}
