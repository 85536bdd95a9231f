//! The parts of the layers of encoders and decoders, on the host. Each part has a residual sum and
//! a norm; one is a feed-forward layer.

use super::config::{NormOrder, TransformerLayerConfig};
use crate::attention::reference::options::Options;
use crate::layers::multi_head::reference::HostWeights;
use crate::layers::multi_head::reference_backward::{LinearGradients, MultiHeadGradients};
use crate::matmul::projection::reference::{HostLinear, project, project_backward};
use crate::position::RowPositions;
use crate::rows::elementwise::reference::{activate, activation_slope};
use crate::rows::norm::reference::{HostNorm, HostNormGradients, norm, norm_backward};
use crate::tensor::{Error, Real};

/// The weights of a feed-forward layer.
#[derive(Clone, Copy, Debug)]
pub struct HostFeedForward<'a, R> {
    /// `[hidden_features, features]`.
    pub up: HostLinear<'a, R>,
    /// `[hidden_features, features]`, of a gated layer.
    pub gate: Option<HostLinear<'a, R>>,
    /// `[features, hidden_features]`.
    pub down: HostLinear<'a, R>,
}

/// The output of [`encoder`](crate::reference::encoder) or [`decoder`](crate::reference::decoder).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Encoded<R> {
    /// `[batch, length, features]`.
    pub out: Vec<R>,
    /// The output of each layer, before the final norm.
    pub hidden: Vec<Vec<R>>,
    /// Each layer's attention weights, `[batch, heads, length, length + appended]`, if the options
    /// request them. In a decoder, a layer's self-attention is followed by its cross-attention,
    /// `[batch, heads, q_len, kv_len + appended]`.
    pub weights: Vec<Vec<R>>,
}

/// The gradients of a [`HostFeedForward`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FeedForwardGradients<R> {
    /// The gradients of [`HostFeedForward::up`].
    pub up: LinearGradients<R>,
    /// The gradients of [`HostFeedForward::gate`].
    pub gate: Option<LinearGradients<R>>,
    /// The gradients of [`HostFeedForward::down`].
    pub down: LinearGradients<R>,
}

pub(crate) fn added<R: Real>(a: &[R], b: &[R]) -> Vec<R> {
    a.iter().zip(b).map(|(a, b)| *a + *b).collect()
}

/// The input and the weights of the attention whose keys a layer reads; `None` if it reads its own
/// keys.
pub(crate) type KeysOf<'a, R> = Option<(&'a Vec<R>, &'a HostWeights<'a, R>)>;

/// Refuses a layer whose rotation differs from the rotation of the layer whose keys it reads.
pub(crate) fn check_shared_keys<'a>(
    calls: impl Iterator<Item = (&'a TransformerLayerConfig, &'a Options<'a>)>,
) -> Result<(), Error> {
    let calls: Vec<_> = calls.collect();
    for (config, options) in &calls {
        let Some(source) = config.keys_of else { continue };
        let same = match (&options.rotary, &calls[source].1.rotary) {
            (None, None) => true,
            (Some((a, at)), Some((b, other))) => {
                a == b
                    && match (at, other) {
                        (RowPositions::Start(a), RowPositions::Start(b)) => a == b,
                        (RowPositions::Tensor(a), RowPositions::Tensor(b)) => {
                            a.data == b.data && a.shape == b.shape
                        }
                        _ => false,
                    }
            }
            _ => false,
        };
        if !same {
            let why =
                "use the rotation and positions of the layer whose keys it reads, or no rotation in both";
            return Err(Error::Unsupported {
                what: "a different rotation in a layer with `TransformerLayerConfig::keys_of`",
                why,
            });
        }
    }
    Ok(())
}

/// The gradients that layers with another layer's keys leave to that layer.
pub(crate) struct KeyGradients<R> {
    /// The gradient of the input of the keys' projection.
    d_input: Vec<R>,
    /// The gradients of the weights of keys and values, in the order of [`of_keys`].
    d_weights: Vec<Vec<R>>,
}

impl<R: Real> KeyGradients<R> {
    /// Moves the key gradients of a layer into the sum over layers.
    pub fn add(sum: &mut Option<Self>, own: &mut MultiHeadGradients<R>) {
        let d_input = added(&own.d_key, &own.d_value);
        let d_weights: Vec<_> = of_keys(own).into_iter().map(std::mem::take).collect();
        *sum = Some(match sum.take() {
            None => KeyGradients { d_input, d_weights },
            Some(sum) => KeyGradients {
                d_input: added(&sum.d_input, &d_input),
                d_weights: sum.d_weights.iter().zip(&d_weights).map(|(a, b)| added(a, b)).collect(),
            },
        });
    }

    /// Adds the sum to the gradients of the layer that projects the keys, and to the gradient of
    /// its input.
    pub fn give(self, own: &mut MultiHeadGradients<R>, d_input: Vec<R>) -> Vec<R> {
        for (own, more) in of_keys(own).into_iter().zip(self.d_weights) {
            *own = added(own, &more);
        }
        added(&d_input, &self.d_input)
    }
}

/// Returns the gradient of the input of layer `n`'s self-attention, and the gradients of its
/// weights. Key gradients move to the layer that projects the keys, or come from the layers that
/// read them.
pub(crate) fn of_inputs<R: Real>(
    mut own: MultiHeadGradients<R>,
    n: usize,
    source: Option<usize>,
    shared: &mut [Option<KeyGradients<R>>],
) -> (Vec<R>, MultiHeadGradients<R>) {
    if let Some(source) = source {
        KeyGradients::add(&mut shared[source], &mut own);
        return (own.d_query.clone(), own);
    }
    let d = added(&added(&own.d_query, &own.d_key), &own.d_value);
    match shared[n].take() {
        Some(more) => (more.give(&mut own, d), own),
        None => (d, own),
    }
}

/// The gradients of the weights of keys and values.
fn of_keys<R>(of: &mut MultiHeadGradients<R>) -> Vec<&mut Vec<R>> {
    let mut all = vec![&mut of.key.d_weight, &mut of.value.d_weight];
    all.extend(&mut of.key.d_bias);
    all.extend(&mut of.value.d_bias);
    all.extend(of.d_bias_kv.iter_mut().flatten());
    if let Some([_, k_norm]) = &mut of.qk_norm {
        all.extend([&mut k_norm.d_weight, &mut k_norm.d_bias]);
    }
    all
}

/// The stored tensors of a computed part of a layer.
pub(crate) struct Step<R> {
    /// The input of the part.
    pub input: Vec<R>,
    /// The input of its norm.
    normed: Vec<R>,
}

impl<R: Real> Step<R> {
    /// Computes a part of `x` with its norm. Returns the step and its output.
    ///
    /// # Errors
    /// The errors of the part.
    pub fn of(
        x: Vec<R>,
        config: &TransformerLayerConfig,
        of: &HostNorm<R>,
        part: impl FnOnce(&[R]) -> Result<Vec<R>, Error>,
    ) -> Result<(Self, Vec<R>), Error> {
        Ok(match config.order {
            NormOrder::Post => {
                let sum = added(&x, &part(&x)?);
                let out = normed(&sum, config, of)?;
                (Step { input: x, normed: sum }, out)
            }
            NormOrder::Pre => {
                let input = normed(&x, config, of)?;
                let out = added(&x, &part(&input)?);
                (Step { input, normed: x }, out)
            }
        })
    }

    /// Computes, from the gradient of the output, the gradients of `x`, of the part's weights and
    /// of the norm's weights. `part` maps its input and the gradient of its output to the gradients
    /// of its input and of its weights.
    ///
    /// # Errors
    /// The errors of the part.
    pub fn backward<G>(
        &self,
        d_out: &[R],
        config: &TransformerLayerConfig,
        of: &HostNorm<R>,
        part: impl FnOnce(&[R], &[R]) -> Result<(Vec<R>, G), Error>,
    ) -> Result<(Vec<R>, G, HostNormGradients<R>), Error> {
        Ok(match config.order {
            NormOrder::Post => {
                let (d_sum, of_norm) = through_norm(&self.normed, config, of, d_out)?;
                let (d_input, own) = part(&self.input, &d_sum)?;
                (added(&d_sum, &d_input), own, of_norm)
            }
            NormOrder::Pre => {
                let (d_input, own) = part(&self.input, d_out)?;
                let (d_x, of_norm) = through_norm(&self.normed, config, of, &d_input)?;
                (added(d_out, &d_x), own, of_norm)
            }
        })
    }
}

/// Normalises rows of the stack's width.
pub(crate) fn normed<R: Real>(
    x: &[R],
    config: &TransformerLayerConfig,
    of: &HostNorm<R>,
) -> Result<Vec<R>, Error> {
    norm(x, config.features(), of.weight, of.bias, &config.norm)
}

/// Computes the gradients of that norm: of `x`, and of its weights.
pub(crate) fn through_norm<R: Real>(
    x: &[R],
    config: &TransformerLayerConfig,
    of: &HostNorm<R>,
    d_out: &[R],
) -> Result<(Vec<R>, HostNormGradients<R>), Error> {
    let got = norm_backward(x, config.features(), of.weight, &config.norm, d_out)?;
    Ok((got.d_x, HostNormGradients { d_weight: got.d_weight, d_bias: got.d_bias }))
}

/// The tensors of a feed-forward layer.
struct Feed<R> {
    up: Vec<R>,
    gate: Option<Vec<R>>,
    hidden: Vec<R>,
    out: Vec<R>,
}

impl<R: Real> Feed<R> {
    fn of(x: &[R], config: &TransformerLayerConfig, weights: &HostFeedForward<R>) -> Result<Self, Error> {
        let (features, width) = (config.features(), config.hidden_features);
        let product = |l: &HostLinear<R>| project(x, l.weight, l.bias, features, width);
        let up = product(&weights.up)?;
        let gate = weights.gate.as_ref().map(product).transpose()?;
        let hidden: Vec<R> = match &gate {
            Some(gate) => gate.iter().zip(&up).map(|(g, u)| activate(*g, config.activation) * *u).collect(),
            None => up.iter().map(|u| activate(*u, config.activation)).collect(),
        };
        let out = project(&hidden, weights.down.weight, weights.down.bias, width, features)?;
        Ok(Feed { up, gate, hidden, out })
    }
}

/// Computes `down(f(up(x)))`, or `down(f(gate(x)) · up(x))`, for rows of `x` `[rows, features]`.
///
/// # Errors
/// Slices of another length.
pub fn feed_forward<R: Real>(
    x: &[R],
    config: &TransformerLayerConfig,
    weights: &HostFeedForward<R>,
) -> Result<Vec<R>, Error> {
    Ok(Feed::of(x, config, weights)?.out)
}

/// Computes the gradients of [`feed_forward`]: of `x`, and of the weights.
pub(crate) fn feed_backward<R: Real>(
    x: &[R],
    config: &TransformerLayerConfig,
    weights: &HostFeedForward<R>,
    d_out: &[R],
) -> Result<(Vec<R>, FeedForwardGradients<R>), Error> {
    Feed::of(x, config, weights)?.backward(x, config, weights, d_out)
}

impl<R: Real> Feed<R> {
    /// Computes the gradients of the input `x`, and of the weights.
    fn backward(
        &self,
        x: &[R],
        config: &TransformerLayerConfig,
        weights: &HostFeedForward<R>,
        d_out: &[R],
    ) -> Result<(Vec<R>, FeedForwardGradients<R>), Error> {
        let (features, width) = (config.features(), config.hidden_features);
        let Feed { up, gate, hidden, .. } = self;
        let got = project_backward(hidden, weights.down.weight, d_out, width, features)?;
        let own = |d_weight, d_bias, linear: &HostLinear<R>| LinearGradients {
            d_weight,
            d_bias: linear.bias.map(|_| d_bias),
        };
        let down = own(got.d_weight, got.d_bias, &weights.down);
        let d_hidden = got.d_x;
        let slope = |x: &R| activation_slope(*x, config.activation);
        let each = |f: &dyn Fn(usize) -> R| (0..d_hidden.len()).map(f).collect::<Vec<R>>();
        let d_up = match gate {
            Some(gate) => each(&|n| d_hidden[n] * activate(gate[n], config.activation)),
            None => each(&|n| d_hidden[n] * slope(&up[n])),
        };
        let of_up = project_backward(x, weights.up.weight, &d_up, features, width)?;
        let mut d_x = of_up.d_x;
        let up_own = own(of_up.d_weight, of_up.d_bias, &weights.up);
        let mut gate_own = None;
        if let (Some(gate), Some(linear)) = (gate, &weights.gate) {
            let d_gate = each(&|n| d_hidden[n] * slope(&gate[n]) * up[n]);
            let got = project_backward(x, linear.weight, &d_gate, features, width)?;
            d_x = added(&d_x, &got.d_x);
            gate_own = Some(own(got.d_weight, got.d_bias, linear));
        }
        Ok((d_x, FeedForwardGradients { up: up_own, gate: gate_own, down }))
    }
}
