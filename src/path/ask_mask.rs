//! A mask, a few pairs → what it makes of each.

use super::dispatches::grid;
use crate::device::DeviceFacts;
use crate::kernel::Dispatch;
use crate::kernels::{KernelVariant, ask_mask, mask};
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
) -> Dispatch<'a, KernelVariant> {
    let mask = mask::MaskVariant::of(given, false, false).scores_only();
    let number = count(scores.shape());
    let params = ask_mask::Params {
        mask: mask::MaskParams::new(given, shape, 0, None, device),
        count: number as u32,
        pad0: 0,
        pad1: 0,
        pad2: 0,
    };
    let mut tensors: Vec<_> = [pairs, scores, answers].map(|t| t.window(device)).into();
    tensors.extend(mask.windows(given, device));
    Dispatch {
        variant: KernelVariant::AskMask(ask_mask::AskMask { derivative, mask }),
        params: mask.with_mods(&params, given, device),
        tensors,
        grid: grid([number.div_ceil(ask_mask::WORKGROUP), 1, 1]),
    }
}
