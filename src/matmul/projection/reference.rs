//! `y = x Wᵀ + b`

use crate::tensor::{Error, Real, check_sizes, expect_length};

/// Weight `[out, in]` and bias `[out]` of one projection. The weight of a narrow projection is one
/// `[dim, in / heads]` matrix per head, one after the other.
#[derive(Clone, Copy, Debug)]
pub struct HostLinear<'a, R> {
    /// `[out, in]`, dense.
    pub weight: &'a [R],
    /// `[out]`.
    pub bias: Option<&'a [R]>,
}

/// Multiplies rows of `x` `[rows, d_in]` by `weight` `[d_out, d_in]` and adds `bias` `[d_out]`:
/// `y[r, o] = Σᵢ x[r, i] · weight[o, i] + bias[o]`, shape `[rows, d_out]`.
///
/// # Errors
/// A width is 0, or a slice has the wrong length.
pub fn project<R: Real>(
    x: &[R],
    weight: &[R],
    bias: Option<&[R]>,
    d_in: usize,
    d_out: usize,
) -> Result<Vec<R>, Error> {
    let rows = check_rows(x, weight, d_in, d_out)?;
    bias.map_or(Ok(()), |bias| expect_length("bias", bias, d_out))?;
    let mut y = Vec::with_capacity(rows * d_out);
    for row in x.chunks_exact(d_in) {
        for (o, w) in weight.chunks_exact(d_in).enumerate() {
            let sum = row.iter().zip(w).fold(R::zero(), |sum, (x, w)| sum + *x * *w);
            y.push(bias.map_or(sum, |b| sum + b[o]));
        }
    }
    Ok(y)
}

/// Returns the number of rows of `x`.
fn check_rows<R>(x: &[R], weight: &[R], d_in: usize, d_out: usize) -> Result<usize, Error> {
    check_sizes("weight", &[("d_in", d_in), ("d_out", d_out)])?;
    let rows = x.len() / d_in;
    expect_length("x", x, rows * d_in)?;
    expect_length("weight", weight, d_out.saturating_mul(d_in))?;
    Ok(rows)
}

/// The gradients that [`project_backward`] returns.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ProjectGradients<R> {
    /// `[rows, d_in]`.
    pub d_x: Vec<R>,
    /// `[d_out, d_in]`.
    pub d_weight: Vec<R>,
    /// `[d_out]`. Computed even if there is no bias.
    pub d_bias: Vec<R>,
}

/// Returns the gradients of `Σ y · d_y` with respect to the inputs of [`project`], for `d_y`
/// `[rows, d_out]`:
///
/// ```text
/// d_x[r, i]      = Σₒ d_y[r, o] · weight[o, i]
/// d_weight[o, i] = Σᵣ d_y[r, o] · x[r, i]
/// d_bias[o]      = Σᵣ d_y[r, o]
/// ```
///
/// A NaN in a row of `x` appears in `d_weight` even if the row's `d_y` is zero. In attention,
/// masked keys do not have this effect.
///
/// # Errors
/// See [`project`].
pub fn project_backward<R: Real>(
    x: &[R],
    weight: &[R],
    d_y: &[R],
    d_in: usize,
    d_out: usize,
) -> Result<ProjectGradients<R>, Error> {
    let rows = check_rows(x, weight, d_in, d_out)?;
    expect_length("d_y", d_y, rows.saturating_mul(d_out))?;
    let mut d_x = vec![R::zero(); x.len()];
    let mut d_weight = vec![R::zero(); weight.len()];
    let mut d_bias = vec![R::zero(); d_out];
    for (row, d_y) in d_y.chunks_exact(d_out).enumerate() {
        let range = row * d_in..(row + 1) * d_in;
        for (o, d) in d_y.iter().enumerate() {
            let (x, d_x) = (&x[range.clone()], &mut d_x[range.clone()]);
            let (w, d_w) = (&weight[o * d_in..][..d_in], &mut d_weight[o * d_in..][..d_in]);
            d_x.iter_mut().zip(w).for_each(|(sum, w)| *sum = *sum + *d * *w);
            d_w.iter_mut().zip(x).for_each(|(sum, x)| *sum = *sum + *d * *x);
            d_bias[o] = d_bias[o] + *d;
        }
    }
    Ok(ProjectGradients { d_x, d_weight, d_bias })
}
