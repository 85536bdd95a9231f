//! Tiles of the fused kernel on matrix units.

use crate::device::tuned::Pick;
use crate::device::{DeviceFacts, Family, Fragment};
use crate::kernel::KernelOptions;
use crate::matmul::plan::ENOUGH_WORKGROUPS;
use crate::tensor::{DType, Shape};

/// Tiles of `fused/matrix.wgsl`, which describes them.
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
    /// True if queries and keys have exactly `head` channels.
    pub exact: bool,
    /// True if queries stay in workgroup memory, not in fragments.
    pub q_in_memory: bool,
}

/// With more channels, 16 rows no longer fit in registers.
const MOST_CHANNELS: usize = 256;

/// The registers of an invocation for the rows of a subgroup of 32 and their sums. GPUs with
/// fragments of 8 × 8 (Apple's) have about 128 registers, others 255. Scores, addresses and data
/// for the next stage use the rest.
pub(super) const ROOM: u32 = 96;

/// Returns the largest number of rows of a subgroup, at least `least`, whose `registers` fit
/// [`ROOM`].
pub(super) fn most_rows(least: u32, registers: impl Fn(u32) -> u32) -> Option<u32> {
    [32, 16, 8].into_iter().filter(|rows| *rows >= least).find(|rows| registers(*rows) <= ROOM)
}

/// Checks the number of channels.
///
/// # Errors
/// Returns the reason if there are too many channels.
pub(super) fn check_channels(shape: &Shape) -> Result<(), &'static str> {
    if shape.head_dim.max(shape.value_dim) > MOST_CHANNELS {
        return Err("`head_dim` and `value_dim` may be at most 256; set `MatrixUnits::Auto`");
    }
    Ok(())
}

/// Returns the first tiles, best first, that give every core of a large GPU a workgroup. (Splits of
/// the keys can give each core a second one.) Otherwise returns tiles that `rows` of a head fill at
/// least half. `size` returns a tile's rows and subgroups.
pub(super) fn tiles_for<T: Copy>(
    fitting: &[T],
    rows: usize,
    heads: usize,
    size: impl Fn(&T) -> (u32, u32),
) -> Result<T, &'static str> {
    let fills = |t: &&T| rows.div_ceil(size(t).0 as usize).saturating_mul(heads) >= ENOUGH_WORKGROUPS / 2;
    let is_small = |t: &&T| {
        let (of_tile, subgroups) = size(t);
        subgroups <= 2 && (of_tile as usize) < 2 * rows
    };
    let found = fitting.iter().find(fills).or_else(|| fitting.iter().find(is_small)).or(fitting.last());
    found
        .copied()
        .ok_or("their tiles need more workgroup memory, invocations or registers than the device allows")
}

/// Returns devices with `fragment`, and channels, for lists of kernels: subgroups of 32 and of 64,
/// 32 and 48 KiB.
pub(super) fn usual(fragment: Fragment) -> impl Iterator<Item = (DeviceFacts, usize)> {
    let devices =
        [(32, 32768), (32, 49152), (64, 32768), (64, 49152)].map(|(width, workgroup_memory)| DeviceFacts {
            f16: true,
            subgroup_min: width,
            subgroup_max: width,
            workgroup_memory,
            max_invocations: 1024,
            matrix: Some(fragment),
            ..DeviceFacts::LEAST
        });
    let channels = [32, 64, 80, 96, 128, 192, 256];
    devices.into_iter().flat_map(move |device| channels.map(|channels| (device.clone(), channels)))
}

/// Returns the largest number of rows of a subgroup that registers can hold. All of these rows
/// share one load of keys and values. The second result is true if queries must stay in workgroup
/// memory. This is so if even the fewest rows do not fit otherwise. FlashAttention-2 uses 16 rows.
fn sub_rows(head: u32, value: u32, device: &DeviceFacts) -> (u32, bool) {
    let least = device.matrix.map_or(8, Fragment::side);
    let rows = most_rows(least, |rows| rows * (head / 2 + value) / 32);
    (rows.unwrap_or(least), rows.is_none())
}

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
        let halves = keys * (head + value + 16);
        let queries = if self.q_in_memory { 2 * (head + 8) } else { 0 };
        let of_rows = 2 * (keys + 8) + queries + 4 * (keys + 4) + 8;
        // Eight partial intervals and the total, and flags of 16 bytes.
        2 * halves + self.rows() * of_rows + 16 * 10
    }

    fn fits(&self, device: &DeviceFacts) -> bool {
        let (rows, workgroup, side) = (self.rows(), self.workgroup(), self.fragment.side());
        // Invocations that share a row are neighbours in one subgroup, at most four.
        let shares = if workgroup >= rows {
            workgroup.is_multiple_of(rows)
                && workgroup / rows <= 4
                && self.keys.is_multiple_of(4 * workgroup / rows)
        } else {
            rows.is_multiple_of(workgroup)
        };
        // The kernel loads queries in at most four passes.
        let halves = self.keys * (self.head + self.value + 16) + rows * (self.keys + 8);
        let passes = self.q_in_memory || 4 * ((halves / rows - 8) / side) >= self.head / side;
        shares
            && passes
            && workgroup >= 8
            && workgroup <= device.max_invocations
            && self.memory() <= device.workgroup_memory
    }

    /// Returns the tiles to try, best first. More rows share the staged keys, and more keys share
    /// the barriers.
    fn candidates(
        fragment: Fragment,
        shape: &Shape,
        kernel_options: &KernelOptions,
        device: &DeviceFacts,
    ) -> impl Iterator<Item = FusedMatrix> + use<> {
        let whole = |n: usize| (n as u32).next_multiple_of(16);
        let (head, value) = (whole(shape.head_dim), whole(shape.value_dim));
        let exact = head as usize == shape.head_dim;
        let (rows, q_in_memory) = sub_rows(head, value, device);
        // Software drivers have fragments for testing, but they compile large tiles slowly.
        let side = fragment.side();
        let small = if q_in_memory { vec![(side, 2, 16), (side, 1, 16)] } else { vec![(2 * side, 2, 16)] };
        // More staged keys would use the registers that wide heads need.
        let most_keys = if head + value > 256 { 16 } else { 32 };
        let width = device.planned_subgroup();
        let mut large = Vec::new();
        if fragment == Fragment::Sixteen {
            // On an H200 (580.159), eight subgroups of 128 channels are 1.47 times as fast as four.
            // Four stage all keys for half as many rows.
            if width <= 32 && (129..=256).contains(&(head + value)) {
                large.push((rows, 8, 32));
            }
            // On the same GPU, 16 rows of 64 channels are 1.13 times as fast as 32. More subgroups
            // then share a core. No GPU of AMD's has run either. The model prefers 32 rows there:
            // 0.71 of RDNA 3's rate of matrix instructions, not 0.65.
            if rows > 16 && !device.scalar_registers {
                large.push((16, 4, 32));
            }
        }
        let usual = [(4, 32), (2, 32), (4, 16), (2, 16), (1, 32), (1, 16)];
        large.extend(usual.map(|(subgroups, keys)| (rows, subgroups, keys)));
        let tiles = if kernel_options.target.is_cpu(device) { small } else { large };
        // For wide heads, a subgroup of 32 that stages all data alone needs more than 255
        // registers.
        let most_alone = if fragment == Fragment::Sixteen && width == 32 { 384 } else { u32::MAX };
        let tiles = tiles.into_iter().filter(move |(_, subgroups, keys)| {
            *keys <= most_keys && (*subgroups > 1 || head + value <= most_alone)
        });
        tiles.map(move |(sub_rows, subgroups, keys)| FusedMatrix {
            fragment,
            sub_rows,
            subgroups,
            width,
            keys,
            head,
            value,
            exact,
            q_in_memory,
        })
    }

    /// Returns the plans for many rows of the usual channels. The devices have subgroups of 32 and
    /// of 64, and 32 and 48 KiB.
    pub fn planned(fragment: Fragment) -> Vec<FusedMatrix> {
        let mut all: Vec<FusedMatrix> = Vec::new();
        for (device, channels) in usual(fragment) {
            let (shape, kernel_options) = (Shape::new(1, 64, 4096, channels), KernelOptions::default());
            let pick = Pick::default();
            let found =
                fused_matrix(shape.q_len, shape.heads, &shape, DType::F16, &kernel_options, &pick, &device);
            all.extend(found.ok().filter(|tiles| !all.contains(tiles)));
        }
        all
    }

    /// Returns every kind of tiles for `fragment`.
    pub fn all(fragment: Fragment) -> Vec<FusedMatrix> {
        let of = |head, value, sub_rows, subgroups, width, keys| FusedMatrix {
            fragment,
            sub_rows,
            subgroups,
            width,
            keys,
            head,
            value,
            exact: true,
            q_in_memory: false,
        };
        vec![
            of(64, 64, 16, 4, 32, 32),
            of(64, 64, 32, 4, 32, 32),
            of(64, 64, 32, 4, 64, 32),
            of(128, 128, 16, 4, 32, 32),
            of(128, 128, 16, 8, 32, 32),
            of(128, 128, 16, 4, 64, 32),
            FusedMatrix { exact: false, ..of(128, 128, 16, 2, 64, 32) },
            FusedMatrix { q_in_memory: true, ..of(256, 256, 16, 2, 32, 16) },
            FusedMatrix { q_in_memory: true, ..of(256, 256, 16, 2, 64, 16) },
            FusedMatrix { exact: false, ..of(16, 48, 32, 2, 8, 32) },
        ]
    }
}

/// Returns the tiles for `shape`, or the reason why no tiles fit.
pub(super) fn fused_matrix(
    rows: usize,
    heads: usize,
    shape: &Shape,
    dtype: DType,
    kernel_options: &KernelOptions,
    pick: &Pick,
    device: &DeviceFacts,
) -> Result<FusedMatrix, &'static str> {
    let fragment = kernel_options.fragment(dtype, Family::MatrixAttention, device)?;
    check_channels(shape)?;
    let fitting: Vec<_> =
        FusedMatrix::candidates(fragment, shape, kernel_options, device).filter(|t| t.fits(device)).collect();
    if let Some(picked) = fitting.iter().find(|t| (t.rows(), t.keys) == (pick.rows, pick.keys)) {
        return Ok(*picked);
    }
    // Fewer subgroups stage all keys for fewer rows. On an H200, 512 rows of 8 heads take 1.4 times
    // as long with one subgroup as with four. With four, the keys are split among more workgroups.
    // Eight subgroups need two workgroups for each core.
    let is_shared = |t: &&FusedMatrix| {
        let workgroups = rows.div_ceil(t.rows() as usize).saturating_mul(heads);
        let subgroups = if workgroups >= ENOUGH_WORKGROUPS { 4..=8 } else { 4..=4 };
        subgroups.contains(&t.subgroups) && (t.rows() as usize) < 2 * rows
    };
    if fragment == Fragment::Sixteen
        && let Some(shared) = fitting.iter().find(is_shared)
    {
        return Ok(*shared);
    }
    tiles_for(&fitting, rows, heads, |t| (t.rows(), t.subgroups))
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

    fn plan(shape: Shape, device: &DeviceFacts) -> Result<FusedMatrix, &'static str> {
        tuned(shape, &KernelOptions::default(), device)
    }

    fn tuned(
        shape: Shape,
        kernel_options: &KernelOptions,
        device: &DeviceFacts,
    ) -> Result<FusedMatrix, &'static str> {
        let rows = shape.q_len * shape.group();
        let heads = shape.batch * shape.kv_heads;
        fused_matrix(rows, heads, &shape, DType::F16, kernel_options, &Pick::default(), device)
    }

    fn shape(heads: usize, length: usize, dim: usize) -> Shape {
        Shape {
            batch: 1,
            heads,
            kv_heads: heads,
            q_len: length,
            kv_len: length,
            head_dim: dim,
            value_dim: dim,
        }
    }

    #[test]
    fn large_problems_get_large_tiles() {
        let of = |heads, length, dim, device: &DeviceFacts| {
            let tiles = plan(shape(heads, length, dim), device).expect("tiles");
            assert!(tiles.fits(device), "{tiles:?}");
            (tiles.sub_rows, tiles.subgroups, tiles.keys)
        };
        assert_eq!(of(16, 16384, 128, &DEVICE), (16, 8, 32));
        assert_eq!(of(32, 16384, 64, &DEVICE), (16, 4, 32));
        // Eight subgroups only if each core of a large GPU gets two workgroups.
        assert_eq!(of(8, 2048, 128, &DEVICE), (16, 4, 32));
        let scalar = DeviceFacts { scalar_registers: true, ..DEVICE };
        assert_eq!(of(32, 16384, 64, &scalar), (32, 4, 32));
        let varying = DeviceFacts { subgroup_max: 64, ..DEVICE };
        assert_eq!(of(32, 16384, 64, &varying), (16, 4, 32));
        assert_eq!(of(16, 16384, 128, &varying), (16, 4, 32));
        // Queries of wider heads are in workgroup memory.
        assert_eq!(of(8, 16384, 256, &DEVICE), (16, 2, 16));
        let small = DeviceFacts { workgroup_memory: 32768, ..DEVICE };
        assert_eq!(of(8, 16384, 192, &small), (16, 2, 16));
        assert!(plan(shape(8, 16384, 256), &small).is_err());
        // Too few rows for the device.
        assert_eq!(of(8, 512, 64, &varying), (16, 4, 32));
        assert_eq!(of(8, 24, 64, &varying), (32, 1, 32));
        let apple = DeviceFacts { workgroup_memory: 32768, matrix: Some(Fragment::Eight), ..DEVICE };
        assert_eq!(of(16, 16384, 128, &apple), (16, 4, 32));
        assert_eq!(of(32, 16384, 64, &apple), (32, 2, 32));
        assert_eq!(of(8, 16384, 256, &apple), (8, 4, 16));
    }

    #[test]
    fn every_plan_is_one_the_shader_takes() {
        let mut found = 0;
        for fragment in [Fragment::Eight, Fragment::Sixteen] {
            for width in [4, 8, 16, 32, 64] {
                for workgroup_memory in [16384, 32768, 49152, 65536] {
                    for max_invocations in [128, 256, 1024] {
                        let device = DeviceFacts {
                            matrix: Some(fragment),
                            subgroup_min: width,
                            subgroup_max: width,
                            workgroup_memory,
                            max_invocations,
                            ..DEVICE
                        };
                        for (head_dim, value_dim) in
                            [(1, 1), (16, 256), (256, 16), (64, 64), (100, 70), (128, 128)]
                        {
                            for (q_len, form) in [17, 100, 5000]
                                .map(|n| (n, Target::Auto))
                                .into_iter()
                                .chain([(100, Target::Software)])
                            {
                                let shape = Shape { head_dim, value_dim, ..shape(8, q_len, 1) };
                                let kernel_options =
                                    KernelOptions::new().target(form).matrix_units(MatrixUnits::Always);
                                let Ok(tiles) = tuned(shape, &kernel_options, &device) else { continue };
                                found += 1;
                                let FusedMatrix { sub_rows, keys, head, value, .. } = tiles;
                                let (side, rows, workgroup) =
                                    (fragment.side(), tiles.rows(), tiles.workgroup());
                                // The shader's assertions and the host's promises.
                                assert!(
                                    [sub_rows, keys, head, value].iter().all(|n| n % side == 0),
                                    "{tiles:?}"
                                );
                                assert!(
                                    [head, value, keys, rows].iter().all(|n| n % 8 == 0) && workgroup >= 8
                                );
                                assert!(workgroup % rows == 0 || rows % workgroup == 0, "{tiles:?}");
                                let parts = (workgroup / rows).max(1);
                                assert!([1, 2, 4].contains(&parts) && keys % (4 * parts) == 0, "{tiles:?}");
                                let halves = keys * (head + value + 16) + rows * (keys + 8);
                                let passes = 4 * ((halves / rows - 8) / side) >= head / side;
                                assert!(tiles.q_in_memory || passes, "{tiles:?}");
                                assert!(head as usize >= head_dim && value as usize >= value_dim);
                                assert!(tiles.memory() <= workgroup_memory && workgroup <= max_invocations);
                            }
                        }
                    }
                }
            }
        }
        assert!(found > 800, "{found}");
    }

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
                let shape = Shape { head_dim, value_dim, ..shape(2, 21, 1) };
                tuned(shape, &kernel_options, &device)
                    .unwrap_or_else(|why| panic!("{fragment:?} {shape:?}: {why}"));
            }
        }
    }

    #[test]
    fn unsupported_calls_are_refused() {
        let refused = |shape: Shape, device: &DeviceFacts| plan(shape, device).expect_err("refused");
        assert!(refused(shape(8, 512, 257), &DEVICE).contains("at most 256"));
        let none = DeviceFacts { matrix: None, ..DEVICE };
        assert!(refused(shape(8, 512, 64), &none).contains("lack them"));
        let software = DeviceFacts { software: true, ..DEVICE };
        assert!(refused(shape(8, 512, 64), &software).contains("software"));
        let small = DeviceFacts { workgroup_memory: 4096, ..DEVICE };
        assert!(refused(shape(8, 512, 64), &small).contains("workgroup memory"));
        let f32 = fused_matrix(
            512,
            8,
            &shape(8, 512, 64),
            DType::F32,
            &KernelOptions::default(),
            &Pick::default(),
            &DEVICE,
        );
        assert!(f32.expect_err("refused").contains("F32"));
    }
}
