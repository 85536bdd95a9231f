//! A stack of decoder layers.

use super::encoder::added;
use super::{
    Encoded, HostFeedForward, HostNorm, HostWeights, LayerShape, Options, Real, expect_length, feed_forward,
    multi_head, norm,
};
use crate::block_config::{BlockConfig, NormOrder};
use crate::error::Error;
use crate::tensor::check_sizes;

/// The weights of one layer of a decoder.
#[derive(Clone, Copy, Debug)]
pub struct HostDecoderLayer<'a, R> {
    /// Of its self-attention.
    pub self_attention: HostWeights<'a, R>,
    /// Of its attention to the memory.
    pub cross_attention: HostWeights<'a, R>,
    /// Of its feed-forward layer.
    pub feed_forward: HostFeedForward<'a, R>,
    /// Of the norms of self-attention, of cross-attention and of the feed-forward layer.
    pub norms: [HostNorm<'a, R>; 3],
}

/// A part of a layer.
type Part<'a, R> = dyn Fn(&[R]) -> Result<Vec<R>, Error> + 'a;

/// A stack of decoder layers over `x` `[batch, q_len, features]` and `memory` `[batch, kv_len, features]`, with a norm after the last
/// where `final_norm` is given. `options` are those of self-attention, and of cross-attention.
///
/// # Errors
/// Those of the stages: sizes of 0, slices of another length, a mask that does not fit.
pub fn decoder<R: Real>(
    [x, memory]: [&[R]; 2],
    shape: LayerShape,
    config: &BlockConfig,
    layers: &[HostDecoderLayer<R>],
    final_norm: Option<&HostNorm<R>>,
    [of_self, of_cross]: [&Options; 2],
) -> Result<Encoded<R>, Error> {
    config.check()?;
    let LayerShape { batch, q_len, kv_len } = shape;
    let sizes = [("layers", layers.len()), ("batch", batch), ("q_len", q_len), ("kv_len", kv_len)];
    check_sizes("decoder", &sizes)?;
    let features = config.features();
    expect_length("x", x, batch.saturating_mul(q_len).saturating_mul(features))?;
    expect_length("memory", memory, batch.saturating_mul(kv_len).saturating_mul(features))?;
    let normed = |x: &[R], of: &HostNorm<R>| norm(x, features, of.weight, of.bias, &config.norm);
    let mut hidden: Vec<Vec<R>> = Vec::with_capacity(layers.len());
    let mut x = x.to_vec();
    for layer in layers {
        let attend = |x: &[R]| {
            let own = LayerShape { kv_len: q_len, ..shape };
            Ok(multi_head([x; 3], own, &config.attention, &layer.self_attention, of_self)?.out)
        };
        let cross = |x: &[R]| {
            let inputs = [x, memory, memory];
            Ok(multi_head(inputs, shape, &config.attention, &layer.cross_attention, of_cross)?.out)
        };
        let feed = |x: &[R]| feed_forward(x, config, &layer.feed_forward);
        let parts: [&Part<R>; 3] = [&attend, &cross, &feed];
        for (part, of) in parts.into_iter().zip(&layer.norms) {
            x = match config.order {
                NormOrder::Post => normed(&added(&x, &part(&x)?), of)?,
                NormOrder::Pre => added(&x, &part(&normed(&x, of)?)?),
            };
        }
        hidden.push(x.clone());
    }
    let out = match final_norm {
        Some(of) => normed(&x, of)?,
        None => x,
    };
    Ok(Encoded { out, hidden })
}
