//! The configuration of linear attention.

use super::feature_map::{FeatureMap, RandomFeatures, UpdateRule};
use super::kernels::linear_recurrent::MOST_FEATURES;
use crate::attention::check_dtype;
use crate::device::DeviceFacts;
use crate::kernel::KernelOptions;
use crate::tensor::{DType, Error, Shape, check_sizes};

/// The configuration of a [`LinearAttention`](super::LinearAttention), fixed at its creation.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
pub struct LinearConfig {
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) value_dim: usize,
    pub(crate) dtype: DType,
    pub(crate) map: FeatureMap,
    pub(crate) rule: UpdateRule,
    pub(crate) causal: bool,
    pub(crate) normalised: bool,
    pub(crate) eps: Option<f64>,
    pub(crate) scale: f64,
    pub(crate) kernel_options: KernelOptions,
}

impl LinearConfig {
    /// Configures `heads` query heads of `head_dim` channels. The defaults: f32, φ = elu + 1, no
    /// causality, results divided by the norm.
    pub fn new(heads: usize, head_dim: usize) -> Self {
        LinearConfig {
            heads,
            kv_heads: heads,
            head_dim,
            value_dim: head_dim,
            dtype: DType::F32,
            map: FeatureMap::Elu,
            rule: UpdateRule::Linear,
            causal: false,
            normalised: true,
            eps: None,
            scale: 1.0,
            kernel_options: KernelOptions::default(),
        }
    }

    /// Key/value heads, a divisor of `heads`, each with a state: query head `h` uses `h / (heads /
    /// kv_heads)`.
    pub fn kv_heads(mut self, kv_heads: usize) -> Self {
        self.kv_heads = kv_heads;
        self
    }

    /// Channels of values and of the output, `head_dim` unless set.
    pub fn value_dim(mut self, value_dim: usize) -> Self {
        self.value_dim = value_dim;
        self
    }

    /// Element type of q, k, v and out: F32, F16 or BF16. Sums and states are always f32.
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }

    /// The feature map φ.
    pub fn feature_map(mut self, map: FeatureMap) -> Self {
        self.map = map;
        self
    }

    /// The rule that adds a token to a state. Rules other than [`UpdateRule::Linear`] require
    /// causality, process one token at a time and have no gradients.
    /// [`RecurrentAttention`](crate::recurrent::RecurrentAttention) has them in chunks, with
    /// gradients, for as many heads of queries as of keys and without feature maps.
    pub fn update_rule(mut self, rule: UpdateRule) -> Self {
        self.rule = rule;
        self
    }

    /// True if query i sees only the keys j ≤ i. The call then has as many keys as queries.
    pub fn causal(mut self, causal: bool) -> Self {
        self.causal = causal;
        self
    }

    /// True if results are divided by the norm, `φ(q) · Σ φ(k)`. Otherwise they are multiplied by
    /// [`scale`](Self::scale).
    pub fn normalised(mut self, normalised: bool) -> Self {
        self.normalised = normalised;
        self
    }

    /// The number added to the norm, 10⁻⁶ unless set. With random features the default is 0,
    /// because their scale is arbitrary.
    pub fn eps(mut self, eps: impl Into<Option<f64>>) -> Self {
        self.eps = eps.into();
        self
    }

    /// The factor of results that are not normalised, 1 unless set.
    pub fn scale(mut self, scale: f64) -> Self {
        self.scale = scale;
        self
    }

    /// The options that select kernels without changing the result. Linear attention reads only the
    /// target, and ignores the rest of [`KernelOptions`].
    pub fn kernel_options(mut self, kernel_options: KernelOptions) -> Self {
        self.kernel_options = kernel_options;
        self
    }

    /// The number of features of a row.
    pub(crate) fn features(&self) -> usize {
        self.map.features(self.head_dim)
    }

    pub(crate) fn check(&self, device: &DeviceFacts) -> Result<(), Error> {
        self.kernel_options.refuse_batch_invariant("`batch_invariant` with linear attention")?;
        let LinearConfig { heads, kv_heads, head_dim, value_dim, .. } = *self;
        Shape { batch: 1, heads, kv_heads, q_len: 1, kv_len: 1, head_dim, value_dim }.check()?;
        check_dtype(self.dtype, device)?;
        let finite = |x: f64| x.is_finite() && (x as f32).is_finite();
        if let Some(eps) = self.eps.filter(|eps| !finite(*eps) || *eps < 0.0) {
            return Err(Error::Option { option: "eps", value: eps, expected: "finite and at least 0" });
        }
        if !finite(self.scale) {
            return Err(Error::Option { option: "scale", value: self.scale, expected: "finite" });
        }
        if self.rule != UpdateRule::Linear && !self.causal {
            let why = "an update rule processes tokens in order; set `causal(true)`";
            return Err(Error::Unsupported { what: "an update rule without causality", why });
        }
        if self.rule.has_beta() && self.normalised {
            let why =
                "the delta rule subtracts from the state, so there is no normaliser; set `normalised(false)`";
            return Err(Error::Unsupported { what: "a delta rule with normalisation", why });
        }
        if self.rule != UpdateRule::Linear && self.map.is_scaled() {
            let why = "the state would need the scale of the features; use another feature map";
            return Err(Error::Unsupported { what: "exponential features with an update rule", why });
        }
        if self.rule != UpdateRule::Linear && self.normalised && self.features() > MOST_FEATURES {
            let (what, name) = ("features", "the limit of normalised update rules");
            return Err(Error::Limit {
                what,
                needed: self.features() as u64,
                limit: MOST_FEATURES as u64,
                name,
            });
        }
        if let FeatureMap::Random { kind, directions } = self.map {
            check_sizes("feature_map", &[("directions", directions)])?;
            if let RandomFeatures::Relu { epsilon } = kind
                && (!finite(epsilon) || epsilon < 0.0)
            {
                let expected = "finite and at least 0";
                return Err(Error::Option { option: "epsilon", value: epsilon, expected });
            }
            if kind.is_scaled() && self.eps.is_some_and(|eps| eps != 0.0) {
                let why = "their scale is arbitrary, so `eps` would differ between queries; set `eps(0.0)`";
                return Err(Error::Unsupported { what: "`eps` with exponential features", why });
            }
            if kind.is_scaled() && !self.normalised {
                let why = "only the normaliser removes their scale; set `normalised(true)`";
                return Err(Error::Unsupported { what: "exponential features without normalisation", why });
            }
        }
        Ok(())
    }
}
