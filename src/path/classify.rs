//! A mask → its block map.

use super::dispatches::grid;
use crate::block_map::Blocks;
use crate::device::DeviceFacts;
use crate::kernel::{Dispatch, View};
use crate::kernels::{KernelVariant, classify, mask};
use crate::mask::DeviceMask;
use crate::problem::Shape;
use crate::tensor::TensorView;

/// The dispatch that writes `blocks.map`; `shape` gives batch, heads and the lengths.
pub(crate) fn call<'a>(
    given: &DeviceMask<'a>,
    shape: &Shape,
    blocks: &Blocks<TensorView<'a>>,
    device: &DeviceFacts,
) -> Dispatch<'a, KernelVariant> {
    let variant = classify::Classify { mask: mask::MaskVariant::of(given, false, false).blocks_only() };
    let window = blocks.map.window(device);
    let [batch, heads, rows, cols] = blocks.map.shape();
    let params = classify::Params {
        map: View::from(window.layout),
        mask: mask::MaskParams::new(given, shape, 0, None, device),
        // A block larger than the problem is one block, and their product fits.
        size: [blocks.size[0].min(shape.q_len) as u32, blocks.size[1].min(shape.kv_len) as u32],
        map_heads: heads as u32,
        batches: (shape.batch / batch) as u32,
        heads: (shape.heads / heads) as u32,
        pad0: 0,
        pad1: 0,
        pad2: 0,
    };
    let mut tensors = vec![window];
    tensors.extend(variant.mask.windows(given, device));
    Dispatch {
        variant: KernelVariant::Classify(variant),
        params: variant.mask.with_mods(&params, given, device),
        tensors,
        grid: grid([cols, rows, batch * heads]),
    }
}
