//! A stack of decoder layers, and its gradients.

use crate::attention::reference::options::Options;
use crate::layers::multi_head::reference::{HostWeights, MultiHeadShape, multi_head};
use crate::layers::multi_head::reference_backward::{MultiHeadGradients, multi_head_backward};
use crate::layers::stack::config::TransformerLayerConfig;
use crate::layers::stack::reference::{
    Encoded, FeedForwardGradients, HostFeedForward, KeyGradients, KeysOf, Step, added, check_shared_keys,
    feed_backward, feed_forward, normed, of_inputs, through_norm,
};
use crate::rows::norm::reference::{HostNorm, HostNormGradients};
use crate::tensor::{Error, Real, check_sizes, expect_length};

/// The weights of one layer of a decoder.
#[derive(Clone, Copy, Debug)]
pub struct HostDecoderLayer<'a, R> {
    /// The weights of its self-attention.
    pub self_attention: HostWeights<'a, R>,
    /// The weights of its attention to the memory.
    pub cross_attention: HostWeights<'a, R>,
    /// The weights of its feed-forward layer.
    pub feed_forward: HostFeedForward<'a, R>,
    /// The norms of self-attention, of cross-attention and of the feed-forward layer.
    pub norms: [HostNorm<'a, R>; 3],
}

/// Computes a stack of decoder layers over `x` `[batch, q_len, features]` and `memory` `[batch,
/// kv_len, features]`. `final_norm`, if any, follows the last layer. `options` are the options of
/// self-attention and of cross-attention.
///
/// # Errors
/// The errors of the stages: sizes of 0, slices of another length, a mask that does not fit.
pub fn decoder<R: Real>(
    [x, memory]: [&[R]; 2],
    shape: MultiHeadShape,
    config: &TransformerLayerConfig,
    layers: &[HostDecoderLayer<R>],
    final_norm: Option<&HostNorm<R>>,
    options: [&Options; 2],
) -> Result<Encoded<R>, Error> {
    let calls = vec![(*config, options.map(|options| *options)); layers.len()];
    decoder_by_layer([x, memory], shape, &calls, layers, final_norm)
}

/// Computes a [`decoder`] whose layers differ: `calls` has the configuration of each layer and the
/// options of its two attentions. Configurations may differ in scale, softcap and
/// [`TransformerLayerConfig::keys_of`], the layer whose keys self-attention reads.
///
/// # Errors
/// As [`decoder`], and another number of calls than layers.
pub fn decoder_by_layer<R: Real>(
    [x, memory]: [&[R]; 2],
    shape: MultiHeadShape,
    calls: &[(TransformerLayerConfig, [Options; 2])],
    layers: &[HostDecoderLayer<R>],
    final_norm: Option<&HostNorm<R>>,
) -> Result<Encoded<R>, Error> {
    let configs: Vec<TransformerLayerConfig> = calls.iter().map(|(config, _)| *config).collect();
    let config = &TransformerLayerConfig::of_layers(&configs, layers.len())?;
    check_shared_keys(calls.iter().map(|(config, [options, _])| (config, options)))?;
    let MultiHeadShape { batch, q_len, kv_len } = shape;
    let sizes = [("batch", batch), ("q_len", q_len), ("kv_len", kv_len)];
    check_sizes("decoder", &sizes)?;
    let features = config.features();
    expect_length("x", x, batch.saturating_mul(q_len).saturating_mul(features))?;
    expect_length("memory", memory, batch.saturating_mul(kv_len).saturating_mul(features))?;
    let mut hidden: Vec<Vec<R>> = Vec::with_capacity(layers.len());
    let mut weights = Vec::new();
    let mut inputs = Vec::new();
    for (layer, (config, options)) in layers.iter().zip(calls) {
        let x = hidden.last().map_or(x, |x| x);
        let keys = config.keys_of.map(|source| (&inputs[source], &layers[source].self_attention));
        let ([attended, ..], out) = layer.steps(([x, memory], keys), shape, config, options, &mut weights)?;
        inputs.push(attended.input);
        hidden.push(out);
    }
    let last = &hidden[layers.len() - 1];
    let out = final_norm.map_or_else(|| Ok(last.clone()), |of| normed(last, config, of))?;
    Ok(Encoded { out, hidden, weights })
}

impl<R: Real> HostDecoderLayer<'_, R> {
    /// Returns the attentions and the feed-forward layer, and the layer's output. Attention weights
    /// go to `weights`. If the layer reads the keys of another layer, `keys` are the input and the
    /// weights of that layer's self-attention.
    fn steps(
        &self,
        ([x, memory], keys): ([&[R]; 2], KeysOf<R>),
        shape: MultiHeadShape,
        config: &TransformerLayerConfig,
        [of_self, of_cross]: &[Options; 2],
        weights: &mut Vec<Vec<R>>,
    ) -> Result<([Step<R>; 3], Vec<R>), Error> {
        let [first, second, third] = &self.norms;
        let (attended, x) = Step::of(x.to_vec(), config, first, |x| {
            let own = MultiHeadShape { kv_len: shape.q_len, ..shape };
            let mine = &self.self_attention;
            let (keys, weights_of) = keys.map_or((x, *mine), |(keys, of)| (&keys[..], mine.with_keys_of(of)));
            let attended = multi_head([x, keys, keys], own, &config.attention, &weights_of, of_self)?;
            weights.extend(attended.weights);
            Ok(attended.out)
        })?;
        let (crossed, x) = Step::of(x, config, second, |x| {
            let inputs = [x, memory, memory];
            let attended = multi_head(inputs, shape, &config.attention, &self.cross_attention, of_cross)?;
            weights.extend(attended.weights);
            Ok(attended.out)
        })?;
        let feed = |x: &[R]| feed_forward(x, config, &self.feed_forward);
        let (fed, out) = Step::of(x, config, third, feed)?;
        Ok(([attended, crossed, fed], out))
    }
}

/// The gradients of a [`HostDecoderLayer`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DecoderLayerGradients<R> {
    /// The gradients of its self-attention. The gradients of the attention's inputs are part of the
    /// stack's `d_x`. If the layer reads the keys of another layer, the gradients of the weights of
    /// keys and values are empty. The other layer's gradients contain them.
    pub self_attention: MultiHeadGradients<R>,
    /// The gradients of its attention to the memory. The gradients of the attention's inputs are
    /// part of `d_x` and `d_memory`.
    pub cross_attention: MultiHeadGradients<R>,
    /// The gradients of its feed-forward layer.
    pub feed_forward: FeedForwardGradients<R>,
    /// The gradients of its norms.
    pub norms: [HostNormGradients<R>; 3],
}

/// The gradients that [`decoder_backward`] returns.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DecoderGradients<R> {
    /// `[batch, q_len, features]`.
    pub d_x: Vec<R>,
    /// `[batch, kv_len, features]`, the sum over the layers.
    pub d_memory: Vec<R>,
    /// The gradients of each layer.
    pub layers: Vec<DecoderLayerGradients<R>>,
    /// The gradients of the final norm, if there is one.
    pub final_norm: Option<HostNormGradients<R>>,
}

/// Computes the gradients of `Σ out · d_out` with respect to the inputs of [`decoder`]. `d_out` has
/// the shape of `x`.
///
/// # Errors
/// As [`decoder`].
pub fn decoder_backward<R: Real>(
    [x, memory]: [&[R]; 2],
    shape: MultiHeadShape,
    config: &TransformerLayerConfig,
    layers: &[HostDecoderLayer<R>],
    final_norm: Option<&HostNorm<R>>,
    options: [&Options; 2],
    d_out: &[R],
) -> Result<DecoderGradients<R>, Error> {
    let calls = vec![(*config, options.map(|options| *options)); layers.len()];
    decoder_by_layer_backward([x, memory], shape, &calls, layers, final_norm, d_out)
}

/// Computes the gradients of `Σ out · d_out` with respect to the inputs of [`decoder_by_layer`].
/// `d_out` has the shape of `x`.
///
/// # Errors
/// As [`decoder_by_layer`].
pub fn decoder_by_layer_backward<R: Real>(
    [x, memory]: [&[R]; 2],
    shape: MultiHeadShape,
    calls: &[(TransformerLayerConfig, [Options; 2])],
    layers: &[HostDecoderLayer<R>],
    final_norm: Option<&HostNorm<R>>,
    d_out: &[R],
) -> Result<DecoderGradients<R>, Error> {
    let Encoded { hidden, .. } = decoder_by_layer([x, memory], shape, calls, layers, final_norm)?;
    expect_length("d_out", d_out, x.len())?;
    let own_shape = MultiHeadShape { kv_len: shape.q_len, ..shape };
    let mut d = d_out.to_vec();
    let mut d_memory = vec![R::zero(); memory.len()];
    let mut of_final = None;
    if let Some(of) = final_norm {
        let (d_x, own) = through_norm(&hidden[layers.len() - 1], &calls[0].0, of, &d)?;
        (d, of_final) = (d_x, Some(own));
    }
    let mut of_layers = Vec::with_capacity(layers.len());
    let mut shared: Vec<Option<KeyGradients<R>>> = layers.iter().map(|_| None).collect();
    let before = |n: usize| if n == 0 { x } else { &hidden[n - 1] };
    for (n, (layer, (config, options))) in layers.iter().zip(calls).enumerate().rev() {
        let [of_self, of_cross] = options;
        let source = config.keys_of;
        let input = |source: usize| {
            let ((config, options), x) = (&calls[source], before(source));
            let ([attended, ..], _) =
                layers[source].steps(([x, memory], None), shape, config, options, &mut Vec::new())?;
            Ok::<_, Error>(attended.input)
        };
        let keys = source.map(input).transpose()?;
        let keys = keys.as_ref().zip(source.map(|source| &layers[source].self_attention));
        let ([attended, crossed, fed], _) =
            layer.steps(([before(n), memory], keys), shape, config, options, &mut Vec::new())?;
        let [first, second, third] = &layer.norms;
        let feed = |x: &[R], d: &[R]| feed_backward(x, config, &layer.feed_forward, d);
        let (d_fed, feed_forward, of_third) = fed.backward(&d, config, third, feed)?;
        let cross = |x: &[R], d: &[R]| {
            let (inputs, weights) = ([x, memory, memory], &layer.cross_attention);
            let own = multi_head_backward(inputs, shape, &config.attention, weights, of_cross, d, None)?;
            d_memory = added(&d_memory, &added(&own.d_key, &own.d_value));
            Ok((own.d_query.clone(), own))
        };
        let (d_crossed, cross_attention, of_second) = crossed.backward(&d_fed, config, second, cross)?;
        let attend = |x: &[R], d: &[R]| {
            let own = &layer.self_attention;
            let (keys, weights) = keys.map_or((x, *own), |(keys, of)| (&keys[..], own.with_keys_of(of)));
            let inputs = [x, keys, keys];
            let own = multi_head_backward(inputs, own_shape, &config.attention, &weights, of_self, d, None)?;
            Ok(of_inputs(own, n, source, &mut shared))
        };
        let (d_x, self_attention, of_first) = attended.backward(&d_crossed, config, first, attend)?;
        d = d_x;
        let norms = [of_first, of_second, of_third];
        of_layers.push(DecoderLayerGradients { self_attention, cross_attention, feed_forward, norms });
    }
    of_layers.reverse();
    Ok(DecoderGradients { d_x: d, d_memory, layers: of_layers, final_norm: of_final })
}
