//! `scale · q kᵀ`

use crate::tensor::{Error, Real, Shape, count, expect_length};

/// Returns the scores of every query against every key of its head: `s[b, h, i, j] = scale · Σ_d
/// q[b, h, i, d] · k[b, h / group, j, d]`. The shape is `[batch, heads, q_len, kv_len]`. The scale
/// is rounded to f32, as on a device.
///
/// # Errors
/// Returns an error if a dimension is zero or does not divide, or if a slice has another length.
pub fn scores<R: Real>(q: &[R], k: &[R], shape: Shape, scale: f64) -> Result<Vec<R>, Error> {
    shape.check()?;
    expect_length("q", q, count(shape.q()))?;
    expect_length("k", k, count(shape.k()))?;
    let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, .. } = shape;
    let scale = R::of(f64::from(scale as f32));
    let mut scores = Vec::with_capacity(batch * heads * q_len * kv_len);
    for b in 0..batch {
        for h in 0..heads {
            let keys = (b * kv_heads + h / shape.group()) * kv_len;
            for i in 0..q_len {
                let query = &q[((b * heads + h) * q_len + i) * head_dim..][..head_dim];
                for j in 0..kv_len {
                    let key = &k[(keys + j) * head_dim..][..head_dim];
                    let dot = query.iter().zip(key).fold(R::zero(), |sum, (q, k)| sum + *q * *k);
                    scores.push(scale * dot);
                }
            }
        }
    }
    Ok(scores)
}
