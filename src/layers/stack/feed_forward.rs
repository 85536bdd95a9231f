//! The feed-forward part of a layer, and its gradients.

use super::config::TransformerLayerConfig;
use super::gradients::{WrittenGradients, without};
use super::workspace::{Workspace, gate_gradient_offset, gate_offset};
use crate::device::DeviceFacts;
use crate::kernel::{Dispatches, Slot};
use crate::layers::multi_head::LinearGradients;
use crate::matmul::Linear;
use crate::matmul::projection::dispatch::{self, LinearOp};
use crate::matmul::projection::dispatch_backward::{self, Gradient, LinearBackward};
use crate::matmul::projection::{OwnedLinear, check_vector, check_weight};
use crate::rows::elementwise::dispatch::ElementwiseOp;
use crate::tensor::{Access, Error, Tensor, TensorView, count, same_dtype};

/// The weights of a feed-forward layer: `down(f(up(x)))`, or `down(f(gate(x)) · up(x))` if it is
/// gated.
#[doc(alias = "linear1")]
#[doc(alias = "linear2")]
#[derive(Clone, Copy, Debug)]
pub struct FeedForwardWeights<'a> {
    /// `[hidden_features, features]`: `linear1` of PyTorch, `up_proj` of Llama.
    pub up: Linear<'a>,
    /// `[hidden_features, features]`, in a gated layer: `gate_proj` of Llama.
    pub gate: Option<Linear<'a>>,
    /// `[features, hidden_features]`: `linear2` of PyTorch, `down_proj` of Llama.
    pub down: Linear<'a>,
}

/// Places for the gradients of [`FeedForwardWeights`](crate::layers::FeedForwardWeights). By
/// default no gradient is written.
#[derive(Clone, Copy, Debug, Default)]
pub struct FeedForwardGradients<'a> {
    /// The gradients of [`FeedForwardWeights::up`](crate::layers::FeedForwardWeights::up).
    pub up: LinearGradients<'a>,
    /// The gradients of [`FeedForwardWeights::gate`](crate::layers::FeedForwardWeights::gate).
    pub gate: LinearGradients<'a>,
    /// The gradients of [`FeedForwardWeights::down`](crate::layers::FeedForwardWeights::down).
    pub down: LinearGradients<'a>,
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
            let why = "set it if `TransformerLayerConfig::gated` is set, and only then";
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

    /// Returns all tensors that it reads, without its input.
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

    pub fn check_gradients<'a>(
        &self,
        gradients: &FeedForwardGradients<'a>,
        written: &mut WrittenGradients<'a>,
        device: &DeviceFacts,
    ) -> Result<(), Error> {
        let all = [
            ("d_feed_forward.up", Some(&self.up), gradients.up),
            ("d_feed_forward.gate", self.gate.as_ref(), gradients.gate),
            ("d_feed_forward.down", Some(&self.down), gradients.down),
        ];
        for (name, own, LinearGradients { weight, bias }) in all {
            let own_bias = own.and_then(|own| own.bias.as_ref());
            if weight.is_some() && own.is_none() || bias.is_some() && own_bias.is_none() {
                return Err(without(name));
            }
            if let (Some(weight), Some(own)) = (weight, own) {
                check_weight(name, &weight, own.weight.layout.shape, Access::Write, device)?;
                written.push((name, weight));
            }
            if let (Some(bias), Some(own)) = (bias, own_bias) {
                check_vector(name, &bias, own.layout.shape[3], Access::Write, device)?;
                written.push((name, bias));
            }
        }
        Ok(())
    }
}

impl<'a> Workspace<'a> {
    pub fn hidden(&self) -> Result<TensorView<'a>, Error> {
        self.tensor(Slot::Hidden, self.config.hidden_features)
    }

    /// The first products of a feed-forward layer: of `up`, then of the gate.
    pub fn products(&self) -> Result<[TensorView<'a>; 2], Error> {
        let first = self.tensor(Slot::Products, self.config.hidden_features)?;
        Ok([first, first.with_offset(gate_offset(self.config, &self.rows))])
    }

    /// Returns the dispatches of the feed-forward layer of `x`, into `out`; see
    /// [`feed_hidden`](Self::feed_hidden).
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

    /// Computes the input of the feed-forward layer's last product. The first product's kernel
    /// applies the activation, unless the layer is gated or `keeps` is true. `keeps` requests the
    /// values before the activation.
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

    /// The activation of the first products.
    pub fn activated(&self, layer: &FeedForward) -> Result<ElementwiseOp<'a>, Error> {
        let [up, gate] = self.products()?;
        let activation = Some(self.config.activation);
        Ok(match layer.gate {
            Some(_) => ElementwiseOp { activation, x: gate, multiply: Some(up), residual: None },
            None => ElementwiseOp { activation, x: up, multiply: None, residual: None },
        })
    }

    /// The gradients of a product `x → y`: of `linear`, and of `x`.
    fn linear_backward(
        &self,
        (linear, to): (&'a OwnedLinear, LinearGradients<'a>),
        [x, d_y]: [TensorView<'a>; 2],
        d_x: Gradient<'a>,
    ) -> LinearBackward<'a> {
        LinearBackward {
            w: linear.weight.view(),
            d_y,
            d_x: Some(d_x),
            d_w: self.gradient_of(to.weight).map(|d_w| (x, d_w)),
            d_b: self.gradient_of(to.bias),
            narrow: false,
        }
    }

    /// Computes the gradient `d_x` of the input `x` from the gradient `d_out` of the output.
    /// [`feed_hidden`](Self::feed_hidden) of `x` must come first.
    pub fn feed_backward(
        &self,
        (layer, to): (&'a FeedForward, FeedForwardGradients<'a>),
        [x, d_out]: [TensorView<'a>; 2],
        d_x: Gradient<'a>,
    ) -> Result<Dispatches<'a>, Error> {
        let width = self.config.hidden_features;
        let d_hidden = self.gradient(Slot::HiddenGradient, width)?;
        let d_up = self.gradient(Slot::ProductsGradient, width)?;
        let bytes = 4 * count(self.rows.shape(width)) as u64;
        let d_gate = d_up.with_offset((gate_gradient_offset(bytes) / 4) as usize);
        let written = Gradient { view: d_hidden, accumulates: false };
        let down = self.linear_backward((&layer.down, to.down), [self.hidden()?, d_out], written);
        let mut dispatches = dispatch_backward::dispatches(&[down], self.kernel_options, self.device)?;
        let op = self.activated(layer)?;
        dispatches.push(match &layer.gate {
            Some(_) => op.backward(d_hidden, Some(d_gate), Some(d_up), false, self.device),
            None => op.backward(d_hidden, Some(d_up), None, false, self.device),
        });
        let mut products = vec![self.linear_backward((&layer.up, to.up), [x, d_up], d_x)];
        if let Some(gate) = &layer.gate {
            let more = Gradient { accumulates: true, ..d_x };
            products.push(self.linear_backward((gate, to.gate), [x, d_gate], more));
        }
        dispatches.extend(dispatch_backward::dispatches(&products, self.kernel_options, self.device)?);
        Ok(dispatches)
    }
}
