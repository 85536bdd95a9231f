//! The host side of `quantized_rows.wgsl`.

use super::quantized_project::format_parts;
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, WIDTHS, Width, kernel, shader};
use crate::matmul::quantized::format::QuantizedFormat;
use crate::tensor::DType;

kernel! {
    /// Looks up rows of a quantised table.
    QuantizedRows, QuantizedRowsCall
    tensors {
        ids: One Read U32 one view,
        w: One Read U32 one,
        out: One Write F32 width view,
    }
    numbers {
        /// The first byte of W.
        first_byte: u32,
        row_bytes: u32,
        /// Rows of the table.
        rows: u32,
        /// Groups of four channels in a row.
        fours: u32,
        /// Groups of four channels in all rows of a sequence.
        work: u32,
        /// The number of invocations that share this work.
        step: u32,
        /// The bits of NaN.
        missing: u32,
    }
    variant {
        format: QuantizedFormat,
        width: Width,
    }
}

/// Invocations of a workgroup.
pub(crate) const WORKGROUP: usize = 64;

impl Variant for QuantizedRows {
    const LABEL: &'static str = "attention.quantized_rows";
    const FAMILIES: Families = Families::of(Family::QuantizedProducts);

    fn describe(&self) -> Kernel {
        let [half, blocks] = format_parts(self.format);
        let parts = [shader!("tensor/view"), shader!("matmul/quantized/quantized_rows"), half, blocks];
        self.declare()
            .u32("WORKGROUP", WORKGROUP as u32)
            .bool("OUT_IN_FOURS", self.width == Width::Four)
            .kernel(&parts, WORKGROUP as u32, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let [ids, w] = [DType::U32; 2];
        QuantizedFormat::ALL.into_iter().flat_map(move |format| {
            FLOATS
                .into_iter()
                .flat_map(move |out| WIDTHS.map(|width| QuantizedRows { ids, w, out, format, width }))
        })
    }
}
