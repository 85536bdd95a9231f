//! Activations, and their shader texts.

use crate::kernel::shader;

/// The function between the two products of a feed-forward layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Activation {
    /// `max(x, 0)`, with slope 0 at 0.
    Relu,
    /// `x Φ(x)`, where Φ is the cumulative distribution function of the normal distribution
    /// (Hendrycks and Gimpel 2016, "Gaussian error linear units"). It is `gelu` of PyTorch and the
    /// activation of BERT. The error is a few units in the last place of the result, also far below
    /// zero.
    Gelu,
    /// The approximation `x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2`, used by GPT-2: `gelu_new`,
    /// `approximate="tanh"`.
    GeluTanh,
    /// `x / (1 + exp(−x))`, swish. Llama and related models use it with a gate.
    Silu,
    /// `1 / (1 + exp(−x))`. With
    /// [`TransformerLayerConfig::gated`](crate::layers::TransformerLayerConfig::gated) the
    /// feed-forward layer is a gated linear unit (Dauphin et al. 2017, "Language modeling with
    /// gated convolutional networks").
    Sigmoid,
}

impl Activation {
    /// All activations.
    pub const ALL: [Activation; 5] =
        [Activation::Relu, Activation::Gelu, Activation::GeluTanh, Activation::Silu, Activation::Sigmoid];
}

/// The shader texts of an activation and its slope.
pub(crate) fn activation_parts(activation: Option<Activation>) -> &'static [&'static str] {
    const EXP: &str = shader!("matmul/activation/exp");
    match activation {
        None => &[shader!("matmul/activation/none")],
        Some(Activation::Relu) => &[shader!("matmul/activation/relu")],
        Some(Activation::Gelu) => &[EXP, shader!("matmul/activation/gelu")],
        Some(Activation::GeluTanh) => &[EXP, shader!("matmul/activation/gelu_tanh")],
        Some(Activation::Silu) => &[EXP, shader!("matmul/activation/silu")],
        Some(Activation::Sigmoid) => &[EXP, shader!("matmul/activation/sigmoid")],
    }
}
