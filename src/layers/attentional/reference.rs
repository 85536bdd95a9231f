//! The attentional vector `tanh(W_c [context; hidden] + b)` on the host.

use crate::matmul::projection::reference::HostLinear;
use crate::tensor::{Error, Real, expect_length};

/// Computes the attentional vector (Luong et al. 2015, equation 5): `[rows, out]`. The inputs are
/// contexts `[rows, c]`, hidden states `[rows, h]` and a weight `[out, c + h]`.
///
/// # Errors
/// Slices that are not whole rows, or a weight or bias of another length.
pub fn attentional<R: Real>(
    context: &[R],
    hidden: &[R],
    linear: HostLinear<R>,
    rows: usize,
    out: usize,
) -> Result<Vec<R>, Error> {
    let [c, h] = [context, hidden].map(|x| x.len() / rows.max(1));
    expect_length("context", context, rows * c)?;
    expect_length("hidden", hidden, rows * h)?;
    expect_length("linear.weight", linear.weight, out.saturating_mul(c + h))?;
    linear.bias.map_or(Ok(()), |bias| expect_length("linear.bias", bias, out))?;
    let element = |n: usize| {
        let (row, o) = (n / out, n % out);
        let joined = context[row * c..][..c].iter().chain(&hidden[row * h..][..h]);
        let bias = linear.bias.map_or(R::zero(), |bias| bias[o]);
        joined.zip(&linear.weight[o * (c + h)..]).fold(bias, |sum, (x, w)| sum + *x * *w).tanh()
    };
    Ok((0..rows * out).map(element).collect())
}

/// The gradients that [`attentional_backward`] returns.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct AttentionalGradients<R> {
    /// `[rows, c]`.
    pub d_context: Vec<R>,
    /// `[rows, h]`.
    pub d_hidden: Vec<R>,
    /// `[out, c + h]`.
    pub d_weight: Vec<R>,
    /// `[out]`.
    pub d_bias: Vec<R>,
}

/// Computes the gradients of `Σ out · d_out` with respect to the inputs of [`attentional`]. `d_out`
/// is `[rows, out]`.
///
/// # Errors
/// As [`attentional`].
pub fn attentional_backward<R: Real>(
    context: &[R],
    hidden: &[R],
    linear: HostLinear<R>,
    d_out: &[R],
    rows: usize,
    out: usize,
) -> Result<AttentionalGradients<R>, Error> {
    expect_length("d_out", d_out, rows.saturating_mul(out))?;
    let values = attentional(context, hidden, linear, rows, out)?;
    let [c, h] = [context, hidden].map(|x| x.len() / rows.max(1));
    let mut got = AttentionalGradients {
        d_context: vec![R::zero(); context.len()],
        d_hidden: vec![R::zero(); hidden.len()],
        d_weight: vec![R::zero(); linear.weight.len()],
        d_bias: vec![R::zero(); out],
    };
    for (n, t) in values.iter().enumerate() {
        let (row, o) = (n / out, n % out);
        let d = d_out[n] * (R::one() - *t * *t);
        got.d_bias[o] = got.d_bias[o] + d;
        for j in 0..c + h {
            let w = o * (c + h) + j;
            let (x, d_x) = if j < c {
                (context[row * c + j], &mut got.d_context[row * c + j])
            } else {
                (hidden[row * h + j - c], &mut got.d_hidden[row * h + j - c])
            };
            *d_x = *d_x + d * linear.weight[w];
            got.d_weight[w] = got.d_weight[w] + d * x;
        }
    }
    Ok(got)
}
