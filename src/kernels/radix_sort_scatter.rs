//! Twin of `radix_sort_scatter.wgsl`.

use super::radix_sort_count::{COUNTS_BYTES, WORKGROUP, digits};
use super::shader;
use crate::kernel::{Binding, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text of the last step of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RadixSortScatter {
    /// Whether it is the first pass.
    pub first: bool,
    /// Whether the place of each key is wanted too.
    pub ranks: bool,
}

const RANKS: &str = "fn ranks_put(o: u32, place: u32) { ranks_store(o, place); }\n";
const NO_RANKS: &str = "fn ranks_put(o: u32, place: u32) {}\n";

params! {
    pub(crate) struct Params {
        keys: View,
        before: View,
        order: View,
        ranks: View,
        heads: u32,
        rows: u32,
        length: u32,
        blocks: u32,
        shift: u32,
        digit_mask: u32,
        pad1: u32,
        pad2: u32,
    }
}

impl RadixSortScatter {
    pub fn describe(&self) -> Kernel {
        let (mut bindings, constants, before) = digits(self.first);
        bindings.push(Binding::read("counts", DType::U32, Width::One));
        bindings.push(Binding::write("order", DType::U32, Width::One));
        if self.ranks {
            bindings.push(Binding::write("ranks", DType::U32, Width::One));
        }
        let parts = [
            shader!("tensor/view"),
            shader!("radix_sort/digits"),
            shader!("radix_sort_scatter"),
            before,
            if self.ranks { RANKS } else { NO_RANKS },
        ];
        let kernel = Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32);
        Kernel { workgroup_memory: COUNTS_BYTES, ..kernel }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        let of = |[first, ranks]: [bool; 2]| RadixSortScatter { first, ranks };
        [[true, true], [true, false], [false, true], [false, false]].into_iter().map(of)
    }
}
