//! What the kernels of the backward pass are given.

use crate::attention::plan::Added;
use crate::device::DeviceFacts;
use crate::kernel::KernelOptions;
use crate::mask::kernels::{MaskParams, MaskVariant, Masked};
use crate::mask::mods::CapturedGradients;
use crate::mask::{DeviceMask, Dropout};
use crate::tensor::{CallTensors, Error, Shape, TensorView};

/// Where the gradients of a mask's tensors go, if anywhere.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AddedGradients<'a> {
    added: [Option<TensorView<'a>>; Added::ALL.len()],
    captured: CapturedGradients<'a>,
}

impl<'a> AddedGradients<'a> {
    pub fn get(&self, of: Added) -> Option<TensorView<'a>> {
        self.added[of as usize]
    }

    pub fn set(&mut self, of: Added, gradient: Option<TensorView<'a>>) {
        self.added[of as usize] = gradient;
    }

    pub fn set_captured(&mut self, gradients: &[Option<TensorView<'a>>]) {
        self.captured = CapturedGradients::new(gradients);
    }

    pub fn is_empty(&self) -> bool {
        self.wanted().next().is_none() && self.captured().next().is_none()
    }

    /// Those of rules that are wanted.
    pub fn wanted(&self) -> impl Iterator<Item = (Added, TensorView<'a>)> + use<'a> {
        Added::ALL.into_iter().zip(self.added).filter_map(|(of, view)| Some((of, view?)))
    }

    /// Those of what a score function captures that are wanted, by their place.
    pub fn captured(&self) -> impl Iterator<Item = (usize, TensorView<'a>)> + use<'a> {
        self.captured.wanted()
    }

    /// Checks them against the tensors of a checked mask.
    pub fn check(&self, mask: &DeviceMask, tensors: &mut CallTensors<'a, '_>) -> Result<(), Error> {
        for (of, view) in self.wanted() {
            let own = mask.floats(of.id()).ok_or_else(|| missing(of))?;
            tensors.gradient(of.name(), Some(view), own.dtype, own.shape())?;
        }
        match mask.mods().score {
            Some(bound) => bound.check_gradients(&self.captured, tensors),
            None if self.captured().next().is_some() => {
                let why = "the mask has no score_mod; leave it out, or give the forward call's mask";
                Err(Error::Unsupported { what: "d_captured", why })
            }
            None => Ok(()),
        }
    }
}

/// The gradient of a tensor that the mask has not.
fn missing(of: Added) -> Error {
    let why = match of {
        Added::Bias => "the mask has no bias; leave it out, or give the forward call's mask",
        Added::Slopes => "the mask has no slopes of ALiBi; leave it out, or give the forward call's mask",
        Added::Relative => {
            "the mask has no table of relative biases; leave it out, or give the forward call's mask"
        }
        Added::Sinks => "the mask has no sink logits; leave it out, or give the forward call's mask",
    };
    Error::Unsupported { what: of.name(), why }
}

/// Checked tensors of a backward call.
#[derive(Clone, Copy)]
pub(crate) struct BackwardProblem<'a> {
    pub shape: Shape,
    /// How many of the last keys stand outside of the mask.
    pub appended: usize,
    pub q: TensorView<'a>,
    pub k: TensorView<'a>,
    pub v: TensorView<'a>,
    pub out: TensorView<'a>,
    pub lse: TensorView<'a>,
    pub d_out: TensorView<'a>,
    pub d_lse: Option<TensorView<'a>>,
    pub d_q: Option<TensorView<'a>>,
    pub d_k: Option<TensorView<'a>>,
    pub d_v: Option<TensorView<'a>>,
    pub d_added: AddedGradients<'a>,
    /// Whether d_q, d_k and d_v are added to what is there.
    pub accumulates: bool,
    /// Whether `d_added` are.
    pub adds_to_added: bool,
    pub mask: DeviceMask<'a>,
    pub dropout: Option<Dropout<TensorView<'a>>>,
    /// Whether `out` and `lse` are of more keys than these: then `lse` is taken as it is.
    pub partial: bool,
    pub scale: f32,
    pub softcap: Option<f32>,
    pub kernel_options: KernelOptions,
}

impl<'a> BackwardProblem<'a> {
    /// All rules of the call's mask.
    pub(super) fn mask_variant(&self) -> MaskVariant {
        MaskVariant::of(&self.mask, self.softcap.is_some(), self.appended > 0)
    }

    /// These rules of the call's mask.
    pub(super) fn masked(&self, variant: MaskVariant, device: &DeviceFacts) -> Masked<'a> {
        let params = MaskParams::new(&self.mask, &self.shape, self.appended, self.softcap, device);
        Masked::new(variant, &self.mask, params, device)
    }
}

pub(crate) fn in_fours(t: TensorView) -> bool {
    t.layout.in_fours(3)
}
