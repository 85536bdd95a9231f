//! Twin of `quantized_project.wgsl`.

use super::{matmul, shader};
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::plan::QuantizedTiles;
use crate::quantized_format::QuantizedFormat;
use crate::tensor::DType;

/// What changes the text of a product with quantised weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct QuantizedProject {
    pub format: QuantizedFormat,
    pub tiles: QuantizedTiles,
    pub x: DType,
    pub y: DType,
    /// Whether x loads in fours.
    pub width: Width,
    pub store: Width,
}

params! {
    pub(crate) struct Params {
        x: View,
        y: View,
        w: u32,
        row_bytes: u32,
        features: u32,
        cols: u32,
        dim: u32,
        rows: u32,
        length: u32,
        step: u32,
        last_word: u32,
        none: u32,
        pad: [u32; 2],
    }
}

/// What unpacks blocks.
pub(crate) fn format_parts(format: QuantizedFormat) -> [&'static str; 2] {
    let blocks = match format {
        QuantizedFormat::Q4_1 => shader!("quantized/q4_1"),
        QuantizedFormat::Q8_0 => shader!("quantized/q8_0"),
    };
    [shader!("tensor/half"), blocks]
}

impl QuantizedProject {
    pub fn describe(&self) -> Kernel {
        let [half, blocks] = format_parts(self.format);
        let mut constants = vec![Constant::Bool("IN_FOURS", self.width == Width::Four)];
        match self.tiles {
            QuantizedTiles::Many(tiles) => {
                constants.push(Constant::Bool("Y_IN_FOURS", self.store == Width::Four));
                matmul::describe::<Params>(matmul::MatmulStage {
                    tiles,
                    a_along_m: false,
                    b_along_n: false,
                    repairs: false,
                    constants,
                    bindings: self.bindings(),
                    parts: &[shader!("quantized_project"), shader!("quantized/tile"), half, blocks],
                })
            }
            QuantizedTiles::FewGpu { rows, columns, lanes } => {
                constants.extend([Constant::U32("COLUMNS", columns), Constant::U32("LANES", lanes)]);
                self.few(
                    &[shader!("quantized/few_rows_gpu")],
                    rows,
                    lanes * columns,
                    lanes * columns,
                    constants,
                )
            }
            QuantizedTiles::FewCpu { rows, columns, lanes, whole_words } => {
                let (parts, together) = match self.format {
                    QuantizedFormat::Q4_1 => (shader!("quantized/q4_1_parts"), 1),
                    QuantizedFormat::Q8_0 => {
                        (shader!("quantized/q8_0_parts"), if whole_words { 2 } else { 1 })
                    }
                };
                constants.extend([Constant::U32("COLUMNS", columns), Constant::U32("LANES", lanes)]);
                constants.push(Constant::U32("TOGETHER", together));
                self.few(&[shader!("quantized/few_rows_cpu"), parts], rows, lanes, 0, constants)
            }
        }
    }

    /// The kernel of few rows, with so many sums of a row in workgroup memory.
    fn few(
        &self,
        core: &[&'static str],
        rows: u32,
        invocations: u32,
        sums: u32,
        mut constants: Vec<Constant>,
    ) -> Kernel {
        constants.push(Constant::U32("ROWS", rows));
        let [half, blocks] = format_parts(self.format);
        let mut parts = vec![shader!("tensor/view"), shader!("quantized_project"), half, blocks];
        parts.extend(core);
        let kernel = Kernel::new::<Params>(&constants, self.bindings(), &parts, invocations);
        Kernel { workgroup_memory: sums * rows * 4, ..kernel }
    }

    fn bindings(&self) -> Vec<Binding> {
        vec![
            Binding::read("x", self.x, self.width),
            Binding::read("w", DType::U32, Width::One),
            Binding::write("y", self.y, self.store),
        ]
    }

    pub fn all() -> impl Iterator<Item = Self> {
        let gpu = |rows| QuantizedTiles::FewGpu { rows, columns: 4, lanes: 16 };
        let cpu =
            |rows, columns, lanes, whole_words| QuantizedTiles::FewCpu { rows, columns, lanes, whole_words };
        let [f32, f16, bf16] = super::FLOATS;
        let plain = [
            gpu(1),
            gpu(8),
            cpu(1, 8, 8, true),
            cpu(1, 2, 8, true),
            cpu(1, 8, 16, true),
            cpu(8, 8, 8, false),
        ]
        .into_iter()
        .chain(matmul::ALL.map(QuantizedTiles::Many))
        .map(move |tiles| (tiles, f32, f32));
        let tiles = [gpu(4), cpu(2, 8, 8, false), QuantizedTiles::Many(matmul::ALL[2])];
        let others = [[f16, f16], [bf16, bf16], [f16, f32], [bf16, f32], [f32, f16], [f32, bf16]];
        let others = tiles.into_iter().flat_map(move |tiles| others.map(|[x, y]| (tiles, x, y)));
        plain.chain(others).flat_map(|(tiles, x, y)| {
            QuantizedFormat::ALL.into_iter().flat_map(move |format| {
                super::WIDTHS.map(|width| {
                    let many = matches!(tiles, QuantizedTiles::Many(_));
                    let store = if many { width } else { Width::One };
                    QuantizedProject { format, tiles, x, y, width, store }
                })
            })
        })
    }
}
