//! Options of a reference call.

use crate::attention::{ScoreStage, check_options, scale_in_f32};
use crate::mask::reference::check_dropout;
use crate::mask::{Dropout, HostMask};
use crate::position::{RopeConfig, RowPositions};
use crate::tensor::{Error, HostTensor, Real, Shape};

/// The options of one attention call, besides dimensions and tensors. All numbers are rounded to
/// f32, as on a device, in any arithmetic.
///
/// ```
/// use wgpu_attention::Mask;
/// use wgpu_attention::reference::Options;
/// let options = Options::new().mask(Mask::causal()).scale(0.125).weights(true);
/// ```
#[derive(Clone, Copy, Debug, Default)]
#[must_use]
pub struct Options<'a> {
    pub(crate) scale: Option<f64>,
    pub(crate) softcap: Option<f64>,
    pub(crate) mask: HostMask<'a>,
    pub(crate) dropout: Option<Dropout<HostTensor<'a, bool>>>,
    pub(crate) appended: usize,
    pub(crate) weights: bool,
    pub(crate) rotary: Option<(RopeConfig, RowPositions<HostTensor<'a, u32>>)>,
}

impl<'a> Options<'a> {
    /// The default options: scale `1 / √head_dim`; no softcap, mask, dropout or weights.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the factor of `q·k`, rounded to f32. The default is `1 / √head_dim`.
    pub fn scale(mut self, scale: impl Into<Option<f64>>) -> Self {
        self.scale = scale.into();
        self
    }

    /// Bounds the scores: `softcap · tanh(score / softcap)`, rounded to f32.
    pub fn softcap(mut self, softcap: impl Into<Option<f64>>) -> Self {
        self.softcap = softcap.into();
        self
    }

    /// Sets the mask: the keys that each query may see, and the bias.
    pub fn mask(mut self, mask: HostMask<'a>) -> Self {
        self.mask = mask;
        self
    }

    /// Applies dropout to the weights.
    #[doc(alias = "dropout_p")]
    pub fn dropout(mut self, dropout: impl Into<Option<Dropout<HostTensor<'a, bool>>>>) -> Self {
        self.dropout = dropout.into();
        self
    }

    /// For layers: rotates projected queries and keys by their positions before they attend.
    /// Queries and keys must have the same number of rows. Appended keys are not rotated. For
    /// attention alone, call [`rotate`](crate::reference::rotate) first.
    #[doc(alias = "rope")]
    pub fn rotary(
        mut self,
        rope: impl Into<Option<RopeConfig>>,
        at: RowPositions<HostTensor<'a, u32>>,
    ) -> Self {
        self.rotary = rope.into().map(|rope| (rope, at));
        self
    }

    /// Returns the attention weights too (`need_weights` of `nn.MultiheadAttention`). A device then
    /// uses the staged path, which has the weights in memory.
    #[doc(alias = "need_weights")]
    pub fn weights(mut self, wanted: bool) -> Self {
        self.weights = wanted;
        self
    }

    /// Sets the number of keys at the end that every query sees, whatever the mask says. The mask
    /// covers only the keys before them. A layer sets this option itself.
    pub fn appended(mut self, keys: usize) -> Self {
        self.appended = keys;
        self
    }
}

impl Options<'_> {
    /// The factor of `q·k`.
    pub(super) fn scale_value(&self, head_dim: usize) -> f64 {
        f64::from(scale_in_f32(self.scale, head_dim))
    }

    /// Refuses masks and dropout that do not fit `shape`, and numbers outside their range.
    pub(crate) fn check(&self, shape: Shape) -> Result<(), Error> {
        check_options(self.scale, self.softcap)?;
        if self.rotary.is_some() {
            let why = "only layers rotate; rotate queries and keys before the call";
            return Err(Error::Unsupported { what: "rotary positions outside a layer", why });
        }
        let Some(kv_len) = shape.kv_len.checked_sub(self.appended) else {
            let value = self.appended as f64;
            return Err(Error::Option { option: "appended", value, expected: "at most `kv_len`" });
        };
        self.mask.check(Shape { kv_len, ..shape })?;
        self.dropout.as_ref().map_or(Ok(()), |dropout| check_dropout(dropout, &shape))
    }

    /// Returns the scores of a stage, for a checked shape.
    pub(super) fn at_stage<R: Real>(&self, mut scores: Vec<R>, shape: Shape, stage: ScoreStage) -> Vec<R> {
        let [_, heads, q_len, kv_len] = shape.weights();
        for (n, score) in scores.iter_mut().enumerate() {
            let (row, j) = (n / kv_len, n % kv_len);
            let index = [row / q_len / heads, row / q_len % heads, row % q_len, j];
            *score = match stage {
                ScoreStage::Scaled => *score,
                ScoreStage::Softcapped => self.capped(*score, &shape, index),
                ScoreStage::Biased => self.changed(*score, &shape, index).unwrap_or(R::neg_infinity()),
            };
        }
        scores
    }
}
