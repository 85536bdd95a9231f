//! The configuration of a gated DeltaNet layer.

use crate::attention::check_dtype;
use crate::device::DeviceFacts;
use crate::kernel::KernelOptions;
use crate::recurrent::{Decay, RecurrentConfig};
use crate::rows::norm::config::NormConfig;
use crate::tensor::{DType, Error, check_sizes};

/// The dimensions and fixed options of a [`GatedDeltaNet`](super::GatedDeltaNet).
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
pub struct GatedDeltaNetConfig {
    pub(crate) features: usize,
    pub(crate) heads: usize,
    pub(crate) value_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) value_dim: usize,
    pub(crate) conv_width: usize,
    pub(crate) norm_eps: f64,
    pub(crate) dtype: DType,
    pub(crate) kernel_options: KernelOptions,
}

impl GatedDeltaNetConfig {
    /// Configures a layer whose input and output have `features` channels (`hidden_size`). It has
    /// `heads` heads of queries and keys (`linear_num_key_heads`). Each has `head_dim` channels
    /// (`linear_key_head_dim`). The defaults: as many value heads and channels, a convolution of 4
    /// rows, an `eps` of 10⁻⁶, F32.
    #[doc(alias = "linear_num_key_heads")]
    pub fn new(features: usize, heads: usize, head_dim: usize) -> Self {
        GatedDeltaNetConfig {
            features,
            heads,
            value_heads: heads,
            head_dim,
            value_dim: head_dim,
            conv_width: 4,
            norm_eps: 1e-6,
            dtype: DType::F32,
            kernel_options: KernelOptions::default(),
        }
    }

    /// Value heads, a multiple of `heads`. Value head `h` uses key head `h / (value_heads /
    /// heads)`, rounded down.
    #[doc(alias = "linear_num_value_heads")]
    pub fn value_heads(mut self, value_heads: usize) -> Self {
        self.value_heads = value_heads;
        self
    }

    /// Channels of a value head, `head_dim` unless set.
    #[doc(alias = "linear_value_head_dim")]
    pub fn value_dim(mut self, value_dim: usize) -> Self {
        self.value_dim = value_dim;
        self
    }

    /// Rows of the causal convolution, 2 to 8.
    #[doc(alias = "linear_conv_kernel_dim")]
    pub fn conv_width(mut self, conv_width: usize) -> Self {
        self.conv_width = conv_width;
        self
    }

    /// The `eps` of the gated RMSNorm, 0 or above.
    #[doc(alias = "rms_norm_eps")]
    pub fn norm_eps(mut self, eps: f64) -> Self {
        self.norm_eps = eps;
        self
    }

    /// Element type of input, output and intermediate tensors: F32, F16 or BF16. Sums, decays,
    /// rates and recurrent states are always F32.
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }

    /// The options that select kernels. They may change the rounding of the result.
    pub fn kernel_options(mut self, kernel_options: KernelOptions) -> Self {
        self.kernel_options = kernel_options;
        self
    }

    /// The shape of the state of the convolution for `batch` sequences: `[batch, 1, conv_width − 1,
    /// channels]`.
    pub fn conv_state_shape(&self, batch: usize) -> [usize; 4] {
        [batch, 1, self.conv_width.saturating_sub(1), self.mixed()]
    }

    /// The shape of the recurrent state for `batch` sequences: `[batch, value_heads, head_dim,
    /// value_dim]`.
    pub fn recurrent_state_shape(&self, batch: usize) -> [usize; 4] {
        [batch, self.value_heads, self.head_dim, self.value_dim]
    }

    /// Channels of the queries or keys of all heads.
    pub(crate) fn keys(&self) -> usize {
        self.heads.saturating_mul(self.head_dim)
    }

    /// Channels of the values of all heads.
    pub(crate) fn values(&self) -> usize {
        self.value_heads.saturating_mul(self.value_dim)
    }

    /// Channels of the convolution: queries, keys, values.
    pub(crate) fn mixed(&self) -> usize {
        self.keys().saturating_mul(2).saturating_add(self.values())
    }

    /// Rows of `in_proj_qkvz`: the channels of the convolution, and the gate.
    pub(crate) fn projected(&self) -> usize {
        self.mixed().saturating_add(self.values())
    }

    pub(crate) fn norm(&self) -> NormConfig {
        NormConfig::rms().eps(self.norm_eps)
    }

    pub(crate) fn recurrent(&self) -> RecurrentConfig {
        RecurrentConfig::new(self.heads, self.head_dim)
            .value_heads(self.value_heads)
            .value_dim(self.value_dim)
            .dtype(self.dtype)
            .decay(Decay::PerHead)
            .delta(true)
            .normalize_qk(1e-6)
            .kernel_options(self.kernel_options)
    }

    /// Refuses dimensions and options that no layer can have.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let GatedDeltaNetConfig { features, heads, value_heads, head_dim, value_dim, .. } = *self;
        let sizes = [
            ("features", features),
            ("heads", heads),
            ("value_heads", value_heads),
            ("head_dim", head_dim),
            ("value_dim", value_dim),
        ];
        check_sizes("GatedDeltaNetConfig", &sizes)?;
        if !value_heads.is_multiple_of(heads) {
            let (what, by) = ("value_heads", "heads");
            return Err(Error::NotDivisible { what, value: value_heads, by, divisor: heads });
        }
        if !(2..=8).contains(&self.conv_width) {
            let expected = "from 2 to 8: the rows of the convolution";
            return Err(Error::Option { option: "conv_width", value: self.conv_width as f64, expected });
        }
        self.norm().check()
    }

    pub(crate) fn check_on(&self, device: &DeviceFacts) -> Result<(), Error> {
        self.check()?;
        check_dtype(self.dtype, device)?;
        self.recurrent().check(device)
    }
}
