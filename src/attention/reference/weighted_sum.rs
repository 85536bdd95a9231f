//! `weights · v`

use super::block_sums::{BLOCK, BlockSums};
use crate::tensor::{Error, Real, Shape, count, expect_length};

/// `out[b, h, i, d] = Σⱼ weights[b, h, i, j] · v[b, h / group, j, d]`, shape `[batch, heads, q_len,
/// value_dim]`.
///
/// A weight of zero contributes nothing, whatever the value holds.
///
/// # Errors
/// Returns an error if a dimension is zero or does not divide, or if a slice has another length.
pub fn weighted_sum<R: Real>(weights: &[R], v: &[R], shape: Shape) -> Result<Vec<R>, Error> {
    shape.check()?;
    expect_length("weights", weights, count(shape.weights()))?;
    expect_length("v", v, count(shape.v()))?;
    let Shape { batch, heads, kv_heads, q_len, kv_len, value_dim, .. } = shape;
    let mut out = BlockSums::new(batch * heads * q_len * value_dim);
    for row in 0..batch * heads * q_len {
        let (b, h) = (row / q_len / heads, row / q_len % heads);
        let values = (b * kv_heads + h / shape.group()) * kv_len;
        for (j, weight) in weights[row * kv_len..][..kv_len].iter().enumerate() {
            if j % BLOCK == 0 {
                out.end_block(row * value_dim..(row + 1) * value_dim);
            }
            if *weight != R::zero() {
                out.add_scaled(row * value_dim, *weight, &v[(values + j) * value_dim..][..value_dim]);
            }
        }
    }
    Ok(out.totals())
}
