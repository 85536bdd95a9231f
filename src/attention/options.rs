//! Scale, softcap and stages of scores.

use crate::tensor::Error;

/// A stage of scores between the product and the softmax.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ScoreStage {
    /// `scale · q·k`, of every pair. This is mode 0 of `qk_matmul_output_mode` in ONNX's Attention,
    /// whose mode 3 gives the weights.
    Scaled,
    /// Scores after the softcap, of every pair. Without a softcap they equal `Scaled`.
    Softcapped,
    /// The input of the softmax, after softcap, bias and mask. It is −∞ where a query does not see
    /// the key.
    Biased,
}

/// The factor of `q·k` in f32, as kernels and the reference use it. The default is 1 / √head_dim.
pub(crate) fn scale_in_f32(scale: Option<f64>, head_dim: usize) -> f32 {
    scale.unwrap_or(1.0 / (head_dim as f64).sqrt()) as f32
}

/// Refuses a scale or softcap that is not usable after rounding to f32.
pub(crate) fn check_options(scale: Option<f64>, softcap: Option<f64>) -> Result<(), Error> {
    if let Some(value) = scale.filter(|s| !(*s as f32).is_finite()) {
        return Err(Error::Option { option: "scale", value, expected: "finite in f32" });
    }
    if let Some(value) = softcap.filter(|c| !(*c > 0.0 && (*c as f32).is_normal())) {
        return Err(Error::Option { option: "softcap", value, expected: "above 0 and a normal f32" });
    }
    Ok(())
}
