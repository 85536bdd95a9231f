//! What the kernels of the backward pass are given.

use crate::device::DeviceFacts;
use crate::dropout::Dropout;
use crate::error::Error;
use crate::kernel::View;
use crate::mask::DeviceMask;
use crate::plan::{Added, Tuning};
use crate::problem::Shape;
use crate::tensor::{Access, DType, TensorView, expect_shape};

/// Where the gradients of a mask's tensors go, if anywhere.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AddedGradients<'a>([Option<TensorView<'a>>; Added::ALL.len()]);

impl<'a> AddedGradients<'a> {
    pub fn get(&self, of: Added) -> Option<TensorView<'a>> {
        self.0[of as usize]
    }

    pub fn set(&mut self, of: Added, gradient: Option<TensorView<'a>>) {
        self.0[of as usize] = gradient;
    }

    pub fn is_empty(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }

    /// Those that are wanted.
    pub fn wanted(&self) -> impl Iterator<Item = (Added, TensorView<'a>)> + use<'a> {
        Added::ALL.into_iter().zip(self.0).filter_map(|(of, view)| Some((of, view?)))
    }

    /// Checks them against the tensors of a checked mask.
    pub fn check(&self, mask: &DeviceMask, device: &DeviceFacts) -> Result<(), Error> {
        self.wanted().try_for_each(|(of, view)| {
            let own = mask.floats(of.id()).ok_or_else(|| missing(of))?;
            let dtype = if view.dtype == DType::F32 { DType::F32 } else { own.dtype };
            view.check_as(of.name(), dtype, Access::Write, device)?;
            expect_shape(of.name(), view.shape(), own.shape())
        })
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
    pub scale: f32,
    pub softcap: Option<f32>,
    pub tuning: Tuning,
}

pub(super) fn in_fours(t: TensorView) -> bool {
    t.layout.in_fours(3)
}

pub(super) fn view(t: TensorView, device: &DeviceFacts) -> View {
    View::from(t.window(device).layout)
}
