//! Splits a grid of workgroups into dispatches of bounded work.

use crate::device::DeviceFacts;
use crate::tensor::Error;

/// A part of a grid: its first workgroup and its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub first: [u32; 3],
    pub grid: [u32; 3],
}

/// The largest number of dispatches. If a call needs more, the caller's limit is too small.
const MOST_PIECES: usize = 1 << 16;

/// Returns the size of a part along each axis, in workgroups. A part fits the device and has at
/// most `limit` operations, with `work` operations per workgroup. A workgroup is never split. Parts
/// are whole layers of the last axis if these fit, otherwise runs along the first axis.
pub(crate) fn steps(
    [x, y, z]: [usize; 3],
    work: f64,
    limit: u64,
    device: &DeviceFacts,
) -> Result<[usize; 3], Error> {
    let most = device.max_workgroups as usize;
    let workgroups = ((limit as f64 / work.max(1.0)) as usize).max(1);
    // In decode, slices of the output lie along y.
    let step_y = y.min(workgroups).min(most);
    let step_x = x.min((workgroups / step_y).max(1)).min(most);
    let whole = step_x == x && step_y == y;
    let step_z = if whole { z.min((workgroups / (x * y)).max(1)).min(most) } else { 1 };
    let count = x.div_ceil(step_x).saturating_mul(y.div_ceil(step_y)).saturating_mul(z.div_ceil(step_z));
    if count > MOST_PIECES {
        let expected = "large enough that the call takes at most 65536 dispatches";
        return Err(Error::Option { option: "work_limit", value: limit as f64, expected });
    }
    Ok([step_x, step_y, step_z])
}

/// The parts of the grid, with at most `steps` workgroups along each axis.
pub(crate) fn pieces([x, y, z]: [usize; 3], steps: [usize; 3]) -> impl Iterator<Item = Piece> + use<> {
    let cuts =
        |n: usize, step: usize| (0..n).step_by(step).map(move |at| (at as u32, step.min(n - at) as u32));
    cuts(z, steps[2]).flat_map(move |(fz, nz)| {
        cuts(y, steps[1]).flat_map(move |(fy, ny)| {
            cuts(x, steps[0]).map(move |(fx, nx)| Piece { first: [fx, fy, fz], grid: [nx, ny, nz] })
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: DeviceFacts = DeviceFacts::LEAST;

    #[test]
    fn pieces_cover_the_grid_once_and_keep_the_limit() {
        for grid in [[1, 1, 1], [7, 1, 5], [5, 3, 4], [70_000, 2, 1], [3, 1, 70_000], [1000, 2, 33]] {
            for limit in [1, 10, 64, 1000, 1 << 37] {
                let Ok(steps) = steps(grid, 10.0, limit, &DEVICE) else {
                    assert!(grid.iter().product::<usize>() > MOST_PIECES && limit < 100);
                    continue;
                };
                let pieces: Vec<_> = pieces(grid, steps).collect();
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
        let refused = steps([70_000, 1, 1], 10.0, 1, &DEVICE);
        assert!(matches!(refused, Err(Error::Option { option: "work_limit", .. })), "{refused:?}");
    }
}
