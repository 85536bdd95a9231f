//! A whole layer: project → attend → project.

use super::config::{MultiHeadConfig, Side};
use crate::attention::reference::attention::{Attended, attention};
use crate::attention::reference::heads::{join_heads, split_heads};
use crate::attention::reference::options::Options;
use crate::matmul::projection::reference::{HostLinear, project};
use crate::matmul::{Activation, SideShape};
use crate::position::reference::rotate;
use crate::position::{RopeConfig, RowPositions};
use crate::rows::elementwise::reference::activate;
use crate::rows::norm::reference::HostNorm;
use crate::rows::norm::reference::norm;
use crate::tensor::{Error, HostTensor, Real, Shape, expect_length};

/// The weights of a layer.
#[derive(Clone, Copy, Debug)]
pub struct HostWeights<'a, R> {
    /// `[heads · head_dim, query_features]`.
    pub query: HostLinear<'a, R>,
    /// `[kv_heads · head_dim, key_features]`.
    pub key: HostLinear<'a, R>,
    /// `[kv_heads · value_dim, value_features]`.
    pub value: HostLinear<'a, R>,
    /// `[out_features, heads · value_dim]`.
    pub out: HostLinear<'a, R>,
    /// One more key `[kv_heads · head_dim]` and value `[kv_heads · value_dim]`, which the layer
    /// appends after projection (`bias_k`, `bias_v` of `nn.MultiheadAttention`).
    #[doc(alias = "bias_k")]
    #[doc(alias = "bias_v")]
    #[doc(alias = "add_bias_kv")]
    pub bias_kv: Option<[&'a [R]; 2]>,
    /// Weights and biases of the norms of queries and of keys, `[head_dim]` each, of
    /// [`MultiHeadConfig::qk_norm`](crate::layers::MultiHeadConfig::qk_norm).
    pub qk_norm: Option<[HostNorm<'a, R>; 2]>,
    /// The gate of the heads' outputs, `[heads · value_dim, query_features]` or `[heads,
    /// query_features]`. It belongs to
    /// [`MultiHeadConfig::output_gate`](crate::layers::MultiHeadConfig::output_gate).
    pub gate: Option<HostLinear<'a, R>>,
}

impl<'a, R> HostWeights<'a, R> {
    /// The weights of a layer that reads the keys of `source`.
    pub(crate) fn with_keys_of(&self, source: &HostWeights<'a, R>) -> Self
    where
        R: Copy,
    {
        let HostWeights { key, value, bias_kv, .. } = *source;
        let k_norm = source.qk_norm.map(|[_, k_norm]| k_norm);
        let qk_norm = self.qk_norm.zip(k_norm).map(|([q_norm, _], k_norm)| [q_norm, k_norm]);
        HostWeights { key, value, bias_kv, qk_norm, ..*self }
    }
}

/// Lengths of one call of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MultiHeadShape {
    /// Independent sequences.
    pub batch: usize,
    /// Queries per sequence.
    pub q_len: usize,
    /// Keys per sequence, without appended keys.
    pub kv_len: usize,
}

/// Computes a multi-head attention layer over dense `[batch, length, features]` inputs. The layer
/// sets `options.appended`; scale and softcap come from `config`.
///
/// # Errors
/// As [`attention`], and slices whose length is not the length of their shape.
pub fn multi_head<R: Real>(
    inputs: [&[R]; 3],
    shape: MultiHeadShape,
    config: &MultiHeadConfig,
    weights: &HostWeights<R>,
    options: &Options,
) -> Result<Attended<R>, Error> {
    let Projected { q, k, v, gate, shape, options, .. } =
        project_inputs(inputs, shape, config, weights, options)?;
    let attended = attention(&q, &k, &v, shape, &options)?;
    let context = join_heads(&attended.out, shape.q_len, config.heads, config.value_dim)?;
    let context = gated(context, &gate);
    let width = config.heads * config.value_dim;
    expect_length("weights.out", weights.out.weight, config.out_features * width)?;
    weights.out.bias.map_or(Ok(()), |b| expect_length("bias.out", b, config.out_features))?;
    let out = project(&context, weights.out.weight, weights.out.bias, width, config.out_features)?;
    Ok(Attended { out, ..attended })
}

/// The attention inside of a layer.
pub(super) struct Projected<'a, R> {
    /// Queries, keys and values have the shape `shape`, with appended keys.
    pub q: Vec<R>,
    pub k: Vec<R>,
    pub v: Vec<R>,
    /// Rows of queries and keys before their norm, heads next to each other, without appended keys.
    /// Both are empty if the layer has no norms.
    pub unnormed: [Vec<R>; 2],
    /// Logits of the gate, `[batch · q_len, heads · value_dim or heads]`; empty if the layer has no
    /// gate.
    pub gate: Vec<R>,
    pub shape: Shape,
    pub options: Options<'a>,
}

/// Computes the stages of a layer before attention.
pub(super) fn project_inputs<'a, R: Real>(
    [query, key, value]: [&[R]; 3],
    shape: MultiHeadShape,
    config: &MultiHeadConfig,
    weights: &HostWeights<R>,
    options: &Options<'a>,
) -> Result<Projected<'a, R>, Error> {
    config.check()?;
    let MultiHeadShape { batch, q_len, kv_len } = shape;
    config.shape(batch, q_len, kv_len, 0).check()?;
    if options.rotary.is_some() && q_len != kv_len {
        let why = "a layer rotates only self-attention; rotate the projected tensors instead";
        return Err(Error::Unsupported {
            what: "rotary positions with unequal numbers of queries and keys",
            why,
        });
    }
    let q = side(query, batch.saturating_mul(q_len), config.side(Side::Query), &weights.query)?;
    let k = side(key, batch.saturating_mul(kv_len), config.side(Side::Key), &weights.key)?;
    let ((unnormed_q, q), (unnormed_k, k)) = (normed(0, q, config, weights)?, normed(1, k, config, weights)?);
    let q = rotated(q, [batch, config.heads, q_len, config.head_dim], options, rotate)?;
    let mut k = rotated(k, [batch, config.kv_heads, kv_len, config.head_dim], options, rotate)?;
    let mut v = side(value, batch.saturating_mul(kv_len), config.side(Side::Value), &weights.value)?;
    config.check_gate(weights.gate.is_some())?;
    let gate = match config.gate_side().zip(weights.gate.as_ref()) {
        Some((of, linear)) => side(query, batch.saturating_mul(q_len), of, linear)?,
        None => Vec::new(),
    };
    let mut appended = 0;
    if let Some([bias_k, bias_v]) = weights.bias_kv {
        expect_length("bias_k", bias_k, config.kv_heads * config.head_dim)?;
        expect_length("bias_v", bias_v, config.kv_heads * config.value_dim)?;
        k = append(&k, batch, bias_k);
        v = append(&v, batch, bias_v);
        appended += 1;
    }
    if config.add_zero_attn {
        k = append(&k, batch, &vec![R::zero(); config.kv_heads * config.head_dim]);
        v = append(&v, batch, &vec![R::zero(); config.kv_heads * config.value_dim]);
        appended += 1;
    }
    Ok(Projected {
        q: split_heads(&q, q_len, config.heads, config.head_dim)?,
        k: split_heads(&k, kv_len + appended, config.kv_heads, config.head_dim)?,
        v: split_heads(&v, kv_len + appended, config.kv_heads, config.value_dim)?,
        unnormed: [unnormed_q, unnormed_k],
        gate,
        shape: config.shape(batch, q_len, kv_len, appended),
        options: Options { appended, rotary: None, scale: config.scale, softcap: config.softcap, ..*options },
    })
}

/// The heads' outputs times the sigmoids of `gate`, if there is one. A logit of a head applies to
/// all channels of the head.
pub(super) fn gated<R: Real>(mut context: Vec<R>, gate: &[R]) -> Vec<R> {
    if !gate.is_empty() {
        let shared = context.len() / gate.len();
        for (x, logit) in context.chunks_exact_mut(shared).zip(gate) {
            let open = activate(*logit, Activation::Sigmoid);
            x.iter_mut().for_each(|x| *x = *x * open);
        }
    }
    context
}

/// The weight and the bias of the norm of queries or of keys.
pub(super) fn norm_of<'a, R: Real>(side: usize, weights: &HostWeights<'a, R>) -> [Option<&'a [R]>; 2] {
    weights.qk_norm.map_or([None; 2], |norms| [norms[side].weight, norms[side].bias])
}

/// Queries or keys before and after their norm, if the layer has norms.
fn normed<R: Real>(
    side: usize,
    x: Vec<R>,
    config: &MultiHeadConfig,
    weights: &HostWeights<R>,
) -> Result<(Vec<R>, Vec<R>), Error> {
    let Some(of) = &config.qk_norm else {
        if weights.qk_norm.is_some() {
            let why = "the layer does not normalise queries and keys; set `MultiHeadConfig::qk_norm`";
            return Err(Error::Unsupported { what: "`qk_norm` of the weights without the option", why });
        }
        return Ok((Vec::new(), x));
    };
    let [weight, bias] = norm_of(side, weights);
    let normed = norm(&x, config.head_dim, weight, bias, of)?;
    Ok((x, normed))
}

/// Rotates each head of rows with `turn`, if the layer has rotary positions. The heads of a row lie
/// next to each other.
pub(super) fn rotated<R: Real>(
    x: Vec<R>,
    shape: [usize; 4],
    options: &Options,
    turn: impl Fn(&[R], [usize; 4], &RopeConfig, RowPositions<HostTensor<u32>>) -> Result<Vec<R>, Error>,
) -> Result<Vec<R>, Error> {
    let Some((rope, at)) = options.rotary else { return Ok(x) };
    let [_, heads, length, dim] = shape;
    let turned = turn(&split_heads(&x, length, heads, dim)?, shape, &rope, at)?;
    join_heads(&turned, length, heads, dim)
}

/// Computes the projection of one side, wide or narrow: `[rows, features]` → `[rows, heads · dim]`.
fn side<R: Real>(x: &[R], rows: usize, shape: SideShape, linear: &HostLinear<R>) -> Result<Vec<R>, Error> {
    let SideShape { heads, dim, features, narrow } = shape;
    expect_length("input", x, rows.saturating_mul(features))?;
    expect_length("weight", linear.weight, heads * dim * shape.read())?;
    linear.bias.map_or(Ok(()), |b| expect_length("bias", b, heads * dim))?;
    if !narrow {
        return project(x, linear.weight, linear.bias, features, heads * dim);
    }
    let mut y = vec![R::zero(); rows * heads * dim];
    for h in 0..heads {
        let slice = columns(x, features, h * shape.read(), shape.read());
        let weight = &linear.weight[h * dim * shape.read()..][..dim * shape.read()];
        let head = project(&slice, weight, linear.bias.map(|b| &b[h * dim..][..dim]), shape.read(), dim)?;
        for (row, part) in y.chunks_exact_mut(heads * dim).zip(head.chunks_exact(dim)) {
            row[h * dim..][..dim].copy_from_slice(part);
        }
    }
    Ok(y)
}

/// Returns `count` columns of rows of `width`, from column `first` on.
pub(super) fn columns<R: Real>(x: &[R], width: usize, first: usize, count: usize) -> Vec<R> {
    x.chunks_exact(width).flat_map(|row| &row[first..][..count]).copied().collect()
}

/// Appends `row` to each of `batch` sequences.
fn append<R: Real>(x: &[R], batch: usize, row: &[R]) -> Vec<R> {
    x.chunks_exact(x.len() / batch).flat_map(|sequence| sequence.iter().chain(row)).copied().collect()
}
