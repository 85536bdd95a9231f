//! The dispatches of a cache: they move lengths, write rows and copy pages.

use super::kernels::cache::{CacheParams, CacheVariant, START, WORDS};
use super::kernels::cache_advance::{CacheAdvanceCall, Counts};
use super::kernels::cache_append::{self, CacheAppend, CacheAppendCall};
use super::kernels::cache_compact::{CacheCompact, CacheCompactCall};
use super::kernels::cache_copy::CacheCopyCall;
use super::kernels::cache_read::{self, CacheReadCall};
use super::kernels::cache_reorder::{CacheReorder, CacheReorderCall};
use super::kernels::cache_words::{self, CacheWordsCall};
use super::kernels::hadamard_rows::HadamardRowsCall;
use super::storage::LayoutKind;
use crate::device::DeviceFacts;
use crate::kernel::vec4_grid::Vec4Grid;
use crate::kernel::{Dispatch, Dispatches, Width};
use crate::position::Rope;
use crate::position::kernels::rotation_table::RotationParams;
use crate::position::kernels::row_positions::PositionParams;
use crate::tensor::{DType, TensorView, Window};

/// One layer of a cache.
#[derive(Clone, Copy)]
pub(crate) struct CacheLayer<'a> {
    pub k: Window<'a>,
    pub v: Window<'a>,
    pub sequence_table: Window<'a>,
    pub cached: CacheVariant,
    pub params: CacheParams,
    /// The largest number of stored tokens of a sequence.
    pub kept: usize,
    /// Channels of a block that is multiplied by a Walsh–Hadamard matrix before it is stored.
    pub hadamard: Option<usize>,
    /// True for scales and rounding as in ggml, of keys and of values.
    pub ggml: [bool; 2],
    /// True if values are the first channels of keys: both buffers are the same.
    pub latent: bool,
}

/// The rows of keys, or of values.
struct Side<'a> {
    rows: Window<'a>,
    /// Words of a row with channels, and with scales and position.
    words: u32,
    groups: u32,
    /// The word at which scales begin.
    scales: u32,
}

impl<'a> CacheLayer<'a> {
    /// True if `positions` are the cache's own starts, so that rows are at their positions in the
    /// cache.
    pub fn has_starts(&self, positions: &TensorView) -> bool {
        let shape = [self.params.batch as usize, 1, 1, 1];
        positions.buffer == self.sequence_table.buffer
            && (positions.dtype, positions.offset()) == (DType::U32, START)
            && (positions.shape(), positions.strides()[0]) == (shape, WORDS)
    }

    /// The keys, and the values unless they are latent.
    fn sides(&self) -> impl Iterator<Item = Side<'a>> + use<'a> {
        let CacheParams { k_words, k_groups, k_scales, v_words, v_groups, v_scales, .. } = self.params;
        let keys = Side { rows: self.k, words: k_words, groups: k_groups, scales: k_scales };
        let values = Side { rows: self.v, words: v_words, groups: v_groups, scales: v_scales };
        [Some(keys), (!self.latent).then_some(values)].into_iter().flatten()
    }

    /// The vectors of channels, and the words of scales and positions. Each item is a buffer, a
    /// width, the number in a row, and the place of the first.
    fn words(&self) -> impl Iterator<Item = (Window<'a>, Width, u32, u32)> + use<'a> {
        let of_side = |Side { rows, words, groups, scales }| {
            [(rows, Width::Four, words / 4, 0), (rows, Width::One, groups, scales)]
        };
        self.sides().flat_map(of_side).filter(|(_, _, words, _)| *words > 0)
    }
}

/// The numbers of blocks for kernels: their channels, and the factor that makes the matrix its own
/// inverse.
fn hadamard_numbers(hadamard: Option<usize>) -> (u32, f32) {
    let block = hadamard.unwrap_or(1);
    (block as u32, 1.0 / (block as f32).sqrt())
}

/// Returns the dispatch that multiplies blocks of `x` by a Walsh–Hadamard matrix. `x` and `out`
/// have the same shape.
pub(crate) fn hadamard_rows<'a>(
    x: TensorView<'a>,
    out: TensorView<'a>,
    block: usize,
    device: &DeviceFacts,
) -> Dispatch<'a> {
    let grid = Vec4Grid::of(out.shape(), device);
    let (block, scale) = hadamard_numbers(Some(block));
    let call = HadamardRowsCall {
        x,
        out,
        block,
        fours: grid.in_row,
        work: grid.in_head,
        step: grid.step,
        scale,
        width: Width::of_rows(&[x, out]),
    };
    call.dispatch(grid.workgroups, device)
}

/// The moves of the lengths.
pub(crate) struct Moves<'a> {
    pub counts: Counts,
    /// The tensor of the counts, if they are in device memory.
    pub given: Option<TensorView<'a>>,
    /// The upper bound of each count.
    pub most: usize,
    /// True if tokens are removed.
    pub back: bool,
}

/// Returns the dispatch that moves the lengths of every sequence.
pub(crate) fn advance<'a>(
    sequence_table: Window<'a>,
    (layout_kind, compacts): (LayoutKind, bool),
    cache: CacheParams,
    moves: &Moves<'a>,
    device: &DeviceFacts,
) -> Dispatch<'a> {
    let call = CacheAdvanceCall {
        sequence_table,
        counts: moves.given,
        cache,
        rows: moves.most as u32,
        back: u32::from(moves.back),
        counted: moves.counts,
        layout_kind,
        compacts,
    };
    call.dispatch([1; 3], device)
}

/// Returns the dispatch that copies words from `source` to `to`: `count` pairs of `moves`, from the
/// pair `first` on.
pub(crate) fn words<'a>(
    [to, source, moves]: [Window<'a>; 3],
    first: usize,
    count: usize,
    device: &DeviceFacts,
) -> Dispatch<'a> {
    let last = |window: &Window| (window.size / 4).saturating_sub(1) as u32;
    let call = CacheWordsCall {
        to,
        source,
        moves,
        first: first as u32,
        count: count as u32,
        to_last: last(&to),
        source_last: last(&source),
    };
    call.dispatch([count.div_ceil(cache_words::WORKGROUP), 1, 1], device)
}

/// Positions of rows, and their tensor if they are in device memory.
pub(crate) type PositionsOf<'a> = (PositionParams, Option<TensorView<'a>>);

/// The rotation of keys by their positions while they are appended.
#[derive(Clone, Copy)]
pub(crate) struct KeyRotation<'a> {
    table: TensorView<'a>,
    params: RotationParams,
    /// Queries `[batch, heads, rows, head_dim]` of the same tokens, which are rotated in place.
    queries: Option<TensorView<'a>>,
}

impl<'a> KeyRotation<'a> {
    pub fn new(rope: &'a Rope, queries: Option<TensorView<'a>>) -> Self {
        KeyRotation { table: rope.view(), params: rope.rotation_params(), queries }
    }
}

/// Returns the dispatches that write k `[batch, kv_heads, rows, head_dim]` and v `[batch, kv_heads,
/// rows, value_dim]` into a layer. There are two if the storages differ. The rows are the tokens of
/// the last advance, or existing positions `at`.
pub(crate) fn append<'a>(
    layer: &CacheLayer<'a>,
    [k, v]: [TensorView<'a>; 2],
    rotation: Option<KeyRotation<'a>>,
    at: Option<PositionsOf<'a>>,
    device: &DeviceFacts,
) -> Dispatches<'a> {
    let ([batch, kv_heads, rows, head_dim], value_dim) = (k.shape(), v.shape()[3]);
    let CacheVariant { storages, layout_kind, groups, compacts } = layer.cached;
    let (hadamard_block, hadamard_scale) = hadamard_numbers(layer.hadamard);
    let of_sides = |side: usize, writes: [bool; 2]| {
        let units = CacheAppend::units(storages[side], groups);
        let count = |n: usize, dim: usize| if writes[n] { dim.div_ceil(units[n] as usize) } else { 0 };
        let (k_units, v_units) = (count(0, head_dim), count(1, value_dim));
        // If there are two dispatches, the first one rotates.
        let q = rotation.and_then(|rotation| rotation.queries).filter(|_| writes[0]);
        let q_heads = q.map_or(0, |q| q.shape()[1]);
        let call = CacheAppendCall {
            k,
            v,
            cache_k: layer.k,
            cache_v: (!layer.latent).then_some(layer.v),
            sequence_table: layer.sequence_table,
            rotation_table: rotation.map(|rotation| rotation.table),
            positions: at.and_then(|(_, tensor)| tensor),
            q,
            cache: layer.params,
            rotation: rotation.map_or(bytemuck::Zeroable::zeroed(), |rotation| rotation.params),
            at: at.map_or(bytemuck::Zeroable::zeroed(), |(at, _)| at),
            head_dim: head_dim as u32,
            value_dim: value_dim as u32,
            k_units: k_units as u32,
            v_units: v_units as u32,
            rows: rows as u32,
            q_heads: q_heads as u32,
            hadamard_block,
            hadamard_scale,
            counts_refused: u32::from(writes[0]),
            storage: storages[side],
            layout_kind,
            compacts,
            groups,
            overwrites: at.is_some(),
            hadamard: layer.hadamard.is_some(),
            ggml: layer.ggml[side],
            latent: layer.latent,
        };
        let pairs = rotation.map_or(0, |rotation| rotation.params.pairs as usize);
        let invocations = kv_heads * (k_units + v_units) + q_heads * pairs;
        call.dispatch([invocations.div_ceil(cache_append::WORKGROUP), rows, batch], device)
    };
    // The rows of latent keys have the values.
    if layer.latent {
        vec![of_sides(0, [true, false])]
    } else if storages[0] == storages[1] && layer.ggml[0] == layer.ggml[1] {
        vec![of_sides(0, [true; 2])]
    } else {
        vec![of_sides(0, [true, false]), of_sides(1, [false, true])]
    }
}

/// Returns the dispatch that reads k and v, with the shapes of [`append`], from a layer.
pub(crate) fn read<'a>(
    layer: &CacheLayer<'a>,
    [k, v]: [TensorView<'a>; 2],
    (at, positions): PositionsOf<'a>,
    device: &DeviceFacts,
) -> Dispatch<'a> {
    let ([batch, kv_heads, rows, head_dim], value_dim) = (k.shape(), v.shape()[3]);
    let [k_units, v_units] = [head_dim, value_dim].map(|dim| dim.div_ceil(cache_read::UNIT));
    let (hadamard_block, hadamard_scale) = hadamard_numbers(layer.hadamard);
    let call = CacheReadCall {
        k,
        v,
        cache_k: layer.k,
        cache_v: layer.v,
        sequence_table: layer.sequence_table,
        positions,
        cache: layer.params,
        at,
        head_dim: head_dim as u32,
        value_dim: value_dim as u32,
        k_units: k_units as u32,
        v_units: v_units as u32,
        hadamard_block,
        hadamard_scale,
        cached: layer.cached,
        hadamard: layer.hadamard.is_some(),
    };
    let groups = (kv_heads * (k_units + v_units)).div_ceil(cache_read::WORKGROUP);
    call.dispatch([groups, rows, batch], device)
}

/// Returns the dispatches that copy the first `slots` slots of a page, of keys and of values.
pub(crate) fn copy_page<'a>(
    layer: &CacheLayer<'a>,
    [from, to]: [u32; 2],
    slots: usize,
    device: &DeviceFacts,
) -> Dispatches<'a> {
    let CacheParams { kv_heads, page_len, .. } = layer.params;
    let of_side = |Side { rows, words, groups, scales }| {
        let call = CacheCopyCall {
            rows,
            src: from * kv_heads * page_len,
            dst: to * kv_heads * page_len,
            slots: slots as u32,
            page_len,
            kv_heads,
            words,
            groups,
            scales,
        };
        call.dispatch([slots, kv_heads as usize, 1], device)
    };
    layer.sides().map(of_side).collect()
}

/// Returns the dispatches that apply the moves in the sequence table, for keys and for values. They
/// move the first `slots` slots of all sequences.
pub(crate) fn reorder<'a>(layer: &CacheLayer<'a>, slots: usize, device: &DeviceFacts) -> Dispatches<'a> {
    let CacheLayer { sequence_table, params: cache, .. } = *layer;
    let columns = CacheReorder::columns(device);
    let of_words = |(rows, width, words, start)| {
        let (run, head) = (slots as u32 * words, cache.page_len * words);
        let call = CacheReorderCall { rows, sequence_table, cache, run, head, start, width, columns };
        call.dispatch([CacheReorder::workgroups(run, columns), cache.kv_heads as usize, 1], device)
    };
    layer.words().map(of_words).collect()
}

/// Returns the dispatches that keep the tokens of `keep`, for keys and for values. Each side has
/// one for channels, and one for scales and positions.
pub(crate) fn compact<'a>(
    layer: &CacheLayer<'a>,
    keep: TensorView<'a>,
    most: usize,
    device: &DeviceFacts,
) -> Dispatches<'a> {
    let CacheLayer { sequence_table, params: cache, cached, .. } = *layer;
    let of_words = |(rows, width, words, start)| {
        let (most, layout_kind, columns) =
            (most as u32, cached.layout_kind, CacheCompact::columns(words, device));
        let call = CacheCompactCall {
            rows,
            sequence_table,
            keep,
            cache,
            most,
            words,
            start,
            layout_kind,
            width,
            columns,
        };
        let workgroups = CacheCompact::workgroups(words, columns);
        call.dispatch([workgroups, cache.kv_heads as usize, cache.batch as usize], device)
    };
    layer.words().map(of_words).collect()
}
