//! Scale, softcap and stages of scores.

use crate::tensor::Error;

/// How far scores have come on their way to the softmax.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ScoreStage {
    /// `scale · q·k`, of every pair. Mode 0 of `qk_matmul_output_mode` in ONNX's Attention, whose
    /// mode 3 are the weights.
    Scaled,
    /// After the softcap, of every pair. As before where there is none.
    Softcapped,
    /// The input of the softmax: after softcap, bias and mask, −∞ where a query does not see the
    /// key.
    Biased,
}

/// The factor of `q·k` as kernels take it, and the reference after them; 1 / √head_dim unless
/// given.
pub(crate) fn scale_in_f32(scale: Option<f64>, head_dim: usize) -> f32 {
    scale.unwrap_or(1.0 / (head_dim as f64).sqrt()) as f32
}

/// Refuses numbers that no score survives, by what is left of them in f32.
pub(crate) fn check_options(scale: Option<f64>, softcap: Option<f64>) -> Result<(), Error> {
    if let Some(value) = scale.filter(|s| !(*s as f32).is_finite()) {
        return Err(Error::Option { option: "scale", value, expected: "finite in f32" });
    }
    if let Some(value) = softcap.filter(|c| !(*c > 0.0 && (*c as f32).is_normal())) {
        return Err(Error::Option { option: "softcap", value, expected: "above 0 and a normal f32" });
    }
    Ok(())
}
