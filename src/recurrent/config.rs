//! The configuration of recurrent attention.

use super::dispatch::Problem;
use super::kernels::numbers::RecurrentForm;
use crate::attention::check_dtype;
use crate::device::DeviceFacts;
use crate::kernel::{KernelOptions, Target};
use crate::linear_attention::plan::LinearTiles;
use crate::tensor::{DType, Error, Shape, TensorView, eps_in_f32};

/// The decay of the states of a [`RecurrentAttention`](super::RecurrentAttention).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Decay {
    /// A state keeps everything: linear attention, DeltaNet.
    None,
    /// One decay for each head and token: Mamba-2, gated DeltaNet, RetNet, lightning attention.
    PerHead,
    /// One decay for each key channel, head and token: gated linear attention, KDA.
    PerChannel,
}

/// The configuration of a [`RecurrentAttention`](super::RecurrentAttention), fixed at its creation.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
pub struct RecurrentConfig {
    pub(crate) heads: usize,
    pub(crate) value_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) value_dim: usize,
    pub(crate) dtype: DType,
    pub(crate) decay: Decay,
    pub(crate) delta: bool,
    pub(crate) scale: Option<f64>,
    pub(crate) unit_eps: Option<f64>,
    pub(crate) kernel_options: KernelOptions,
}

impl RecurrentConfig {
    /// Configures `heads` heads of queries and keys, with `head_dim` channels. The defaults: as
    /// many value heads and channels, f32, no decay, no delta rule, scale 1 / √head_dim.
    pub fn new(heads: usize, head_dim: usize) -> Self {
        RecurrentConfig {
            heads,
            value_heads: heads,
            head_dim,
            value_dim: head_dim,
            dtype: DType::F32,
            decay: Decay::None,
            delta: false,
            scale: None,
            unit_eps: None,
            kernel_options: KernelOptions::default(),
        }
    }

    /// Value heads, a multiple of `heads`, each with a state: value head `h` uses query/key head `h
    /// / (value_heads / heads)`.
    pub fn value_heads(mut self, value_heads: usize) -> Self {
        self.value_heads = value_heads;
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

    /// The decay of a state with each token.
    pub fn decay(mut self, decay: Decay) -> Self {
        self.decay = decay;
        self
    }

    /// True for a delta rule. A state gives a value for the key. The update is β times the
    /// difference of the token's value from it. A call then needs `beta`. False: the update is the
    /// value.
    ///
    /// The source is Schlag et al. 2021, "Linear Transformers Are Secretly Fast Weight
    /// Programmers".
    ///
    /// The rule is stable for keys of length 1 and β in [0, 2].
    #[doc(alias = "DeltaNet")]
    pub fn delta(mut self, delta: bool) -> Self {
        self.delta = delta;
        self
    }

    /// The factor of queries, 1 / √head_dim unless set.
    pub fn scale(mut self, scale: impl Into<Option<f64>>) -> Self {
        self.scale = scale.into();
        self
    }

    /// Divides each row of q and k by `√(Σ x² + eps)` first, as gated DeltaNet and KDA do with eps
    /// = 10⁻⁶. Without an eps, rows are used as they are.
    #[doc(alias = "l2norm")]
    pub fn normalize_qk(mut self, eps: impl Into<Option<f64>>) -> Self {
        self.unit_eps = eps.into();
        self
    }

    /// The options that select kernels without changing the result. Only the target matters here.
    pub fn kernel_options(mut self, kernel_options: KernelOptions) -> Self {
        self.kernel_options = kernel_options;
        self
    }

    /// Returns a problem of checked tensors without options, states or results.
    pub(crate) fn problem<'a>(
        &self,
        shape: Shape,
        [q, k, v]: [TensorView<'a>; 3],
        device: &DeviceFacts,
    ) -> Problem<'a> {
        let software = match self.kernel_options.target {
            Target::Auto => device.software,
            target => target == Target::Software,
        };
        Problem {
            shape,
            form: RecurrentForm {
                delta: self.delta,
                by_channel: self.decay == Decay::PerChannel,
                unit: self.unit_eps.is_some(),
            },
            scale: self.factor() as f32,
            eps: eps_in_f32(self.unit_eps.unwrap_or(0.0)),
            q,
            k,
            v,
            out: None,
            decay: None,
            beta: None,
            lengths: None,
            starts: None,
            initial: None,
            last: None,
            in_place: false,
            slots: None,
            initial_slots: None,
            kept: None,
            gradients: None,
            tiles: LinearTiles::of(software, device),
            most_heads: device.max_workgroups as usize,
        }
    }

    pub(crate) fn factor(&self) -> f64 {
        self.scale.unwrap_or(1.0 / (self.head_dim as f64).sqrt())
    }

    pub(crate) fn check(&self, device: &DeviceFacts) -> Result<(), Error> {
        self.kernel_options.refuse_batch_invariant("`batch_invariant` with recurrent attention")?;
        let RecurrentConfig { heads, value_heads, head_dim, value_dim, .. } = *self;
        if heads > 0 && !value_heads.is_multiple_of(heads) {
            return Err(Error::NotDivisible {
                what: "value_heads",
                value: value_heads,
                by: "heads",
                divisor: heads,
            });
        }
        Shape { batch: 1, heads: value_heads, kv_heads: heads, q_len: 1, kv_len: 1, head_dim, value_dim }
            .check()?;
        check_dtype(self.dtype, device)?;
        let finite = |x: f64| x.is_finite() && (x as f32).is_finite();
        if !finite(self.factor()) {
            return Err(Error::Option { option: "scale", value: self.factor(), expected: "finite" });
        }
        if let Some(eps) = self.unit_eps.filter(|eps| !finite(*eps) || *eps < 0.0) {
            let expected = "finite and at least 0";
            return Err(Error::Option { option: "normalize_qk", value: eps, expected });
        }
        Ok(())
    }
}
