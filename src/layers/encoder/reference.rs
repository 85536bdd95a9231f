//! A stack of encoder layers, and its gradients.

use crate::attention::reference::options::Options;
use crate::layers::multi_head::reference::{HostWeights, MultiHeadShape, multi_head};
use crate::layers::multi_head::reference_backward::{MultiHeadGradients, multi_head_backward};
use crate::layers::stack::config::TransformerLayerConfig;
use crate::layers::stack::reference::{
    Encoded, FeedForwardGradients, HostFeedForward, KeyGradients, KeysOf, Step, check_shared_keys,
    feed_backward, feed_forward, normed, of_inputs, through_norm,
};
use crate::rows::norm::reference::{HostNorm, HostNormGradients};
use crate::tensor::{Error, Real, check_sizes, expect_length};

/// The weights of one layer of an encoder.
#[derive(Clone, Copy, Debug)]
pub struct HostEncoderLayer<'a, R> {
    /// The weights of its self-attention.
    pub attention: HostWeights<'a, R>,
    /// The weights of its feed-forward layer.
    pub feed_forward: HostFeedForward<'a, R>,
    /// The norms of attention and of the feed-forward layer.
    pub norms: [HostNorm<'a, R>; 2],
}

/// Computes a stack of encoder layers over `x` `[batch, length, features]`. `final_norm`, if any,
/// follows the last layer.
///
/// # Errors
/// The errors of the stages: sizes of 0, slices of another length, a mask that does not fit.
pub fn encoder<R: Real>(
    x: &[R],
    [batch, length]: [usize; 2],
    config: &TransformerLayerConfig,
    layers: &[HostEncoderLayer<R>],
    final_norm: Option<&HostNorm<R>>,
    options: &Options,
) -> Result<Encoded<R>, Error> {
    encoder_by_layer(x, [batch, length], &vec![(*config, *options); layers.len()], layers, final_norm)
}

/// Computes an [`encoder`] whose layers differ: `calls` has the configuration and the options of
/// each layer. Configurations may differ in scale, softcap and [`TransformerLayerConfig::keys_of`].
/// A layer that reads the keys of another layer uses that layer's weights of keys and values too.
///
/// # Errors
/// As [`encoder`], and another number of calls than layers.
pub fn encoder_by_layer<R: Real>(
    x: &[R],
    [batch, length]: [usize; 2],
    calls: &[(TransformerLayerConfig, Options)],
    layers: &[HostEncoderLayer<R>],
    final_norm: Option<&HostNorm<R>>,
) -> Result<Encoded<R>, Error> {
    let configs: Vec<TransformerLayerConfig> = calls.iter().map(|(config, _)| *config).collect();
    let config = &TransformerLayerConfig::of_layers(&configs, layers.len())?;
    check_shared_keys(calls.iter().map(|(config, options)| (config, options)))?;
    check_sizes("encoder", &[("batch", batch), ("length", length)])?;
    expect_length("x", x, batch.saturating_mul(length).saturating_mul(config.features()))?;
    let mut hidden: Vec<Vec<R>> = Vec::with_capacity(layers.len());
    let mut weights = Vec::new();
    let mut inputs = Vec::new();
    for (layer, (config, options)) in layers.iter().zip(calls) {
        let x = hidden.last().map_or(x, |x| x);
        let keys = config.keys_of.map(|source| (&inputs[source], &layers[source].attention));
        let ([attended, _], out) = layer.steps((x, keys), [batch, length], config, options, &mut weights)?;
        inputs.push(attended.input);
        hidden.push(out);
    }
    let last = &hidden[layers.len() - 1];
    let out = final_norm.map_or_else(|| Ok(last.clone()), |of| normed(last, config, of))?;
    Ok(Encoded { out, hidden, weights })
}

impl<R: Real> HostEncoderLayer<'_, R> {
    /// Returns the attention and the feed-forward layer, and the layer's output. Attention weights
    /// go to `weights`. If the layer reads the keys of another layer, `keys` are the input and the
    /// weights of that layer's attention.
    fn steps(
        &self,
        (x, keys): (&[R], KeysOf<R>),
        [batch, length]: [usize; 2],
        config: &TransformerLayerConfig,
        options: &Options,
        weights: &mut Vec<Vec<R>>,
    ) -> Result<([Step<R>; 2], Vec<R>), Error> {
        let [first, second] = &self.norms;
        let (attended, x) = Step::of(x.to_vec(), config, first, |x| {
            let shape = MultiHeadShape { batch, q_len: length, kv_len: length };
            let own = &self.attention;
            let (keys, weights_of) = keys.map_or((x, *own), |(keys, of)| (&keys[..], own.with_keys_of(of)));
            let attended = multi_head([x, keys, keys], shape, &config.attention, &weights_of, options)?;
            weights.extend(attended.weights);
            Ok(attended.out)
        })?;
        let feed = |x: &[R]| feed_forward(x, config, &self.feed_forward);
        let (fed, out) = Step::of(x, config, second, feed)?;
        Ok(([attended, fed], out))
    }
}

/// The gradients of a [`HostEncoderLayer`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EncoderLayerGradients<R> {
    /// The gradients of its attention. The gradients of the attention's inputs are part of the
    /// stack's `d_x`. If the layer reads the keys of another layer, the gradients of the weights of
    /// keys and values are empty. The other layer's gradients contain them.
    pub attention: MultiHeadGradients<R>,
    /// The gradients of its feed-forward layer.
    pub feed_forward: FeedForwardGradients<R>,
    /// The gradients of its norms.
    pub norms: [HostNormGradients<R>; 2],
}

/// The gradients that [`encoder_backward`] returns.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EncoderGradients<R> {
    /// `[batch, length, features]`.
    pub d_x: Vec<R>,
    /// The gradients of each layer.
    pub layers: Vec<EncoderLayerGradients<R>>,
    /// The gradients of the final norm, if there is one.
    pub final_norm: Option<HostNormGradients<R>>,
}

/// Computes the gradients of `Σ out · d_out` with respect to the inputs of [`encoder`]. `d_out` has
/// the shape of `x`.
///
/// # Errors
/// As [`encoder`].
pub fn encoder_backward<R: Real>(
    x: &[R],
    [batch, length]: [usize; 2],
    config: &TransformerLayerConfig,
    layers: &[HostEncoderLayer<R>],
    final_norm: Option<&HostNorm<R>>,
    options: &Options,
    d_out: &[R],
) -> Result<EncoderGradients<R>, Error> {
    let calls = vec![(*config, *options); layers.len()];
    encoder_by_layer_backward(x, [batch, length], &calls, layers, final_norm, d_out)
}

/// Computes the gradients of `Σ out · d_out` with respect to the inputs of [`encoder_by_layer`].
/// `d_out` has the shape of `x`.
///
/// # Errors
/// As [`encoder_by_layer`].
pub fn encoder_by_layer_backward<R: Real>(
    x: &[R],
    [batch, length]: [usize; 2],
    calls: &[(TransformerLayerConfig, Options)],
    layers: &[HostEncoderLayer<R>],
    final_norm: Option<&HostNorm<R>>,
    d_out: &[R],
) -> Result<EncoderGradients<R>, Error> {
    let Encoded { hidden, .. } = encoder_by_layer(x, [batch, length], calls, layers, final_norm)?;
    expect_length("d_out", d_out, x.len())?;
    let mut d = d_out.to_vec();
    let mut of_final = None;
    if let Some(of) = final_norm {
        let (d_x, own) = through_norm(&hidden[layers.len() - 1], &calls[0].0, of, &d)?;
        (d, of_final) = (d_x, Some(own));
    }
    let shape = MultiHeadShape { batch, q_len: length, kv_len: length };
    let mut of_layers = Vec::with_capacity(layers.len());
    let mut shared: Vec<Option<KeyGradients<R>>> = layers.iter().map(|_| None).collect();
    let before = |n: usize| if n == 0 { x } else { &hidden[n - 1] };
    for (n, (layer, (config, options))) in layers.iter().zip(calls).enumerate().rev() {
        let rows = [batch, length];
        let source = config.keys_of;
        let input = |source: usize| {
            let (config, options) = &calls[source];
            let ([attended, _], _) =
                layers[source].steps((before(source), None), rows, config, options, &mut Vec::new())?;
            Ok::<_, Error>(attended.input)
        };
        let keys = source.map(input).transpose()?;
        let keys = keys.as_ref().zip(source.map(|source| &layers[source].attention));
        let ([attended, fed], _) = layer.steps((before(n), keys), rows, config, options, &mut Vec::new())?;
        let [first, second] = &layer.norms;
        let feed = |x: &[R], d: &[R]| feed_backward(x, config, &layer.feed_forward, d);
        let (d_fed, feed_forward, of_second) = fed.backward(&d, config, second, feed)?;
        let attend = |x: &[R], d: &[R]| {
            let own = &layer.attention;
            let (keys, weights) = keys.map_or((x, *own), |(keys, of)| (&keys[..], own.with_keys_of(of)));
            let inputs = [x, keys, keys];
            let own = multi_head_backward(inputs, shape, &config.attention, &weights, options, d, None)?;
            Ok(of_inputs(own, n, source, &mut shared))
        };
        let (d_x, attention, of_first) = attended.backward(&d_fed, config, first, attend)?;
        d = d_x;
        of_layers.push(EncoderLayerGradients { attention, feed_forward, norms: [of_first, of_second] });
    }
    of_layers.reverse();
    Ok(EncoderGradients { d_x: d, layers: of_layers, final_norm: of_final })
}
