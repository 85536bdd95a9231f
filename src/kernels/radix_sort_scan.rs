//! Twin of `radix_sort_scan.wgsl`.

use super::shader;
use crate::kernel::{Binding, Constant, Kernel, Width, params};
use crate::tensor::DType;

/// The sums of counts; they have one text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RadixSortScan;

const WORKGROUP: u32 = 64;

params! {
    pub(crate) struct Params {
        length: u32,
        heads: u32,
        pad0: u32,
        pad1: u32,
    }
}

impl RadixSortScan {
    pub fn describe(&self) -> Kernel {
        let bindings = vec![Binding::write("counts", DType::U32, Width::One)];
        let constants = [Constant::U32("WORKGROUP", WORKGROUP)];
        let kernel = Kernel::new::<Params>(&constants, bindings, &[shader!("radix_sort_scan")], WORKGROUP);
        Kernel { workgroup_memory: 4 * WORKGROUP, ..kernel }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        std::iter::once(RadixSortScan)
    }
}
