//! What the kernels of local attention share.

use crate::kernel::{FLOATS, WIDTHS, Width};
use crate::tensor::DType;

/// The function `length_of`: keys of a sequence. Without `lengths` all keys are there.
pub(super) fn length_of(lengths: Option<DType>) -> &'static str {
    if lengths.is_some() {
        "fn length_of(b: u32) -> u32 { return lengths_at(view_at(p.lengths, b, 0u, 0u, 0u)); }\n"
    } else {
        "fn length_of(b: u32) -> u32 { return p.kv_len; }\n"
    }
}

/// The variants of sums over a window, of which there are two kernels: the types of `x` and `y`,
/// lengths, whether sums are added to what is there, the width of `x` and `y`. Sums have the type
/// of what is summed, or F32.
pub(super) fn window_sums() -> impl Iterator<Item = ([DType; 2], Option<DType>, bool, Width)> {
    let kinds = FLOATS.into_iter().flat_map(|x| {
        let widened = (x != DType::F32).then_some(DType::F32);
        [Some(x), widened].into_iter().flatten().map(move |y| [x, y])
    });
    kinds.flat_map(|types| {
        [None, Some(DType::U32)].into_iter().flat_map(move |lengths| {
            [false, true]
                .into_iter()
                .flat_map(move |accumulates| WIDTHS.map(|width| (types, lengths, accumulates, width)))
        })
    })
}
