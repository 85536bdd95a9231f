//! The host side of `radix_sort_count.wgsl`, and the constants that the three steps of a pass
//! share.

use crate::device::{Families, Family};
use crate::kernel::{Declared, Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The first step of a pass of the radix sort: the count of each digit in each block.
    RadixSortCount, RadixSortCountCall
    tensors {
        keys: One Read U32 one view,
        // The order before this pass. The first pass has none.
        before: Opt Read U32 one view,
        counts: One Write U32 one,
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

/// Bits of a digit.
pub(crate) const BITS: u32 = 4;
/// The number of digits.
pub(crate) const DIGITS: usize = 1 << BITS;
/// Invocations of a workgroup, and keys per invocation.
pub(super) const WORKGROUP: usize = 64;
const KEYS: usize = 16;
/// Keys of a workgroup.
pub(crate) const BLOCK: usize = WORKGROUP * KEYS;
/// Bytes of the counts of a workgroup.
pub(super) const COUNTS_BYTES: u32 = (DIGITS * WORKGROUP * 4) as u32;

/// Adds the constants of `radix_sort/digits.wgsl`.
pub(super) fn with_digits(declared: Declared) -> Declared {
    declared.u32("WORKGROUP", WORKGROUP as u32).u32("KEYS", KEYS as u32).u32("DIGITS", DIGITS as u32)
}

impl Variant for RadixSortCount {
    const LABEL: &'static str = "attention.radix_sort_count";
    const FAMILIES: Families = Families::of(Family::RadixSort);

    fn describe(&self) -> Kernel {
        let parts = [
            shader!("tensor/view"),
            shader!("rows/radix_sort/digits"),
            shader!("rows/radix_sort/radix_sort_count"),
        ];
        with_digits(self.declare()).kernel(&parts, WORKGROUP as u32, COUNTS_BYTES)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let [keys, counts] = [DType::U32; 2];
        [None, Some(DType::U32)].into_iter().map(move |before| RadixSortCount { keys, before, counts })
    }
}
