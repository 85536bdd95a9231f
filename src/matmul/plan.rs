//! Tile sizes of products: projections, scores, the weighted sum.

use crate::device::family::{PRODUCT_GRADIENTS, PRODUCTS};
use crate::device::registers::Registers;
use crate::device::tuned::{Class, Pick};
use crate::device::{DeviceFacts, Family, Fragment};
use crate::kernel::{KernelOptions, MatrixUnits};
use crate::tensor::{DType, Error};

/// The tile of a product. The shader is compiled for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Tiles {
    /// `side × side` of the result per workgroup of 256 invocations, `k` of the inner axis per
    /// step.
    Gpu { side: u32, k: u32 },
    /// `rows` × `4 · lanes` of the result per workgroup of `lanes` invocations.
    Cpu { rows: u32, lanes: u32 },
    /// `rows` × `4 · fours` of the result per workgroup of a GPU, only for projections. `lanes`
    /// invocations share four columns.
    Few { rows: u32, fours: u32, lanes: u32 },
    /// Tiles on matrix units, only for projections.
    Matrix(MatrixTiles),
}

/// `side × side` of the result per workgroup of four subgroups. `lanes` counts all invocations, if
/// subgroups have the planned width.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MatrixTiles {
    pub fragment: Fragment,
    pub side: u32,
    pub lanes: u32,
}

impl MatrixTiles {
    /// Elements of the inner axis per step.
    pub const K: u32 = 32;

    /// Fragments of a subgroup that are stored through workgroup memory at once. They fill the rest
    /// of the workgroup memory. The limit is 16 KiB for the small tile and 32 KiB for the large
    /// tile.
    pub fn leaving(&self) -> u32 {
        (if self.side == 64 && self.fragment == Fragment::Sixteen { 16 } else { 32 }) / self.fragment.side()
    }

    /// Bytes: tiles of A and B in f16 with 16 bytes more per row, and the fragments that are
    /// stored.
    pub fn workgroup_memory(&self) -> u32 {
        let side = self.fragment.side();
        2 * self.side * (Self::K + 8) * 2 + 4 * side * (self.leaving() * side + 4) * 4
    }
}

/// A product of `rows × inner` by `inner × cols`, `batch` times.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MatmulShape {
    pub batch: usize,
    pub rows: usize,
    pub cols: usize,
}

/// The properties of projections that are computed together, for the plan.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProductOutline {
    pub shape: MatmulShape,
    pub inner: usize,
    /// The types of inputs, weights and outputs.
    pub stored: [DType; 3],
    /// `in_fours` is true if inputs and weights load as vec4. `w_along_columns` is true if the
    /// weights load along columns.
    pub in_fours: bool,
    pub w_along_columns: bool,
    pub kernel_options: KernelOptions,
}

impl ProductOutline {
    /// The class of calls that share one measurement, if plans may follow measurements.
    pub fn class(&self) -> Option<Class> {
        let ProductOutline { shape, inner, stored, in_fours, w_along_columns, kernel_options } = *self;
        let flags = [in_fours, w_along_columns, kernel_options.f16_operands];
        let flags = flags.into_iter().enumerate().fold(0, |bits, (n, flag)| bits | u32::from(flag) << n);
        let lengths = [shape.batch, shape.rows, shape.cols, inner];
        let [x, w, y] = stored.map(|dtype| dtype as u32);
        kernel_options.is_open().then(|| Class::new(1, [flags, x, w, y], lengths))
    }
}

/// Chooses the tiles of projections by the measurements for such products, or by the built-in
/// rules.
///
/// # Errors
/// The options demand kernels that these products do not support.
pub(crate) fn choose_product(outline: &ProductOutline, device: &DeviceFacts) -> Result<Tiles, Error> {
    let measured = device.tuned.is_some().then(|| outline.class()).flatten();
    let pick = measured.and_then(|class| device.pick(class));
    let picked = pick.and_then(|pick| choose_product_as(outline, &pick, &device.overridden(&pick)).ok());
    picked.map_or_else(|| choose_product_as(outline, &Pick::default(), device), Ok)
}

/// Chooses the tiles of projections by `pick`. The plan uses only the facts in `device`.
pub(crate) fn choose_product_as(
    outline: &ProductOutline,
    pick: &Pick,
    device: &DeviceFacts,
) -> Result<Tiles, Error> {
    let ProductOutline { shape, stored, in_fours, kernel_options, .. } = *outline;
    let dtype = match stored {
        _ if stored.contains(&DType::BF16) => DType::BF16,
        [DType::F16, DType::F16, _] => DType::F16,
        _ => DType::F32,
    };
    let matrix = if kernel_options.batch_invariant {
        Err("the order of their sums depends on the rows, which `batch_invariant` excludes")
    } else {
        matrix_tiles(shape, dtype, in_fours, &kernel_options, pick, device)
    };
    if let Some(tiles) = kernel_options.settle(matrix)? {
        return Ok(Tiles::Matrix(tiles));
    }
    if device.lacks_both(PRODUCTS) {
        return Err(Error::Disabled { family: PRODUCTS.of(device.software) });
    }
    let cpu = kernel_options.target.choose(PRODUCTS, device);
    let few = || few_rows(outline, cpu, device);
    Ok(picked_tiles(shape, cpu, pick).or_else(few).unwrap_or_else(|| tiles(shape, cpu, device)))
}

/// The largest number of rows for which each element of the weights is loaded once. A tile would
/// compute at least 64 rows.
pub(crate) const FEW_ROWS: usize = 8;

/// The tiles of a product of few rows on a GPU.
fn few_rows(outline: &ProductOutline, cpu: bool, device: &DeviceFacts) -> Option<Tiles> {
    let MatmulShape { rows, cols, .. } = outline.shape;
    // Workgroups of 8 columns are 72 for a product of 576 columns. Loads along columns need 16
    // columns for 64 bytes in f32.
    let [fours, lanes] = if outline.w_along_columns { [4, 16] } else { [2, 32] };
    let usable = !cpu && !outline.kernel_options.batch_invariant && !device.lacks(Family::FewRowProducts);
    let fits = rows <= FEW_ROWS && cols.div_ceil(4 * fours as usize) <= device.max_workgroups as usize;
    (usable && fits).then_some(Tiles::Few { rows: rows.next_power_of_two() as u32, fours, lanes })
}

/// Chooses the tiles of a gradient of a projection, by the built-in rules and without matrix units.
///
/// # Errors
/// The options demand matrix units.
pub(crate) fn choose_gradient(
    shape: MatmulShape,
    kernel_options: &KernelOptions,
    device: &DeviceFacts,
) -> Result<Tiles, Error> {
    kernel_options.settle::<()>(Err("gradients of projections do not use them; set `MatrixUnits::Auto`"))?;
    if device.lacks_both(PRODUCT_GRADIENTS) {
        return Err(Error::Disabled { family: PRODUCT_GRADIENTS.of(device.software) });
    }
    Ok(tiles(shape, kernel_options.target.choose(PRODUCT_GRADIENTS, device), device))
}

/// The tiles of `pick`, if the product supports them.
fn picked_tiles(MatmulShape { rows, .. }: MatmulShape, cpu: bool, pick: &Pick) -> Option<Tiles> {
    let [power, lanes] = [pick.rows, pick.keys];
    if !cpu {
        return [SMALL, LARGE]
            .into_iter()
            .find(|tiles| matches!(tiles, Tiles::Gpu { side, .. } if *side == power));
    }
    let named = power.is_power_of_two() && power <= 32 && [4, 8, 16, 32].contains(&lanes);
    (named && power as usize <= rows.next_power_of_two()).then_some(Tiles::Cpu { rows: power, lanes })
}

/// The small and the large tile. An invocation of the small tile has 4 × 4 sums, in 48 to 60
/// registers on AMD. An invocation of the large tile has 8 × 8 sums, in 96 to 120 registers.
///
/// Per k, the small tile loads two vectors from workgroup memory for 16 multiply-adds. Workgroup
/// memory without broadcast is then the bottleneck. The large tile loads four vectors for 64
/// multiply-adds, and half as many bytes from global memory.
const SMALL: Tiles = Tiles::Gpu { side: 64, k: 16 };
const LARGE: Tiles = Tiles::Gpu { side: 128, k: 8 };

/// The number of workgroups that fill a large GPU. Two workgroups of `LARGE` fill the registers of
/// each of about a hundred cores. With fewer workgroups, four times as many small tiles are faster
/// than more reuse.
pub(crate) const ENOUGH_WORKGROUPS: usize = 256;

/// Chooses the tiles of a product, for software drivers if `cpu`. Large tiles reuse loaded elements
/// more often. Small tiles give more workgroups, and compute less outside the matrix.
pub(crate) fn tiles(product: MatmulShape, cpu: bool, device: &DeviceFacts) -> Tiles {
    let MatmulShape { batch, rows, cols } = product;
    if cpu {
        let lanes = (cols.div_ceil(4).next_power_of_two() as u32).clamp(device.lanes, 32);
        let rows = rows.next_power_of_two().min(32) as u32;
        return Tiles::Cpu { rows, lanes };
    }
    let count = |side: usize| rows.div_ceil(side).saturating_mul(cols.div_ceil(side));
    let (small, large) = (count(64), count(128));
    let fills = large.saturating_mul(batch) >= ENOUGH_WORKGROUPS;
    // A quarter more work outside the matrix is worth the reuse. A third more (192 columns) or
    // twice the work is not.
    let pays = large * 16 <= small * 5;
    // Each invocation needs registers for 8 × 8 sums and the elements of the next step.
    if fills && pays && device.registers == Registers::Wide { LARGE } else { SMALL }
}

/// With fewer rows or columns than half a small tile, most of the tile is padding.
const LEAST_ROWS: usize = 32;

/// Chooses the tiles of a product of `dtype` on matrix units, or returns the reason why there are
/// none. `in_fours` is true if its operands load as vec4.
fn matrix_tiles(
    product: MatmulShape,
    dtype: DType,
    in_fours: bool,
    kernel_options: &KernelOptions,
    pick: &Pick,
    device: &DeviceFacts,
) -> Result<MatrixTiles, &'static str> {
    let MatmulShape { batch, rows, cols } = product;
    let fragment = kernel_options.fragment(dtype, Family::MatrixProducts, device)?;
    if kernel_options.matrix_units == MatrixUnits::Auto && rows.min(cols) < LEAST_ROWS {
        return Err("too few rows or columns");
    }
    let tiles = |side| MatrixTiles { fragment, side, lanes: 4 * device.planned_subgroup() };
    let fits = |tiles: &MatrixTiles| {
        tiles.lanes.is_multiple_of(tiles.side / 4)
            && tiles.lanes <= device.max_invocations
            && tiles.workgroup_memory() <= device.workgroup_memory
    };
    let count = |side: usize| rows.div_ceil(side).saturating_mul(cols.div_ceil(side));
    let (small, large) = (count(64), count(128));
    // A large tile is 64 × 64 per subgroup. With fragments of 8 it needs four times the
    // instructions, and more registers than Apple's compiler provides.
    let fills = large.saturating_mul(batch) >= ENOUGH_WORKGROUPS / 2 && large * 16 <= small * 5;
    // With the sums of a large tile, 128 invocations have registers for the next step's f16
    // elements. The registers are not enough for f32 elements or for the addresses of single
    // elements.
    let room = device.planned_subgroup() >= 64 || in_fours && dtype == DType::F16;
    let large =
        if pick.rows == 0 { fills && room && fragment == Fragment::Sixteen } else { pick.rows == 128 };
    let wanted = if large { [128, 64] } else { [64, 64] };
    wanted.map(tiles).into_iter().find(fits).ok_or("the device's limits are too low for their workgroups")
}

/// The workgroups of a product, `[rows, columns, batch]`. Neighbours share their part of B.
pub(crate) fn grid(tiles: Tiles, product: MatmulShape) -> [usize; 3] {
    let (m, n) = match tiles {
        Tiles::Gpu { side, .. } => (side, side),
        Tiles::Cpu { rows, lanes } => (rows, lanes * 4),
        Tiles::Few { rows, fours, .. } => (rows, fours * 4),
        Tiles::Matrix(MatrixTiles { side, .. }) => (side, side),
    };
    [product.rows.div_ceil(m as usize), product.cols.div_ceil(n as usize), product.batch]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Families;
    use crate::kernel::Target;

    const DEVICE: DeviceFacts = DeviceFacts {
        workgroup_memory: 32768,
        subgroup_min: 32,
        subgroup_max: 32,
        matrix: Some(Fragment::Sixteen),
        ..DeviceFacts::LEAST
    };

    fn side(
        product: [usize; 3],
        kernel_options: &KernelOptions,
        device: &DeviceFacts,
    ) -> Result<u32, &'static str> {
        let [batch, rows, cols] = product;
        let found = matrix_tiles(
            MatmulShape { batch, rows, cols },
            DType::F16,
            true,
            kernel_options,
            &Pick::default(),
            device,
        );
        found.map(|tiles| tiles.side)
    }

    #[test]
    fn few_rows_have_separate_tiles() {
        let auto = KernelOptions::new().target(Target::Gpu);
        let tiles = |rows, cols, kernel_options: KernelOptions, device: &DeviceFacts| {
            let outline = ProductOutline {
                shape: MatmulShape { batch: 1, rows, cols },
                inner: 64,
                stored: [DType::F32; 3],
                in_fours: true,
                w_along_columns: false,
                kernel_options,
            };
            choose_product(&outline, device).expect("a plan")
        };
        for (rows, taken) in [(1, 1), (3, 4), (8, 8)] {
            let few = Tiles::Few { rows: taken, fours: 2, lanes: 32 };
            assert_eq!(tiles(rows, 576, auto, &DEVICE), few);
        }
        assert_eq!(tiles(9, 576, auto, &DEVICE), SMALL);
        assert_eq!(tiles(1, 8 * DEVICE.max_workgroups as usize + 1, auto, &DEVICE), SMALL);
        assert_eq!(tiles(1, 576, auto.batch_invariant(true), &DEVICE), SMALL);
        let without = DeviceFacts { disabled: Families::of(Family::FewRowProducts), ..DEVICE };
        assert_eq!(tiles(1, 576, auto, &without), SMALL);
        let software = KernelOptions::new().target(Target::Software);
        assert!(matches!(tiles(1, 576, software, &DEVICE), Tiles::Cpu { .. }));
    }

    #[test]
    fn large_matrix_tiles_are_for_large_products() {
        let auto = KernelOptions::new().target(Target::Gpu);
        assert_eq!(side([1, 1408, 1536], &auto, &DEVICE), Ok(128));
        assert_eq!(side([128, 128, 128], &auto, &DEVICE), Ok(128));
        assert_eq!(side([1, 1280, 1536], &auto, &DEVICE), Ok(64), "too few to fill a GPU");
        assert_eq!(side([128, 128, 192], &auto, &DEVICE), Ok(64), "a third more beyond the edge");
        let one = MatmulShape { batch: 128, rows: 128, cols: 128 };
        let rounded = auto.f16_operands(true);
        for (dtype, in_fours, widest, wanted) in
            [(DType::F32, true, 32, 64), (DType::F16, false, 32, 64), (DType::F32, false, 64, 128)]
        {
            let device = DeviceFacts { subgroup_max: widest, ..DEVICE };
            let found = matrix_tiles(one, dtype, in_fours, &rounded, &Pick::default(), &device);
            assert_eq!(found.map(|tiles| tiles.side), Ok(wanted), "{dtype:?}, {in_fours}, {widest}");
        }
        let least = DeviceFacts { workgroup_memory: 16384, ..DEVICE };
        assert_eq!(side([128, 128, 128], &auto, &least), Ok(64));
        let metal = DeviceFacts { matrix: Some(Fragment::Eight), subgroup_min: 4, subgroup_max: 64, ..least };
        assert_eq!(side([128, 128, 128], &auto, &metal), Ok(64));
    }

    #[test]
    fn matrix_tiles_fit_the_device_and_the_shader() {
        for (fragment, side) in [(Fragment::Eight, 64), (Fragment::Sixteen, 64), (Fragment::Sixteen, 128)] {
            for (min, max, lanes) in [(8, 8, 32), (8, 32, 128), (32, 32, 128), (4, 64, 256), (32, 64, 256)] {
                // For Metal's range of 4 to 64 the plan assumes 32.
                let lanes = if fragment == Fragment::Eight { lanes.min(128) } else { lanes };
                let device =
                    DeviceFacts { matrix: Some(fragment), subgroup_min: min, subgroup_max: max, ..DEVICE };
                let product = MatmulShape { batch: 128, rows: side, cols: side };
                let kernel_options = KernelOptions::new().target(Target::Gpu);
                let tiles =
                    matrix_tiles(product, DType::F16, true, &kernel_options, &Pick::default(), &device);
                let tiles = tiles.expect("within these limits");
                assert_eq!((tiles.side, tiles.lanes), (side as u32, lanes));
                // The assertions of the shader.
                assert!((tiles.side * MatrixTiles::K / 4).is_multiple_of(lanes));
                assert!(lanes.is_multiple_of(tiles.side / 4));
                assert!(tiles.workgroup_memory() <= if side == 64 { 16384 } else { 32768 });
            }
        }
    }

    #[test]
    fn matrix_units_need_rows_a_device_and_leave() {
        let with = |units| KernelOptions::new().target(Target::Gpu).matrix_units(units);
        assert!(side([1, 31, 512], &with(MatrixUnits::Auto), &DEVICE).is_err());
        assert!(side([1, 512, 31], &with(MatrixUnits::Auto), &DEVICE).is_err());
        assert_eq!(side([1, 1, 1], &with(MatrixUnits::Always), &DEVICE), Ok(64));
        assert!(side([1, 512, 512], &with(MatrixUnits::Never), &DEVICE).is_err());
        let few = DeviceFacts { max_invocations: 127, ..DEVICE };
        assert!(side([1, 512, 512], &with(MatrixUnits::Always), &few).is_err());
        assert!(side([1, 512, 512], &with(MatrixUnits::Always), &DeviceFacts::LEAST).is_err());
    }
}
