//! What every tiled product has in common: the loop of `matmul/*.wgsl` around a stage's hooks.

use super::plan::{MatrixTiles, Tiles};
use crate::device::Fragment;
use crate::kernel::{Constant, Declared, Kernel, memory_of, shader};

/// The loop of a product, and how it loads.
#[derive(Clone, Copy)]
pub(crate) struct Loop {
    pub tiles: Tiles,
    /// Whether `tile_a4` loads along the rows of A, or along the inner axis; software drivers do
    /// the latter.
    pub a_along_m: bool,
    /// Whether `tile_b4` loads along the columns of B, or along its rows.
    pub b_along_n: bool,
    /// Whether sums that came out NaN are taken again by the stage's `tile_repair`.
    pub repairs: bool,
}

impl Loop {
    /// The kernel of a stage with this loop around these parts.
    pub fn around(&self, stage: Declared, parts: &[&str]) -> Kernel {
        let (mut all, invocations, workgroup_memory) = self.text();
        all.extend(parts);
        stage.with(self.constants()).kernel(&all, invocations, workgroup_memory)
    }

    fn constants(&self) -> Vec<Constant> {
        let mut constants = vec![
            Constant::Bool("A_ALONG_M", self.a_along_m),
            Constant::Bool("B_ALONG_N", self.b_along_n),
            Constant::Bool("REPAIRS", self.repairs),
        ];
        match self.tiles {
            Tiles::Gpu { side, k } => {
                constants.extend([Constant::U32("TILE", side), Constant::U32("TILE_K", k)]);
            }
            Tiles::Cpu { rows, lanes } => {
                constants.extend([Constant::U32("ROWS", rows), Constant::U32("LANES", lanes)]);
            }
            Tiles::Matrix(matrix) => constants.extend([
                Constant::Fragments(matrix.fragment),
                Constant::U32("TILE", matrix.side),
                Constant::U32("TILE_K", MatrixTiles::K),
                Constant::U32("WORKGROUP", matrix.lanes),
                Constant::U32("LEAVING", matrix.leaving()),
            ]),
        }
        constants
    }

    /// Its parts, the invocations of a workgroup, and bytes of workgroup memory.
    fn text<'a>(&self) -> (Vec<&'a str>, u32, u32) {
        let view = shader!("tensor/view");
        match self.tiles {
            // Of A and of B: k rows, and eight vectors that their shifts take.
            Tiles::Gpu { side, k } => (vec![view, shader!("matmul/gpu")], 256, 2 * (side * k * 4 + 8 * 16)),
            Tiles::Cpu { lanes, .. } => (vec![view, shader!("matmul/cpu")], lanes, 0),
            Tiles::Matrix(matrix) => {
                let parts = vec![view, shader!("matmul/matrix"), memory_of(matrix.fragment)];
                (parts, matrix.lanes, matrix.workgroup_memory())
            }
        }
    }
}

/// The tiles worth checking every kernel with.
pub(crate) const ALL: [Tiles; 4] = [
    Tiles::Cpu { rows: 1, lanes: 8 },
    Tiles::Cpu { rows: 32, lanes: 32 },
    Tiles::Gpu { side: 64, k: 16 },
    Tiles::Gpu { side: 128, k: 8 },
];

/// Those on matrix units.
pub(crate) const MATRIX: [Tiles; 4] = [
    Tiles::Matrix(MatrixTiles { fragment: Fragment::Eight, side: 64, lanes: 128 }),
    Tiles::Matrix(MatrixTiles { fragment: Fragment::Sixteen, side: 64, lanes: 128 }),
    Tiles::Matrix(MatrixTiles { fragment: Fragment::Sixteen, side: 128, lanes: 256 }),
    Tiles::Matrix(MatrixTiles { fragment: Fragment::Sixteen, side: 64, lanes: 256 }),
];
