//! What blocks of encoders and decoders share: norms, feed-forward layers, residual sums.

mod backward;
pub(crate) mod config;
mod hidden;
mod layer_call;
pub(crate) mod reference;
mod self_attention;
mod shared_keys;

pub use backward::FeedForwardGradients;
pub(crate) use backward::{
    AttentionPart, AttentionPlans, InputGradients, WrittenGradients, backward_size, check_final_gradients,
    check_input_gradient,
};
use config::TransformerLayerConfig;
pub(crate) use hidden::Hidden;
pub use layer_call::LayerCall;
pub(crate) use layer_call::LayerCalls;
pub(crate) use self_attention::{SelfAttention, check_advanced, check_cache, check_no_cache};
pub(crate) use shared_keys::{KeysTurn, SharedKeys};

use super::multi_head::config::MultiHeadConfig;
use crate::attention::check_dtype;
use crate::device::DeviceFacts;
use crate::kernel::{Dispatch, Dispatches, KernelOptions, Scratch, ScratchSize, Slot, in_scratch};
use crate::matmul::Linear;
use crate::matmul::projection::dispatch::{self, LinearOp};
use crate::matmul::projection::{OwnedLinear, check_vector, check_weight};
use crate::rows::elementwise::dispatch::ElementwiseOp;
use crate::rows::norm::OwnedNorm;
use crate::tensor::{Access, DType, Error, Tensor, TensorView, check_float, count, same_dtype};

/// The weights of a feed-forward layer: `down(f(up(x)))`, or `down(f(gate(x)) · up(x))` where it is gated.
#[doc(alias = "linear1")]
#[doc(alias = "linear2")]
#[derive(Clone, Copy, Debug)]
pub struct FeedForwardWeights<'a> {
    /// `[hidden_features, features]`: `linear1` of PyTorch, `up_proj` of Llama.
    pub up: Linear<'a>,
    /// `[hidden_features, features]`, of a gated layer: `gate_proj` of Llama.
    pub gate: Option<Linear<'a>>,
    /// `[features, hidden_features]`: `linear2` of PyTorch, `down_proj` of Llama.
    pub down: Linear<'a>,
}

#[derive(Clone, Debug)]
pub(crate) struct FeedForward {
    pub up: OwnedLinear,
    pub gate: Option<OwnedLinear>,
    pub down: OwnedLinear,
}

impl FeedForward {
    pub fn new(
        weights: &FeedForwardWeights,
        config: &TransformerLayerConfig,
        device: &DeviceFacts,
    ) -> Result<Self, Error> {
        if weights.gate.is_some() != config.gated {
            let why = "a gated layer has the weights of a gate, another has none";
            return Err(Error::Unsupported { what: "feed_forward.gate", why });
        }
        let (features, hidden) = (config.features(), config.hidden_features);
        let linears = [
            ("feed_forward.up", "feed_forward.up.bias", Some(&weights.up), [hidden, features]),
            ("feed_forward.gate", "feed_forward.gate.bias", weights.gate.as_ref(), [hidden, features]),
            ("feed_forward.down", "feed_forward.down.bias", Some(&weights.down), [features, hidden]),
        ];
        for (name, bias_name, linear, [out, from]) in linears {
            let Some(linear) = linear else { continue };
            check_weight(name, &linear.weight, [1, 1, out, from], Access::Read, device)?;
            if let Some(bias) = &linear.bias {
                check_vector(bias_name, bias, out, Access::Read, device)?;
            }
        }
        if let Some(gate) = &weights.gate {
            same_dtype("feed_forward.gate", &gate.weight, weights.up.weight.dtype())?;
            if let (Some(a), Some(b)) = (&gate.bias, &weights.up.bias) {
                same_dtype("feed_forward.gate.bias", a, b.dtype())?;
            }
        }
        Ok(FeedForward {
            up: OwnedLinear::new(&weights.up),
            gate: weights.gate.as_ref().map(OwnedLinear::new),
            down: OwnedLinear::new(&weights.down),
        })
    }

    /// All that it reads besides its input.
    pub fn tensors(&self) -> impl Iterator<Item = (&'static str, TensorView<'_>)> {
        let all = [
            ("feed_forward.up", Some(&self.up)),
            ("feed_forward.gate", self.gate.as_ref()),
            ("feed_forward.down", Some(&self.down)),
        ];
        all.into_iter().flat_map(|(name, linear)| {
            linear.into_iter().flat_map(move |l| {
                [Some(l.weight.view()), l.bias.as_ref().map(Tensor::view)]
                    .into_iter()
                    .flatten()
                    .map(move |t| (name, t))
            })
        })
    }
}

/// Rows that a stack of blocks works on: `[batch, 1, length, features]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    pub batch: usize,
    pub length: usize,
}

impl Rows {
    pub fn shape(&self, features: usize) -> [usize; 4] {
        [self.batch, 1, self.length, features]
    }
}

/// The tensors between the parts of blocks, each in a part of the scratch, and what is common to all blocks.
#[derive(Clone, Copy)]
pub(crate) struct Workspace<'a> {
    pub config: &'a TransformerLayerConfig,
    pub rows: Rows,
    pub scratch: &'a Scratch,
    pub kernel_options: &'a KernelOptions,
    pub device: &'a DeviceFacts,
    /// Whether gradients that go out of the stack are added to what is there.
    pub accumulates: bool,
}

impl<'a> Workspace<'a> {
    pub fn tensor(&self, slot: Slot, features: usize) -> Result<TensorView<'a>, Error> {
        let dtype = self.config.attention.dtype;
        Ok(in_scratch(self.scratch.buffer(slot)?, dtype, self.rows.shape(features), 0))
    }

    pub fn features(&self, slot: Slot) -> Result<TensorView<'a>, Error> {
        self.tensor(slot, self.config.features())
    }

    /// A gradient, which is F32 whatever the stack's type: many are below f16's smallest number.
    pub fn gradient(&self, slot: Slot, features: usize) -> Result<TensorView<'a>, Error> {
        Ok(in_scratch(self.scratch.buffer(slot)?, DType::F32, self.rows.shape(features), 0))
    }

    pub fn hidden(&self) -> Result<TensorView<'a>, Error> {
        self.tensor(Slot::Hidden, self.config.hidden_features)
    }

    /// What the first products of a feed-forward layer give: of up, then of the gate.
    pub fn products(&self) -> Result<[TensorView<'a>; 2], Error> {
        let first = self.tensor(Slot::Products, self.config.hidden_features)?;
        Ok([first, first.with_offset(gate_offset(self.config, &self.rows))])
    }

    pub fn norm(
        &self,
        norm: &'a OwnedNorm,
        x: TensorView<'a>,
        residual: Option<TensorView<'a>>,
        out: TensorView<'a>,
        sum: Option<TensorView<'a>>,
    ) -> Dispatch<'a> {
        norm.op(self.config.norm, x, residual).forward(out, sum, self.kernel_options, self.device)
    }

    /// `out = a + b`
    pub fn sum(&self, a: TensorView<'a>, b: TensorView<'a>, out: TensorView<'a>) -> Dispatch<'a> {
        let op = ElementwiseOp { activation: None, x: a, multiply: None, residual: Some(b) };
        op.forward(out, self.device)
    }

    /// The feed-forward layer of `x`, into `out`; see [`feed_hidden`](Self::feed_hidden).
    pub fn feed_forward(
        &self,
        layer: &'a FeedForward,
        x: TensorView<'a>,
        out: TensorView<'a>,
        keeps: bool,
    ) -> Result<Dispatches<'a>, Error> {
        let mut dispatches = self.feed_hidden(layer, x, keeps)?;
        let down = layer.down.product(self.hidden()?, out, false);
        dispatches.extend(dispatch::dispatches(&[down], self.kernel_options, self.device)?);
        Ok(dispatches)
    }

    /// What the last product of the feed-forward layer of `x` takes. The activation is done at the end of the first product unless `keeps`
    /// asks for what comes before it, or it is gated.
    pub fn feed_hidden(
        &self,
        layer: &'a FeedForward,
        x: TensorView<'a>,
        keeps: bool,
    ) -> Result<Dispatches<'a>, Error> {
        let hidden = self.hidden()?;
        let mut dispatches = Dispatches::new();
        let activation = Some(self.config.activation);
        if layer.gate.is_none() && !keeps {
            let up = LinearOp { activation, ..layer.up.product(x, hidden, false) };
            dispatches.extend(dispatch::dispatches(&[up], self.kernel_options, self.device)?);
        } else {
            let [up, gate] = self.products()?;
            let mut products = vec![layer.up.product(x, up, false)];
            products.extend(layer.gate.as_ref().map(|layer| layer.product(x, gate, false)));
            dispatches.extend(dispatch::dispatches(&products, self.kernel_options, self.device)?);
            dispatches.push(self.activated(layer)?.forward(hidden, self.device));
        }
        Ok(dispatches)
    }

    /// What becomes of the first products.
    pub fn activated(&self, layer: &FeedForward) -> Result<ElementwiseOp<'a>, Error> {
        let [up, gate] = self.products()?;
        let activation = Some(self.config.activation);
        Ok(match layer.gate {
            Some(_) => ElementwiseOp { activation, x: gate, multiply: Some(up), residual: None },
            None => ElementwiseOp { activation, x: up, multiply: None, residual: None },
        })
    }
}

/// Where the gate's product begins, after up's: where every device can bind.
pub(crate) fn gate_offset(config: &TransformerLayerConfig, rows: &Rows) -> usize {
    let align = 256 / config.attention.dtype.bytes();
    count(rows.shape(config.hidden_features)).next_multiple_of(align)
}

/// Elements of a row of each kind of tensor, with room for the beginnings of parts.
pub(crate) fn bytes(config: &TransformerLayerConfig, rows: &Rows, features: usize) -> u64 {
    (count(rows.shape(features)) as u64)
        .saturating_mul(config.attention.dtype.bytes() as u64)
        .next_multiple_of(4)
}

/// The scratch of the forward pass of blocks, besides that of attention.
pub(crate) fn forward_size(
    config: &TransformerLayerConfig,
    rows: &Rows,
    keeps: bool,
    streams: &[Slot],
) -> ScratchSize {
    let wide = bytes(config, rows, config.features());
    let hidden = bytes(config, rows, config.hidden_features);
    let mut size = ScratchSize::default().with(Slot::Hidden, hidden);
    for slot in streams {
        size = size.with(*slot, wide);
    }
    if config.gated || keeps {
        let offset = gate_offset(config, rows) as u64 * config.attention.dtype.bytes() as u64;
        size = size.with(Slot::Products, if config.gated { offset + hidden } else { hidden });
    }
    size
}

/// Refuses rows whose tensors no kernel could address.
pub(crate) fn check_rows(
    config: &TransformerLayerConfig,
    rows: &Rows,
    device: &DeviceFacts,
) -> Result<(), Error> {
    let widest = config.features().max(config.hidden_features);
    let elements = count(rows.shape(widest)) as u64;
    if elements > u64::from(u32::MAX / 4) {
        let bytes = elements.saturating_mul(config.attention.dtype.bytes() as u64);
        return Err(Error::BindingLimit { tensor: "scratch", bytes, limit: device.max_binding_bytes });
    }
    Ok(())
}

/// Checks what a stack takes or gives: `[batch, 1, length, features]` of the layer's dtype.
pub(crate) fn check_rows_of(
    name: &'static str,
    view: &TensorView,
    config: &MultiHeadConfig,
    access: Access,
    device: &DeviceFacts,
) -> Result<(), Error> {
    check_float(name, view)?;
    check_dtype(config.dtype, device)?;
    view.check_as(name, config.dtype, access, device)
}
