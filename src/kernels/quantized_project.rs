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
    }
}

/// What unpacks blocks.
pub(crate) fn format_parts(format: QuantizedFormat) -> [&'static str; 2] {
    let blocks = match format {
        QuantizedFormat::Q4_1 => shader!("quantized/q4_1"),
        QuantizedFormat::Q8_0 => shader!("quantized/q8_0"),
    };
    [shader!("quantized/half"), blocks]
}

impl QuantizedProject {
    pub fn describe(&self) -> Kernel {
        let bindings = vec![
            Binding::read("x", self.x, self.width),
            Binding::read("w", DType::U32, Width::One),
            Binding::write("y", self.y, self.store),
        ];
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
                    bindings,
                    parts: &[shader!("quantized_project"), shader!("quantized/tile"), half, blocks],
                })
            }
            QuantizedTiles::Few { rows, columns, lanes } => {
                constants.extend([Constant::U32("ROWS", rows), Constant::U32("COLUMNS", columns)]);
                let (core, workgroup_memory) = match lanes {
                    1 => (shader!("quantized/few_rows_cpu"), 0),
                    _ => (shader!("quantized/few_rows_gpu"), lanes * columns * rows * 4),
                };
                if lanes > 1 {
                    constants.push(Constant::U32("LANES", lanes));
                }
                let parts = [shader!("tensor/view"), shader!("quantized_project"), core, half, blocks];
                let kernel = Kernel::new::<Params>(&constants, bindings, &parts, lanes * columns);
                Kernel { workgroup_memory, ..kernel }
            }
        }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        let few = |rows, columns, lanes| QuantizedTiles::Few { rows, columns, lanes };
        let [f32, f16, bf16] = super::FLOATS;
        let plain = [few(1, 8, 1), few(8, 32, 1), few(1, 4, 16), few(8, 4, 16)]
            .into_iter()
            .chain(matmul::ALL.map(QuantizedTiles::Many))
            .map(move |tiles| (tiles, f32, f32));
        let tiles = [few(2, 16, 1), few(4, 4, 16), QuantizedTiles::Many(matmul::ALL[2])];
        let others = [[f16, f16], [bf16, bf16], [f16, f32], [bf16, f32], [f32, f16], [f32, bf16]];
        let others = tiles.into_iter().flat_map(move |tiles| others.map(|[x, y]| (tiles, x, y)));
        plain.chain(others).flat_map(|(tiles, x, y)| {
            QuantizedFormat::ALL.into_iter().flat_map(move |format| {
                super::WIDTHS.map(|width| {
                    let few = matches!(tiles, QuantizedTiles::Few { .. });
                    let store = if few { Width::One } else { width };
                    QuantizedProject { format, tiles, x, y, width, store }
                })
            })
        })
    }
}
