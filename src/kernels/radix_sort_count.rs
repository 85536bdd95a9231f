//! Twin of `radix_sort_count.wgsl`, and what the three steps of a pass share.

use super::shader;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text of the count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RadixSortCount {
    /// Whether it is the first pass.
    pub first: bool,
}

/// Bits of a digit.
pub(crate) const BITS: u32 = 4;
/// Digits there are.
pub(crate) const DIGITS: usize = 1 << BITS;
/// Invocations of a workgroup, and keys of each.
pub(super) const WORKGROUP: usize = 64;
const KEYS: usize = 16;
/// Keys of a workgroup.
pub(crate) const BLOCK: usize = WORKGROUP * KEYS;
/// Bytes of the counts of a workgroup.
pub(super) const COUNTS_BYTES: u32 = (DIGITS * WORKGROUP * 4) as u32;

params! {
    pub(crate) struct Params {
        keys: View,
        before: View,
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

/// Keys and the order before, with the constants of `radix_sort/digits.wgsl`.
pub(super) fn digits(first: bool) -> (Vec<Binding>, Vec<Constant>, &'static str) {
    let mut bindings = vec![Binding::read("keys", DType::U32, Width::One)];
    let before = if first {
        "fn before_at(o: u32) -> u32 { return o; }\n"
    } else {
        bindings.push(Binding::read("before", DType::U32, Width::One));
        ""
    };
    let constants = vec![
        Constant::U32("WORKGROUP", WORKGROUP as u32),
        Constant::U32("KEYS", KEYS as u32),
        Constant::U32("DIGITS", DIGITS as u32),
        Constant::Bool("FIRST", first),
    ];
    (bindings, constants, before)
}

impl RadixSortCount {
    pub fn describe(&self) -> Kernel {
        let (mut bindings, constants, before) = digits(self.first);
        bindings.push(Binding::write("counts", DType::U32, Width::One));
        let parts =
            [shader!("tensor/view"), shader!("radix_sort/digits"), shader!("radix_sort_count"), before];
        let kernel = Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32);
        Kernel { workgroup_memory: COUNTS_BYTES, ..kernel }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        [true, false].into_iter().map(|first| RadixSortCount { first })
    }
}
