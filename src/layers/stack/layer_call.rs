//! The mask and the rotation of each layer in a call of a stack.

use crate::layers::multi_head::MultiHeadForward;
use crate::mask::DeviceMask;
use crate::position::{Rotary, Rotation, RowPositions};
use crate::tensor::{Error, TensorView};

/// The mask and the rotation of the self-attention of one layer. Use it in a call of a stack whose
/// layers differ: see [`EncoderForward::layer_calls`](crate::layers::EncoderForward::layer_calls).
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct LayerCall<'a> {
    pub(crate) mask: DeviceMask<'a>,
    pub(crate) rotary: Option<Rotary<'a>>,
}

impl<'a> LayerCall<'a> {
    /// Makes the call of a layer with this mask and without a rotation. Sinks of the layer are part
    /// of the mask: [`Mask::sink_logits`](crate::Mask::sink_logits).
    pub fn new(mask: DeviceMask<'a>) -> Self {
        LayerCall { mask, rotary: None }
    }

    /// Rotates queries and keys of the layer by their positions: see
    /// [`EncoderForward::rotary`](crate::layers::EncoderForward::rotary).
    #[doc(alias = "rope")]
    #[doc(alias = "position_ids")]
    pub fn rotary(mut self, rotation: impl Into<Rotation<'a>>, at: RowPositions<TensorView<'a>>) -> Self {
        self.rotary = Some(Rotary { rotation: rotation.into(), at });
        self
    }

    /// The self-attention of `x`, into `out`.
    fn attention(&self, x: TensorView<'a>, out: TensorView<'a>) -> MultiHeadForward<'a> {
        MultiHeadForward::self_attention(x, out).mask(self.mask).rotary_of(self.rotary)
    }

    fn tensors(&self) -> Vec<(&'static str, TensorView<'a>)> {
        let mut all = self.mask.tensors();
        all.extend(self.rotary.iter().flat_map(Rotary::tensors));
        all
    }
}

/// The masks and rotations of the layers of a call: one for all layers, or one for each.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LayerCalls<'a> {
    pub mask: Option<DeviceMask<'a>>,
    pub rotary: Option<Rotary<'a>>,
    pub each: Option<&'a [LayerCall<'a>]>,
}

impl<'a> LayerCalls<'a> {
    /// Refuses another number of entries than `layers`. It also refuses entries together with a
    /// mask or a rotation for all layers.
    pub fn check(&self, layers: usize) -> Result<(), Error> {
        let Some(each) = self.each else { return Ok(()) };
        if each.len() != layers {
            return Err(Error::Length { tensor: "layer_calls", expected: layers, got: each.len() });
        }
        if self.mask.is_some() || self.rotary.is_some() {
            let why = "each entry of `layer_calls` sets the mask and rotation of its layer; omit `mask` and `rotary`";
            return Err(Error::Unsupported { what: "`mask` or `rotary` with `layer_calls`", why });
        }
        Ok(())
    }

    /// The number of masks and rotations: 1 for all layers, or one for each.
    pub fn distinct(&self) -> usize {
        self.each.map_or(1, <[_]>::len)
    }

    /// Adds the layer `n` to an error, if layers differ.
    pub fn at(&self, n: usize, error: Error) -> Error {
        match self.each {
            Some(_) => Error::Layer { layer: n, error: Box::new(error) },
            None => error,
        }
    }

    fn of(&self, n: usize) -> LayerCall<'a> {
        let common = LayerCall { mask: self.mask.unwrap_or_default(), rotary: self.rotary };
        self.each.and_then(|each| each.get(n)).copied().unwrap_or(common)
    }

    /// The mask of layer `n`.
    pub fn mask_of(&self, n: usize) -> DeviceMask<'a> {
        self.of(n).mask
    }

    /// The rotation of layer `n`.
    pub fn rotary_of(&self, n: usize) -> Option<Rotary<'a>> {
        self.of(n).rotary
    }

    /// The self-attention of `x` in layer `n`, into `out`.
    pub fn attention(&self, n: usize, x: TensorView<'a>, out: TensorView<'a>) -> MultiHeadForward<'a> {
        self.of(n).attention(x, out)
    }

    /// All tensors that the masks and rotations read.
    pub fn tensors(&self) -> Vec<(&'static str, TensorView<'a>)> {
        (0..self.distinct()).flat_map(|n| self.of(n).tensors()).collect()
    }
}
