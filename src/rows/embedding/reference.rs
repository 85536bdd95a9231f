//! The reference of embeddings.

use crate::tensor::{Error, Real, check_sizes, expect_length};

/// Returns `scale · table[id]` of every id, from a table `[rows, width]`: `[ids, width]`. An id
/// without a row in the table gives zeros.
///
/// # Errors
/// A width of 0, or a table that is not whole rows.
pub fn embedding<R: Real>(ids: &[u32], table: &[R], width: usize, scale: f64) -> Result<Vec<R>, Error> {
    check_sizes("table", &[("width", width)])?;
    expect_length("table", table, table.len() / width * width)?;
    let scale = R::of(f64::from(scale as f32));
    let zeros = vec![R::zero(); width];
    let row = |id: &u32| table.chunks_exact(width).nth(*id as usize).unwrap_or(&zeros);
    Ok(ids.iter().flat_map(|id| row(id).iter().map(|x| scale * *x)).collect())
}

/// Returns the gradient of `Σ out · d_out` with respect to the table of [`embedding`], `[rows,
/// width]`. `d_out` is `[ids, width]`.
///
/// # Errors
/// A size of 0, or a slice of the wrong length.
pub fn embedding_backward<R: Real>(
    ids: &[u32],
    d_out: &[R],
    [rows, width]: [usize; 2],
    scale: f64,
) -> Result<Vec<R>, Error> {
    check_sizes("d_table", &[("rows", rows), ("width", width)])?;
    expect_length("d_out", d_out, ids.len().saturating_mul(width))?;
    let mut d_table = vec![R::zero(); rows.saturating_mul(width)];
    for (id, d_row) in ids.iter().zip(d_out.chunks_exact(width)) {
        if let Some(row) = d_table.chunks_exact_mut(width).nth(*id as usize) {
            row.iter_mut().zip(d_row).for_each(|(sum, d)| *sum = *sum + *d);
        }
    }
    let scale = R::of(f64::from(scale as f32));
    Ok(d_table.into_iter().map(|sum| scale * sum).collect())
}
