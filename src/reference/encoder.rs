//! A stack of encoder layers, and its gradients.

use super::{
    HostLinear, HostWeights, LayerGradients, LayerShape, LinearGradients, Options, Real, activate,
    activation_slope, expect_length, multi_head, multi_head_backward, norm, norm_backward, project,
    project_backward,
};
use crate::block_config::{BlockConfig, NormOrder};
use crate::error::Error;
use crate::tensor::check_sizes;

/// Weight and bias of a norm, `[features]` each.
#[derive(Clone, Copy, Debug)]
pub struct HostNorm<'a, R> {
    /// 1 without.
    pub weight: Option<&'a [R]>,
    /// 0 without.
    pub bias: Option<&'a [R]>,
}

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

/// The weights of one layer of an encoder.
#[derive(Clone, Copy, Debug)]
pub struct HostEncoderLayer<'a, R> {
    /// Of its self-attention.
    pub attention: HostWeights<'a, R>,
    /// Of its feed-forward layer.
    pub feed_forward: HostFeedForward<'a, R>,
    /// Of attention's norm and of the feed-forward layer's.
    pub norms: [HostNorm<'a, R>; 2],
}

/// What [`encoder`] gives.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Encoded<R> {
    /// `[batch, length, features]`.
    pub out: Vec<R>,
    /// What each layer gives, before the final norm.
    pub hidden: Vec<Vec<R>>,
    /// Each layer's attention weights, `[batch, heads, length, length + appended]`, if the options ask for them. Of a decoder those of
    /// self-attention, then those of cross-attention, `[batch, heads, q_len, kv_len + appended]`.
    pub weights: Vec<Vec<R>>,
}

/// A stack of encoder layers over `x` `[batch, length, features]`, with a norm after the last where `final_norm` is given.
///
/// # Errors
/// Those of the stages: sizes of 0, slices of another length, a mask that does not fit.
pub fn encoder<R: Real>(
    x: &[R],
    [batch, length]: [usize; 2],
    config: &BlockConfig,
    layers: &[HostEncoderLayer<R>],
    final_norm: Option<&HostNorm<R>>,
    options: &Options,
) -> Result<Encoded<R>, Error> {
    config.check()?;
    check_sizes("encoder", &[("layers", layers.len()), ("batch", batch), ("length", length)])?;
    expect_length("x", x, batch.saturating_mul(length).saturating_mul(config.features()))?;
    let mut hidden: Vec<Vec<R>> = Vec::with_capacity(layers.len());
    let mut weights = Vec::new();
    for layer in layers {
        let x = hidden.last().map_or(x, |x| x);
        let stages = Stages::of(x, [batch, length], config, layer, options)?;
        hidden.push(stages.out);
        weights.extend(stages.weights);
    }
    let last = &hidden[layers.len() - 1];
    let out = match final_norm {
        Some(of) => norm(last, config.features(), of.weight, of.bias, &config.norm)?,
        None => last.clone(),
    };
    Ok(Encoded { out, hidden, weights })
}

/// What a layer computes.
struct Stages<R> {
    /// What goes into attention.
    attended_input: Vec<R>,
    weights: Option<Vec<R>>,
    /// x and what attention gives.
    first_sum: Vec<R>,
    /// What goes into the feed-forward layer.
    feed_input: Vec<R>,
    feed: Feed<R>,
    /// Of post-norm: what the last norm is of.
    second_sum: Vec<R>,
    out: Vec<R>,
}

/// What a feed-forward layer computes.
struct Feed<R> {
    up: Vec<R>,
    gate: Option<Vec<R>>,
    hidden: Vec<R>,
    out: Vec<R>,
}

pub(super) fn added<R: Real>(a: &[R], b: &[R]) -> Vec<R> {
    a.iter().zip(b).map(|(a, b)| *a + *b).collect()
}

impl<R: Real> Feed<R> {
    fn of(x: &[R], config: &BlockConfig, weights: &HostFeedForward<R>) -> Result<Self, Error> {
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

/// `down(f(up(x)))`, or `down(f(gate(x)) · up(x))`, of rows of `x` `[rows, features]`.
///
/// # Errors
/// Slices of another length.
pub fn feed_forward<R: Real>(
    x: &[R],
    config: &BlockConfig,
    weights: &HostFeedForward<R>,
) -> Result<Vec<R>, Error> {
    Ok(Feed::of(x, config, weights)?.out)
}

impl<R: Real> Stages<R> {
    fn of(
        x: &[R],
        [batch, length]: [usize; 2],
        config: &BlockConfig,
        layer: &HostEncoderLayer<R>,
        options: &Options,
    ) -> Result<Self, Error> {
        let normed = |x: &[R], of: &HostNorm<R>| norm(x, config.features(), of.weight, of.bias, &config.norm);
        let shape = LayerShape { batch, q_len: length, kv_len: length };
        let attend = |x: &[R]| {
            multi_head([x; 3], shape, &config.attention, &layer.attention, options)
                .map(|attended| (attended.out, attended.weights))
        };
        let [first, second] = &layer.norms;
        match config.order {
            NormOrder::Post => {
                let (attended, weights) = attend(x)?;
                let first_sum = added(x, &attended);
                let feed_input = normed(&first_sum, first)?;
                let feed = Feed::of(&feed_input, config, &layer.feed_forward)?;
                let second_sum = added(&feed_input, &feed.out);
                let out = normed(&second_sum, second)?;
                Ok(Stages {
                    attended_input: x.to_vec(),
                    weights,
                    first_sum,
                    feed_input,
                    feed,
                    second_sum,
                    out,
                })
            }
            NormOrder::Pre => {
                let attended_input = normed(x, first)?;
                let (attended, weights) = attend(&attended_input)?;
                let first_sum = added(x, &attended);
                let feed_input = normed(&first_sum, second)?;
                let feed = Feed::of(&feed_input, config, &layer.feed_forward)?;
                let out = added(&first_sum, &feed.out);
                Ok(Stages {
                    attended_input,
                    weights,
                    first_sum,
                    feed_input,
                    feed,
                    second_sum: Vec::new(),
                    out,
                })
            }
        }
    }
}

/// The gradients of a [`HostNorm`], whether it has them or not.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct HostNormGradients<R> {
    /// `[features]`.
    pub d_weight: Vec<R>,
    /// `[features]`.
    pub d_bias: Vec<R>,
}

/// The gradients of a [`HostFeedForward`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FeedForwardGradients<R> {
    /// Of [`HostFeedForward::up`].
    pub up: LinearGradients<R>,
    /// Of [`HostFeedForward::gate`].
    pub gate: Option<LinearGradients<R>>,
    /// Of [`HostFeedForward::down`].
    pub down: LinearGradients<R>,
}

/// The gradients of a [`HostEncoderLayer`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EncoderLayerGradients<R> {
    /// Of its attention; those of its inputs have gone into `d_x` of the stack.
    pub attention: LayerGradients<R>,
    /// Of its feed-forward layer.
    pub feed_forward: FeedForwardGradients<R>,
    /// Of its norms.
    pub norms: [HostNormGradients<R>; 2],
}

/// What [`encoder_backward`] gives.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EncoderGradients<R> {
    /// `[batch, length, features]`.
    pub d_x: Vec<R>,
    /// Of each layer.
    pub layers: Vec<EncoderLayerGradients<R>>,
    /// Of the final norm, if there is one.
    pub final_norm: Option<HostNormGradients<R>>,
}

/// The gradients of `Σ out · d_out` with respect to the inputs of [`encoder`]; `d_out` is shaped as `x`.
///
/// # Errors
/// As [`encoder`].
pub fn encoder_backward<R: Real>(
    x: &[R],
    [batch, length]: [usize; 2],
    config: &BlockConfig,
    layers: &[HostEncoderLayer<R>],
    final_norm: Option<&HostNorm<R>>,
    options: &Options,
    d_out: &[R],
) -> Result<EncoderGradients<R>, Error> {
    let Encoded { hidden, .. } = encoder(x, [batch, length], config, layers, final_norm, options)?;
    expect_length("d_out", d_out, x.len())?;
    let features = config.features();
    let through_norm = |x: &[R], of: &HostNorm<R>, d_out: &[R]| {
        let got = norm_backward(x, features, of.weight, &config.norm, d_out)?;
        let own = HostNormGradients { d_weight: got.d_weight, d_bias: got.d_bias };
        Ok::<_, Error>((got.d_x, own))
    };
    let mut d = d_out.to_vec();
    let mut of_final = None;
    if let Some(of) = final_norm {
        let (d_x, own) = through_norm(&hidden[layers.len() - 1], of, &d)?;
        (d, of_final) = (d_x, Some(own));
    }
    let shape = LayerShape { batch, q_len: length, kv_len: length };
    let mut of_layers = Vec::with_capacity(layers.len());
    for (n, layer) in layers.iter().enumerate().rev() {
        let x = if n == 0 { x } else { &hidden[n - 1] };
        let stages = Stages::of(x, [batch, length], config, layer, options)?;
        let through_attention = |d_out: &[R]| {
            let inputs = [&stages.attended_input[..]; 3];
            let got = multi_head_backward(
                inputs,
                shape,
                &config.attention,
                &layer.attention,
                options,
                d_out,
                None,
            )?;
            let d_x = added(&added(&got.d_query, &got.d_key), &got.d_value);
            Ok::<_, Error>((d_x, got))
        };
        let [first, second] = &layer.norms;
        let (attention, feed_forward, norms);
        match config.order {
            NormOrder::Post => {
                let (d_second, own_second) = through_norm(&stages.second_sum, second, &d)?;
                let (d_feed, own_feed) = stages.feed_backward(config, &layer.feed_forward, &d_second)?;
                let (d_first, own_first) =
                    through_norm(&stages.first_sum, first, &added(&d_second, &d_feed))?;
                let (d_attended, own) = through_attention(&d_first)?;
                d = added(&d_first, &d_attended);
                (attention, feed_forward, norms) = (own, own_feed, [own_first, own_second]);
            }
            NormOrder::Pre => {
                let (d_feed, own_feed) = stages.feed_backward(config, &layer.feed_forward, &d)?;
                let (d_first, own_second) = through_norm(&stages.first_sum, second, &d_feed)?;
                let d_first = added(&d, &d_first);
                let (d_attended, own) = through_attention(&d_first)?;
                let (d_x, own_first) = through_norm(x, first, &d_attended)?;
                d = added(&d_first, &d_x);
                (attention, feed_forward, norms) = (own, own_feed, [own_first, own_second]);
            }
        }
        of_layers.push(EncoderLayerGradients { attention, feed_forward, norms });
    }
    of_layers.reverse();
    Ok(EncoderGradients { d_x: d, layers: of_layers, final_norm: of_final })
}

impl<R: Real> Stages<R> {
    /// Of what goes into the feed-forward layer, and of its weights.
    fn feed_backward(
        &self,
        config: &BlockConfig,
        weights: &HostFeedForward<R>,
        d_out: &[R],
    ) -> Result<(Vec<R>, FeedForwardGradients<R>), Error> {
        let (features, width) = (config.features(), config.hidden_features);
        let Feed { up, gate, hidden, .. } = &self.feed;
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
        let of_up = project_backward(&self.feed_input, weights.up.weight, &d_up, features, width)?;
        let mut d_x = of_up.d_x;
        let up_own = own(of_up.d_weight, of_up.d_bias, &weights.up);
        let mut gate_own = None;
        if let (Some(gate), Some(linear)) = (gate, &weights.gate) {
            let d_gate = each(&|n| d_hidden[n] * slope(&gate[n]) * up[n]);
            let got = project_backward(&self.feed_input, linear.weight, &d_gate, features, width)?;
            d_x = added(&d_x, &got.d_x);
            gate_own = Some(own(got.d_weight, got.d_bias, linear));
        }
        Ok((d_x, FeedForwardGradients { up: up_own, gate: gate_own, down }))
    }
}
