//! Twin of `quantized_rows.wgsl`.

use super::quantized_project::format_parts;
use super::shader;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::quantized_format::QuantizedFormat;
use crate::tensor::DType;

/// What changes the text of a look-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct QuantizedRows {
    pub format: QuantizedFormat,
    pub out: DType,
    pub width: Width,
}

/// Invocations of a workgroup.
pub(crate) const WORKGROUP: usize = 64;

params! {
    pub(crate) struct Params {
        ids: View,
        out: View,
        w: u32,
        row_bytes: u32,
        rows: u32,
        fours: u32,
        work: u32,
        step: u32,
        missing: u32,
        pad: u32,
    }
}

impl QuantizedRows {
    pub fn describe(&self) -> Kernel {
        let bindings = vec![
            Binding::read("ids", DType::U32, Width::One),
            Binding::read("w", DType::U32, Width::One),
            Binding::write("out", self.out, self.width),
        ];
        let constants = [
            Constant::U32("WORKGROUP", WORKGROUP as u32),
            Constant::Bool("OUT_IN_FOURS", self.width == Width::Four),
        ];
        let [half, blocks] = format_parts(self.format);
        let parts = [shader!("tensor/view"), shader!("quantized_rows"), half, blocks];
        Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32)
    }

    pub fn all() -> impl Iterator<Item = Self> {
        QuantizedFormat::ALL.into_iter().flat_map(|format| {
            super::FLOATS
                .into_iter()
                .flat_map(move |out| super::WIDTHS.map(|width| QuantizedRows { format, out, width }))
        })
    }
}
