//! The host side of `project_backward.wgsl`.

use crate::device::Families;
use crate::device::family::PRODUCT_GRADIENTS;
use crate::kernel::{FLOATS, Kernel, Variant, WIDTHS, Width, families, kernel, params, shader, shared};
use crate::matmul::plan::Tiles;
use crate::matmul::product;
use crate::tensor::DType;

/// The largest number of tensor axes that form one axis of a product.
pub(crate) const LEVELS: usize = 3;

params! {
    /// The WGSL `ProductAxis`.
    #[derive(Default)]
    pub(crate) struct ProductAxis {
        lengths: [u32; 4],
        left: [u32; 4],
        right: [u32; 4],
    }
}

shared! { ProductAxis = "ProductAxis" }

kernel! {
    /// A product C = A · B that computes a gradient.
    ProjectBackward, ProjectBackwardCall
    tensors {
        d_y: One Read F32 a_width,
        other: One Read F32 b_width,
        result: One Write F32 c_width,
    }
    numbers {
        /// The rows, in A and C.
        rows: ProductAxis,
        /// The columns, in B and C.
        cols: ProductAxis,
        /// The inner axis, in A and B.
        inner: ProductAxis,
        /// The first elements of A, B and C.
        first: [u32; 4],
        /// The steps from one product to the next in A, B and C.
        step: [u32; 4],
    }
    variant {
        tiles: Tiles,
        /// True if A is loaded along the axis of its rows, false if along the inner axis.
        a_along_m: bool,
        /// True if B is loaded along its columns, false if along the inner axis.
        b_along_n: bool,
        a_width: Width,
        b_width: Width,
        c_width: Width,
        /// Tensor axes that form the rows.
        row_levels: u32,
        /// Tensor axes that form the inner axis.
        inner_levels: u32,
        /// True if the product is added to the values in `result`.
        accumulates: bool,
    }
}

impl Variant for ProjectBackward {
    const LABEL: &'static str = "attention.project_backward";

    fn describe(&self) -> Kernel {
        let product = product::Loop {
            tiles: self.tiles,
            a_along_m: self.a_along_m,
            b_along_n: self.b_along_n,
            ragged: true,
            repairs: false,
        };
        let declared = self
            .declare()
            .bool("A_IN_FOURS", self.a_width == Width::Four)
            .bool("B_IN_FOURS", self.b_width == Width::Four)
            .bool("C_IN_FOURS", self.c_width == Width::Four)
            .u32("ROW_LEVELS", self.row_levels)
            .u32("INNER_LEVELS", self.inner_levels)
            .bool("ACCUMULATES", self.accumulates);
        product.around(declared, &[shader!("matmul/projection/project_backward")])
    }

    fn families(&self) -> Families {
        let family = PRODUCT_GRADIENTS.of(matches!(self.tiles, Tiles::Cpu { .. }));
        families(&[Some(family)], &[self.d_y, self.other, self.result])
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let [one, four] = WIDTHS;
        product::ALL.into_iter().flat_map(move |tiles| {
            let plain = ProjectBackward {
                tiles,
                d_y: DType::F32,
                other: DType::F32,
                result: DType::F32,
                a_along_m: false,
                b_along_n: true,
                a_width: four,
                b_width: four,
                c_width: four,
                row_levels: 1,
                inner_levels: 1,
                accumulates: false,
            };
            // Software drivers always load A along the inner axis.
            let along = [false, true].into_iter().filter(move |m| !m || matches!(tiles, Tiles::Gpu { .. }));
            let along = along.flat_map(|a| [[a, false], [a, true]]);
            let layouts = along.flat_map(move |[a_along_m, b_along_n]| {
                let of = move |[a_width, b_width, c_width]: [Width; 3],
                               [row_levels, inner_levels]: [u32; 2]| {
                    ProjectBackward {
                        a_along_m,
                        b_along_n,
                        a_width,
                        b_width,
                        c_width,
                        row_levels,
                        inner_levels,
                        accumulates: b_along_n,
                        ..plain
                    }
                };
                let widths = [[four; 3], [one; 3], [four, one, one], [one, four, one]];
                let levels = [[2, 1], [1, 2], [2, 2], [1, 3]];
                let widths = widths.into_iter().map(move |widths| of(widths, [1, 1]));
                widths.chain(levels.into_iter().map(move |levels| of([four; 3], levels)))
            });
            let dtypes = FLOATS.into_iter().flat_map(move |dtype| {
                let of = move |c, width, accumulates| ProjectBackward {
                    d_y: dtype,
                    other: dtype,
                    result: c,
                    a_width: width,
                    b_width: width,
                    c_width: width,
                    accumulates,
                    ..plain
                };
                let fours = FLOATS.into_iter().map(move |c| of(c, four, false));
                fours.chain(WIDTHS.into_iter().map(move |width| of(dtype, width, true)))
            });
            layouts.chain(dtypes)
        })
    }
}
