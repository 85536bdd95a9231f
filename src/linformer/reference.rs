//! Attention over keys and values that are projected along the length (Wang et al. 2020,
//! "Linformer").

use crate::attention::reference::attention::{Attended, attention};
use crate::attention::reference::backward::{attention_backward, attention_backward_magnitudes};
use crate::attention::reference::options::Options;
use crate::tensor::{Error, Real, Shape, check_sizes, count, expect_length};

/// The projections of [`linformer`] from `kv_len` to `rank` keys and values.
#[derive(Clone, Copy, Debug)]
pub struct LengthProjections<'a, R> {
    /// The projection of keys: `[rank, kv_len]`, or `[kv_heads, rank, kv_len]` if `per_head`.
    pub e: &'a [R],
    /// The projection of values, shaped as `e`.
    pub f: &'a [R],
    /// The number of projected keys and values.
    pub rank: usize,
    /// True if each key/value head has a separate projection.
    pub per_head: bool,
    /// The mask of keys, `[batch, kv_len]`: true for keys that exist. The others count as rows of
    /// zeros.
    pub key_mask: Option<&'a [bool]>,
}

/// The results of [`linformer_backward`]: the gradient of every input, shaped as the input.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LinformerGradients<R> {
    /// `[batch, heads, q_len, head_dim]`.
    pub d_q: Vec<R>,
    /// `[batch, kv_heads, kv_len, head_dim]`, 0 for masked keys.
    pub d_k: Vec<R>,
    /// `[batch, kv_heads, kv_len, value_dim]`, 0 for masked values.
    pub d_v: Vec<R>,
    /// Shaped as `e`: summed over the batch, and over the heads that share it.
    pub d_e: Vec<R>,
    /// Shaped as `f`, and summed likewise.
    pub d_f: Vec<R>,
}

impl<R: Real> LengthProjections<'_, R> {
    fn check(&self, shape: &Shape) -> Result<(), Error> {
        shape.check()?;
        check_sizes("shape", &[("rank", self.rank)])?;
        let heads = if self.per_head { shape.kv_heads } else { 1 };
        let elements = count([1, heads, self.rank, shape.kv_len]);
        expect_length("e", self.e, elements)?;
        expect_length("f", self.f, elements)?;
        self.key_mask.map_or(Ok(()), |mask| expect_length("key_mask", mask, shape.batch * shape.kv_len))
    }

    fn is_there(&self, b: usize, j: usize, shape: &Shape) -> bool {
        self.key_mask.is_none_or(|mask| mask[b * shape.kv_len + j])
    }

    /// Calls `each` for every product of an element of a projection and of an unmasked row. The
    /// arguments are the indices in the projection, the tensor and the projected tensor.
    fn terms(&self, shape: &Shape, dim: usize, mut each: impl FnMut(usize, usize, usize)) {
        let Shape { batch, kv_heads, kv_len, .. } = *shape;
        for group in 0..batch * kv_heads {
            let first = if self.per_head { group % kv_heads * self.rank } else { 0 };
            for r in 0..self.rank {
                for j in (0..kv_len).filter(|j| self.is_there(group / kv_heads, *j, shape)) {
                    for d in 0..dim {
                        let of_projection = (first + r) * kv_len + j;
                        each(
                            of_projection,
                            (group * kv_len + j) * dim + d,
                            (group * self.rank + r) * dim + d,
                        );
                    }
                }
            }
        }
    }

    /// Returns `projection · x` for each head.
    fn project(&self, projection: &[R], x: &[R], shape: &Shape, dim: usize) -> Vec<R> {
        let mut sums = vec![R::zero(); shape.batch * shape.kv_heads * self.rank * dim];
        self.terms(shape, dim, |of_projection, of_x, to| {
            sums[to] = sums[to] + projection[of_projection] * x[of_x];
        });
        sums
    }

    /// Returns the gradients of `x` and of the projection, from the gradient of the result of
    /// [`project`](Self::project).
    fn project_backward(&self, projection: &[R], x: &[R], d: &[R], shape: &Shape, dim: usize) -> [Vec<R>; 2] {
        let (mut d_x, mut d_projection) = (vec![R::zero(); x.len()], vec![R::zero(); projection.len()]);
        self.terms(shape, dim, |of_projection, of_x, to| {
            d_x[of_x] = d_x[of_x] + projection[of_projection] * d[to];
            d_projection[of_projection] = d_projection[of_projection] + d[to] * x[of_x];
        });
        [d_x, d_projection]
    }
}

/// Computes `softmax(scale · q (e k)ᵀ) · (f v)` over dense row-major slices shaped as [`Shape`]
/// says. Mask and dropout of `options` apply to the `rank` projected keys.
///
/// # Errors
/// As [`attention`](crate::attention::reference::attention::attention()), and projections of a
/// wrong length.
pub fn linformer<R: Real>(
    q: &[R],
    k: &[R],
    v: &[R],
    projections: &LengthProjections<R>,
    shape: Shape,
    options: &Options,
) -> Result<Attended<R>, Error> {
    projections.check(&shape)?;
    expect_length("k", k, count(shape.k()))?;
    expect_length("v", v, count(shape.v()))?;
    let [k, v] = projected(k, v, projections, &shape);
    attention(q, &k, &v, Shape { kv_len: projections.rank, ..shape }, options)
}

/// Returns the projected keys and values.
fn projected<R: Real>(k: &[R], v: &[R], projections: &LengthProjections<R>, shape: &Shape) -> [Vec<R>; 2] {
    [
        projections.project(projections.e, k, shape, shape.head_dim),
        projections.project(projections.f, v, shape, shape.value_dim),
    ]
}

/// Computes the gradients of `Σ out · d_out + Σ lse · d_lse` with respect to the inputs of
/// [`linformer`]:
///
/// ```text
/// d_k = eᵀ d_(e k)      d_e = Σ d_(e k) kᵀ      d_v = fᵀ d_(f v)      d_f = Σ d_(f v) vᵀ
/// ```
///
/// # Errors
/// As [`linformer`].
#[allow(clippy::too_many_arguments)]
pub fn linformer_backward<R: Real>(
    q: &[R],
    k: &[R],
    v: &[R],
    projections: &LengthProjections<R>,
    d_out: &[R],
    d_lse: Option<&[R]>,
    shape: Shape,
    options: &Options,
) -> Result<LinformerGradients<R>, Error> {
    gradients([q, k, v], projections, d_out, d_lse, shape, options, false)
}

/// Computes the sums of the absolute values of the terms of [`linformer_backward`], in the same
/// shapes. For attention, [`attention_backward_magnitudes`] does the same.
///
/// # Errors
/// As [`linformer`].
#[cfg(feature = "inspect")]
#[allow(clippy::too_many_arguments)]
pub fn linformer_backward_magnitudes<R: Real>(
    q: &[R],
    k: &[R],
    v: &[R],
    projections: &LengthProjections<R>,
    d_out: &[R],
    d_lse: Option<&[R]>,
    shape: Shape,
    options: &Options,
) -> Result<LinformerGradients<R>, Error> {
    gradients([q, k, v], projections, d_out, d_lse, shape, options, true)
}

fn gradients<R: Real>(
    [q, k, v]: [&[R]; 3],
    projections: &LengthProjections<R>,
    d_out: &[R],
    d_lse: Option<&[R]>,
    shape: Shape,
    options: &Options,
    magnitudes: bool,
) -> Result<LinformerGradients<R>, Error> {
    projections.check(&shape)?;
    expect_length("k", k, count(shape.k()))?;
    expect_length("v", v, count(shape.v()))?;
    let [low_k, low_v] = projected(k, v, projections, &shape);
    let low = Shape { kv_len: projections.rank, ..shape };
    let of = if magnitudes { attention_backward_magnitudes } else { attention_backward };
    let got = of(q, &low_k, &low_v, d_out, d_lse, low, options)?;
    let terms = |x: &[R]| x.iter().map(|x| if magnitudes { x.abs() } else { *x }).collect::<Vec<R>>();
    let back = |projection: &[R], x: &[R], d: &[R], dim| {
        projections.project_backward(&terms(projection), &terms(x), d, &shape, dim)
    };
    let [d_k, d_e] = back(projections.e, k, &got.d_k, shape.head_dim);
    let [d_v, d_f] = back(projections.f, v, &got.d_v, shape.value_dim);
    Ok(LinformerGradients { d_q: got.d_q, d_k, d_v, d_e, d_f })
}
