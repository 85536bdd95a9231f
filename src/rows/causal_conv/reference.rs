//! The reference of causal convolutions.

use crate::matmul::Activation;
use crate::rows::elementwise::reference::{activate, activation_slope};
use crate::tensor::{Error, Real, check_sizes, expect_length};

/// One sequence for a causal convolution, on the host. The number of rows may be 0.
#[derive(Clone, Copy, Debug)]
pub struct CausalConvInputs<'a, R> {
    /// `[rows, channels]`.
    pub x: &'a [R],
    /// `[channels, width]`. The last column meets the current row.
    pub weight: &'a [R],
    /// `[channels]`.
    pub bias: Option<&'a [R]>,
    /// `[width − 1, channels]`: the rows before `x`, the oldest first. Zeros if absent.
    pub initial_state: Option<&'a [R]>,
    /// Applied to the sums.
    pub activation: Option<Activation>,
    /// The number of channels.
    pub channels: usize,
}

/// The results of [`causal_conv`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CausalConvOutput<R> {
    /// `[rows, channels]`.
    pub out: Vec<R>,
    /// `[width − 1, channels]`: the last rows of the initial state and `x`.
    pub final_state: Vec<R>,
}

/// The gradients that [`causal_conv_backward`] returns.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CausalConvGradients<R> {
    /// `[rows, channels]`.
    pub d_x: Vec<R>,
    /// `[channels, width]`.
    pub d_weight: Vec<R>,
    /// `[channels]`. Computed even if there is no bias.
    pub d_bias: Vec<R>,
    /// `[width − 1, channels]`. Computed even if there is no initial state.
    pub d_initial_state: Vec<R>,
}

impl<R: Real> CausalConvInputs<'_, R> {
    /// Returns the width of the weight.
    fn check(&self) -> Result<usize, Error> {
        let CausalConvInputs { x, weight, bias, initial_state, channels, .. } = *self;
        let width = weight.len().checked_div(channels).unwrap_or(0);
        check_sizes("weight", &[("channels", channels), ("width", width)])?;
        expect_length("x", x, x.len() / channels * channels)?;
        expect_length("weight", weight, channels * width)?;
        bias.map_or(Ok(()), |bias| expect_length("bias", bias, channels))?;
        let kept = (width - 1) * channels;
        initial_state.map_or(Ok(()), |state| expect_length("initial_state", state, kept))?;
        Ok(width)
    }

    /// The rows of the state, then those of x.
    fn rows(&self, width: usize) -> Vec<R> {
        let kept = (width - 1) * self.channels;
        let mut rows = self.initial_state.map_or_else(|| vec![R::zero(); kept], <[R]>::to_vec);
        rows.extend(self.x);
        rows
    }

    /// The sum of one row and channel before the activation.
    fn sum(&self, rows: &[R], [i, c, width]: [usize; 3]) -> R {
        let bias = self.bias.map_or(R::zero(), |bias| bias[c]);
        (0..width).fold(bias, |sum, j| sum + self.weight[c * width + j] * rows[(i + j) * self.channels + c])
    }
}

/// Returns the causal convolution of each channel of one sequence, as in Mamba (Gu and Dao 2023):
///
/// ```text
/// out[i, c] = f(bias[c] + Σ weight[c, j] · x[i − width + 1 + j, c])        over j
/// ```
///
/// # Errors
/// A width or a number of channels of 0, or a slice of the wrong length.
pub fn causal_conv<R: Real>(inputs: &CausalConvInputs<R>) -> Result<CausalConvOutput<R>, Error> {
    let width = inputs.check()?;
    let (rows, channels) = (inputs.rows(width), inputs.channels);
    let each = |n: usize| {
        let sum = inputs.sum(&rows, [n / channels, n % channels, width]);
        inputs.activation.map_or(sum, |activation| activate(sum, activation))
    };
    let out = (0..inputs.x.len()).map(each).collect();
    Ok(CausalConvOutput { out, final_state: rows[inputs.x.len()..].to_vec() })
}

/// Returns the gradients of `Σ out · d_out + Σ final_state · d_final_state` with respect to the
/// inputs of [`causal_conv`]. `d_out` is `[rows, channels]`, `d_final_state` is `[width − 1,
/// channels]`.
///
/// # Errors
/// See [`causal_conv`].
pub fn causal_conv_backward<R: Real>(
    inputs: &CausalConvInputs<R>,
    d_out: &[R],
    d_final_state: Option<&[R]>,
) -> Result<CausalConvGradients<R>, Error> {
    let width = inputs.check()?;
    let (rows, channels) = (inputs.rows(width), inputs.channels);
    let kept = (width - 1) * channels;
    expect_length("d_out", d_out, inputs.x.len())?;
    d_final_state.map_or(Ok(()), |d| expect_length("d_final_state", d, kept))?;
    let mut d_rows = vec![R::zero(); rows.len()];
    for (n, d) in d_final_state.into_iter().flatten().enumerate() {
        d_rows[inputs.x.len() + n] = *d;
    }
    let (mut d_weight, mut d_bias) = (vec![R::zero(); channels * width], vec![R::zero(); channels]);
    for (n, d_out) in d_out.iter().enumerate() {
        let (i, c) = (n / channels, n % channels);
        let slope = |activation| activation_slope(inputs.sum(&rows, [i, c, width]), activation);
        let error = inputs.activation.map_or(*d_out, |activation| *d_out * slope(activation));
        d_bias[c] = d_bias[c] + error;
        for j in 0..width {
            let (weight, row) = (c * width + j, (i + j) * channels + c);
            d_weight[weight] = d_weight[weight] + error * rows[row];
            d_rows[row] = d_rows[row] + error * inputs.weight[weight];
        }
    }
    let d_x = d_rows.split_off(kept);
    Ok(CausalConvGradients { d_x, d_weight, d_bias, d_initial_state: d_rows })
}
