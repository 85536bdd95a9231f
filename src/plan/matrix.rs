//! Tiles of the fused kernel on matrix units.

use super::Tuning;
use super::fused::FusedTiles;
use crate::problem::Shape;
use crate::tensor::{DType, DeviceFacts, Fragment};

/// Tiles of `shared/fused_matrix.wgsl`, which says what they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FusedMatrix {
    pub fragment: Fragment,
    /// Rows of a subgroup, subgroups of a workgroup, invocations of a subgroup.
    pub sub_rows: u32,
    pub subgroups: u32,
    pub width: u32,
    /// Keys of a tile.
    pub keys: u32,
    /// Channels of queries and keys, and of values, in whole fragments.
    pub head: u32,
    pub value: u32,
    /// Whether queries and keys have `head` channels, not fewer.
    pub exact: bool,
}

/// More channels than this, and the sums of 16 rows no longer fit in registers.
const MOST_CHANNELS: usize = 256;

/// Up to as many channels a subgroup holds 32 rows; beyond, 16. In registers of 32 lanes: 32 rows of 128 channels take
/// 64 of queries and 128 of sums.
const MOST_CHANNELS_OF_32: u32 = 128;

impl FusedMatrix {
    pub fn rows(&self) -> u32 {
        self.sub_rows * self.subgroups
    }

    pub fn workgroup(&self) -> u32 {
        self.subgroups * self.width
    }

    /// Bytes of workgroup memory, as the shader declares it.
    pub fn memory(&self) -> u32 {
        let FusedMatrix { keys, head, value, .. } = *self;
        let halves = (keys * (head + value + 16)).max(self.rows() * (self.fragment.side() + 8));
        let of_rows = 2 * (keys + 8) + 4 * (keys + 4) + 8;
        // Eight partial intervals and the whole, two flags of 16 bytes.
        2 * halves + self.rows() * of_rows + 16 * 10
    }

    fn fits(&self, device: &DeviceFacts) -> bool {
        let (rows, workgroup) = (self.rows(), self.workgroup());
        // Neighbours that share a row are of one subgroup, and at most four.
        let shares = if workgroup >= rows {
            workgroup.is_multiple_of(rows)
                && workgroup / rows <= 4
                && self.keys.is_multiple_of(4 * workgroup / rows)
        } else {
            rows.is_multiple_of(workgroup)
        };
        let passes = self.keys * (self.head + self.value + 16) >= 8 * rows;
        shares && passes && workgroup <= device.max_invocations && self.memory() <= device.workgroup_memory
    }

    /// The tiles to try, best first: more rows share what is staged, more keys the barriers.
    fn candidates(
        fragment: Fragment,
        shape: &Shape,
        tuning: &Tuning,
        device: &DeviceFacts,
    ) -> impl Iterator<Item = FusedMatrix> + use<> {
        let whole = |n: usize| (n as u32).next_multiple_of(16);
        let (head, value) = (whole(shape.head_dim), whole(shape.value_dim));
        let exact = head as usize == shape.head_dim;
        // Software drivers, which have fragments to test with, take a while to compile large tiles.
        let small = [(2 * fragment.side(), 2, 16)];
        let sub_rows = if head.max(value) <= MOST_CHANNELS_OF_32 { 32 } else { 16 };
        let large = [(4, 32), (2, 64), (2, 32), (1, 32), (4, 16), (2, 16), (1, 16)]
            .map(|(subgroups, keys)| (sub_rows, subgroups, keys));
        let tiles = if tuning.tiling.uniform(device) { small.to_vec() } else { large.to_vec() };
        let width = device.subgroup_max;
        tiles.into_iter().map(move |(sub_rows, subgroups, keys)| FusedMatrix {
            fragment,
            sub_rows,
            subgroups,
            width,
            keys,
            head,
            value,
            exact,
        })
    }

    /// Every kind of tiles there is, for `fragment`.
    pub fn all(fragment: Fragment) -> Vec<FusedTiles> {
        let of = |head, value, sub_rows, subgroups, width, keys, exact| {
            FusedTiles::Matrix(FusedMatrix { fragment, sub_rows, subgroups, width, keys, head, value, exact })
        };
        vec![
            of(64, 64, 32, 4, 64, 32, true),
            of(64, 64, 32, 4, 32, 32, true),
            of(128, 128, 32, 4, 64, 32, true),
            of(128, 128, 32, 2, 64, 32, true),
            of(128, 128, 32, 2, 32, 32, false),
            of(256, 256, 16, 4, 64, 16, true),
            of(16, 48, 32, 2, 8, 64, false),
        ]
    }
}

/// The tiles for `shape`, or why there are none.
pub(super) fn fused_matrix(
    rows: usize,
    heads: usize,
    shape: &Shape,
    dtype: DType,
    tuning: &Tuning,
    device: &DeviceFacts,
) -> Result<FusedTiles, &'static str> {
    let fragment = tuning.matrix.fragment(dtype, tuning.tiling, device)?;
    if shape.head_dim.max(shape.value_dim) > MOST_CHANNELS {
        return Err("head_dim and value_dim may be at most 256");
    }
    let fitting = || FusedMatrix::candidates(fragment, shape, tuning, device).filter(|t| t.fits(device));
    // Large tiles as long as enough workgroups remain.
    let fills = |t: &FusedMatrix| rows.div_ceil(t.rows() as usize).saturating_mul(heads) >= super::FULL;
    fitting()
        .find(fills)
        .or_else(|| fitting().find(|t| t.rows() as usize <= rows.next_power_of_two().max(32)))
        .or_else(|| fitting().last())
        .map(FusedTiles::Matrix)
        .ok_or("their tiles take more workgroup memory or invocations than the device allows")
}
