//! Plans of the fused kernel: tiles, workgroups, splits of the keys.

use super::decode::{KeySource, decode_cpu, decode_gpu};
use super::fused_cpu::{cpu_block, picked_cpu_block};
use super::matrix::fused_matrix;
use super::{DecodeCpu, DecodeGpu, FusedMatrix, Outline};
use crate::cache::storage::StorageKind;
use crate::device::family::FUSED;
use crate::device::registers::Registers;
use crate::device::tuned::Pick;
use crate::device::{DeviceFacts, Family};
use crate::kernel::pieces::{Piece, pieces, steps};
use crate::kernel::{KernelOptions, MatrixUnits, Target};
use crate::matmul::plan::ENOUGH_WORKGROUPS;
use crate::tensor::{DType, Error, Shape};

/// The tiles of the fused kernel, fixed when its shader is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum FusedTiles {
    /// For GPUs with `registers`. A workgroup of `workgroup` invocations computes `rows` packed
    /// rows and `slice` channels of out. A tile has `keys` keys; `v_keys` rows of v are staged at a
    /// time. `lanes` invocations share a row.
    Gpu { rows: u32, workgroup: u32, lanes: u32, slice: u32, keys: u32, v_keys: u32, registers: Registers },
    /// For software drivers. A workgroup of `lanes` computes `rows` packed rows in blocks of `keys`
    /// keys. All data of a row is in variables.
    Cpu { lanes: u32, rows: u32, keys: u32, head_vectors: u32, value_vectors: u32 },
    /// For few packed rows, on GPUs.
    DecodeGpu(DecodeGpu),
    /// For few packed rows and packed keys, on software drivers.
    DecodeCpu(DecodeCpu),
    /// For matrix units.
    Matrix(FusedMatrix),
    /// For additive scores, on GPUs. A workgroup of `rows · keys / 4` computes `rows` packed rows
    /// and `slice` channels of out, in tiles of `keys` keys.
    AdditiveGpu { rows: u32, keys: u32, slice: u32 },
    /// For additive scores, on software drivers. `key_lanes` of `lanes` invocations share a row,
    /// and each computes blocks of `keys` keys.
    AdditiveCpu { lanes: u32, key_lanes: u32, keys: u32, value_vectors: u32 },
}

impl FusedTiles {
    /// For the GPU variant: channels of q and k that are staged at a time, and keys whose weights
    /// are.
    pub const CHUNK: u32 = 16;
    pub const P_KEYS: u32 = 32;

    /// The tiles of additive scores. Tests check every mask with the second and the third.
    pub const ADDITIVE: [FusedTiles; 8] = [
        ADDITIVE_FEW[0],
        ADDITIVE_MANY,
        FusedTiles::AdditiveCpu { lanes: 8, key_lanes: 1, keys: 8, value_vectors: 3 },
        FusedTiles::AdditiveCpu { lanes: 8, key_lanes: 8, keys: 8, value_vectors: 5 },
        FusedTiles::AdditiveCpu { lanes: 4, key_lanes: 2, keys: 8, value_vectors: 2 },
        FusedTiles::AdditiveCpu { lanes: 16, key_lanes: 1, keys: 4, value_vectors: 20 },
        ADDITIVE_FEW[1],
        ADDITIVE_FEW[2],
    ];

    /// The tiles with which tests check every mask.
    pub const MASKED: [FusedTiles; 4] = [SMALL_64, SHORT_16[0], CPU, DECODE_CPU];

    /// Returns every kind of tiles.
    pub fn all() -> Vec<FusedTiles> {
        let named = [SMALL_64, SMALL_128, SMALL_256, CPU, CPU_16, DECODE_CPU];
        let square = [SQUARE_64, SQUARE_128, LARGE_64, LARGE_128];
        let middle = MIDDLE_16.into_iter().chain(MIDDLE_32).chain(MIDDLE_64);
        let narrow = [NARROW_16, NARROW_32];
        SHORT_16.into_iter().chain(SHORT_32).chain(named).chain(square).chain(middle).chain(narrow).collect()
    }

    /// Returns decode tiles of every kind to check, with keys of `storages` in a cache or with
    /// tensors.
    pub fn decode(storages: Option<[StorageKind; 2]>) -> Vec<FusedTiles> {
        let keys = KeySource {
            storages: storages.unwrap_or([StorageKind::F32; 2]),
            words: storages.is_some(),
            simple: true,
            operands: DType::F32,
        };
        let mut all = Vec::new();
        for (rows, head_dim, value_dim) in [
            (1, 13, 65),
            (1, 64, 64),
            (2, 192, 128),
            (4, 128, 128),
            (8, 80, 80),
            (8, 256, 256),
            (16, 96, 96),
            (4, 576, 512),
        ] {
            let shape = Shape { q_len: rows, value_dim, ..Shape::new(1, 1, 1, head_dim) };
            for (subgroup_min, registers) in
                [0, 8, 32].into_iter().flat_map(|s| Registers::ALL.map(|registers| (s, registers)))
            {
                let subgroup_max = subgroup_min;
                let device = DeviceFacts { subgroup_min, subgroup_max, registers, ..DeviceFacts::LEAST };
                all.extend(decode_gpu(rows, &shape, &keys, &device).map(FusedTiles::DecodeGpu));
            }
            let lanes: &[u32] = if head_dim == value_dim { &[4, 8, 16] } else { &[8] };
            for lanes in lanes {
                all.extend(decode_cpu(*lanes, false, rows, &shape, &keys).map(FusedTiles::DecodeCpu));
            }
            if rows == 4 {
                all.extend(decode_cpu(8, true, rows, &shape, &keys).map(FusedTiles::DecodeCpu));
            }
        }
        let mut seen = std::collections::HashSet::new();
        all.retain(|tiles| seen.insert(*tiles));
        all
    }

    /// The packed rows of a workgroup.
    fn rows(self) -> usize {
        match self {
            FusedTiles::Gpu { rows, .. } | FusedTiles::Cpu { rows, .. } => rows as usize,
            FusedTiles::DecodeGpu(decode) => decode.rows as usize,
            FusedTiles::DecodeCpu(decode) => decode.rows as usize,
            FusedTiles::Matrix(tiles) => tiles.rows() as usize,
            FusedTiles::AdditiveGpu { rows, .. } => rows as usize,
            FusedTiles::AdditiveCpu { lanes, key_lanes, .. } => (lanes / key_lanes) as usize,
        }
    }

    /// The channels of out that a workgroup computes.
    fn slice(self) -> usize {
        match self {
            FusedTiles::Gpu { slice, .. } => slice as usize,
            FusedTiles::Cpu { value_vectors, .. } | FusedTiles::AdditiveCpu { value_vectors, .. } => {
                value_vectors as usize * 4
            }
            FusedTiles::DecodeGpu(decode) => {
                (decode.loads.v * decode.loads.vectors[1] * 4).div_ceil(decode.slices()) as usize
            }
            FusedTiles::DecodeCpu(decode) => (decode.loads.v * decode.loads.vectors[1] * 4) as usize,
            FusedTiles::Matrix(tiles) => tiles.value as usize,
            FusedTiles::AdditiveGpu { slice, .. } => slice as usize,
        }
    }

    /// The number of neighbouring workgroups that compute all channels of out.
    fn slices(self, value_dim: usize) -> usize {
        match self {
            FusedTiles::DecodeGpu(decode) => decode.slices() as usize,
            _ => value_dim.div_ceil(self.slice()),
        }
    }

    /// The keys of a split are a multiple of this number: whole tiles.
    pub fn split_step(self) -> u32 {
        match self {
            FusedTiles::DecodeGpu(decode) => decode.keys().max(64),
            FusedTiles::Gpu { keys, .. } | FusedTiles::AdditiveGpu { keys, .. } => keys.max(64),
            _ => 64,
        }
    }

    /// True if this variant is for software drivers.
    pub fn is_cpu(self) -> bool {
        matches!(self, FusedTiles::Cpu { .. } | FusedTiles::DecodeCpu(_) | FusedTiles::AdditiveCpu { .. })
    }

    /// True if this variant is for additive scores.
    pub fn is_additive(self) -> bool {
        matches!(self, FusedTiles::AdditiveGpu { .. } | FusedTiles::AdditiveCpu { .. })
    }

    /// True if the kernel can load keys and values as vectors of words.
    pub fn takes_words(self) -> bool {
        matches!(self, FusedTiles::DecodeGpu(_) | FusedTiles::DecodeCpu(_))
    }

    /// The least keys of a split. Fewer keys do not justify a workgroup's start and end.
    pub fn split_least(self) -> u32 {
        match self {
            FusedTiles::Gpu { .. } | FusedTiles::DecodeGpu(_) | FusedTiles::Matrix(_) => 128,
            FusedTiles::Cpu { .. } | FusedTiles::DecodeCpu(_) => 256,
            // A pair of additive scores takes more work.
            FusedTiles::AdditiveGpu { keys, .. } => keys.max(64),
            FusedTiles::AdditiveCpu { .. } => 64,
        }
    }

    /// The number of workgroups that is enough. On CPUs it is some for every core; the machine can
    /// have more cores than the one that plans.
    fn enough(self) -> usize {
        match self {
            FusedTiles::Gpu { .. } => 2 * ENOUGH_WORKGROUPS,
            FusedTiles::Matrix(_) | FusedTiles::AdditiveGpu { .. } => ENOUGH_WORKGROUPS,
            // Small workgroups: each core runs several.
            FusedTiles::DecodeGpu(_) => 2 * ENOUGH_WORKGROUPS,
            FusedTiles::Cpu { .. } | FusedTiles::DecodeCpu(_) | FusedTiles::AdditiveCpu { .. } => 16,
        }
    }

    /// Bytes of workgroup memory, as the shader declares it.
    pub fn workgroup_memory(self) -> u32 {
        let (rows, lanes, slice, keys, v_keys) = match self {
            FusedTiles::Gpu { rows, lanes, slice, keys, v_keys, .. } => (rows, lanes, slice, keys, v_keys),
            FusedTiles::Cpu { .. } => return 0,
            FusedTiles::DecodeGpu(decode) => return decode.memory(),
            FusedTiles::DecodeCpu(decode) => return decode.memory(),
            FusedTiles::Matrix(tiles) => return tiles.memory(),
            // Chunks of four vectors and one of padding, for rows twice and for keys. Then weights,
            // and a number of each invocation.
            FusedTiles::AdditiveGpu { rows, keys, .. } => {
                return 80 * (2 * rows + keys) + 4 * rows * keys + rows * keys;
            }
            // A state and a vector of each invocation.
            FusedTiles::AdditiveCpu { lanes, .. } => return 24 * lanes,
        };
        let (chunk, p_keys) = (Self::CHUNK, Self::P_KEYS);
        // In vectors: q and k, each fourth row shifted by one, or weights and v, or maxima by lane.
        let qk = (rows + keys) * chunk / 4 + (rows + keys) / 4;
        let pv = p_keys * rows / 4 + p_keys / 4 + v_keys * slice / 4;
        let parts = lanes * (rows / 4 + 1);
        let tile = qk.max(pv).max(parts);
        // Three vectors per four rows, two pairs per row, eight partial intervals and the total.
        16 * (tile + 3 * rows / 4 + rows + 9)
    }
}

/// For [`Registers::Wide`]: each invocation has 8 × 4 scores and as many rows of sums, and loads
/// ahead.
const fn wide(rows: u32, workgroup: u32, slice: u32, v_keys: u32) -> FusedTiles {
    FusedTiles::Gpu { rows, workgroup, lanes: 16, slice, keys: 64, v_keys, registers: Registers::Wide }
}

/// Also for [`Registers::Wide`]: each invocation has 8 × 8 scores and 8 × 8 sums, and loads ahead.
/// A multiply-add reads a byte of workgroup memory in these tiles, and 1.25 or more in others.
const fn square(rows: u32, slice: u32) -> FusedTiles {
    let (workgroup, lanes, v_keys) = if slice == 64 { (rows, 8, 16) } else { (2 * rows, 16, 8) };
    FusedTiles::Gpu { rows, workgroup, lanes, slice, keys: slice, v_keys, registers: Registers::Wide }
}

/// For [`Registers::Middle`]: half as many scores and sums, without loading ahead.
const fn middle(rows: u32, workgroup: u32, slice: u32, v_keys: u32) -> FusedTiles {
    FusedTiles::Gpu { rows, workgroup, lanes: 16, slice, keys: 64, v_keys, registers: Registers::Middle }
}

/// For [`Registers::Narrow`]: a quarter of the scores, half as many keys, without loading ahead.
const fn narrow(rows: u32, workgroup: u32) -> FusedTiles {
    FusedTiles::Gpu {
        rows,
        workgroup,
        lanes: 16,
        slice: 64,
        keys: 32,
        v_keys: 8,
        registers: Registers::Narrow,
    }
}

/// 64 packed rows, within the WebGPU default limits.
const SMALL_64: FusedTiles = wide(64, 128, 64, 16);
const SMALL_128: FusedTiles = wide(64, 128, 128, 8);
/// Twice the invocations, so that the sums of 256 channels fit in registers.
const SMALL_256: FusedTiles = wide(64, 256, 256, 4);
/// For devices with scalar registers: as many rows, half the invocations. The model of
/// benches/PREDICTIONS.md gives them 0.78 and 0.84 of RDNA 3's rate of arithmetic, with 64 and 128
/// channels. It gives the tiles above 0.59 and 0.72. No GPU has run square tiles.
const SQUARE_64: FusedTiles = square(64, 64);
const SQUARE_128: FusedTiles = square(64, 128);
/// 128 packed rows in 24 KiB. They need half as many loads of keys and values from global memory
/// per multiply-add. No rule chooses them; `Pipelines::tune` can. An H200 (580.159) ran 128 rows
/// with 8 × 4 scores of an invocation. They took 1.12 and 1.03 times as long as 64 rows.
const LARGE_64: FusedTiles = square(128, 64);
const LARGE_128: FusedTiles = square(128, 128);
/// For few queries: more workgroups, and less computation past the last row. Slices are as wide as
/// registers allow, because every slice scores all keys again.
const SHORT_32: [FusedTiles; 2] = [wide(32, 64, 64, 8), wide(32, 64, 128, 8)];
const SHORT_16: [FusedTiles; 3] = [wide(16, 64, 64, 8), wide(16, 64, 128, 8), wide(16, 64, 256, 4)];

/// For fewer registers: 16, 32 and 64 packed rows, slices of 64 and of 128 channels.
const MIDDLE_16: [FusedTiles; 2] = [middle(16, 64, 64, 8), middle(16, 64, 128, 8)];
const MIDDLE_32: [FusedTiles; 2] = [middle(32, 128, 64, 8), middle(32, 128, 128, 8)];
const MIDDLE_64: [FusedTiles; 2] = [middle(64, 256, 64, 16), middle(64, 256, 128, 8)];

/// For the fewest registers. Every slice of 64 channels scores all keys again.
const NARROW_16: FusedTiles = narrow(16, 64);
const NARROW_32: FusedTiles = narrow(32, 128);

/// For 16 lanes, the widest vectors.
const CPU_16: FusedTiles =
    FusedTiles::Cpu { lanes: 16, rows: 32, keys: 2, head_vectors: 8, value_vectors: 8 };
const CPU: FusedTiles = FusedTiles::Cpu { lanes: 8, rows: 24, keys: 2, head_vectors: 4, value_vectors: 4 };
const DECODE_CPU: FusedTiles =
    FusedTiles::Cpu { lanes: 8, rows: 8, keys: 1, head_vectors: 5, value_vectors: 3 };

/// For additive scores with few rows, or with many channels of values. Narrower slices would score
/// all keys again.
const ADDITIVE_FEW: [FusedTiles; 3] = [
    FusedTiles::AdditiveGpu { rows: 4, keys: 128, slice: 256 },
    FusedTiles::AdditiveGpu { rows: 4, keys: 128, slice: 512 },
    FusedTiles::AdditiveGpu { rows: 4, keys: 128, slice: 1024 },
];
const ADDITIVE_MANY: FusedTiles = FusedTiles::AdditiveGpu { rows: 16, keys: 32, slice: 256 };

/// The cost of a tanh, in multiply-adds.
pub(crate) const TANH: f64 = 16.0;

/// The plan of a call of the fused kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct FusedPlan {
    pub tiles: FusedTiles,
    /// Workgroups that share the keys of a tile of rows.
    pub splits: usize,
    /// True if the results of splits are merged.
    merges: bool,
    /// The keys of a split that begins at a multiple of them. 0 if splits depend on the rows.
    pub fixed_split: usize,
    /// Workgroups: row tiles times splits, slices of out, batch · kv_heads.
    grid: [usize; 3],
    /// The most workgroups along each axis in one dispatch.
    steps: [usize; 3],
    /// Packed rows of all sequences and heads. `width` is value_dim in whole vectors.
    rows: usize,
    width: usize,
}

/// The most splits of a plan. With more, merging the partial sums would dominate the time.
pub(crate) const MOST_SPLITS: usize = 128;

/// The most keys of a split, if the partial sums fit [`EXACT_BYTES`]. f32 loses digits in longer
/// sums. The mean of 2²⁰ equal values in splits of 2¹⁶ keys has a relative error of 6e-4. The
/// reference sums blocks of as many keys.
const LONGEST_SUM: usize = 1 << 13;

/// The most bytes of partial sums that [`LONGEST_SUM`] can add.
const EXACT_BYTES: u64 = 32 << 20;

/// Up to this many tokens, the scratch of a call with a cache does not depend on the cache's
/// capacity.
const LONG_CACHE: usize = 1 << 17;

/// Plans the tiles, workgroups and dispatches of the fused kernel.
pub(super) fn fused(outline: &Outline, pick: &Pick, device: &DeviceFacts) -> Result<FusedPlan, Error> {
    let Outline { shape, kernel_options, reach, .. } = outline;
    let rows = shape.q_len * shape.group();
    let heads = shape.batch * shape.kv_heads;
    let tiles = fused_tiles(rows, heads, outline, pick, device)?;
    let row_tiles = rows.div_ceil(tiles.rows());
    let slices = tiles.slices(shape.value_dim);
    // The largest number of queries among the rows of a tile.
    let queries = ((tiles.rows() + shape.group() - 2) / shape.group() + 1).min(shape.q_len);
    let workgroups = row_tiles.saturating_mul(slices).saturating_mul(heads);
    let split_bytes = partial_bytes(rows.saturating_mul(heads), shape.value_dim.next_multiple_of(4));
    let reach = reach.of_queries(queries);
    let short = if outline.keys.is_cache() { LONG_CACHE } else { LONGEST_SUM };
    let least = if reach > short { least_splits(reach, split_bytes) } else { 1 };
    let invariant = kernel_options.batch_invariant;
    let splits = if invariant {
        fixed_splits(outline, device)?
    } else {
        splits(tiles, workgroups, reach, least, kernel_options, pick, device)?
    };
    let grid = [row_tiles.saturating_mul(splits), slices, heads];
    // The work includes masked pairs.
    let most = outline.most_keys();
    let keys = if invariant { most.min(FIXED_SPLIT) } else { most.div_ceil(splits) };
    let pairs = tiles.rows() as f64 * keys as f64;
    let score = shape.head_dim as f64 * if outline.additive { TANH } else { 1.0 };
    let work = 2.0 * pairs * (score + tiles.slice() as f64);
    let most_work = kernel_options.most_forward_work(matches!(tiles, FusedTiles::Matrix(_)), device);
    let plan = FusedPlan {
        tiles,
        splits,
        // With sinks, a single split has other bits than no split.
        merges: splits > 1 || invariant && outline.sinks,
        fixed_split: if invariant { FIXED_SPLIT } else { 0 },
        grid,
        steps: steps(grid, work, most_work, device)?,
        rows: rows.saturating_mul(heads),
        width: shape.value_dim.next_multiple_of(4),
    };
    let (bytes, limit) = (plan.partial_bytes(), device.max_binding_bytes.min(4 * u64::from(u32::MAX)));
    if bytes > limit {
        return Err(Error::BindingLimit { tensor: "partials (scratch)", bytes, limit });
    }
    Ok(plan)
}

/// Returns the tiles for `rows` packed rows of each of `heads` heads.
fn fused_tiles(
    rows: usize,
    heads: usize,
    outline: &Outline,
    pick: &Pick,
    device: &DeviceFacts,
) -> Result<FusedTiles, Error> {
    let Outline { shape, kernel_options, .. } = outline;
    if outline.additive {
        kernel_options.refuse_batch_invariant("`batch_invariant` with additive attention")?;
        if kernel_options.matrix_units == MatrixUnits::Always {
            let why = "additive scores are sums of `tanh`, not products; set `MatrixUnits::Auto`";
            return Err(Error::Unsupported { what: "matrix units for this call", why });
        }
        let cpu = kernel_options.target.choose(FUSED, device);
        return Ok(if cpu {
            additive_cpu(rows, shape, device.lanes)
        } else {
            additive_gpu(rows, shape.value_dim)
        });
    }
    if kernel_options.batch_invariant {
        return invariant_tiles(rows, shape, kernel_options, device);
    }
    let keys = outline.source();
    let matrix = if rows > 16 || kernel_options.matrix_units == MatrixUnits::Always {
        fused_matrix(rows, heads, shape, keys.operands, kernel_options, pick, device)
    } else {
        Err("few rows are limited by memory, not by arithmetic")
    };
    if let Some(tiles) = kernel_options.settle(matrix)? {
        return Ok(FusedTiles::Matrix(tiles));
    }
    if kernel_options.target.choose(FUSED, device) {
        let decode = || decode_cpu(device.lanes, device.gathers, rows, shape, &keys);
        let decode = if device.lacks(Family::DecodeCpu) { None } else { decode() };
        let decode = decode.map(FusedTiles::DecodeCpu);
        let whole = || fused_cpu(rows, shape, pick, device.lanes);
        return Ok(decode.unwrap_or_else(whole));
    }
    let decode = decode_gpu(rows, shape, &keys, device).map(FusedTiles::DecodeGpu);
    Ok(decode.unwrap_or_else(|| fused_gpu(rows, shape.value_dim, pick, device)))
}

/// The keys of a split that does not depend on the rows: a multiple of the keys of every tile.
const FIXED_SPLIT: usize = 1024;

/// Returns the tiles whose rows do not depend on each other, for any number of rows. All of them
/// have the same keys, and each row adds them in the same order.
fn invariant_tiles(
    rows: usize,
    shape: &Shape,
    kernel_options: &KernelOptions,
    device: &DeviceFacts,
) -> Result<FusedTiles, Error> {
    let refused = |what, why| Err(Error::Unsupported { what, why });
    if kernel_options.target == Target::Software {
        let why = "only kernels for GPUs have it, and software drivers run them; set `Target::Auto`";
        return refused("`batch_invariant` with `Target::Software`", why);
    }
    if kernel_options.matrix_units == MatrixUnits::Always {
        let why = "the order of their sums depends on the rows; set `MatrixUnits::Auto`";
        return refused("`batch_invariant` with matrix units", why);
    }
    if kernel_options.splits.is_some() {
        return refused("`batch_invariant` with `splits`", "splits have fixed lengths; leave `splits` unset");
    }
    if device.lacks(Family::FusedGpu) {
        return Err(Error::Disabled { family: Family::FusedGpu });
    }
    // Square tiles have other keys, and their lanes another order of sums.
    let device = DeviceFacts { scalar_registers: false, ..device.clone() };
    Ok(fused_gpu(rows, shape.value_dim, &Pick::default(), &device))
}

/// The number of splits of [`FIXED_SPLIT`] keys.
fn fixed_splits(outline: &Outline, device: &DeviceFacts) -> Result<usize, Error> {
    let splits = outline.most_keys().div_ceil(FIXED_SPLIT).max(1);
    if splits > MOST_SPLITS {
        let why = "it has at most 131072 keys; leave `KernelOptions::batch_invariant` unset";
        return Err(Error::Unsupported { what: "`batch_invariant` for so many keys", why });
    }
    if device.lacks(Family::SplitKeys) && (splits > 1 || outline.sinks) {
        return Err(Error::Disabled { family: Family::SplitKeys });
    }
    Ok(splits)
}

/// Returns the tiles of additive scores for GPUs.
fn additive_gpu(rows: usize, value_dim: usize) -> FusedTiles {
    match value_dim {
        0..=256 if rows > 4 => ADDITIVE_MANY,
        0..=256 => ADDITIVE_FEW[0],
        257..=512 => ADDITIVE_FEW[1],
        _ => ADDITIVE_FEW[2],
    }
}

/// Returns the tiles of additive scores for software drivers. Rows fill the lanes, or lanes share
/// rows.
fn additive_cpu(rows: usize, shape: &Shape, lanes: u32) -> FusedTiles {
    // With more channels of out, or more keys, the code would not stay in the first-level cache.
    let value_vectors = (shape.value_dim.div_ceil(4) as u32).min(64);
    let key_lanes = (lanes / rows.next_power_of_two().min(lanes as usize) as u32).max(1);
    FusedTiles::AdditiveCpu { lanes, key_lanes, keys: 8, value_vectors }
}

/// Returns the tiles for software drivers, with all channels of q in variables.
fn fused_cpu(rows: usize, shape: &Shape, pick: &Pick, lanes: u32) -> FusedTiles {
    let head_vectors = shape.head_dim.div_ceil(4);
    let value_vectors = shape.value_dim.div_ceil(4);
    let picked = picked_cpu_block(pick, lanes, rows, head_vectors, value_vectors);
    let block = picked.unwrap_or_else(|| cpu_block(lanes, rows, head_vectors, value_vectors));
    FusedTiles::Cpu {
        lanes,
        rows: block.queries * lanes,
        keys: block.keys,
        head_vectors: head_vectors as u32,
        value_vectors: block.value_vectors,
    }
}

/// Returns the number of splits of the keys of `workgroups` tiles, at least `least`. The device
/// should be busy, but no split should have too few keys.
///
/// The number depends on the largest `reach` of a tile. Only the device may know the actual number
/// of keys. Workgroups without keys end at once (0.05 µs each with lavapipe). An indirect dispatch
/// of the exact number costs more: wgpu checks it with a separate dispatch (60 µs with lavapipe).
fn splits(
    tiles: FusedTiles,
    workgroups: usize,
    reach: usize,
    least: usize,
    kernel_options: &KernelOptions,
    pick: &Pick,
    device: &DeviceFacts,
) -> Result<usize, Error> {
    match kernel_options.splits {
        Some(n) if (1..=MOST_SPLITS).contains(&n) => Ok(n),
        Some(n) => {
            let expected = "at least 1 and at most 128";
            Err(Error::Option { option: "splits", value: n as f64, expected })
        }
        None if device.lacks(Family::SplitKeys) => Ok(1),
        None => {
            let wanted = tiles.enough() / workgroups.max(1);
            // Kernels give each split whole steps. Splits beyond the number of steps would have no
            // keys.
            let worth = reach / tiles.split_least() as usize;
            let steps = reach.div_ceil(tiles.split_step() as usize);
            let ruled = wanted.min(worth).clamp(1, MOST_SPLITS);
            let asked = match pick.splits {
                0.. => ruled << pick.splits,
                _ => ruled >> -pick.splits,
            };
            Ok(asked.max(least).min(steps).clamp(1, MOST_SPLITS))
        }
    }
}

/// Returns the tiles for GPUs, of 64 rows if there are enough rows.
fn fused_gpu(rows: usize, value_dim: usize, pick: &Pick, device: &DeviceFacts) -> FusedTiles {
    if let Some(picked) = picked_gpu(pick.rows, value_dim, device) {
        return picked;
    }
    let widest = |tiles: &[FusedTiles]| {
        let fits = tiles.iter().find(|t| t.slice() >= value_dim);
        fits.or(tiles.last()).copied()
    };
    let short = match (device.registers, rows) {
        (Registers::Wide, 0..=16) => widest(&SHORT_16),
        (Registers::Wide, 17..=32) => widest(&SHORT_32),
        (Registers::Wide, _) => None,
        (Registers::Middle, 0..=16) => widest(&MIDDLE_16),
        (Registers::Middle, 17..=32) => widest(&MIDDLE_32),
        (Registers::Middle, _) => widest(&MIDDLE_64),
        (Registers::Narrow, 0..=16) => Some(NARROW_16),
        (Registers::Narrow, _) => Some(NARROW_32),
    };
    if let Some(short) = short {
        return short;
    }
    match (value_dim, device.scalar_registers) {
        (0..=64, true) => SQUARE_64,
        (65..=128, true) => SQUARE_128,
        (0..=64, false) => SMALL_64,
        (65..=128, false) => SMALL_128,
        _ => SMALL_256,
    }
}

/// Every tile of the GPU variant, narrow slices first.
const GPU: [FusedTiles; 18] = [
    NARROW_16,
    NARROW_32,
    SMALL_64,
    LARGE_64,
    SHORT_32[0],
    SHORT_16[0],
    MIDDLE_16[0],
    MIDDLE_32[0],
    MIDDLE_64[0],
    SMALL_128,
    LARGE_128,
    SHORT_32[1],
    SHORT_16[1],
    MIDDLE_16[1],
    MIDDLE_32[1],
    MIDDLE_64[1],
    SMALL_256,
    SHORT_16[2],
];

/// Returns the tiles of exactly `picked` rows, if they exist and fit.
fn picked_gpu(picked: u32, value_dim: usize, device: &DeviceFacts) -> Option<FusedTiles> {
    let fits = |tiles: &&FusedTiles| match tiles {
        FusedTiles::Gpu { rows, registers, .. } => {
            *rows == picked
                && *registers == device.registers
                && tiles.workgroup_memory() <= device.workgroup_memory
        }
        _ => false,
    };
    let mut fitting = GPU.iter().filter(fits);
    let enough = fitting.clone().find(|tiles| tiles.slice() >= value_dim);
    enough.or_else(|| fitting.next_back()).copied()
}

/// Returns the number of splits that sum at most [`LONGEST_SUM`] keys, if their partial sums fit
/// [`EXACT_BYTES`].
fn least_splits(reach: usize, split_bytes: u64) -> usize {
    reach.div_ceil(LONGEST_SUM).min((EXACT_BYTES / split_bytes.max(1)) as usize)
}

/// Returns the bytes of the sums, maxima and totals of one split.
fn partial_bytes(rows: usize, width: usize) -> u64 {
    (rows as u64).saturating_mul(4 * (width as u64 + 4))
}

impl FusedPlan {
    /// The start of the splits' maxima and totals in their memory, in elements.
    pub fn stats(&self) -> usize {
        if !self.merges {
            return 0;
        }
        self.rows * self.splits * self.width
    }

    /// Bytes of memory for the sums, maxima and totals of splits.
    pub fn partial_bytes(&self) -> u64 {
        if !self.merges {
            return 0;
        }
        (self.splits as u64).saturating_mul(partial_bytes(self.rows, self.width))
    }

    /// The packed rows of all sequences and heads.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the dispatches that the grid is cut into.
    pub fn pieces(&self) -> impl Iterator<Item = Piece> + use<> {
        pieces(self.grid, self.steps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Fragment;

    const DEVICE: DeviceFacts = DeviceFacts { f16: true, max_binding_bytes: 1 << 30, ..DeviceFacts::LEAST };

    #[test]
    fn workgroup_tiles_fit_the_device_and_fill_it() {
        let wide = DeviceFacts { registers: Registers::Wide, ..DEVICE };
        let scalar = DeviceFacts { scalar_registers: true, ..wide.clone() };
        let large = DeviceFacts { workgroup_memory: 32768, ..wide.clone() };
        let of = |rows, value_dim, device| fused_gpu(rows, value_dim, &Pick::default(), device);
        for value_dim in [1, 64, 65, 128, 129, 512] {
            for rows in [1, 16, 17, 32, 33, 4096] {
                for device in [&DEVICE, &wide, &scalar] {
                    let tiles = of(rows, value_dim, device);
                    assert!(tiles.workgroup_memory() <= DEVICE.workgroup_memory, "{tiles:?}");
                }
            }
        }
        assert_eq!(of(4096, 64, &DEVICE), MIDDLE_64[0]);
        assert_eq!(of(4096, 200, &DEVICE), MIDDLE_64[1]);
        assert_eq!(of(17, 128, &DEVICE), MIDDLE_32[1]);
        assert_eq!(of(1, 1, &DEVICE), MIDDLE_16[0]);
        assert_eq!(of(4096, 64, &large), SMALL_64);
        assert_eq!(of(4096, 128, &large), SMALL_128);
        assert_eq!(of(4096, 200, &large), SMALL_256);
        assert_eq!(of(5, 64, &large), SHORT_16[0]);
        assert_eq!(of(16, 512, &large), SHORT_16[2]);
        assert_eq!(of(20, 65, &large), SHORT_32[1]);
        assert_eq!([64, 128].map(|value_dim| of(4096, value_dim, &scalar)), [SQUARE_64, SQUARE_128]);
        assert_eq!((of(32, 64, &scalar), of(4096, 200, &scalar)), (SHORT_32[0], SMALL_256));
        let pick = Pick { rows: 128, ..Pick::default() };
        assert_eq!(fused_gpu(4096, 64, &pick, &DeviceFacts { scalar_registers: true, ..large }), LARGE_64);
        assert!(SMALL_256.workgroup_memory() <= 16384 && LARGE_128.workgroup_memory() <= 32768);
    }

    #[test]
    fn default_work_limit_follows_the_device() {
        let limits = |kernel_options: KernelOptions, device: &DeviceFacts| {
            [false, true].map(|on_matrix_units| kernel_options.most_forward_work(on_matrix_units, device))
        };
        let matrix = DeviceFacts { matrix: Some(Fragment::Sixteen), ..DEVICE };
        let software = DeviceFacts { software: true, ..matrix.clone() };
        assert_eq!(limits(KernelOptions::new(), &DEVICE), [1 << 37; 2]);
        assert_eq!(limits(KernelOptions::new(), &software), [1 << 37; 2]);
        assert_eq!(limits(KernelOptions::new(), &matrix), [1 << 39, 1 << 40]);
        assert_eq!(limits(KernelOptions::new().work_limit(7), &matrix), [7; 2]);
        assert_eq!(KernelOptions::new().most_work(), 1 << 37);
    }
}
