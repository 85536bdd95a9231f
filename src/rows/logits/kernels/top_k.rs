//! The host side of `top_k.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::{FLOATS, FLOATS_OR_NONE, Kernel, Variant, WIDTHS, Width, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The `k` largest elements of each row.
    TopK, TopKCall
    tensors {
        x: One Read F32 width view,
        values: Opt Write F32 one view,
        indices: One Write U32 one view,
    }
    numbers {
        columns: u32,
        k: u32,
        heads: u32,
        length: u32,
        rows: u32,
        /// Workgroups that share the rows.
        step: u32,
    }
    variant {
        /// Invocations that share a row.
        lanes: u32,
        width: Width,
    }
}

/// The number of invocations that share a row of `columns` columns. Software drivers need few.
pub(crate) fn lanes(columns: usize, cpu: bool) -> u32 {
    if cpu { 8 } else { columns.div_ceil(4).next_power_of_two().clamp(32, 256) as u32 }
}

impl Variant for TopK {
    const LABEL: &'static str = "attention.top_k";
    const FAMILIES: Families = Families::of(Family::TopK);

    fn describe(&self) -> Kernel {
        let parts = [
            shader!("tensor/view"),
            shader!("rows/logits/place"),
            shader!("rows/logits/sort_key"),
            shader!("rows/logits/top_k"),
        ];
        self.declare().u32("LANES", self.lanes).kernel(&parts, self.lanes, 8 * self.lanes)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let indices = DType::U32;
        [8, 32, 256].into_iter().flat_map(move |lanes| {
            FLOATS.into_iter().flat_map(move |x| {
                FLOATS_OR_NONE
                    .into_iter()
                    .flat_map(move |values| WIDTHS.map(|width| TopK { x, values, indices, lanes, width }))
            })
        })
    }
}
