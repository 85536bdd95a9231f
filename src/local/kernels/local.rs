//! Functions that the kernels of local attention share.

use crate::kernel::{FLOATS, WIDTHS, Width};
use crate::tensor::DType;

/// Returns the WGSL function `length_of`: the number of keys of a sequence. Without `lengths` it is
/// the number of all keys.
pub(super) fn length_of(lengths: Option<DType>) -> &'static str {
    if lengths.is_some() {
        "fn length_of(b: u32) -> u32 { return lengths_at(view_at(p.lengths, b, 0u, 0u, 0u)); }\n"
    } else {
        "fn length_of(b: u32) -> u32 { return p.kv_len; }\n"
    }
}

/// Returns the variants of the two kernels that sum over windows. They differ in the types of `x`
/// and `y`, lengths, accumulation, and the width of `x` and `y`. Sums have the type of their terms,
/// or F32.
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
