//! The host side of `project.wgsl`.

use crate::device::family::PRODUCTS;
use crate::device::{Families, Family};
use crate::kernel::{
    FLOATS, Kernel, Several, Slots, Variant, WIDTHS, Width, families, kernel, params, shader, shared,
};
use crate::matmul::plan::Tiles;
use crate::matmul::{Activation, activation_parts, product};
use crate::tensor::DType;

/// Projections that one dispatch can hold: queries, keys, values.
pub(crate) const PARTS: usize = Several::MOST;

params! {
    /// The WGSL `ProjectPart`.
    pub(crate) struct ProjectPart {
        x: [u32; 4],
        w: [u32; 4],
        y: [u32; 4],
        x_offset: u32,
        y_offset: u32,
        bias_offset: u32,
        bias_stride: u32,
        features: u32,
        dim: u32,
        heads: u32,
        has_bias: u32,
        x_slot: u32,
        w_slot: u32,
        bias_slot: u32,
        rows: u32,
        length: u32,
        pad0: u32,
        pad1: u32,
        pad2: u32,
    }
}

shared! { [ProjectPart; PARTS] = "array<ProjectPart, 3>" }

kernel! {
    /// Up to three projections.
    Project, ProjectCall
    tensors {
        x: Several Read F32 width,
        w: Several Read F32 width,
        bias: Several Read F32 one,
        y: Placed Write F32 store,
    }
    numbers {
        parts: [ProjectPart; PARTS],
        batches: u32,
        /// 1 if each head is a separate product.
        narrow: u32,
        /// Products per batch entry: the largest number of heads if narrow, else 1.
        z_heads: u32,
    }
    variant {
        tiles: Tiles,
        // The width of x along its features, and of W along features, or along columns if
        // `w_along_columns`.
        width: Width,
        /// True if W is contiguous along its output columns: `[in, out]` in memory.
        w_along_columns: bool,
        store: Width,
        /// The activation after the product and its bias.
        activation: Option<Activation>,
    }
}

impl Variant for Project {
    const LABEL: &'static str = "attention.project";

    fn describe(&self) -> Kernel {
        let product = product::Loop {
            tiles: self.tiles,
            a_along_m: false,
            b_along_n: self.w_along_columns,
            ragged: self.width == Width::One,
            repairs: false,
        };
        let mut declared = self
            .declare()
            .bool("HAS_BIAS", self.bias.count > 0)
            .bool("IN_FOURS", self.width == Width::Four)
            .bool("Y_IN_FOURS", self.store == Width::Four);
        let mut elements = ["f32"; 2];
        // Matrix units load f16 elements without conversion.
        if matches!(self.tiles, Tiles::Matrix { .. }) {
            declared = declared.native("x").native("w");
            elements = [self.x, self.w].map(|slots| slots.dtype.operand());
        }
        let [a, b] = elements;
        let aliases = format!("alias A_ELEMENT = {a};\nalias B_ELEMENT = {b};\n");
        let parts =
            [&[shader!("matmul/projection/project"), aliases.as_str()], activation_parts(self.activation)]
                .concat();
        product.around(declared, &parts)
    }

    fn families(&self) -> Families {
        let family = match self.tiles {
            Tiles::Matrix(_) => Family::MatrixProducts,
            Tiles::Few { .. } => Family::FewRowProducts,
            tiles => PRODUCTS.of(matches!(tiles, Tiles::Cpu { .. })),
        };
        families(&[Some(family)], &[self.x.dtype, self.w.dtype, self.y])
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let slots = |count, dtype| Slots { count, dtype };
        let buffers = [(1, 1, 0), (1, 3, 3), (3, 1, 1)];
        let of = move |tiles, [x, w, bias, y]: [DType; 4]| {
            buffers.into_iter().flat_map(move |(xs, ws, biases)| {
                WIDTHS.into_iter().flat_map(move |width| {
                    [false, true].into_iter().map(move |w_along_columns| Project {
                        tiles,
                        x: slots(xs, x),
                        w: slots(ws, w),
                        bias: slots(biases, bias),
                        y,
                        width,
                        w_along_columns,
                        store: width,
                        activation: None,
                    })
                })
            })
        };
        let [f32, f16, bf16] = FLOATS;
        let plain = product::ALL
            .into_iter()
            .flat_map(move |tiles| FLOATS.into_iter().flat_map(move |d| of(tiles, [d, d, f32, d])));
        let few = product::FEW.into_iter().flat_map(move |(tiles, along)| {
            let all = FLOATS.into_iter().flat_map(move |d| of(tiles, [d, d, f32, d]));
            all.filter(move |kernel| kernel.w_along_columns == along)
        });
        let matrix = product::MATRIX.into_iter().flat_map(move |tiles| of(tiles, [f16; 4]));
        let rounded =
            [[f32; 4], [f16, f32, f16, f32]].into_iter().flat_map(move |d| of(product::MATRIX[2], d));
        let bf16 = of(product::ALL[0], [bf16; 4]);
        let one = slots(1, f32);
        let activated =
            product::ALL.into_iter().chain([product::FEW[0].0, product::MATRIX[1]]).flat_map(move |tiles| {
                Activation::ALL.into_iter().flat_map(move |activation| {
                    WIDTHS.map(|width| Project {
                        tiles,
                        x: one,
                        w: one,
                        bias: one,
                        y: f32,
                        width: if matches!(tiles, Tiles::Matrix(_)) { Width::Four } else { width },
                        w_along_columns: false,
                        store: width,
                        activation: Some(activation),
                    })
                })
            });
        plain.chain(few).chain(matrix).chain(rounded).chain(bf16).chain(activated)
    }
}
