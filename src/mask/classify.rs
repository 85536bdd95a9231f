//! Computes the block map of a mask.

use super::kernels::classify::ClassifyCall;
use super::kernels::{MaskParams, MaskVariant, Masked};
use super::{Blocks, DeviceMask};
use crate::device::DeviceFacts;
use crate::kernel::Dispatch;
use crate::tensor::{Shape, TensorView};

/// Returns the dispatch that writes `blocks.map`. `shape` has batch, heads and the lengths.
pub(crate) fn call<'a>(
    given: &DeviceMask<'a>,
    shape: &Shape,
    blocks: &Blocks<TensorView<'a>>,
    device: &DeviceFacts,
) -> Dispatch<'a> {
    let variant = MaskVariant::of(given, false, false).blocks_only();
    let [batch, heads, rows, cols] = blocks.map.shape();
    let call = ClassifyCall {
        map: blocks.map,
        mask: Masked::new(variant, given, MaskParams::new(given, shape, 0, None, device), device),
        // A block larger than the problem is one block, so the product of its sides fits.
        size: [blocks.size[0].min(shape.q_len) as u32, blocks.size[1].min(shape.kv_len) as u32],
        map_heads: heads as u32,
        batches: (shape.batch / batch) as u32,
        heads: (shape.heads / heads) as u32,
    };
    call.dispatch([cols, rows, batch * heads], device)
}
