//! What every tiled product has in common: the loop of `matmul/*.wgsl` around a stage's hooks.

use super::shader;
use crate::device::Fragment;
use crate::kernel::{Binding, Constant, Kernel, Table};
use crate::plan::{MatrixTiles, Tiles};

/// A tiled kernel's own half: the loop is the same for all.
pub(crate) struct MatmulStage<'a> {
    pub tiles: Tiles,
    /// Whether `tile_a4` loads along the rows of A, or along the inner axis; software drivers do the latter.
    pub a_along_m: bool,
    /// Whether `tile_b4` loads along the columns of B, or along its rows.
    pub b_along_n: bool,
    /// Whether sums that came out NaN are taken again by the stage's `tile_repair`.
    pub repairs: bool,
    pub constants: Vec<Constant>,
    pub bindings: Vec<Binding>,
    pub parts: &'a [&'a str],
}

/// The kernel of a stage with parameters `P`.
pub(crate) fn describe<P: Table>(stage: MatmulStage) -> Kernel {
    let MatmulStage { tiles, a_along_m, b_along_n, repairs, mut constants, bindings, parts } = stage;
    constants.push(Constant::Bool("A_ALONG_M", a_along_m));
    constants.push(Constant::Bool("B_ALONG_N", b_along_n));
    constants.push(Constant::Bool("REPAIRS", repairs));
    let (core, invocations, workgroup_memory) = match tiles {
        Tiles::Gpu { side, k } => {
            constants.extend([Constant::U32("TILE", side), Constant::U32("TILE_K", k)]);
            // Of A and of B: k rows, and eight vectors that their shifts take.
            (shader!("matmul/gpu"), 256, 2 * (side * k * 4 + 8 * 16))
        }
        Tiles::Cpu { rows, lanes } => {
            constants.extend([Constant::U32("ROWS", rows), Constant::U32("LANES", lanes)]);
            (shader!("matmul/cpu"), lanes, 0)
        }
        Tiles::Matrix(matrix) => {
            constants.extend([
                Constant::Fragments(matrix.fragment),
                Constant::U32("TILE", matrix.side),
                Constant::U32("TILE_K", MatrixTiles::K),
                Constant::U32("WORKGROUP", matrix.lanes),
                Constant::U32("LEAVING", matrix.leaving()),
            ]);
            (shader!("matmul/matrix"), matrix.lanes, matrix.workgroup_memory())
        }
    };
    let memory = match tiles {
        Tiles::Matrix(matrix) => Some(super::memory_of(matrix.fragment)),
        _ => None,
    };
    let mut all = vec![shader!("tensor/view"), core];
    all.extend(memory);
    all.extend(parts);
    Kernel { workgroup_memory, ..Kernel::new::<P>(&constants, bindings, &all, invocations) }
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
