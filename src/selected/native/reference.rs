//! The reference of native sparse attention.

use super::config::NativeSparseConfig;
use crate::attention::reference::attention::{Attended, attention};
use crate::attention::reference::backward::{Gradients, attention_backward, attention_backward_magnitudes};
use crate::attention::reference::options::Options;
use crate::mask::{At, HostMask};
use crate::rows::logits::reference::top_k;
use crate::selected::reference::SelectedKeys;
use crate::tensor::{Error, HostTensor, Real, Shape, count, expect_length};

/// The inputs of native sparse attention, on the host.
#[derive(Clone, Copy, Debug)]
pub struct NativeSparseInputs<'a, R> {
    /// `[batch, heads, q_len, head_dim]`.
    pub q: &'a [R],
    /// `[batch, kv_heads, kv_len, head_dim]`.
    pub k: &'a [R],
    /// `[batch, kv_heads, kv_len, value_dim]`.
    pub v: &'a [R],
    /// `[batch, heads, q_len, 3]`.
    pub gates: &'a [R],
    /// Compressed keys and values, unless they are means:
    /// `[batch, kv_heads, compressed_len, head_dim or value_dim]`.
    pub compressed: Option<[&'a [R]; 2]>,
    /// The window's own keys and values.
    pub window: Option<[&'a [R]; 2]>,
}

/// The result of [`native_sparse_attention`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct NativeSparseAttended<R> {
    /// `[batch, heads, q_len, value_dim]`.
    pub out: Vec<R>,
    /// The outputs of compressed attention, selected attention and the window.
    pub branches: [Vec<R>; 3],
    /// Their log-sum-exp, each `[batch, heads, q_len]`.
    pub lse: [Vec<R>; 3],
}

/// The gradients that [`native_sparse_attention_backward`] returns.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct NativeSparseGradients<R> {
    /// `[batch, heads, q_len, head_dim]`.
    pub d_q: Vec<R>,
    /// `[batch, kv_heads, kv_len, head_dim]`.
    pub d_k: Vec<R>,
    /// `[batch, kv_heads, kv_len, value_dim]`.
    pub d_v: Vec<R>,
    /// `[batch, heads, q_len, 3]`.
    pub d_gates: Vec<R>,
    /// The gradients of compressed keys and values, if they are inputs.
    pub d_compressed: Option<[Vec<R>; 2]>,
    /// The gradients of the window's own keys and values, if they are inputs.
    pub d_window: Option<[Vec<R>; 2]>,
}

/// Adds the terms of a mean, or of its gradient. `pairs` gives a row of `x` and a row of the
/// result.
fn add_rows<R: Real>(
    x: &[R],
    dim: usize,
    rows: usize,
    scale: R,
    pairs: impl Iterator<Item = [usize; 2]>,
) -> Vec<R> {
    let mut out = vec![R::zero(); rows * dim];
    for [from, to] in pairs {
        for d in 0..dim {
            out[to * dim + d] = out[to * dim + d] + x[from * dim + d] * scale;
        }
    }
    out
}

/// The rows of each block, as pairs of a row and its block, over all sequences of `rows` rows.
fn rows_of_blocks(
    config: &NativeSparseConfig,
    sequences: usize,
    rows: usize,
) -> impl Iterator<Item = [usize; 2]> {
    let (blocks, NativeSparseConfig { length, stride, .. }) = (config.compressed_len(rows), *config);
    (0..sequences * blocks).flat_map(move |n| {
        let (sequence, first) = (n / blocks, n % blocks * stride);
        (first..(first + length).min(rows)).map(move |row| [sequence * rows + row, n])
    })
}

struct Call<'a, R> {
    inputs: &'a NativeSparseInputs<'a, R>,
    shape: Shape,
    config: &'a NativeSparseConfig,
    means: Option<[Vec<R>; 2]>,
}

impl<'a, R: Real> Call<'a, R> {
    fn new(
        inputs: &'a NativeSparseInputs<'a, R>,
        shape: Shape,
        config: &'a NativeSparseConfig,
    ) -> Result<Self, Error> {
        let NativeSparseInputs { q, k, v, gates, compressed, window } = *inputs;
        let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = shape;
        shape.check()?;
        config.check()?;
        if q_len > kv_len {
            let expected = "at most `kv_len`: the last query is at the last key";
            return Err(Error::Option { option: "q_len", value: q_len as f64, expected });
        }
        expect_length("q", q, count(shape.q()))?;
        expect_length("gates", gates, count([batch, heads, q_len, 3]))?;
        let of_keys = |[k, v]: [&[R]; 2], names: [&'static str; 2], rows: usize| {
            expect_length(names[0], k, count([batch, kv_heads, rows, head_dim]))?;
            expect_length(names[1], v, count([batch, kv_heads, rows, value_dim]))
        };
        of_keys([k, v], ["k", "v"], kv_len)?;
        if let Some(keys) = compressed {
            of_keys(keys, ["compressed k", "compressed v"], config.compressed_len(kv_len))?;
        }
        if let Some(keys) = window {
            of_keys(keys, ["window k", "window v"], kv_len)?;
        }
        let mean = |x, dim| {
            let sequences = batch * kv_heads;
            let (blocks, scale) =
                (sequences * config.compressed_len(kv_len), R::one() / R::of(config.length as f64));
            add_rows(x, dim, blocks, scale, rows_of_blocks(config, sequences, kv_len))
        };
        let means = compressed.is_none().then(|| [mean(k, head_dim), mean(v, value_dim)]);
        Ok(Call { inputs, shape, config, means })
    }

    /// Keys, values and shape of a branch.
    fn keys(&self, branch: usize) -> ([&[R]; 2], Shape) {
        let inputs = self.inputs;
        let all = [inputs.k, inputs.v];
        let compressed = Shape { kv_len: self.config.compressed_len(self.shape.kv_len), ..self.shape };
        match branch {
            0 => match (&self.means, inputs.compressed) {
                (Some([k, v]), _) => ([k, v], compressed),
                (None, own) => (own.unwrap_or(all), compressed),
            },
            1 => (all, self.shape),
            _ => (inputs.window.unwrap_or(all), self.shape),
        }
    }

    /// Calls `f` with the options of a branch.
    fn with_options<T>(&self, branch: usize, indices: &[u32], f: impl FnOnce(&Options) -> T) -> T {
        let NativeSparseConfig { attention, length, stride, block, count, window, .. } = *self.config;
        let Shape { batch, heads, kv_heads, q_len, kv_len, .. } = self.shape;
        let indices = HostTensor::new(indices, [batch, kv_heads, q_len, count]);
        let keys = SelectedKeys { indices, heads, block, window: 0 };
        let first = kv_len - q_len;
        let is_complete = |at: &At| at.key as usize * stride + length <= first + at.query as usize + 1;
        let is_selected = |at: &At| keys.names(at);
        let mask = match branch {
            0 => HostMask::none().mask_fn(&is_complete),
            1 => HostMask::causal().mask_fn(&is_selected),
            _ => HostMask::causal().window(window - 1, 0),
        };
        f(&Options::new().scale(attention.scale).softcap(attention.softcap).mask(mask).weights(branch == 0))
    }

    fn branch(&self, branch: usize, indices: &[u32]) -> Result<Attended<R>, Error> {
        let ([k, v], shape) = self.keys(branch);
        self.with_options(branch, indices, |options| attention(self.inputs.q, k, v, shape, options))
    }

    fn check_indices(&self, indices: &[u32]) -> Result<(), Error> {
        let Shape { batch, kv_heads, q_len, .. } = self.shape;
        expect_length("indices", indices, count([batch, kv_heads, q_len, self.config.count]))
    }
}

/// Returns the scores by which queries select blocks, `[batch, kv_heads, q_len, blocks]`. Blocks
/// that are always selected have +∞, and later blocks −∞. The `count` largest are the indices.
///
/// # Errors
/// Dimensions that are zero, slices of another length, and more queries than keys.
pub fn native_sparse_scores<R: Real>(
    inputs: &NativeSparseInputs<R>,
    shape: Shape,
    config: &NativeSparseConfig,
) -> Result<Vec<R>, Error> {
    let call = Call::new(inputs, shape, config)?;
    let Shape { batch, heads, kv_heads, q_len, kv_len, .. } = shape;
    let NativeSparseConfig { length, stride, block, initial, local, .. } = *config;
    let weights = call.branch(0, &[])?.weights.unwrap_or_default();
    let (compressed, blocks, group) =
        (config.compressed_len(kv_len), kv_len.div_ceil(block), heads / kv_heads);
    // Strides that compressed block c and block j have in common.
    let common = |c: usize, j: usize| {
        let of_block = j * block / stride..(j + 1) * block / stride;
        (c..c + length / stride).filter(|s| of_block.contains(s)).count()
    };
    let mut scores = Vec::with_capacity(batch * kv_heads * q_len * blocks);
    for row in 0..batch * kv_heads * q_len {
        let (head, i) = (row / q_len, row % q_len);
        let own = (kv_len - q_len + i) / block;
        for j in 0..blocks {
            let score = if j > own {
                R::neg_infinity()
            } else if j < initial || j + local > own {
                R::infinity()
            } else {
                let mut sum = R::zero();
                for h in head * group..(head + 1) * group {
                    let of_query = &weights[(h * q_len + i) * compressed..][..compressed];
                    for (c, weight) in of_query.iter().enumerate() {
                        sum = sum + *weight * R::of(common(c, j) as f64);
                    }
                }
                sum / R::of(group as f64)
            };
            scores.push(score);
        }
    }
    Ok(scores)
}

/// Returns the blocks that queries select, `[batch, kv_heads, q_len, count]`, the best first. An
/// index is −1 (`u32::MAX`) if there are fewer.
///
/// # Errors
/// As [`native_sparse_scores`].
pub fn native_sparse_indices<R: Real>(
    inputs: &NativeSparseInputs<R>,
    shape: Shape,
    config: &NativeSparseConfig,
) -> Result<Vec<u32>, Error> {
    let scores = native_sparse_scores(inputs, shape, config)?;
    let (blocks, count) = (shape.kv_len.div_ceil(config.block), config.count);
    let best = top_k(&scores, blocks, count.min(blocks))?;
    let rows = scores.chunks(blocks).zip(best.chunks(count.min(blocks)));
    let padded = rows.flat_map(|(scores, best)| {
        let listed =
            best.iter().map(|j| if scores[*j as usize] == R::neg_infinity() { u32::MAX } else { *j });
        listed.chain(std::iter::repeat(u32::MAX)).take(count)
    });
    Ok(padded.collect())
}

/// Returns native sparse attention with the selected blocks `indices`, as from
/// [`native_sparse_indices`].
///
/// # Errors
/// As [`native_sparse_scores`].
pub fn native_sparse_attention<R: Real>(
    inputs: &NativeSparseInputs<R>,
    indices: &[u32],
    shape: Shape,
    config: &NativeSparseConfig,
) -> Result<NativeSparseAttended<R>, Error> {
    let call = Call::new(inputs, shape, config)?;
    call.check_indices(indices)?;
    let [a, b, c] = [call.branch(0, indices)?, call.branch(1, indices)?, call.branch(2, indices)?];
    let gate = |at: usize, branch| inputs.gates[at / shape.value_dim * 3 + branch];
    let out = (0..a.out.len())
        .map(|at| gate(at, 0) * a.out[at] + gate(at, 1) * b.out[at] + gate(at, 2) * c.out[at])
        .collect();
    Ok(NativeSparseAttended { out, branches: [a.out, b.out, c.out], lse: [a.lse, b.lse, c.lse] })
}

/// Returns the gradients of `Σ out · d_out` with respect to the inputs of
/// [`native_sparse_attention`].
///
/// # Errors
/// As [`native_sparse_scores`].
pub fn native_sparse_attention_backward<R: Real>(
    inputs: &NativeSparseInputs<R>,
    indices: &[u32],
    d_out: &[R],
    shape: Shape,
    config: &NativeSparseConfig,
) -> Result<NativeSparseGradients<R>, Error> {
    gradients(inputs, indices, d_out, shape, config, false)
}

/// Returns the sums of the absolute values of the terms that [`native_sparse_attention_backward`]
/// sums, in the same order. They bound its rounding errors.
///
/// # Errors
/// As [`native_sparse_scores`].
pub fn native_sparse_attention_backward_magnitudes<R: Real>(
    inputs: &NativeSparseInputs<R>,
    indices: &[u32],
    d_out: &[R],
    shape: Shape,
    config: &NativeSparseConfig,
) -> Result<NativeSparseGradients<R>, Error> {
    gradients(inputs, indices, d_out, shape, config, true)
}

fn gradients<R: Real>(
    inputs: &NativeSparseInputs<R>,
    indices: &[u32],
    d_out: &[R],
    shape: Shape,
    config: &NativeSparseConfig,
    magnitudes: bool,
) -> Result<NativeSparseGradients<R>, Error> {
    let call = Call::new(inputs, shape, config)?;
    call.check_indices(indices)?;
    let Shape { batch, kv_heads, kv_len, head_dim, value_dim, .. } = shape;
    expect_length("d_out", d_out, count(shape.out()))?;
    let mut d_gates = vec![R::zero(); inputs.gates.len()];
    let mut of_branch = |branch: usize| {
        let out = call.branch(branch, indices)?.out;
        let gated: Vec<R> =
            d_out.iter().enumerate().map(|(at, d)| *d * inputs.gates[at / value_dim * 3 + branch]).collect();
        for (at, (out, d)) in out.iter().zip(d_out).enumerate() {
            let term = *out * *d;
            let sum = &mut d_gates[at / value_dim * 3 + branch];
            *sum = *sum + if magnitudes { term.abs() } else { term };
        }
        let ([k, v], shape) = call.keys(branch);
        call.with_options(branch, indices, |options| match magnitudes {
            true => attention_backward_magnitudes(inputs.q, k, v, &gated, None, shape, options),
            false => attention_backward(inputs.q, k, v, &gated, None, shape, options),
        })
    };
    let [compressed, selected, window] = [of_branch(0)?, of_branch(1)?, of_branch(2)?];
    let add = |x: &mut [R], y: &[R]| x.iter_mut().zip(y).for_each(|(x, y)| *x = *x + *y);
    let Gradients { mut d_q, mut d_k, mut d_v, .. } = selected;
    add(&mut d_q, &compressed.d_q);
    add(&mut d_q, &window.d_q);
    let d_window = match inputs.window {
        Some(_) => Some([window.d_k, window.d_v]),
        None => {
            add(&mut d_k, &window.d_k);
            add(&mut d_v, &window.d_v);
            None
        }
    };
    let d_compressed = match inputs.compressed {
        Some(_) => Some([compressed.d_k, compressed.d_v]),
        None => {
            let (sequences, scale) = (batch * kv_heads, R::one() / R::of(config.length as f64));
            let of_rows = |x: &[R], dim| {
                let pairs = rows_of_blocks(config, sequences, kv_len).map(|[row, block]| [block, row]);
                add_rows(x, dim, sequences * kv_len, scale, pairs)
            };
            add(&mut d_k, &of_rows(&compressed.d_k, head_dim));
            add(&mut d_v, &of_rows(&compressed.d_v, value_dim));
            None
        }
    };
    Ok(NativeSparseGradients { d_q, d_k, d_v, d_gates, d_compressed, d_window })
}
