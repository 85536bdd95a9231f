//! The loop that all tiled products share: `matmul/*.wgsl` around the functions of a stage.

use super::plan::{MatrixTiles, Tiles};
use crate::device::Fragment;
use crate::kernel::{Constant, Declared, Kernel, memory_of, shader};

/// The loop of a product, and the direction of its loads.
#[derive(Clone, Copy)]
pub(crate) struct Loop {
    pub tiles: Tiles,
    /// True if `tile_a4` loads along the rows of A, false if it loads along the inner axis. It is
    /// false for software drivers.
    pub a_along_m: bool,
    /// True if `tile_b4` loads along the columns of B, false if it loads along its rows.
    pub b_along_n: bool,
    /// True if the inner range may begin or end within a vector of four. It costs software drivers
    /// a second copy of the loop.
    pub ragged: bool,
    /// True if the stage's `tile_repair` recomputes sums that are NaN.
    pub repairs: bool,
}

impl Loop {
    /// Builds the kernel of a stage: this loop and the parts of the stage.
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
                constants.extend([
                    Constant::U32("ROWS", rows),
                    Constant::U32("LANES", lanes),
                    Constant::Bool("RAGGED", self.ragged),
                ]);
            }
            Tiles::Few { rows, fours, lanes } => constants.extend([
                Constant::U32("ROWS", rows),
                Constant::U32("FOURS", fours),
                Constant::U32("LANES", lanes),
            ]),
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

    /// The texts of the loop, the invocations of a workgroup, and the bytes of workgroup memory.
    fn text<'a>(&self) -> (Vec<&'a str>, u32, u32) {
        let view = shader!("tensor/view");
        match self.tiles {
            // Tiles of A and of B: `k` rows each, and eight vectors for the shifts of rows.
            Tiles::Gpu { side, k } => (vec![view, shader!("matmul/gpu")], 256, 2 * (side * k * 4 + 8 * 16)),
            Tiles::Cpu { lanes, .. } => (vec![view, shader!("matmul/cpu")], lanes, 0),
            Tiles::Few { rows, fours, lanes } => {
                (vec![view, shader!("matmul/few_rows")], fours * lanes, 16 * rows * fours * lanes)
            }
            Tiles::Matrix(matrix) => {
                let parts = vec![view, shader!("matmul/matrix"), memory_of(matrix.fragment)];
                (parts, matrix.lanes, matrix.workgroup_memory())
            }
        }
    }
}

/// The tiles with which tests check every kernel.
pub(crate) const ALL: [Tiles; 4] = [
    Tiles::Cpu { rows: 1, lanes: 8 },
    Tiles::Cpu { rows: 32, lanes: 32 },
    Tiles::Gpu { side: 64, k: 16 },
    Tiles::Gpu { side: 128, k: 8 },
];

/// The tiles for few rows with which tests check every kernel, and whether their weights load along
/// columns.
pub(crate) const FEW: [(Tiles, bool); 4] = [
    (Tiles::Few { rows: 1, fours: 2, lanes: 32 }, false),
    (Tiles::Few { rows: 8, fours: 2, lanes: 32 }, false),
    (Tiles::Few { rows: 1, fours: 4, lanes: 16 }, true),
    (Tiles::Few { rows: 8, fours: 4, lanes: 16 }, true),
];

/// The tiles on matrix units with which tests check every kernel.
pub(crate) const MATRIX: [Tiles; 4] = [
    Tiles::Matrix(MatrixTiles { fragment: Fragment::Eight, side: 64, lanes: 128 }),
    Tiles::Matrix(MatrixTiles { fragment: Fragment::Sixteen, side: 64, lanes: 128 }),
    Tiles::Matrix(MatrixTiles { fragment: Fragment::Sixteen, side: 128, lanes: 256 }),
    Tiles::Matrix(MatrixTiles { fragment: Fragment::Sixteen, side: 64, lanes: 256 }),
];
