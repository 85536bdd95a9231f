//! `weights · v`

use super::{BLOCK, Real, expect_length};
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
        let mut block = vec![R::zero(); value_dim];
        for (n, weights) in weights[row * kv_len..][..kv_len].chunks(BLOCK).enumerate() {
            block.fill(R::zero());
            for (j, weight) in weights.iter().enumerate() {
                if *weight != R::zero() {
                    let value = &v[(values + n * BLOCK + j) * value_dim..][..value_dim];
                    block.iter_mut().zip(value).for_each(|(sum, v)| *sum = *sum + *weight * *v);
                }
            }
            sum.iter_mut().zip(&block).for_each(|(sum, block)| *sum = *sum + *block);
        }
    }
    Ok(out)
}
