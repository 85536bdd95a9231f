//! Which tiles a product is computed with: pure functions of its size and the device.

use crate::error::Error;
use crate::problem::Shape;
use crate::tensor::DeviceFacts;

/// Which class of kernels to use. Both stay inside the WebGPU default limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Tiling {
    /// By the device: `Uniform` where wgpu reports `DeviceType::Cpu`, `Workgroup` elsewhere.
    #[default]
    Auto,
    /// Tiles staged in workgroup memory, sums in registers: for GPUs.
    Workgroup,
    /// Many rows per invocation, no workgroup memory, no barriers: for software drivers.
    Uniform,
}

/// Which sequence of kernels computes attention. All give the same answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Path {
    /// `Fused`, unless attention weights are asked for or the mask has more tensors than the device binds beside
    /// q, k, v and out; then `Staged`.
    #[default]
    Auto,
    /// Scores, softmax, weighted sum, with the score matrix in memory.
    Staged,
    /// One pass with a running softmax and no score matrix.
    Fused,
}

/// What a configuration says about how, not what.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Tuning {
    pub tiling: Tiling,
    pub path: Path,
    /// Most floating-point operations of one dispatch.
    pub work: u64,
}

impl Default for Tuning {
    /// 137 GFLOP: a quarter of a second where attention runs at half a TFLOP/s; watchdogs wait for two or more.
    fn default() -> Self {
        Tuning { tiling: Tiling::Auto, path: Path::Auto, work: 1 << 37 }
    }
}

/// The tile of a product, fixed when its shader is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Tiles {
    /// `side × side` of the result per workgroup of 256, `k` of the inner axis per step.
    Workgroup { side: u32, k: u32 },
    /// `rows` × `4 · lanes` of the result per workgroup of `lanes`.
    Uniform { rows: u32, lanes: u32 },
}

/// A product of `rows × inner` by `inner × cols`, `batch` times.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product {
    pub batch: usize,
    pub rows: usize,
    pub cols: usize,
}

impl Tiling {
    fn uniform(self, device: &DeviceFacts) -> bool {
        match self {
            Tiling::Auto => device.software,
            Tiling::Workgroup => false,
            Tiling::Uniform => true,
        }
    }
}

/// Tiles by sums per invocation: 4 × 4 in 48 to 60 registers on AMD, 8 × 8 in 96 to 120. Per k the first
/// loads two vectors from workgroup memory for 16 multiply-adds, all that memory can do where it does not
/// broadcast; the second four for 64, and half as many bytes from global memory.
const SMALL: Tiles = Tiles::Workgroup { side: 64, k: 16 };
const LARGE: Tiles = Tiles::Workgroup { side: 128, k: 8 };

/// Workgroups that keep a large GPU busy: two of `LARGE` fill the registers of each of about a hundred
/// cores. With fewer, four times as many small ones do more than reuse does.
const FULL: usize = 256;

/// Tiles of a product. Large tiles reuse what they load more often; small ones give more workgroups, and
/// compute less beyond the edges.
pub(crate) fn tiles(product: Product, tiling: Tiling, device: &DeviceFacts) -> Tiles {
    let Product { batch, rows, cols } = product;
    if tiling.uniform(device) {
        let lanes = cols.div_ceil(4).next_power_of_two().clamp(8, 32) as u32;
        let rows = rows.next_power_of_two().min(32) as u32;
        return Tiles::Uniform { rows, lanes };
    }
    let count = |side: usize| rows.div_ceil(side).saturating_mul(cols.div_ceil(side));
    let (small, large) = (count(64), count(128));
    // Reuse pays for a quarter more work beyond the edges, not for a third (192 columns) or twice.
    if large.saturating_mul(batch) >= FULL && large * 16 <= small * 5 { LARGE } else { SMALL }
}

/// Workgroups for a product, `[rows, columns, batch]`: neighbours share their part of B.
pub(crate) fn grid(tiles: Tiles, product: Product) -> [usize; 3] {
    let (m, n) = match tiles {
        Tiles::Workgroup { side, .. } => (side, side),
        Tiles::Uniform { rows, lanes } => (rows, lanes * 4),
    };
    [product.rows.div_ceil(m as usize), product.cols.div_ceil(n as usize), product.batch]
}

/// How the rows of a softmax are shared out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Rows {
    /// Invocations of a workgroup.
    pub workgroup: u32,
    /// Invocations that share a row: 1 or all.
    pub lanes: u32,
}

/// Software drivers get one row per invocation; GPUs one per workgroup.
pub(crate) fn rows(kv_len: usize, tiling: Tiling, device: &DeviceFacts) -> Rows {
    if tiling.uniform(device) {
        return Rows { workgroup: 8, lanes: 1 };
    }
    let lanes = kv_len.div_ceil(4).next_power_of_two().clamp(32, 256) as u32;
    Rows { workgroup: lanes, lanes }
}

/// The tiles of the fused kernel, fixed when its shader is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum FusedTiles {
    /// A packed row per invocation.
    Uniform { lanes: u32, slice: u32 },
}

impl FusedTiles {
    /// The tiles worth checking every mask with.
    pub const ALL: [FusedTiles; 1] = [FusedTiles::Uniform { lanes: 8, slice: 64 }];

    /// Packed rows of a workgroup.
    fn rows(self) -> usize {
        match self {
            FusedTiles::Uniform { lanes, .. } => lanes as usize,
        }
    }

    /// Channels of out that a workgroup computes.
    fn slice(self) -> usize {
        match self {
            FusedTiles::Uniform { slice, .. } => slice as usize,
        }
    }
}

/// How a problem is computed by the fused kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FusedPlan {
    pub tiles: FusedTiles,
    /// Workgroups: row tiles, slices of out, batch · kv_heads.
    pub grid: [usize; 3],
    /// Most floating-point operations of a workgroup.
    pub work: f64,
}

/// Tiles, workgroups and work of the fused kernel.
pub(crate) fn fused(shape: &Shape, _tiling: Tiling, _device: &DeviceFacts) -> FusedPlan {
    let slice = shape.value_dim.next_power_of_two().clamp(4, 64) as u32;
    let tiles = FusedTiles::Uniform { lanes: 8, slice };
    let rows = shape.q_len * shape.group();
    let grid =
        [rows.div_ceil(tiles.rows()), shape.value_dim.div_ceil(tiles.slice()), shape.batch * shape.kv_heads];
    let pairs = tiles.rows() as f64 * shape.kv_len as f64;
    FusedPlan { tiles, grid, work: 2.0 * pairs * (shape.head_dim + tiles.slice()) as f64 }
}

/// A part of a grid: its first workgroup and how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub first: [u32; 3],
    pub grid: [u32; 3],
}

/// More dispatches than this are no plan: the caller's limit is too small for the problem.
const MOST_PIECES: usize = 1 << 16;

/// Cuts a grid so that every piece has at most `limit` operations, `work` per workgroup, and fits the device;
/// a workgroup is not cut. Pieces are whole layers of the last axis if those fit, else runs along the first.
pub(crate) fn pieces(
    grid: [usize; 3],
    work: f64,
    limit: u64,
    device: &DeviceFacts,
) -> Result<Vec<Piece>, Error> {
    let most = device.max_workgroups as usize;
    let workgroups = ((limit as f64 / work.max(1.0)) as usize).max(1);
    let [x, y, z] = grid;
    // Slices of out are few.
    let step_y = y.min(workgroups).min(most);
    let step_x = x.min((workgroups / step_y).max(1)).min(most);
    let step_z = if step_x == x && step_y == y { z.min((workgroups / (x * y)).max(1)).min(most) } else { 1 };
    let count = x.div_ceil(step_x).saturating_mul(y.div_ceil(step_y)).saturating_mul(z.div_ceil(step_z));
    if count > MOST_PIECES {
        let needed = count as u64;
        return Err(Error::Limit {
            what: "dispatches of a call",
            needed,
            limit: MOST_PIECES as u64,
            name: "Config::work_limit",
        });
    }
    let cuts =
        |n: usize, step: usize| (0..n).step_by(step).map(move |at| (at as u32, step.min(n - at) as u32));
    let mut pieces = Vec::with_capacity(count);
    for (fz, nz) in cuts(z, step_z) {
        for (fy, ny) in cuts(y, step_y) {
            pieces.extend(cuts(x, step_x).map(|(fx, nx)| Piece { first: [fx, fy, fz], grid: [nx, ny, nz] }));
        }
    }
    Ok(pieces)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: DeviceFacts = DeviceFacts {
        f16: true,
        software: false,
        max_binding_bytes: 1 << 30,
        offset_alignment: 256,
        max_storage_buffers: 8,
        max_workgroups: 65535,
        max_invocations: 256,
        workgroup_memory: 16384,
    };

    #[test]
    fn pieces_cover_the_grid_once_and_keep_the_limit() {
        for grid in [[1, 1, 1], [7, 1, 5], [5, 3, 4], [70_000, 2, 1], [3, 1, 70_000], [1000, 2, 33]] {
            for limit in [1, 10, 64, 1000, 1 << 37] {
                let Ok(pieces) = pieces(grid, 10.0, limit, &DEVICE) else {
                    assert!(grid.iter().product::<usize>() > MOST_PIECES && limit < 100);
                    continue;
                };
                let mut seen = std::collections::HashSet::new();
                let mut covered = 0;
                for piece in &pieces {
                    let count = piece.grid.iter().map(|n| *n as usize).product::<usize>();
                    assert!(count == 1 || count as u64 * 10 <= limit, "{grid:?} {limit} {piece:?}");
                    assert!(piece.grid.iter().all(|n| *n <= DEVICE.max_workgroups));
                    assert!((0..3).all(|a| (piece.first[a] + piece.grid[a]) as usize <= grid[a]));
                    assert!(seen.insert(piece.first));
                    covered += count;
                }
                assert_eq!(covered, grid.iter().product::<usize>(), "{grid:?} {limit}");
            }
        }
    }

    #[test]
    fn too_many_pieces_are_refused() {
        let refused = pieces([70_000, 1, 1], 10.0, 1, &DEVICE);
        assert!(matches!(refused, Err(Error::Limit { name: "Config::work_limit", .. })), "{refused:?}");
    }
}
