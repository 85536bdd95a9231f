//! The reference of log-softmax and top-k.

use crate::tensor::{Error, Real, check_sizes, expect_length};

fn check<R: Real>(x: &[R], columns: usize) -> Result<(), Error> {
    check_sizes("x", &[("columns", columns)])?;
    expect_length("x", x, x.len() / columns * columns)
}

/// Returns `x − ln Σ exp(x)` of the rows of `x` `[rows, columns]`. The row's maximum is subtracted
/// first. A row is NaN if it contains NaN or ∞, or if all its elements are −∞.
///
/// # Errors
/// `columns` is 0, or the slice is not whole rows.
pub fn log_softmax<R: Real>(x: &[R], columns: usize) -> Result<Vec<R>, Error> {
    check(x, columns)?;
    let mut out = Vec::with_capacity(x.len());
    for row in x.chunks_exact(columns) {
        let top = row.iter().fold(R::neg_infinity(), |top, x| top.max(*x));
        let sum = row.iter().fold(R::zero(), |sum, x| sum + (*x - top).exp());
        out.extend(row.iter().map(|x| (*x - top) - sum.ln()));
    }
    Ok(out)
}

/// Returns the gradient of `Σ out · d_out` with respect to `x` of [`log_softmax`], from `out`:
/// `d_out − exp(out) Σ d_out`.
///
/// # Errors
/// See [`log_softmax`].
pub fn log_softmax_backward<R: Real>(out: &[R], columns: usize, d_out: &[R]) -> Result<Vec<R>, Error> {
    check(out, columns)?;
    expect_length("d_out", d_out, out.len())?;
    let mut d_x = Vec::with_capacity(out.len());
    for (row, d_row) in out.chunks_exact(columns).zip(d_out.chunks_exact(columns)) {
        let sum = d_row.iter().fold(R::zero(), |sum, d| sum + *d);
        d_x.extend(row.iter().zip(d_row).map(|(y, d)| *d - y.exp() * sum));
    }
    Ok(d_x)
}

/// Returns the columns of the k largest elements of the rows of `x` `[rows, columns]`, the largest
/// first: `[rows, k]`. Among equal elements, the lower index comes first. NaN comes before all
/// numbers.
///
/// # Errors
/// `columns` is 0, the slice is not whole rows, or there are fewer columns than `k`.
pub fn top_k<R: Real>(x: &[R], columns: usize, k: usize) -> Result<Vec<u32>, Error> {
    check(x, columns)?;
    if k > columns {
        let expected = "at most the number of columns";
        return Err(Error::Option { option: "k", value: k as f64, expected });
    }
    let mut indices = Vec::with_capacity(x.len() / columns * k);
    for row in x.chunks_exact(columns) {
        let mut order: Vec<u32> = (0..columns as u32).collect();
        let before = |a: &u32, b: &u32| {
            let [x, y] = [a, b].map(|n| row[*n as usize]);
            let by_value = y.partial_cmp(&x).unwrap_or(std::cmp::Ordering::Equal);
            y.is_nan().cmp(&x.is_nan()).then(by_value).then(a.cmp(b))
        };
        if k < columns {
            order.select_nth_unstable_by(k, before);
            order.truncate(k);
        }
        order.sort_unstable_by(before);
        indices.extend(order);
    }
    Ok(indices)
}
