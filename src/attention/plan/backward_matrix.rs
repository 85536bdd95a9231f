//! Tiles of the backward kernel on matrix units.

use super::GradientsOf;
use super::matrix::{ROOM, check_channels, most_rows, tiles_for, usual};
use crate::device::{DeviceFacts, Family, Fragment};
use crate::kernel::KernelOptions;
use crate::tensor::{DType, Shape};

/// Tiles of `fused_backward/matrix.wgsl`. Output rows are the queries or keys whose gradients a
/// workgroup computes. Opposite rows are the keys or queries of the other side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BackwardMatrix {
    pub fragment: Fragment,
    /// Output rows of a subgroup, subgroups of a workgroup, invocations of a subgroup.
    pub sub_rows: u32,
    pub subgroups: u32,
    pub width: u32,
    /// Opposite rows of a tile.
    pub others: u32,
    /// Channels of queries and keys, and of values, in whole fragments.
    pub head: u32,
    pub value: u32,
    /// True if the output rows stay in fragments, not in workgroup memory.
    pub held: bool,
}

/// Returns the channels of an output row's inputs and of its gradients.
fn channels(of: GradientsOf, head: u32, value: u32) -> (u32, u32) {
    let part = |wanted, channels| if wanted { channels } else { 0 };
    (head + part(of.scores(), value), part(of.scores(), head) + part(of.values(), value))
}

/// Returns the largest number of output rows of a subgroup that registers can hold. The second
/// result is true if registers hold the rows themselves too, not only their sums.
fn sub_rows(of: GradientsOf, head: u32, value: u32, least: u32) -> (u32, bool) {
    let (own, sums) = channels(of, head, value);
    let fitting = |of_row: u32| most_rows(least, |rows| rows * of_row / 32);
    let held = fitting(own / 2 + sums).map(|rows| (rows, true));
    held.unwrap_or_else(|| (fitting(sums).unwrap_or(least), false))
}

impl BackwardMatrix {
    /// The output rows of a workgroup.
    pub fn owns(&self) -> u32 {
        self.sub_rows * self.subgroups
    }

    pub fn workgroup(&self) -> u32 {
        self.subgroups * self.width
    }

    /// The queries and keys of a tile.
    fn sides(&self, of: GradientsOf) -> (u32, u32) {
        let (own, others) = (self.owns(), self.others);
        if of == GradientsOf::Queries { (own, others) } else { (others, own) }
    }

    /// The f16 numbers in workgroup memory: staged opposite rows, results of pairs, and output rows
    /// that are not in registers.
    fn halves(&self, of: GradientsOf) -> u32 {
        let BackwardMatrix { others, head, value, .. } = *self;
        let (queries, keys) = self.sides(of);
        let given = u32::from(of.scores()) + u32::from(of.values());
        let own = if self.held { 0 } else { self.owns() * (channels(of, head, value).0 + 8) };
        others * (head + value + 8) + given * queries * (keys + 8) + own
    }

    /// Bytes of workgroup memory, as the shader declares it.
    pub fn memory(&self, of: GradientsOf) -> u32 {
        let (queries, keys) = self.sides(of);
        let singles = (queries * (keys + 4)).max(self.owns() * (self.others + 4));
        // Flags, one or two numbers of each invocation, and the totals.
        2 * self.halves(of) + 4 * singles + 16 + 8 * self.workgroup() + 16
    }

    fn fits(&self, of: GradientsOf, device: &DeviceFacts) -> bool {
        let (workgroup, side) = (self.workgroup(), self.fragment.side());
        let (queries, keys) = self.sides(of);
        // Invocations that share a query each have the same number of its keys.
        let shares = if workgroup >= queries {
            workgroup.is_multiple_of(queries) && keys.is_multiple_of(4 * workgroup / queries)
        } else {
            queries.is_multiple_of(workgroup)
        };
        // Without `held`, a pass stages at least a fragment of each output row.
        let passes = !self.held || self.halves(of) / self.owns() >= side + 8;
        shares
            && passes
            && workgroup >= 8
            && workgroup <= device.max_invocations
            && self.memory(of) <= device.workgroup_memory
    }

    /// True if an invocation has enough registers for the gradients of keys and of values together.
    pub fn has_room_for_both(self) -> bool {
        self.sub_rows * (self.head + self.value) / 32 <= ROOM
    }

    /// Returns the tiles to try, best first. More output rows share the staged rows, and more
    /// opposite rows share the barriers.
    fn candidates(
        of: GradientsOf,
        fragment: Fragment,
        shape: &Shape,
        kernel_options: &KernelOptions,
        device: &DeviceFacts,
    ) -> impl Iterator<Item = BackwardMatrix> + use<> {
        let whole = |n: usize| (n as u32).next_multiple_of(16);
        let (head, value) = (whole(shape.head_dim), whole(shape.value_dim));
        let (rows, held) = sub_rows(of, head, value, fragment.side());
        // Software drivers have fragments for testing, but they compile large tiles slowly.
        let tiles = if kernel_options.target.is_cpu(device) {
            let side = fragment.side();
            // Output rows in registers use less workgroup memory.
            vec![(side, 2, 16, held), (side, 1, 16, held), (side, 1, 16, true)]
        } else {
            [(4, 32), (2, 32), (4, 16), (2, 16), (1, 32), (1, 16)]
                .map(|(subgroups, others)| (rows, subgroups, others, held))
                .to_vec()
        };
        let width = device.planned_subgroup();
        tiles.into_iter().map(move |(sub_rows, subgroups, others, held)| BackwardMatrix {
            fragment,
            sub_rows,
            subgroups,
            width,
            others,
            head,
            value,
            held,
        })
    }

    /// Returns the tiles for `shape`, or the reason why no tiles fit.
    pub fn of(
        of: GradientsOf,
        shape: &Shape,
        dtype: DType,
        kernel_options: &KernelOptions,
        device: &DeviceFacts,
    ) -> Result<Self, &'static str> {
        let fragment = kernel_options.fragment(dtype, Family::MatrixGradients, device)?;
        check_channels(shape)?;
        let (len, heads) = of.own_side(shape);
        let fitting: Vec<_> = Self::candidates(of, fragment, shape, kernel_options, device)
            .filter(|t| t.fits(of, device))
            .collect();
        tiles_for(&fitting, len, shape.batch * heads, |t| (t.owns(), t.subgroups))
    }

    /// Returns the tiles that tools and tests list: the plans for many rows of the usual channels.
    pub fn listed(of: GradientsOf, fragment: Fragment) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::new();
        for (device, channels) in usual(fragment) {
            let shape = Shape::new(1, 64, 4096, channels);
            let found = Self::of(of, &shape, DType::F16, &KernelOptions::default(), &device);
            let found =
                found.ok().filter(|tiles| of != GradientsOf::KeysAndValues || tiles.has_room_for_both());
            all.extend(found.filter(|tiles| !all.contains(tiles)));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::options::{MatrixUnits, Target};

    const DEVICE: DeviceFacts = DeviceFacts {
        f16: true,
        workgroup_memory: 49152,
        max_invocations: 1024,
        subgroup_min: 32,
        subgroup_max: 32,
        matrix: Some(Fragment::Sixteen),
        ..DeviceFacts::LEAST
    };

    fn shape(heads: usize, len: usize, head_dim: usize, value_dim: usize) -> Shape {
        Shape { batch: 1, heads, kv_heads: heads, q_len: len, kv_len: len, head_dim, value_dim }
    }

    #[test]
    fn large_problems_get_large_tiles() {
        let of = |gradients, dim, device: &DeviceFacts| {
            let shape = shape(16, 16384, dim, dim);
            let tiles = BackwardMatrix::of(gradients, &shape, DType::F16, &KernelOptions::default(), device);
            let tiles = tiles.expect("tiles");
            (tiles.sub_rows, tiles.subgroups, tiles.others, tiles.held)
        };
        assert_eq!(of(GradientsOf::Queries, 64, &DEVICE), (16, 4, 32, true));
        assert_eq!(of(GradientsOf::KeysAndValues, 64, &DEVICE), (16, 4, 32, true));
        assert_eq!(of(GradientsOf::Keys, 128, &DEVICE), (16, 2, 32, false));
        let small = DeviceFacts { workgroup_memory: 32768, ..DEVICE };
        assert_eq!(of(GradientsOf::Queries, 64, &small), (16, 4, 32, true));
        assert_eq!(of(GradientsOf::Keys, 128, &small), (16, 2, 16, false));
        let apple = DeviceFacts { matrix: Some(Fragment::Eight), ..small };
        assert_eq!(of(GradientsOf::Keys, 128, &apple), (8, 4, 32, true));
    }

    /// Checks the shader's assertions and the host's promises for every plan.
    #[test]
    fn every_plan_is_one_the_shader_takes() {
        let mut found = 0;
        for fragment in [Fragment::Eight, Fragment::Sixteen] {
            for width in [4, 8, 16, 32, 64] {
                for workgroup_memory in [16384, 32768, 49152, 65536] {
                    let device = DeviceFacts {
                        matrix: Some(fragment),
                        subgroup_min: width,
                        subgroup_max: width,
                        workgroup_memory,
                        ..DEVICE
                    };
                    for (head_dim, value_dim) in
                        [(1, 1), (16, 256), (256, 16), (64, 64), (100, 70), (128, 128), (255, 256)]
                    {
                        for (len, form) in [(17, Target::Gpu), (5000, Target::Gpu), (100, Target::Software)] {
                            let shape = shape(8, len, head_dim, value_dim);
                            let kernel_options =
                                KernelOptions::new().target(form).matrix_units(MatrixUnits::Always);
                            for of in GradientsOf::ALL {
                                let tiles =
                                    BackwardMatrix::of(of, &shape, DType::F16, &kernel_options, &device);
                                let Ok(tiles) = tiles else { continue };
                                found += 1;
                                let side = fragment.side();
                                let BackwardMatrix { sub_rows, others, head, value, .. } = tiles;
                                let whole = [sub_rows, others, head, value].iter().all(|n| n % side == 0);
                                assert!(
                                    whole && [others, tiles.owns(), head, value].iter().all(|n| n % 8 == 0)
                                );
                                let (queries, keys) = tiles.sides(of);
                                let workgroup = tiles.workgroup();
                                assert!(workgroup % queries == 0 || queries % workgroup == 0, "{tiles:?}");
                                assert_eq!(keys % (4 * (workgroup / queries).max(1)), 0, "{tiles:?}");
                                assert!(head as usize >= head_dim && value as usize >= value_dim);
                                assert!(tiles.memory(of) <= workgroup_memory && workgroup <= 1024);
                            }
                        }
                    }
                }
            }
        }
        assert!(found > 1500, "{found}");
    }

    /// Small tiles fit the device that runs the tests, with any number of channels.
    #[test]
    fn small_tiles_take_every_width() {
        let kernel_options = KernelOptions::new().target(Target::Software).matrix_units(MatrixUnits::Always);
        for fragment in [Fragment::Eight, Fragment::Sixteen] {
            let device = DeviceFacts {
                matrix: Some(fragment),
                subgroup_min: 8,
                subgroup_max: 8,
                workgroup_memory: 32768,
                ..DEVICE
            };
            for (head_dim, value_dim) in [(16, 16), (80, 96), (3, 200), (192, 128), (128, 192), (255, 256)] {
                let shape = Shape { head_dim, value_dim, ..shape(2, 21, 1, 1) };
                for of in GradientsOf::ALL {
                    BackwardMatrix::of(of, &shape, DType::F16, &kernel_options, &device)
                        .unwrap_or_else(|why| panic!("{fragment:?} {of:?} {shape:?}: {why}"));
                }
            }
        }
    }
}
