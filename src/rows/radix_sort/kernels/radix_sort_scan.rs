//! The host side of `radix_sort_scan.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The second step of a pass of the radix sort: the sums of counts.
    RadixSortScan, RadixSortScanCall
    tensors {
        counts: One Write U32 one,
    }
    numbers {
        /// Digits times blocks.
        length: u32,
        /// Rows of a batch entry.
        heads: u32,
    }
    variant {}
}

const WORKGROUP: u32 = 64;

impl Variant for RadixSortScan {
    const LABEL: &'static str = "attention.radix_sort_scan";
    const FAMILIES: Families = Families::of(Family::RadixSort);

    fn describe(&self) -> Kernel {
        let parts = [shader!("rows/radix_sort/radix_sort_scan")];
        self.declare().u32("WORKGROUP", WORKGROUP).kernel(&parts, WORKGROUP, 4 * WORKGROUP)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        std::iter::once(RadixSortScan { counts: DType::U32 })
    }
}
