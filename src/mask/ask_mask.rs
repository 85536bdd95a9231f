//! Evaluates a mask for a few pairs.

use super::DeviceMask;
use super::kernels::ask_mask::{self, AskMaskCall};
use super::kernels::{MaskParams, MaskVariant, Masked};
use crate::device::DeviceFacts;
use crate::kernel::Dispatch;
use crate::tensor::{Shape, TensorView, count};

/// Returns the dispatch that writes `answers`.
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
