//! Which tiles a product is computed with: pure functions of its size and the device.

use std::fmt;

use crate::error::Error;
use crate::kernels::cache::Format;
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
    /// `Fused`, unless attention weights are asked for, or the mask and the dropout have more tensors than the
    /// device binds beside q, k, v, out and lse; then `Staged`.
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
    /// Splits of the keys, if not as the plan sees fit.
    pub splits: Option<usize>,
}

impl Default for Tuning {
    /// 137 GFLOP: a quarter of a second where attention runs at half a TFLOP/s; watchdogs wait for two or more.
    fn default() -> Self {
        Tuning { tiling: Tiling::Auto, path: Path::Auto, work: 1 << 37, splits: None }
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
    /// `rows` packed rows per workgroup of `workgroup`; `slice` channels of out, `v_keys` rows of v staged at a time.
    Workgroup { rows: u32, workgroup: u32, slice: u32, v_keys: u32 },
    /// `rows` packed rows per workgroup of [`LANES`](Self::LANES), blocks of `keys` keys, all of a row in variables.
    Uniform { rows: u32, keys: u32, head_vectors: u32, value_vectors: u32 },
    /// Few packed rows, on GPUs.
    FewWorkgroup(FewWorkgroup),
    /// Few packed rows and packed keys, on software drivers.
    FewUniform(FewUniform),
}

/// How keys and values are loaded: vectors of four words.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Blocks {
    /// Vectors of four channels in one.
    pub vectors: u32,
    /// Of a key, of a value.
    pub k: u32,
    pub v: u32,
    /// Whether channels share scales.
    pub scaled: bool,
}

/// Tiles of `shared/decode_workgroup.wgsl`, which says what they are.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct FewWorkgroup {
    pub blocks: Blocks,
    pub rows: u32,
    pub lane_rows: u32,
    pub workgroup: u32,
    pub key_lanes: u32,
    pub key_fours: u32,
    pub v_split: u32,
    pub round: u32,
    pub shared: bool,
    pub subgroups: bool,
}

impl FewWorkgroup {
    fn lanes(&self) -> u32 {
        self.workgroup / (self.rows / self.lane_rows)
    }

    /// Fours of keys of a tile.
    fn units(&self) -> u32 {
        self.lanes() / self.key_lanes * self.key_fours
    }

    pub fn keys(&self) -> u32 {
        4 * self.units()
    }

    /// Pieces of a value's words that a workgroup computes.
    fn columns(&self) -> u32 {
        (self.blocks.v * self.v_split).min(self.lanes())
    }

    fn slices(&self) -> u32 {
        (self.blocks.v * self.v_split).div_ceil(self.columns())
    }

    /// Bytes of workgroup memory, as the shader declares it.
    fn memory(&self) -> u32 {
        let FewWorkgroup { blocks, rows, lane_rows, workgroup, key_lanes, key_fours, round, .. } = *self;
        let words = rows * blocks.k.div_ceil(key_lanes) * key_lanes;
        let none = self.subgroups || key_lanes == 1;
        let partial = round * key_lanes * (workgroup / key_lanes + (8 / key_lanes).max(1));
        let partial = if none { 0 } else { partial };
        let weights = self.units() * (rows | 1) + if self.shared { 0 } else { partial };
        let subsets = (self.lanes() / self.columns()).min(self.units());
        let zeros = if self.units().is_multiple_of(subsets) { 0 } else { rows };
        let tile = (weights.max(partial) + zeros).max(workgroup);
        let fold = key_lanes.min(lane_rows * key_fours) * (lane_rows / key_lanes).max(1) * workgroup
            / key_lanes
            / rows;
        let biases = if blocks.scaled { words } else { 1 };
        16 * (words * blocks.vectors + tile)
            + [rows * fold, rows, rows, rows, 2 * rows, 1, biases].map(words_in_vectors).iter().sum::<u32>()
    }
}

// In names of kernels, which must not be long.

impl fmt::Debug for Blocks {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Blocks { vectors, k, v, scaled } = self;
        write!(f, "{vectors}x{k}x{v}{}", if *scaled { "s" } else { "" })
    }
}

impl fmt::Debug for FewWorkgroup {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let FewWorkgroup { blocks, rows, lane_rows, workgroup, key_lanes, key_fours, v_split, round, .. } =
            self;
        write!(
            f,
            "{blocks:?} rows={rows}x{lane_rows} lanes={workgroup}x{key_lanes} each={key_fours}x{v_split}x{round}"
        )?;
        write!(
            f,
            "{}{}",
            if self.shared { " shared" } else { "" },
            if self.subgroups { " subgroups" } else { "" }
        )
    }
}

impl fmt::Debug for FewUniform {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let FewUniform { blocks, rows, keys, step, chunk } = self;
        write!(f, "{blocks:?} rows={rows} keys={keys}x{step}x{chunk}")
    }
}

/// Bytes of a variable of so many words, which begins where a vector can.
fn words_in_vectors(words: u32) -> u32 {
    (4 * words).next_multiple_of(16)
}

/// Tiles of `shared/decode_uniform.wgsl`, which says what they are.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct FewUniform {
    pub blocks: Blocks,
    pub rows: u32,
    pub keys: u32,
    pub step: u32,
    pub chunk: u32,
}

impl FewUniform {
    /// Bytes of workgroup memory, as the shader declares it.
    fn memory(&self) -> u32 {
        let FewUniform { blocks, rows, chunk, .. } = *self;
        let lanes = FusedTiles::LANES;
        let spread = if lanes / blocks.v > 1 { lanes * blocks.vectors } else { 1 };
        16 * (blocks.k * blocks.vectors * rows + spread)
            + [chunk * rows, 2 * rows * lanes, 1].map(words_in_vectors).iter().sum::<u32>()
    }
}

/// What a plan must know of keys and values besides their dimensions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeySource {
    /// Most that a query may see.
    pub most: usize,
    pub format: Format,
    /// Whether they load as vectors of words, several channels each: in a cache, or in aligned halves.
    pub words: bool,
    /// Whether the kernels for few rows can take the call: they neither skip tiles by a block map nor drop weights.
    pub simple: bool,
}

impl FusedTiles {
    /// Of the form for GPUs: keys of a tile, channels of q and k staged at a time, keys whose weights are.
    pub const KEYS: u32 = 64;
    pub const CHUNK: u32 = 16;
    pub const P_KEYS: u32 = 32;

    /// Invocations of a workgroup of the uniform form: as wide as software drivers' subgroups are.
    pub const LANES: u32 = 8;

    /// The tiles worth checking every mask with.
    pub const MASKED: [FusedTiles; 4] = [SMALL_64, SHORT_16[0], UNIFORM, UNIFORM_FEW];

    /// Every kind of tiles there is.
    pub fn all() -> Vec<FusedTiles> {
        let named = [SMALL_64, SMALL_128, SMALL_256, LARGE_64, LARGE_128, UNIFORM, UNIFORM_FEW];
        SHORT_16.into_iter().chain(SHORT_32).chain(named).collect()
    }

    /// Packed rows of a workgroup.
    fn rows(self) -> usize {
        match self {
            FusedTiles::Workgroup { rows, .. } | FusedTiles::Uniform { rows, .. } => rows as usize,
            FusedTiles::FewWorkgroup(few) => few.rows as usize,
            FusedTiles::FewUniform(few) => few.rows as usize,
        }
    }

    /// Channels of out that a workgroup computes.
    fn slice(self) -> usize {
        match self {
            FusedTiles::Workgroup { slice, .. } => slice as usize,
            FusedTiles::Uniform { value_vectors, .. } => value_vectors as usize * 4,
            FusedTiles::FewWorkgroup(few) => {
                (few.blocks.v * few.blocks.vectors * 4).div_ceil(few.slices()) as usize
            }
            FusedTiles::FewUniform(few) => (few.blocks.v * few.blocks.vectors * 4) as usize,
        }
    }

    /// Workgroups side by side that compute all channels of out.
    fn slices(self, value_dim: usize) -> usize {
        match self {
            FusedTiles::FewWorkgroup(few) => few.slices() as usize,
            _ => value_dim.div_ceil(self.slice()),
        }
    }

    /// Keys of a split are a multiple of this: whole tiles.
    pub fn split_step(self) -> u32 {
        match self {
            FusedTiles::FewWorkgroup(few) => few.keys().max(64),
            _ => 64,
        }
    }

    /// Whether keys and values are loaded as vectors of words where they can be.
    pub fn takes_words(self) -> bool {
        matches!(self, FusedTiles::FewWorkgroup(_) | FusedTiles::FewUniform(_))
    }

    /// Least keys of a split: fewer are not worth a workgroup's beginning and end.
    pub fn split_least(self) -> u32 {
        match self {
            FusedTiles::Workgroup { .. } | FusedTiles::FewWorkgroup(_) => 128,
            FusedTiles::Uniform { .. } | FusedTiles::FewUniform(_) => 256,
        }
    }

    /// Workgroups that are enough: on CPUs some for every core, of which there may be more than here.
    fn enough(self) -> usize {
        match self {
            FusedTiles::Workgroup { .. } => 2 * FULL,
            // Small ones, of which each core takes several.
            FusedTiles::FewWorkgroup(_) => 4 * FULL,
            FusedTiles::Uniform { .. } | FusedTiles::FewUniform(_) => 16,
        }
    }

    /// Bytes of workgroup memory, as the shader declares it.
    pub fn workgroup_memory(self) -> u32 {
        let (rows, slice, v_keys) = match self {
            FusedTiles::Workgroup { rows, slice, v_keys, .. } => (rows, slice, v_keys),
            FusedTiles::Uniform { .. } => return 0,
            FusedTiles::FewWorkgroup(few) => return few.memory(),
            FusedTiles::FewUniform(few) => return few.memory(),
        };
        let (keys, chunk, p_keys) = (Self::KEYS, Self::CHUNK, Self::P_KEYS);
        // In vectors: q and k, each fourth row shifted by one; or weights and v; or maxima by lane.
        let qk = (rows + keys) * chunk / 4 + (rows + keys) / 4;
        let pv = p_keys * rows / 4 + p_keys / 4 + v_keys * slice / 4;
        let parts = 16 * (rows / 4 + 1);
        let tile = qk.max(pv).max(parts);
        // Three vectors per four rows, two pairs per row, eight partial intervals and the whole.
        16 * (tile + 3 * rows / 4 + rows + 9)
    }
}

const fn workgroup(rows: u32, workgroup: u32, slice: u32, v_keys: u32) -> FusedTiles {
    FusedTiles::Workgroup { rows, workgroup, slice, v_keys }
}

/// 64 packed rows: within the WebGPU default limits. Each invocation has 8 × 4 scores and as many rows of sums.
const SMALL_64: FusedTiles = workgroup(64, 128, 64, 16);
const SMALL_128: FusedTiles = workgroup(64, 128, 128, 8);
/// Twice the invocations, so that the sums of 256 channels fit in registers.
const SMALL_256: FusedTiles = workgroup(64, 256, 256, 4);
/// 128 packed rows in 24 KiB: half as many loads of keys and values from global memory per multiply-add.
const LARGE_64: FusedTiles = workgroup(128, 256, 64, 16);
const LARGE_128: FusedTiles = workgroup(128, 256, 128, 8);
/// Few queries: more workgroups, and less computed beyond them. By slices, as wide as registers allow: every slice
/// scores all keys again.
const SHORT_32: [FusedTiles; 2] = [workgroup(32, 64, 64, 8), workgroup(32, 64, 128, 8)];
const SHORT_16: [FusedTiles; 3] =
    [workgroup(16, 64, 64, 8), workgroup(16, 64, 128, 8), workgroup(16, 64, 256, 4)];

const UNIFORM: FusedTiles = FusedTiles::Uniform { rows: 24, keys: 2, head_vectors: 4, value_vectors: 4 };
const UNIFORM_FEW: FusedTiles = FusedTiles::Uniform { rows: 8, keys: 1, head_vectors: 5, value_vectors: 3 };

/// How a problem is computed by the fused kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FusedPlan {
    pub tiles: FusedTiles,
    /// Workgroups that share the keys of a tile of rows.
    pub splits: usize,
    /// Workgroups: row tiles times splits, slices of out, batch · kv_heads.
    grid: [usize; 3],
    /// Most of them along each axis in one dispatch.
    steps: [usize; 3],
    /// Packed rows of all sequences and heads; value_dim in whole vectors.
    rows: usize,
    width: usize,
}

/// More splits than this are no plan: their partial sums would be what the time goes to.
const MOST_SPLITS: usize = 128;

/// Tiles, workgroups and dispatches of the fused kernel. keys: most that a query may see.
pub(crate) fn fused(
    shape: &Shape,
    keys: &KeySource,
    tuning: &Tuning,
    device: &DeviceFacts,
) -> Result<FusedPlan, Error> {
    let rows = shape.q_len * shape.group();
    let heads = shape.batch * shape.kv_heads;
    let tiles = if tuning.tiling.uniform(device) {
        let few = few_uniform(rows, shape, keys).map(FusedTiles::FewUniform);
        few.unwrap_or_else(|| fused_uniform(rows, shape.head_dim.div_ceil(4), shape.value_dim.div_ceil(4)))
    } else {
        let few = few_workgroup(rows, shape, keys, device).map(FusedTiles::FewWorkgroup);
        few.unwrap_or_else(|| fused_workgroup(rows, shape.value_dim, heads, device))
    };
    let keys = keys.most;
    let row_tiles = rows.div_ceil(tiles.rows());
    let slices = tiles.slices(shape.value_dim);
    let splits = splits(tiles, row_tiles.saturating_mul(slices).saturating_mul(heads), keys, tuning)?;
    let grid = [row_tiles.saturating_mul(splits), slices, heads];
    let pairs = tiles.rows() as f64 * keys.div_ceil(splits) as f64;
    let work = 2.0 * pairs * (shape.head_dim + tiles.slice()) as f64;
    let plan = FusedPlan {
        tiles,
        splits,
        grid,
        steps: steps(grid, work, tuning.work, device)?,
        rows: rows.saturating_mul(heads),
        width: shape.value_dim.next_multiple_of(4),
    };
    let (bytes, limit) = (plan.partial_bytes(), device.max_binding_bytes.min(4 * u64::from(u32::MAX)));
    if bytes > limit {
        return Err(Error::BindingLimit { tensor: "partials (scratch)", bytes, limit });
    }
    Ok(plan)
}

/// Splits of the keys of `workgroups` tiles, so that the device is busy and none has too few. By the most keys there may
/// be: how many there are, only the device may know. Workgroups that find none of theirs end at once (0.05 µs each with
/// lavapipe); an indirect dispatch of just enough costs more, because wgpu checks it with a dispatch of its own
/// (60 µs there).
fn splits(tiles: FusedTiles, workgroups: usize, keys: usize, tuning: &Tuning) -> Result<usize, Error> {
    match tuning.splits {
        Some(n) if (1..=MOST_SPLITS).contains(&n) => Ok(n),
        Some(n) => {
            let expected = "at least 1 and at most 128";
            Err(Error::Option { option: "splits", value: n as f64, expected })
        }
        None => {
            let wanted = tiles.enough() / workgroups.max(1);
            Ok(wanted.min(keys / tiles.split_least() as usize).clamp(1, MOST_SPLITS))
        }
    }
}

impl KeySource {
    /// The words of rows as wide as `shape` says.
    fn blocks(&self, shape: &Shape) -> Blocks {
        // Tensors are loaded four channels at a time.
        let vectors = if self.words { self.format.per_word() } else { 1 };
        let of = |dim: usize| dim.div_ceil(4 * vectors) as u32;
        let scaled = self.words && self.format.is_scaled();
        Blocks { vectors: vectors as u32, k: of(shape.head_dim), v: of(shape.value_dim), scaled }
    }
}

/// Few rows on GPUs, where q, weights and sums of lanes fit in workgroup memory.
fn few_workgroup(rows: usize, shape: &Shape, keys: &KeySource, device: &DeviceFacts) -> Option<FewWorkgroup> {
    if rows > 16 || !keys.simple {
        return None;
    }
    let blocks = keys.blocks(shape);
    let rows = rows.next_power_of_two() as u32;
    // Sums of more rows, or more of a word's channels, take more registers than most GPUs give without loss.
    let lane_rows = rows.min(if blocks.scaled { 4 } else { 8 });
    // Lanes of a key: as few idle as can be, then as many as can be.
    let waste = |lanes: u32| blocks.k.div_ceil(lanes) * lanes;
    let allowed = |lanes: u32| device.subgroup_min == 0 || lanes <= device.subgroup_min;
    let mut key_lanes =
        [8, 4, 2, 1].into_iter().filter(|n| *n >= blocks.k.min(4)).min_by_key(|n| waste(*n)).unwrap_or(8);
    if blocks.scaled && blocks.k.is_multiple_of(16) && allowed(16) {
        key_lanes = 16;
    }
    let mut v_split = 1;
    while v_split < blocks.vectors && (blocks.vectors / v_split * lane_rows > 8 || blocks.v * v_split < 8) {
        v_split *= 2;
    }
    let subgroups = device.subgroup_min >= key_lanes;
    let halves = rows / lane_rows;
    let fours: &[u32] = if lane_rows <= 2 { &[2, 1] } else { &[1] };
    let limit = device.workgroup_memory.min(16384);
    for workgroup in [128 * halves, 64 * halves].into_iter().filter(|n| *n <= 256) {
        for key_fours in fours {
            for round in [2, 1].into_iter().filter(|n| *n <= lane_rows * key_fours) {
                for shared in [false, true] {
                    let few = FewWorkgroup {
                        blocks,
                        rows,
                        lane_rows,
                        workgroup,
                        key_lanes,
                        key_fours: *key_fours,
                        v_split,
                        round,
                        shared,
                        subgroups,
                    };
                    if few.memory() <= limit {
                        return Some(few);
                    }
                }
            }
        }
    }
    None
}

/// Few rows of packed keys on software drivers. Keys of a block, keys added at a time and keys between barriers as
/// measured with lavapipe 26; where others are not faster than `fused_uniform`, none.
fn few_uniform(rows: usize, shape: &Shape, keys: &KeySource) -> Option<FewUniform> {
    let narrow = shape.head_dim <= 64;
    let (keys_each, step, chunk) = match (keys.format, rows) {
        _ if !keys.words || !keys.simple || shape.head_dim.max(shape.value_dim) > 256 => return None,
        (Format::F16, 1..=4) if !narrow => (16, if shape.value_dim <= 128 { 4 } else { 2 }, 512),
        (Format::Q8, 1) => (32, 4, 1024),
        (Format::Q8, 2..=4) if shape.head_dim > 128 => (16, 2, 512),
        (Format::Q8, 2..=4) => (32, if narrow { 4 } else { 2 }, 512),
        (Format::Q4, 1) => (16, 4, 1024),
        (Format::Q4, 2..=4) => (if narrow { 32 } else { 16 }, 2, 512),
        (Format::Q4, 5..=8) => (16, 2, 256),
        _ => return None,
    };
    let few = FewUniform {
        blocks: keys.blocks(shape),
        rows: rows.next_power_of_two() as u32,
        keys: keys_each,
        step,
        chunk,
    };
    // Eight rows of 256 channels do not fit.
    (few.memory() <= 16384).then_some(few)
}

/// Tiles for few rows of every kind, worth checking with keys of `format` in a cache, or with tensors.
pub(crate) fn few_tiles(format: Option<Format>) -> Vec<FusedTiles> {
    let keys = KeySource {
        most: 4096,
        format: format.unwrap_or(Format::F32),
        words: format.is_some(),
        simple: true,
    };
    let mut all = Vec::new();
    for (rows, head_dim, value_dim) in [
        (1, 13, 65),
        (1, 64, 64),
        (2, 128, 128),
        (4, 128, 128),
        (8, 128, 64),
        (8, 256, 256),
        (16, 128, 128),
        (4, 512, 512),
    ] {
        let shape = Shape { q_len: rows, value_dim, ..Shape::new(1, 1, 1, head_dim) };
        for subgroup_min in [0, 8, 32] {
            let device = DeviceFacts { workgroup_memory: 16384, subgroup_min, ..DeviceFacts::LEAST };
            all.extend(few_workgroup(rows, &shape, &keys, &device).map(FusedTiles::FewWorkgroup));
        }
        all.extend(few_uniform(rows, &shape, &keys).map(FusedTiles::FewUniform));
    }
    let mut seen = std::collections::HashSet::new();
    all.retain(|tiles| seen.insert(*tiles));
    all
}

/// The form for GPUs: as many rows as there are, as long as enough workgroups remain.
fn fused_workgroup(rows: usize, value_dim: usize, heads: usize, device: &DeviceFacts) -> FusedTiles {
    let widest = |tiles: &[FusedTiles]| {
        let fits = tiles.iter().find(|t| t.slice() >= value_dim);
        fits.or(tiles.last()).copied()
    };
    let short = match rows {
        0..=16 => widest(&SHORT_16),
        17..=32 => widest(&SHORT_32),
        _ => None,
    };
    if let Some(short) = short {
        return short;
    }
    let (small, large) = match value_dim {
        0..=64 => (SMALL_64, Some(LARGE_64)),
        65..=128 => (SMALL_128, Some(LARGE_128)),
        _ => (SMALL_256, None),
    };
    let fits = |tiles: &FusedTiles| tiles.workgroup_memory() <= device.workgroup_memory;
    let fills = |tiles: &FusedTiles| rows.div_ceil(tiles.rows()).saturating_mul(heads) >= FULL;
    large.filter(fits).filter(fills).unwrap_or(small)
}

/// Bytes of code of the uniform form's loop, counted in what a driver made of it for AVX2: per vector of four
/// of k and v 27 to load it and 12 per query to use it, per query and vector of out 84 to scale it.
fn uniform_code(queries: u32, keys: u32, head_vectors: usize, value_vectors: usize) -> usize {
    let (queries, keys) = (queries as usize, keys as usize);
    4 * keys * (head_vectors + value_vectors) * (27 + 12 * queries) + 84 * queries * value_vectors
}

/// The uniform form with as many queries per invocation as its code leaves room for in a cache of instructions of
/// 32 KiB: beyond about 25 KB it runs at half the speed. Vectors of four.
fn fused_uniform(rows: usize, head_vectors: usize, value_vectors: usize) -> FusedTiles {
    // Queries per invocation and keys per block, by how often they use what they load; the room is less for the
    // first two, which now and then run slow at a size that others run well at.
    let all =
        [(4, 4, 22_000), (4, 2, 22_000), (3, 2, 25_000), (2, 2, 25_000), (3, 1, 25_000), (2, 1, 25_000)];
    let few = [(1, 2, 20_000), (1, 1, 25_000)];
    let fitting = |slice: usize| {
        let wanted = all.into_iter().filter(|(queries, ..)| rows > 8 * (*queries as usize - 1)).chain(few);
        wanted.clone().find(|(queries, keys, room)| {
            uniform_code(*queries, *keys, head_vectors, slice) <= *room && (*queries > 1 || rows <= 8)
        })
    };
    // Every slice scores all keys again: two at most, else all at once at whatever speed.
    let halves = value_vectors.div_ceil(2);
    let (slice, (queries, keys, _)) = fitting(value_vectors)
        .map(|t| (value_vectors, t))
        .or_else(|| fitting(halves).map(|t| (halves, t)))
        .unwrap_or((value_vectors, (1, 1, 0)));
    FusedTiles::Uniform {
        rows: queries * FusedTiles::LANES,
        keys,
        head_vectors: head_vectors as u32,
        value_vectors: slice as u32,
    }
}

/// A part of a grid: its first workgroup and how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub first: [u32; 3],
    pub grid: [u32; 3],
}

/// More dispatches than this are no plan: the caller's limit is too small for the problem.
const MOST_PIECES: usize = 1 << 16;

/// How many workgroups along each axis a piece has, so that it has at most `limit` operations, `work` per
/// workgroup, and fits the device; a workgroup is not cut. Pieces are whole layers of the last axis if those fit,
/// else runs along the first.
fn steps([x, y, z]: [usize; 3], work: f64, limit: u64, device: &DeviceFacts) -> Result<[usize; 3], Error> {
    let most = device.max_workgroups as usize;
    let workgroups = ((limit as f64 / work.max(1.0)) as usize).max(1);
    // Slices of out are few.
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

impl FusedPlan {
    /// Where the maxima and totals of the splits begin in their memory, in elements.
    pub fn stats(&self) -> usize {
        self.rows * self.splits * self.width
    }

    /// Memory for the sums, maxima and totals of splits.
    pub fn partial_bytes(&self) -> u64 {
        if self.splits == 1 {
            return 0;
        }
        (self.rows as u64).saturating_mul(self.splits as u64).saturating_mul(4 * (self.width as u64 + 4))
    }

    /// Packed rows of all sequences and heads.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The dispatches: the grid, cut.
    pub fn pieces(&self) -> impl Iterator<Item = Piece> + use<> {
        let FusedPlan { grid: [x, y, z], steps, .. } = *self;
        let cuts =
            |n: usize, step: usize| (0..n).step_by(step).map(move |at| (at as u32, step.min(n - at) as u32));
        cuts(z, steps[2]).flat_map(move |(fz, nz)| {
            cuts(y, steps[1]).flat_map(move |(fy, ny)| {
                cuts(x, steps[0]).map(move |(fx, nx)| Piece { first: [fx, fy, fz], grid: [nx, ny, nz] })
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: DeviceFacts = DeviceFacts { f16: true, max_binding_bytes: 1 << 30, ..DeviceFacts::LEAST };

    #[test]
    fn uniform_tiles_leave_room_for_their_code() {
        let of = |rows, dim: usize| fused_uniform(rows, dim.div_ceil(4), dim.div_ceil(4));
        let tiles = |rows, keys, head_vectors, value_vectors| FusedTiles::Uniform {
            rows,
            keys,
            head_vectors,
            value_vectors,
        };
        assert_eq!(of(512, 32), tiles(32, 4, 8, 8));
        assert_eq!(of(512, 48), tiles(32, 2, 12, 12));
        assert_eq!(of(512, 64), tiles(24, 2, 16, 16));
        assert_eq!(of(512, 128), tiles(24, 1, 32, 32));
        assert_eq!(of(512, 256), tiles(16, 1, 64, 32));
        // Few rows: no lane idles that need not.
        assert_eq!(of(1, 64), tiles(8, 2, 16, 16));
        assert_eq!(of(4, 128), tiles(8, 1, 32, 32));
        assert_eq!(of(9, 64), tiles(16, 2, 16, 16));
        assert_eq!(of(1, 1), tiles(8, 2, 1, 1));
        for rows in [1, 8, 9, 100] {
            for head in 1..160 {
                for value in 1..160 {
                    let FusedTiles::Uniform { rows: tile, keys, value_vectors, .. } =
                        fused_uniform(rows, head, value)
                    else {
                        panic!("another form");
                    };
                    assert!((tile / 8 - 1) as usize * 8 < rows, "{rows} {tile}");
                    assert!(value_vectors as usize == value || value_vectors as usize == value.div_ceil(2));
                    let code = uniform_code(tile / 8, keys, head, value_vectors as usize);
                    assert!(code <= 25_000 || (tile, keys) == (8, 1), "{rows} {head} {value}: {code}");
                }
            }
        }
    }

    #[test]
    fn workgroup_tiles_fit_the_device_and_fill_it() {
        let large = DeviceFacts { workgroup_memory: 32768, ..DEVICE };
        let of = |rows, value_dim, heads, device| fused_workgroup(rows, value_dim, heads, device);
        for value_dim in [1, 64, 65, 128, 129, 512] {
            for rows in [1, 16, 17, 32, 33, 4096] {
                let tiles = of(rows, value_dim, 64, &DEVICE);
                assert!(tiles.workgroup_memory() <= DEVICE.workgroup_memory, "{tiles:?}");
            }
        }
        assert_eq!(of(4096, 64, 32, &large), LARGE_64);
        assert_eq!(of(4096, 128, 32, &large), LARGE_128);
        assert_eq!(of(4096, 64, 32, &DEVICE), SMALL_64);
        // Four times 128 rows by 8 heads are 32 workgroups: twice as many keep more of a GPU busy.
        assert_eq!(of(512, 64, 8, &large), SMALL_64);
        assert_eq!(of(4096, 200, 32, &large), SMALL_256);
        assert_eq!(of(5, 64, 32, &large), SHORT_16[0]);
        assert_eq!(of(16, 512, 32, &large), SHORT_16[2]);
        assert_eq!(of(20, 65, 32, &large), SHORT_32[1]);
        assert!(SMALL_256.workgroup_memory() <= 16384 && LARGE_128.workgroup_memory() <= 32768);
    }

    #[test]
    fn pieces_cover_the_grid_once_and_keep_the_limit() {
        for grid in [[1, 1, 1], [7, 1, 5], [5, 3, 4], [70_000, 2, 1], [3, 1, 70_000], [1000, 2, 33]] {
            for limit in [1, 10, 64, 1000, 1 << 37] {
                let Ok(steps) = steps(grid, 10.0, limit, &DEVICE) else {
                    assert!(grid.iter().product::<usize>() > MOST_PIECES && limit < 100);
                    continue;
                };
                let plan = FusedPlan { tiles: SMALL_64, splits: 1, grid, steps, rows: 1, width: 4 };
                let pieces: Vec<_> = plan.pieces().collect();
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
