//! The host side of `top_k_select.wgsl`, and the constants that the steps share.

use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, WIDTHS, Width, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The first step: the `k` largest elements of each row, in any order.
    TopKSelect, TopKSelectCall
    tensors {
        x: One Read F32 width view,
        indices: Opt Write U32 one view,
        pairs: Opt Write U32 one,
    }
    numbers {
        columns: u32,
        k: u32,
        heads: u32,
        length: u32,
        /// The largest key that is ignored.
        least: u32,
    }
    variant {
        lanes: u32,
        width: Width,
    }
}

/// The index in a result that has no element.
pub(crate) const NONE: u32 = u32::MAX;
/// The key of −∞. No key is smaller.
pub(crate) const NEG_INF_KEY: u32 = !0xff80_0000;

const BINS: u32 = 1 << 11;
const CANDIDATES: u32 = 512;
/// The first two groups of 11 bits.
const HIGH: u32 = !0 << 10;

/// The invocations that share a row. Software drivers need few.
pub(crate) const fn lanes(cpu: bool) -> u32 {
    if cpu { 8 } else { 256 }
}

impl Variant for TopKSelect {
    const LABEL: &'static str = "attention.top_k_select";
    const FAMILIES: Families = Families::of(Family::TopK);

    fn describe(&self) -> Kernel {
        let parts = [
            shader!("tensor/view"),
            shader!("rows/logits/place"),
            shader!("rows/logits/sort_key"),
            shader!("rows/logits/top_k_select"),
        ];
        let memory = 4 * BINS + 4 * self.lanes + 8 * CANDIDATES + 16 + 16;
        self.declare()
            .u32("LANES", self.lanes)
            .u32("BINS", BINS)
            .u32("CANDIDATES", CANDIDATES)
            .u32("HIGH", HIGH)
            .u32("NONE", NONE)
            .kernel(&parts, self.lanes, memory)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let some = Some(DType::U32);
        [false, true].into_iter().flat_map(move |cpu| {
            FLOATS.into_iter().flat_map(move |x| {
                [(some, None), (None, some)].into_iter().flat_map(move |(indices, pairs)| {
                    WIDTHS.map(|width| TopKSelect { x, indices, pairs, lanes: lanes(cpu), width })
                })
            })
        })
    }
}
