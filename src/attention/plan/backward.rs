//! Plans of the backward kernel: tiles, workgroups, dispatches of bounded work.

use super::{BackwardMatrix, GradientsOf};
use crate::device::family::GRADIENTS;
use crate::device::registers::Registers;
use crate::device::{DeviceFacts, Family};
use crate::kernel::pieces::{Piece, pieces, steps};
use crate::kernel::{KernelOptions, Target};
use crate::tensor::{DType, Error, Shape};

/// Tiles of the GPU variant. A tile has as many queries as keys, and an invocation computes four of
/// one side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BackwardGpu {
    side: u32,
    /// The channels of the gradients.
    slice: u32,
    /// The channels of both sides per staging.
    pub chunk: u32,
}

impl BackwardGpu {
    /// The side of tiles for every device.
    const SMALL: u32 = 32;
    /// The side of tiles for devices with more registers and memory. On an NVIDIA H100 they take
    /// 0.83 to 0.91 of the time of small tiles, at 64 and 128 channels. With 128 invocations that
    /// have twice as many channels each, d_k and d_v take 1.08 times as long
    /// (benches/PREDICTIONS.md).
    const LARGE: u32 = 64;

    const fn small(slice: u32) -> Self {
        BackwardGpu { side: Self::SMALL, slice, chunk: 32 }
    }

    const fn large(slice: u32, chunk: u32) -> Self {
        BackwardGpu { side: Self::LARGE, slice, chunk }
    }

    /// True if the kernel loads the next staged data into registers ahead of its use.
    pub fn ahead(self) -> bool {
        self.side == Self::LARGE
    }

    pub fn workgroup(self) -> u32 {
        if self.side == Self::LARGE { 256 } else { self.slice }
    }

    /// The rows per staging of a slice.
    pub fn slice_rows(self) -> u32 {
        if self.side == Self::LARGE { self.chunk } else { 16 }
    }

    /// Returns the tiles for `len` output rows.
    fn of(len: usize, slice: u32, device: &DeviceFacts) -> Self {
        let large = [Self::large(slice, 32), Self::large(slice, 16)];
        let fits = |tiles: &Self| {
            len > Self::SMALL as usize
                && device.registers == Registers::Wide
                && tiles.workgroup() <= device.max_invocations
                && tiles.memory() <= device.workgroup_memory
        };
        large.into_iter().find(fits).unwrap_or(Self::small(slice))
    }

    fn memory(self) -> u32 {
        let staged = (2 * self.side * (self.chunk / 4 + 1)).max(self.slice_rows() * self.slice / 4);
        let given = self.side * (self.side / 4 + 1);
        // The start of rows and a query's numbers, then a range of each invocation and of all.
        16 * (staged + given) + (2 * 8 + 16) * self.side + 8 * self.workgroup() + 16
    }
}

/// The tiles of the backward kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum BackwardTiles {
    /// For GPUs.
    Gpu(BackwardGpu),
    /// For software drivers: `owns` output rows against `others` opposite rows at a time, all
    /// channels.
    Cpu { lanes: u32, owns: u32, others: u32, head_vectors: u32, value_vectors: u32 },
    /// For matrix units.
    Matrix(BackwardMatrix),
}

/// Bytes of code of the CPU variant's loop, counted in a driver's AVX2 code. Each vec4 of an
/// opposite row takes 48 bytes to load, and 15 per output row to use.
fn cpu_code_bytes(of: GradientsOf, owns: u32, others: u32, head: u32, value: u32) -> u32 {
    let scores = if of.scores() { 2 * head + value } else { head };
    let vectors = scores + if of.values() { value } else { 0 };
    4 * others * vectors * (48 + 15 * owns)
}

/// The largest bytes of code for two opposite rows at a time.
const TWO_AT_A_TIME: u32 = 16_000;

/// The most vectors of both sides for the CPU variant. With more, an invocation's variables do not
/// fit, and the kernel compiles for seconds.
const MOST_CPU_VECTORS: u32 = 96;

impl BackwardTiles {
    pub fn is_cpu(self) -> bool {
        matches!(self, BackwardTiles::Cpu { .. })
    }

    /// True if this kernel of queries sums their weights, and divides by the sums.
    pub fn normalise(self, of: GradientsOf) -> bool {
        of.of_queries() && !matches!(self, BackwardTiles::Matrix(_))
    }

    /// The output rows of a workgroup: queries or keys.
    pub fn owns(self) -> u32 {
        match self {
            BackwardTiles::Gpu(tiles) => tiles.side,
            BackwardTiles::Cpu { lanes, owns, .. } => lanes * owns,
            BackwardTiles::Matrix(tiles) => tiles.owns(),
        }
    }

    /// The channels of the gradients that a workgroup computes.
    pub fn slice(self) -> u32 {
        match self {
            BackwardTiles::Gpu(tiles) => tiles.slice,
            BackwardTiles::Cpu { head_vectors, value_vectors, .. } => 4 * head_vectors.max(value_vectors),
            BackwardTiles::Matrix(tiles) => tiles.head.max(tiles.value),
        }
    }

    pub fn invocations(self) -> u32 {
        match self {
            BackwardTiles::Gpu(tiles) => tiles.workgroup(),
            BackwardTiles::Cpu { lanes, .. } => lanes,
            BackwardTiles::Matrix(tiles) => tiles.workgroup(),
        }
    }

    pub fn workgroup_memory(self, of: GradientsOf) -> u32 {
        match self {
            BackwardTiles::Gpu(tiles) => tiles.memory(),
            BackwardTiles::Cpu { .. } => 0,
            BackwardTiles::Matrix(tiles) => tiles.memory(of),
        }
    }

    /// Chooses the tiles.
    ///
    /// # Errors
    /// Returns an error if matrix units must be used and cannot be.
    fn of(
        of: GradientsOf,
        shape: &Shape,
        dtype: DType,
        kernel_options: &KernelOptions,
        device: &DeviceFacts,
    ) -> Result<Self, Error> {
        let cpu = kernel_options.target.choose(GRADIENTS, device);
        if of == GradientsOf::Totals {
            // The kernel for matrix units does not sum weights.
            return Ok(Self::without_matrix_units(of, shape, cpu, device));
        }
        let matrix = kernel_options.settle(BackwardMatrix::of(of, shape, dtype, kernel_options, device))?;
        Ok(matrix.map_or_else(|| Self::without_matrix_units(of, shape, cpu, device), BackwardTiles::Matrix))
    }

    fn without_matrix_units(of: GradientsOf, shape: &Shape, cpu: bool, device: &DeviceFacts) -> Self {
        let [head, value] = [shape.head_dim, shape.value_dim].map(|dim| dim.div_ceil(4) as u32);
        // On drivers that load for each lane, the unrolled loads compile for minutes.
        if cpu && !device.gathers && head + value <= MOST_CPU_VECTORS {
            return Self::cpu(of, shape, device.lanes, [head, value]);
        }
        let most = shape.head_dim.max(shape.value_dim);
        let (len, _) = of.own_side(shape);
        BackwardTiles::Gpu(BackwardGpu::of(len, if most > 64 { 128 } else { 64 }, device))
    }

    fn cpu(of: GradientsOf, shape: &Shape, lanes: u32, [head_vectors, value_vectors]: [u32; 2]) -> Self {
        let len = if of.of_queries() { shape.q_len } else { shape.kv_len };
        // Measured for 64 and 128 channels, with 8 lanes and with 16. Three output rows are slower,
        // and two opposite rows at a time are no faster. One output row is slower for k and v.
        let owns = if len > lanes as usize { 2 } else { 1 };
        let two = cpu_code_bytes(of, owns, 2, head_vectors, value_vectors) <= TWO_AT_A_TIME;
        let others = if two { 2 } else { 1 };
        BackwardTiles::Cpu { lanes, owns, others, head_vectors, value_vectors }
    }

    /// Returns the tiles that tools and tests list.
    pub fn listed(of: GradientsOf) -> impl Iterator<Item = Self> {
        let cpu = [(8, 32), (8, 64), (8, 128), (16, 64)].map(|(lanes, dim)| Self::cpu_listed(of, lanes, dim));
        let gpu = [64, 128].into_iter().flat_map(|slice| {
            [BackwardGpu::small(slice), BackwardGpu::large(slice, 32), BackwardGpu::large(slice, 16)]
        });
        gpu.map(BackwardTiles::Gpu).chain(cpu)
    }

    /// Returns the tiles with which every mask is listed.
    pub fn masked(of: GradientsOf) -> [Self; 2] {
        [BackwardTiles::Gpu(BackwardGpu::small(64)), Self::cpu_listed(of, 8, 32)]
    }

    fn cpu_listed(of: GradientsOf, lanes: u32, dim: u32) -> Self {
        Self::cpu(of, &Shape::new(1, 1, 512, dim as usize), lanes, [dim / 4; 2])
    }
}

/// The plan of one backward kernel. It is cut into dispatches later.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct BackwardPlan {
    pub of: GradientsOf,
    pub tiles: BackwardTiles,
    /// Workgroups: tiles, slices of channels, batch times heads.
    grid: [usize; 3],
    steps: [usize; 3],
}

impl BackwardPlan {
    /// Plans one backward kernel.
    ///
    /// # Errors
    /// Returns an error if:
    ///
    /// - there would be too many dispatches,
    /// - a kernel is disabled and no other kernel replaces it,
    /// - matrix units must be used and cannot be.
    pub fn new(
        of: GradientsOf,
        shape: &Shape,
        dtype: DType,
        kernel_options: &KernelOptions,
        device: &DeviceFacts,
    ) -> Result<Self, Error> {
        let tiles = BackwardTiles::of(of, shape, dtype, kernel_options, device)?;
        // The CPU variant does not support every shape and device.
        if let BackwardTiles::Gpu(_) | BackwardTiles::Cpu { .. } = tiles {
            let family = GRADIENTS.of(tiles.is_cpu());
            if device.lacks_both(GRADIENTS) || kernel_options.target == Target::Auto && device.lacks(family) {
                return Err(Error::Disabled { family });
            }
        }
        let (len, heads) = of.own_side(shape);
        let others = if of.of_queries() { shape.kv_len } else { shape.q_len * shape.group() };
        let channels = match of {
            GradientsOf::Queries | GradientsOf::Keys => shape.head_dim,
            GradientsOf::Values => shape.value_dim,
            GradientsOf::KeysAndValues => shape.head_dim.max(shape.value_dim),
            GradientsOf::Totals => 1,
        };
        let slices = channels.div_ceil(tiles.slice() as usize);
        let grid = [len.div_ceil(tiles.owns() as usize), slices, shape.batch * heads];
        // The work includes masked pairs.
        let work = 2.0 * f64::from(tiles.owns()) * others as f64 * of.operations(shape) as f64;
        Ok(BackwardPlan { of, tiles, grid, steps: steps(grid, work, kernel_options.most_work(), device)? })
    }

    /// True if an invocation can hold the gradients of keys and of values together. With about 128
    /// registers it spills.
    pub fn has_room_for_both(
        shape: &Shape,
        dtype: DType,
        kernel_options: &KernelOptions,
        device: &DeviceFacts,
    ) -> bool {
        let room = match BackwardTiles::of(GradientsOf::KeysAndValues, shape, dtype, kernel_options, device) {
            Ok(BackwardTiles::Gpu(_)) => device.registers == Registers::Wide,
            Ok(BackwardTiles::Cpu { .. }) => true,
            Ok(BackwardTiles::Matrix(tiles)) => tiles.has_room_for_both(),
            // The two kernels can fit separately.
            Err(_) => false,
        };
        room && !device.lacks(Family::JointGradients)
    }

    /// Returns the dispatches that the grid is cut into.
    pub fn pieces(&self) -> impl Iterator<Item = Piece> + use<> {
        pieces(self.grid, self.steps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: DeviceFacts = DeviceFacts { workgroup_memory: 16384, ..DeviceFacts::LEAST };

    fn plan(of: GradientsOf, shape: Shape, device: &DeviceFacts) -> BackwardPlan {
        BackwardPlan::new(of, &shape, DType::F32, &KernelOptions::new(), device).expect("within the limits")
    }

    #[test]
    fn tiles_fit_every_device() {
        for of in GradientsOf::ALL.into_iter().chain([GradientsOf::Totals]) {
            for tiles in BackwardTiles::listed(of) {
                let memory = match tiles {
                    BackwardTiles::Gpu(BackwardGpu { side: 64, chunk: 32, .. }) => 49152,
                    BackwardTiles::Gpu(BackwardGpu { side: 64, .. }) => 32768,
                    _ => DEVICE.workgroup_memory,
                };
                assert!(tiles.workgroup_memory(of) <= memory, "{tiles:?}");
                assert!(tiles.invocations() <= DEVICE.max_invocations, "{tiles:?}");
            }
        }
    }

    #[test]
    fn devices_with_registers_and_memory_have_large_tiles() {
        let side = |device: &DeviceFacts, len| {
            let BackwardTiles::Gpu(tiles) =
                plan(GradientsOf::Queries, Shape::new(1, 1, len, 64), device).tiles
            else {
                panic!("the form for GPUs")
            };
            (tiles.side, tiles.chunk)
        };
        let wide = DeviceFacts { registers: Registers::Wide, workgroup_memory: 49152, ..DEVICE };
        assert_eq!(side(&wide, 512), (64, 32));
        assert_eq!(side(&wide, 32), (32, 32));
        assert_eq!(side(&DeviceFacts { workgroup_memory: 32768, ..wide.clone() }, 512), (64, 16));
        assert_eq!(side(&DeviceFacts { workgroup_memory: 16384, ..wide.clone() }, 512), (32, 32));
        assert_eq!(side(&DeviceFacts { registers: Registers::Middle, ..wide.clone() }, 512), (32, 32));
        assert_eq!(side(&DeviceFacts { max_invocations: 128, ..wide }, 512), (32, 32));
    }

    #[test]
    fn every_row_and_channel_has_a_workgroup() {
        let software = DeviceFacts { software: true, ..DEVICE };
        let shape =
            Shape { batch: 2, heads: 6, kv_heads: 3, q_len: 100, kv_len: 65, head_dim: 64, value_dim: 300 };
        assert_eq!(plan(GradientsOf::Queries, shape, &DEVICE).grid, [4, 1, 12]);
        assert_eq!(plan(GradientsOf::KeysAndValues, shape, &DEVICE).grid, [3, 3, 6]);
        assert_eq!(plan(GradientsOf::Values, shape, &DEVICE).grid, [3, 3, 6]);
        // Too many channels for variables.
        assert!(!plan(GradientsOf::Queries, Shape { value_dim: 600, ..shape }, &software).tiles.is_cpu());
        let small = Shape { value_dim: 64, ..shape };
        let BackwardPlan { tiles, grid, .. } = plan(GradientsOf::Queries, small, &software);
        assert_eq!((tiles.owns(), grid), (16, [7, 1, 12]));
        let few = Shape { q_len: 8, ..small };
        assert_eq!(plan(GradientsOf::Queries, few, &software).tiles.owns(), 8);
    }

    /// The dispatches cover the grid with any limit.
    #[test]
    fn pieces_cover_the_grid() {
        let shape = Shape::new(2, 3, 500, 32);
        for limit in [1, 1 << 20, 1 << 37] {
            let kernel_options = KernelOptions::new().work_limit(limit);
            let plan = BackwardPlan::new(GradientsOf::Queries, &shape, DType::F32, &kernel_options, &DEVICE)
                .expect("a plan");
            let workgroups = |grid: [u32; 3]| grid.iter().map(|n| *n as usize).product::<usize>();
            assert_eq!(plan.pieces().map(|piece| workgroups(piece.grid)).sum::<usize>(), 16 * 6);
            assert_eq!(plan.pieces().count() == 1, limit == 1 << 37);
        }
    }
}
