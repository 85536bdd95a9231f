//! Options of a call of the reference.

use crate::attention::{ScoreStage, check_options, scale_in_f32};
use crate::mask::reference::check_dropout;
use crate::mask::{Dropout, HostMask};
use crate::position::{RopeConfig, RowPositions};
use crate::tensor::{Error, HostTensor, Real, Shape};

/// Everything about one attention call that is not a dimension or a tensor. Numbers are rounded to
/// f32, as for a device, whatever the arithmetic.
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
    /// Scale `1 / √head_dim`; no softcap, mask, dropout or weights.
    pub fn new() -> Self {
        Self::default()
    }

    /// Factor of `q·k` instead of `1 / √head_dim`, rounded to f32.
    pub fn scale(mut self, scale: impl Into<Option<f64>>) -> Self {
        self.scale = scale.into();
        self
    }

    /// Bounds the scores: `softcap · tanh(score / softcap)`, rounded to f32.
    pub fn softcap(mut self, softcap: impl Into<Option<f64>>) -> Self {
        self.softcap = softcap.into();
        self
    }

    /// Which keys a query may see, and the bias.
    pub fn mask(mut self, mask: HostMask<'a>) -> Self {
        self.mask = mask;
        self
    }

    /// Dropout on the weights.
    #[doc(alias = "dropout_p")]
    pub fn dropout(mut self, dropout: impl Into<Option<Dropout<HostTensor<'a, bool>>>>) -> Self {
        self.dropout = dropout.into();
        self
    }

    /// Of a layer: rotates projected queries and keys, of which there are as many, by their
    /// positions before they attend. Appended keys are not rotated. Attention alone takes what
    /// [`rotate`](crate::reference::rotate) has rotated.
    #[doc(alias = "rope")]
    pub fn rotary(
        mut self,
        rope: impl Into<Option<RopeConfig>>,
        at: RowPositions<HostTensor<'a, u32>>,
    ) -> Self {
        self.rotary = rope.into().map(|rope| (rope, at));
        self
    }

    /// Gives the attention weights too (`need_weights` of `nn.MultiheadAttention`). A device then
    /// takes the staged path, which has them in memory.
    #[doc(alias = "need_weights")]
    pub fn weights(mut self, wanted: bool) -> Self {
        self.weights = wanted;
        self
    }

    /// How many of the last keys every query sees, whatever the mask says; the mask covers, and is
    /// shaped for, the keys before them. A layer sets this itself.
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

    /// Refuses masks and dropout that do not fit `shape`, and numbers out of their range.
    pub(crate) fn check(&self, shape: Shape) -> Result<(), Error> {
        check_options(self.scale, self.softcap)?;
        if self.rotary.is_some() {
            let why = "they are a layer's; rotate queries and keys first";
            return Err(Error::Unsupported { what: "rotary positions of attention alone", why });
        }
        let Some(kv_len) = shape.kv_len.checked_sub(self.appended) else {
            let value = self.appended as f64;
            return Err(Error::Option { option: "appended", value, expected: "at most kv_len" });
        };
        self.mask.check(Shape { kv_len, ..shape })?;
        self.dropout.as_ref().map_or(Ok(()), |dropout| check_dropout(dropout, &shape))
    }

    /// Scores of a checked shape at a stage.
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
