//! Twin of `project_backward.wgsl`.

use super::{matmul, shader};
use crate::kernel::{Binding, Constant, Kernel, Width, params, shared};
use crate::plan::Tiles;
use crate::tensor::DType;

/// What changes the text of a gradient's product, C = A · B.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ProjectBackward {
    pub tiles: Tiles,
    pub a: DType,
    pub b: DType,
    pub c: DType,
    /// Whether A is loaded along its rows' axis, not along the inner one.
    pub a_along_m: bool,
    /// Whether B is loaded along its columns, not along the inner axis.
    pub b_along_n: bool,
    pub a_width: Width,
    pub b_width: Width,
    pub c_width: Width,
    /// How many axes the rows are made of, and the inner axis.
    pub row_levels: u32,
    pub inner_levels: u32,
    /// Whether the product is added to what is there.
    pub accumulates: bool,
}

/// Axes that an axis of a product can be made of.
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

params! {
    pub(crate) struct Params {
        rows: ProductAxis,
        cols: ProductAxis,
        inner: ProductAxis,
        first: [u32; 4],
        step: [u32; 4],
    }
}
shared! { ProductAxis = "ProductAxis" }

impl ProjectBackward {
    pub fn describe(&self) -> Kernel {
        let four = |name, width| Constant::Bool(name, width == Width::Four);
        matmul::describe::<Params>(matmul::MatmulStage {
            tiles: self.tiles,
            a_along_m: self.a_along_m,
            b_along_n: self.b_along_n,
            repairs: false,
            constants: vec![
                four("A_IN_FOURS", self.a_width),
                four("B_IN_FOURS", self.b_width),
                four("C_IN_FOURS", self.c_width),
                Constant::U32("ROW_LEVELS", self.row_levels),
                Constant::U32("INNER_LEVELS", self.inner_levels),
                Constant::Bool("ACCUMULATES", self.accumulates),
            ],
            bindings: vec![
                Binding::read("d_y", self.a, self.a_width),
                Binding::read("other", self.b, self.b_width),
                Binding::write("result", self.c, self.c_width),
            ],
            parts: &[shader!("project_backward")],
        })
    }

    pub fn all() -> impl Iterator<Item = Self> {
        let [one, four] = super::WIDTHS;
        matmul::ALL.into_iter().flat_map(move |tiles| {
            let plain = ProjectBackward {
                tiles,
                a: DType::F32,
                b: DType::F32,
                c: DType::F32,
                a_along_m: false,
                b_along_n: true,
                a_width: four,
                b_width: four,
                c_width: four,
                row_levels: 1,
                inner_levels: 1,
                accumulates: false,
            };
            // Software drivers load A along the inner axis.
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
            let dtypes = super::FLOATS.into_iter().flat_map(move |dtype| {
                let of = move |c, width, accumulates| ProjectBackward {
                    a: dtype,
                    b: dtype,
                    c,
                    a_width: width,
                    b_width: width,
                    c_width: width,
                    accumulates,
                    ..plain
                };
                let fours = super::FLOATS.into_iter().map(move |c| of(c, four, false));
                fours.chain(super::WIDTHS.into_iter().map(move |width| of(dtype, width, true)))
            });
            layouts.chain(dtypes)
        })
    }
}
