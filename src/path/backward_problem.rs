//! What the kernels of the backward pass are given.

use crate::device::DeviceFacts;
use crate::dropout::Dropout;
use crate::kernel::View;
use crate::mask::DeviceMask;
use crate::plan::{Added, Tuning};
use crate::problem::Shape;
use crate::tensor::TensorView;

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
    /// By [`Added`].
    pub d_added: [Option<TensorView<'a>>; Added::ALL.len()],
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
