//! The gradients of a whole layer.

use super::config::{MultiHeadConfig, Side};
use super::reference::{
    HostWeights, MultiHeadShape, Projected, columns, gated, norm_of, project_inputs, rotated,
};
use crate::attention::reference::attention::attention;
use crate::attention::reference::backward::{Gradients, attention_backward};
use crate::attention::reference::heads::{join_heads, split_heads};
use crate::attention::reference::options::Options;
use crate::matmul::projection::reference::{HostLinear, ProjectGradients, project_backward};
use crate::matmul::{Activation, SideShape};
use crate::position::reference::rotate_backward;
use crate::rows::elementwise::reference::{activate, activation_slope};
use crate::rows::norm::reference::HostNormGradients;
use crate::rows::norm::reference::norm_backward;
use crate::tensor::{Error, Real, Shape, expect_length};

/// The gradients of a [`HostLinear`], with the same shapes.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LinearGradients<R> {
    /// `[out, in]`, or `[heads, dim, in / heads]` in a narrow layer.
    pub d_weight: Vec<R>,
    /// `[out]`, if there is a bias.
    pub d_bias: Option<Vec<R>>,
}

/// The gradients that [`multi_head_backward`] returns. The gradient of each input has the shape of
/// the input.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct MultiHeadGradients<R> {
    /// `[batch, q_len, query_features]`. If the three inputs are one tensor, its gradient is the
    /// sum of this and the two below.
    pub d_query: Vec<R>,
    /// `[batch, kv_len, key_features]`.
    pub d_key: Vec<R>,
    /// `[batch, kv_len, value_features]`.
    pub d_value: Vec<R>,
    /// The gradients of [`HostWeights::query`].
    pub query: LinearGradients<R>,
    /// The gradients of [`HostWeights::key`].
    pub key: LinearGradients<R>,
    /// The gradients of [`HostWeights::value`].
    pub value: LinearGradients<R>,
    /// The gradients of [`HostWeights::out`].
    pub out: LinearGradients<R>,
    /// The gradients of [`HostWeights::bias_kv`], if it is set.
    pub d_bias_kv: Option<[Vec<R>; 2]>,
    /// The gradients of the norms of queries and of keys, if
    /// [`MultiHeadConfig::qk_norm`](crate::layers::MultiHeadConfig::qk_norm) is set.
    pub qk_norm: Option<[HostNormGradients<R>; 2]>,
    /// The gradients of [`HostWeights::gate`], if it is set.
    pub gate: Option<LinearGradients<R>>,
    /// The gradient of the mask's bias, as in [`Gradients::d_bias`]; the next three likewise.
    pub d_bias: Option<Vec<R>>,
    /// [`Gradients::d_slopes`].
    pub d_slopes: Option<Vec<R>>,
    /// [`Gradients::d_relative`].
    pub d_relative: Option<Vec<R>>,
    /// [`Gradients::d_sinks`].
    pub d_sinks: Option<Vec<R>>,
    /// [`Gradients::d_score_fn`], zeros for appended keys.
    pub d_score_fn: Option<Vec<R>>,
}

/// Computes the gradients of `Σ out · d_out + Σ lse · d_lse` with respect to the inputs of
/// [`multi_head`](crate::reference::multi_head). `d_out` is `[batch, q_len, out_features]`; `d_lse`
/// is `[batch, heads, q_len]`, or zero if it is `None`.
///
/// For NaN in the layer's inputs the rule of [`project_backward`] holds. NaN of a hidden key
/// appears in the gradient of a weight only.
///
/// # Errors
/// As [`multi_head`](crate::reference::multi_head).
pub fn multi_head_backward<R: Real>(
    inputs: [&[R]; 3],
    shape: MultiHeadShape,
    config: &MultiHeadConfig,
    weights: &HostWeights<R>,
    options: &Options,
    d_out: &[R],
    d_lse: Option<&[R]>,
) -> Result<MultiHeadGradients<R>, Error> {
    let MultiHeadShape { batch, q_len, .. } = shape;
    let given = options;
    let Projected { q, k, v, unnormed, gate, shape, options } =
        project_inputs(inputs, shape, config, weights, given)?;
    let attended = attention(&q, &k, &v, shape, &options)?;
    let context = join_heads(&attended.out, q_len, config.heads, config.value_dim)?;
    let (width, out_features) = (config.heads * config.value_dim, config.out_features);
    expect_length("weights.out", weights.out.weight, out_features * width)?;
    weights.out.bias.map_or(Ok(()), |b| expect_length("bias.out", b, out_features))?;
    expect_length("d_out", d_out, batch * q_len * out_features)?;
    let ProjectGradients { d_x, d_weight, d_bias } =
        project_backward(&gated(context.clone(), &gate), weights.out.weight, d_out, width, out_features)?;
    let out = LinearGradients { d_weight, d_bias: weights.out.bias.map(|_| d_bias) };

    let (d_context, d_gate) = gate_backward(d_x, &context, &gate);
    let d_context = split_heads(&d_context, q_len, config.heads, config.value_dim)?;
    let Gradients { d_q, d_k, d_v, d_bias, d_slopes, d_relative, d_sinks, d_score_fn, .. } =
        attention_backward(&q, &k, &v, &d_context, d_lse, shape, &options)?;
    let joined = |x: &[R], length: usize, side: Side| {
        let SideShape { heads, dim, .. } = config.side(side);
        join_heads(x, length, heads, dim)
    };
    let d_q = joined(&d_q, q_len, Side::Query)?;
    let (d_k, mut more_keys) =
        without_appended(&joined(&d_k, shape.kv_len, Side::Key)?, batch, &options, &shape);
    let (d_v, mut more_values) =
        without_appended(&joined(&d_v, shape.kv_len, Side::Value)?, batch, &options, &shape);
    let turned = |d: Vec<R>, side: Side| {
        let SideShape { heads, dim, .. } = config.side(side);
        rotated(d, [batch, heads, q_len, dim], given, rotate_backward)
    };
    let (d_q, d_k) = (turned(d_q, Side::Query)?, turned(d_k, Side::Key)?);
    let mut of_norms = Vec::new();
    let mut unnormed = |side: usize, d: Vec<R>| {
        let Some(of) = &config.qk_norm else { return Ok(d) };
        let got = norm_backward(&unnormed[side], config.head_dim, norm_of(side, weights)[0], of, &d)?;
        of_norms.push(HostNormGradients { d_weight: got.d_weight, d_bias: got.d_bias });
        Ok::<_, Error>(got.d_x)
    };
    let (d_q, d_k) = (unnormed(0, d_q)?, unnormed(1, d_k)?);
    let [query, key, value] = inputs;
    let (mut d_query, of_query) = side_backward(query, &d_q, config.side(Side::Query), &weights.query)?;
    let mut of_gate = None;
    if let Some((of, linear)) = config.gate_side().zip(weights.gate.as_ref()) {
        let (more, own) = side_backward(query, &d_gate, of, linear)?;
        d_query.iter_mut().zip(more).for_each(|(sum, d)| *sum = *sum + d);
        of_gate = Some(own);
    }
    let (d_key, key) = side_backward(key, &d_k, config.side(Side::Key), &weights.key)?;
    let (d_value, value) = side_backward(value, &d_v, config.side(Side::Value), &weights.value)?;
    // Only the first of the appended keys is a weight: a zero key and value have no gradient.
    let d_bias_kv = weights.bias_kv.map(|[bias_k, bias_v]| {
        more_keys.truncate(bias_k.len());
        more_values.truncate(bias_v.len());
        [more_keys, more_values]
    });
    Ok(MultiHeadGradients {
        d_query,
        d_key,
        d_value,
        query: of_query,
        key,
        value,
        out,
        d_bias_kv,
        qk_norm: <[_; 2]>::try_from(of_norms).ok(),
        gate: of_gate,
        d_bias,
        d_slopes,
        d_relative,
        d_sinks,
        d_score_fn,
    })
}

/// Computes, from the gradient `d` of gated heads' outputs, the gradients of the outputs `context`
/// and of the gate's logits.
fn gate_backward<R: Real>(d: Vec<R>, context: &[R], gate: &[R]) -> (Vec<R>, Vec<R>) {
    if gate.is_empty() {
        return (d, Vec::new());
    }
    let shared = context.len() / gate.len();
    let d_gate = gate.iter().enumerate().map(|(n, logit)| {
        let own = n * shared..(n + 1) * shared;
        let sum = d[own.clone()].iter().zip(&context[own]).fold(R::zero(), |sum, (d, x)| sum + *d * *x);
        sum * activation_slope(*logit, Activation::Sigmoid)
    });
    let d_gate = d_gate.collect();
    let of = |(n, d): (usize, &R)| *d * activate(gate[n / shared], Activation::Sigmoid);
    (d.iter().enumerate().map(of).collect(), d_gate)
}

/// Returns the rows of every sequence without the appended rows, and the appended rows, summed over
/// the batch.
fn without_appended<R: Real>(x: &[R], batch: usize, options: &Options, shape: &Shape) -> (Vec<R>, Vec<R>) {
    let sequence = x.len() / batch;
    let more = sequence / shape.kv_len * options.appended;
    let (mut given, mut appended) = (Vec::with_capacity(x.len()), vec![R::zero(); more]);
    for sequence in x.chunks_exact(sequence) {
        let (own, last) = sequence.split_at(sequence.len() - more);
        given.extend_from_slice(own);
        appended.iter_mut().zip(last).for_each(|(sum, d)| *sum = *sum + *d);
    }
    (given, appended)
}

/// Computes the gradients of one side's projection: of its input, and of weight and bias.
fn side_backward<R: Real>(
    x: &[R],
    d_y: &[R],
    shape: SideShape,
    linear: &HostLinear<R>,
) -> Result<(Vec<R>, LinearGradients<R>), Error> {
    let SideShape { heads, dim, features, narrow } = shape;
    let read = shape.read();
    let (mut d_x, mut d_weight, mut d_bias) = (vec![R::zero(); x.len()], Vec::new(), Vec::new());
    // A wide projection is one part. A narrow projection has a part for each head.
    let (parts, dim) = if narrow { (heads, dim) } else { (1, heads * dim) };
    for part in 0..parts {
        let weight = &linear.weight[part * dim * read..][..dim * read];
        let (x, d_y) = (columns(x, features, part * read, read), columns(d_y, parts * dim, part * dim, dim));
        let got = project_backward(&x, weight, &d_y, read, dim)?;
        for (row, d) in d_x.chunks_exact_mut(features).zip(got.d_x.chunks_exact(read)) {
            row[part * read..][..read].copy_from_slice(d);
        }
        d_weight.extend(got.d_weight);
        d_bias.extend(got.d_bias);
    }
    Ok((d_x, LinearGradients { d_weight, d_bias: linear.bias.map(|_| d_bias) }))
}
