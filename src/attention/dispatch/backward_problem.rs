//! Problems of the backward pass: tensors and options that are checked.

use crate::attention::kernels::key_lists::KeyLists;
use crate::attention::plan::Added;
use crate::attention::{Config, scale_in_f32};
use crate::device::DeviceFacts;
use crate::kernel::KernelOptions;
use crate::mask::kernels::{MaskParams, MaskVariant, Masked};
use crate::mask::mods::CapturedGradients;
use crate::mask::{DeviceMask, Dropout};
use crate::tensor::{CallTensors, Error, Shape, TensorView};

/// The tensors for the gradients of a mask's tensors. Each is optional.
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

    /// The requested gradients of the rules' tensors.
    pub fn wanted(&self) -> impl Iterator<Item = (Added, TensorView<'a>)> + use<'a> {
        Added::ALL.into_iter().zip(self.added).filter_map(|(of, view)| Some((of, view?)))
    }

    /// The requested gradients of the tensors that a score function captures, with their indices.
    pub fn captured(&self) -> impl Iterator<Item = (usize, TensorView<'a>)> + use<'a> {
        self.captured.wanted()
    }

    /// Checks the gradients against the tensors of a checked mask.
    pub fn check(&self, mask: &DeviceMask, tensors: &mut CallTensors<'a, '_>) -> Result<(), Error> {
        for (of, view) in self.wanted() {
            let own = mask.floats(of.id()).ok_or_else(|| missing(of))?;
            tensors.gradient(of.name(), Some(view), own.dtype, own.shape())?;
        }
        match mask.mods().score {
            Some(bound) => bound.check_gradients(&self.captured, tensors),
            None if self.captured().next().is_some() => {
                let why = "the mask has no `score_mod`; omit this gradient or pass the forward call's mask";
                Err(Error::Unsupported { what: "d_captured", why })
            }
            None => Ok(()),
        }
    }
}

/// The error for a gradient of a tensor that the mask does not have.
fn missing(of: Added) -> Error {
    let why = match of {
        Added::Bias => "the mask has no bias; omit this gradient or pass the forward call's mask",
        Added::Slopes => "the mask has no ALiBi slopes; omit this gradient or pass the forward call's mask",
        Added::Relative => {
            "the mask has no table of relative biases; omit this gradient or pass the forward call's mask"
        }
        Added::Sinks => "the mask has no sink logits; omit this gradient or pass the forward call's mask",
    };
    Error::Unsupported { what: of.name(), why }
}

/// Checked tensors of a backward call.
#[derive(Clone, Copy)]
pub(crate) struct BackwardProblem<'a> {
    pub shape: Shape,
    /// The number of keys at the end that the mask does not cover.
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
    /// True if d_q, d_k and d_v are added to the tensors' previous values.
    pub accumulates: bool,
    /// True if `d_added` are added to the tensors' previous values.
    pub adds_to_added: bool,
    pub mask: DeviceMask<'a>,
    pub dropout: Option<Dropout<TensorView<'a>>>,
    /// True if `out` and `lse` cover more keys than this call. Weights are then not normalised
    /// again.
    pub partial: bool,
    /// The list of each query's keys, in the tensor of the lengths rule. Each batch entry is a
    /// query, and d_k and d_v have a row for each element of a list.
    pub lists: Option<KeyLists>,
    pub scale: f32,
    pub softcap: Option<f32>,
    pub kernel_options: KernelOptions,
}

impl Config {
    /// The problem of a backward call with this configuration, without a mask and without requested
    /// gradients.
    pub(crate) fn backward_problem<'a>(
        &self,
        shape: Shape,
        [q, k, v]: [TensorView<'a>; 3],
        [out, lse, d_out]: [TensorView<'a>; 3],
    ) -> BackwardProblem<'a> {
        BackwardProblem {
            shape,
            appended: 0,
            q,
            k,
            v,
            out,
            lse,
            d_out,
            d_lse: None,
            d_q: None,
            d_k: None,
            d_v: None,
            d_added: AddedGradients::default(),
            accumulates: false,
            adds_to_added: false,
            mask: DeviceMask::none(),
            dropout: None,
            partial: false,
            lists: None,
            scale: scale_in_f32(self.scale, shape.head_dim),
            softcap: self.softcap.map(|c| c as f32),
            kernel_options: self.kernel_options,
        }
    }
}

impl<'a> BackwardProblem<'a> {
    /// Returns all rules of the call's mask.
    pub(super) fn mask_variant(&self) -> MaskVariant {
        MaskVariant::of(&self.mask, self.softcap.is_some(), self.appended > 0)
    }

    /// Returns the given rules of the call's mask, with their tensors.
    pub(super) fn masked(&self, variant: MaskVariant, device: &DeviceFacts) -> Masked<'a> {
        let params = MaskParams::new(&self.mask, &self.shape, self.appended, self.softcap, device);
        Masked::new(variant, &self.mask, params, device)
    }
}

pub(crate) fn in_fours(t: TensorView) -> bool {
    t.layout.in_fours(3)
}
