//! A mask, a few pairs → what it makes of each.

use crate::device::DeviceFacts;
use crate::kernel::Dispatch;
use crate::kernels::ask_mask::{self, AskMaskCall};
use crate::kernels::mask::{MaskParams, MaskVariant, Masked};
use crate::mask::DeviceMask;
use crate::problem::Shape;
use crate::tensor::{TensorView, count};

/// The dispatch that writes `answers`.
pub(crate) fn call<'a>(
    given: &DeviceMask<'a>,
    derivative: bool,
    shape: &Shape,
    [pairs, scores, answers]: [TensorView<'a>; 3],
    device: &DeviceFacts,
) -> Dispatch<'a> {
    let variant = MaskVariant::of(given, false, false).scores_only();
    let count = count(scores.shape());
    let call = AskMaskCall {
        pairs,
        scores,
        answers,
        mask: Masked::new(variant, given, MaskParams::new(given, shape, 0, None, device), device),
        count: count as u32,
        derivative,
    };
    call.dispatch([count.div_ceil(ask_mask::WORKGROUP), 1, 1], device)
}
