//! The host side of `quantized_project.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::{Declared, FLOATS, Kernel, Variant, WIDTHS, Width, kernel, shader};
use crate::matmul::product;
use crate::matmul::quantized::format::QuantizedFormat;
use crate::matmul::quantized::plan::QuantizedTiles;
use crate::tensor::DType;

kernel! {
    /// A product with quantised weights.
    QuantizedProject, QuantizedProjectCall
    tensors {
        x: One Read F32 width view,
        w: One Read U32 one,
        y: One Write F32 store view,
    }
    numbers {
        /// The first byte of W.
        first_byte: u32,
        /// Bytes of a row of W.
        row_bytes: u32,
        features: u32,
        /// `heads · dim`.
        cols: u32,
        dim: u32,
        /// Rows of one product. All sequences form one product if the strides of x allow it.
        rows: u32,
        /// Rows of one sequence.
        length: u32,
        /// With few rows: the distance from one column of a workgroup to its next column.
        step: u32,
        /// The last word of W.
        last_word: u32,
        /// Always 0.
        none: u32,
    }
    variant {
        format: QuantizedFormat,
        tiles: QuantizedTiles,
        /// Width of x.
        width: Width,
        /// Width of y.
        store: Width,
    }
}

/// The shader texts that unpack blocks.
pub(crate) fn format_parts(format: QuantizedFormat) -> [&'static str; 2] {
    let blocks = match format {
        QuantizedFormat::Q4_1 => shader!("matmul/quantized/q4_1"),
        QuantizedFormat::Q8_0 => shader!("matmul/quantized/q8_0"),
    };
    [shader!("tensor/half"), blocks]
}

impl Variant for QuantizedProject {
    const LABEL: &'static str = "attention.quantized_project";
    const FAMILIES: Families = Families::of(Family::QuantizedProducts);

    fn describe(&self) -> Kernel {
        let [half, blocks] = format_parts(self.format);
        let declared = self.declare().bool("IN_FOURS", self.width == Width::Four);
        match self.tiles {
            QuantizedTiles::Many(tiles) => {
                let product = product::Loop {
                    tiles,
                    a_along_m: false,
                    b_along_n: false,
                    ragged: false,
                    repairs: false,
                };
                let parts = [
                    shader!("matmul/quantized/quantized_project"),
                    shader!("matmul/quantized/tile"),
                    half,
                    blocks,
                ];
                product.around(declared.bool("Y_IN_FOURS", self.store == Width::Four), &parts)
            }
            QuantizedTiles::FewGpu { rows, columns, lanes } => {
                let declared = declared.u32("COLUMNS", columns).u32("LANES", lanes);
                let parts = [shader!("matmul/quantized/few_rows_gpu")];
                self.few(declared, &parts, rows, lanes * columns, lanes * columns)
            }
            QuantizedTiles::FewCpu { rows, columns, lanes, whole_words } => {
                let (parts, together) = match self.format {
                    QuantizedFormat::Q4_1 => (shader!("matmul/quantized/q4_1_parts"), 1),
                    QuantizedFormat::Q8_0 => {
                        (shader!("matmul/quantized/q8_0_parts"), if whole_words { 2 } else { 1 })
                    }
                };
                let declared = declared.u32("COLUMNS", columns).u32("LANES", lanes).u32("TOGETHER", together);
                self.few(declared, &[shader!("matmul/quantized/few_rows_cpu"), parts], rows, lanes, 0)
            }
        }
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let gpu = |rows| QuantizedTiles::FewGpu { rows, columns: 4, lanes: 16 };
        let cpu =
            |rows, columns, lanes, whole_words| QuantizedTiles::FewCpu { rows, columns, lanes, whole_words };
        let [f32, f16, bf16] = FLOATS;
        let plain = [
            gpu(1),
            gpu(8),
            cpu(1, 8, 8, true),
            cpu(1, 2, 8, true),
            cpu(1, 8, 16, true),
            cpu(8, 8, 8, false),
        ]
        .into_iter()
        .chain(product::ALL.map(QuantizedTiles::Many))
        .map(move |tiles| (tiles, f32, f32));
        let tiles = [gpu(4), cpu(2, 8, 8, false), QuantizedTiles::Many(product::ALL[2])];
        let others = [[f16, f16], [bf16, bf16], [f16, f32], [bf16, f32], [f32, f16], [f32, bf16]];
        let others = tiles.into_iter().flat_map(move |tiles| others.map(|[x, y]| (tiles, x, y)));
        plain.chain(others).flat_map(|(tiles, x, y)| {
            QuantizedFormat::ALL.into_iter().flat_map(move |format| {
                WIDTHS.map(|width| {
                    let many = matches!(tiles, QuantizedTiles::Many(_));
                    let store = if many { width } else { Width::One };
                    QuantizedProject { x, w: DType::U32, y, format, tiles, width, store }
                })
            })
        })
    }
}

impl QuantizedProject {
    /// Builds the kernel for few rows, with `sums` sums per row in workgroup memory.
    fn few(
        &self,
        declared: Declared,
        core: &[&'static str],
        rows: u32,
        invocations: u32,
        sums: u32,
    ) -> Kernel {
        let [half, blocks] = format_parts(self.format);
        let mut parts =
            vec![shader!("tensor/view"), shader!("matmul/quantized/quantized_project"), half, blocks];
        parts.extend(core);
        declared.u32("ROWS", rows).kernel(&parts, invocations, sums * rows * 4)
    }
}
