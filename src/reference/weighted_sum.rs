//! `weights · v`

use super::{Real, expect_length};
use crate::error::Error;
use crate::problem::Shape;
use crate::tensor::count;

/// `out[b, h, i, d] = Σⱼ weights[b, h, i, j] · v[b, h / group, j, d]`, shape `[batch, heads, q_len, value_dim]`.
///
/// A weight of zero contributes nothing, whatever the value holds.
///
/// # Errors
/// Dimensions that are zero or do not divide, slices of another length.
pub fn weighted_sum<R: Real>(weights: &[R], v: &[R], shape: Shape) -> Result<Vec<R>, Error> {
    shape.check()?;
    expect_length("weights", weights, count(shape.weights()))?;
    expect_length("v", v, count(shape.v()))?;
    let Shape { batch, heads, kv_heads, q_len, kv_len, value_dim, .. } = shape;
    let mut out = vec![R::zero(); batch * heads * q_len * value_dim];
    for (row, sum) in out.chunks_exact_mut(value_dim).enumerate() {
        let (b, h) = (row / q_len / heads, row / q_len % heads);
        let values = (b * kv_heads + h / shape.group()) * kv_len;
        for (j, weight) in weights[row * kv_len..][..kv_len].iter().enumerate() {
            if *weight != R::zero() {
                let value = &v[(values + j) * value_dim..][..value_dim];
                sum.iter_mut().zip(value).for_each(|(sum, v)| *sum = *sum + *weight * *v);
            }
        }
    }
    Ok(out)
}
