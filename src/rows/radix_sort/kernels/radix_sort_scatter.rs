//! The host side of `radix_sort_scatter.wgsl`.

use super::radix_sort_count::{COUNTS_BYTES, WORKGROUP, with_digits};
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The last step of a pass of the radix sort: stores each key at its new position.
    RadixSortScatter, RadixSortScatterCall
    tensors {
        keys: One Read U32 one view,
        // The order before this pass. The first pass has none.
        before: Opt Read U32 one view,
        counts: One Read U32 one,
        order: One Write U32 one view,
        ranks: Opt Write U32 one view,
    }
    numbers {
        heads: u32,
        rows: u32,
        length: u32,
        blocks: u32,
        /// Bits below the digit.
        shift: u32,
        digit_mask: u32,
    }
    variant {}
}

impl Variant for RadixSortScatter {
    const LABEL: &'static str = "attention.radix_sort_scatter";
    const FAMILIES: Families = Families::of(Family::RadixSort);

    fn describe(&self) -> Kernel {
        let parts = [
            shader!("tensor/view"),
            shader!("rows/radix_sort/digits"),
            shader!("rows/radix_sort/radix_sort_scatter"),
        ];
        with_digits(self.declare()).kernel(&parts, WORKGROUP as u32, COUNTS_BYTES)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let [keys, counts, order] = [DType::U32; 3];
        let optional = [None, Some(DType::U32)];
        optional.into_iter().flat_map(move |before| {
            optional.map(|ranks| RadixSortScatter { keys, before, counts, order, ranks })
        })
    }
}
