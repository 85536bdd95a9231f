//! Masks over a sequence.

use super::MaskPreset;
use super::preset::{ANY, ONE, bools, divisor, numbers, size};
use crate::mask::mods::At;
use crate::tensor::{Error, HostTensor};

/// The distance by which the key precedes the query; negative for later keys.
fn behind(at: &At) -> i64 {
    i64::from(at.position) - i64::from(at.key)
}

/// The positions of query and key in the query's sequence.
pub(super) fn places(at: &At) -> [i64; 2] {
    let start = i64::from(at.sequence_start);
    [i64::from(at.position) - start, i64::from(at.key) - start]
}

/// The key at which the query is, if there is one.
fn standing(at: &At) -> Option<u32> {
    u32::try_from(at.position).ok().filter(|p| *p < at.kv_len)
}

/// Causal mask: `j ≤ p`.
///
/// Built in: [`Mask::causal`](crate::Mask::causal), and
/// [`Mask::causal_top_left`](crate::Mask::causal_top_left) for FlexAttention's `q_idx >= kv_idx`.
///
/// # Errors
/// None.
pub fn causal() -> Result<MaskPreset, Error> {
    const TEXT: &str = "
fn mask_mod(at: At) -> bool { return i32(at.key) <= at.position; }";
    MaskPreset::new("causal", TEXT, &[], vec![], |at| behind(at) >= 0)
}

/// Sliding window: a query sees the key at its position and `window` keys before it,
/// `0 ≤ p − j ≤ window`. Sources: Child et al. 2019, "Generating long sequences with sparse
/// transformers", and Mistral 7B.
///
/// Built in: `Mask::causal().window(window, 0)`.
///
/// # Errors
/// A window of 2^29 or more.
pub fn sliding(window: usize) -> Result<MaskPreset, Error> {
    const TEXT: &str = "
struct Uniforms { window: i32 }
fn mask_mod(at: At) -> bool {
    let behind = at.position - i32(at.key);
    return behind >= 0 && behind <= uniforms().window;
}";
    let window = size("window", window)?;
    MaskPreset::new("sliding", TEXT, &[window], vec![], move |at| {
        (0..=i64::from(window)).contains(&behind(at))
    })
}

/// Dilated sliding window: `|p − j| ≤ window`, in steps of `dilation` (Beltagy et al. 2020,
/// "Longformer").
///
/// Built in: `Mask::none().window(window, window)` with
/// [`Pattern::Dilated`](crate::mask::Pattern::Dilated).
///
/// # Errors
/// A dilation of 0, numbers of 2^29 or more.
pub fn dilated(window: usize, dilation: usize) -> Result<MaskPreset, Error> {
    const TEXT: &str = "
struct Uniforms { window: i32, dilation: i32 }
fn mask_mod(at: At) -> bool {
    let far = abs(at.position - i32(at.key));
    return far <= uniforms().window && far % uniforms().dilation == 0;
}";
    let (window, dilation) = (size("window", window)?, divisor("dilation", dilation)?);
    MaskPreset::new("dilated", TEXT, &[window, dilation], vec![], move |at| {
        let far = behind(at).abs();
        far <= i64::from(window) && far % i64::from(dilation) == 0
    })
}

/// Local blocks: a query sees the block of `block` tokens that contains it,
/// `⌊p / block⌋ = ⌊j / block⌋`.
///
/// Combine it with another mask for sequences of one length, one after the other in a batch entry.
/// This is `batchify` in attention-gym.
///
/// Built in: [`Pattern::Local`](crate::mask::Pattern::Local).
///
/// # Errors
/// A block of 0 tokens, or of 2^29 or more.
pub fn local(block: usize) -> Result<MaskPreset, Error> {
    const TEXT: &str = "
struct Uniforms { block: u32 }
fn mask_mod(at: At) -> bool {
    let first = at.sequence_start;
    return at.position >= i32(first) && (u32(at.position) - first) / uniforms().block == (at.key - first) / uniforms().block;
}";
    let block = divisor("block", block)?;
    MaskPreset::new("local", TEXT, &[block], vec![], move |at| {
        let [q, k] = places(at);
        q >= 0 && q / i64::from(block) == k / i64::from(block)
    })
}

/// Global tokens and a window: `|p − j| ≤ window`, or the query's or the key's token is global
/// (Beltagy et al. 2020, "Longformer").
///
/// `globals` is `[batch, heads, 1, kv_len]`, the first two may be 1.
///
/// Built in: `Mask::none().window(window, window).globals(globals)`.
///
/// # Errors
/// A window of 2^29 or more, a table of another shape or length.
pub fn global_sliding(window: usize, globals: HostTensor<bool>) -> Result<MaskPreset, Error> {
    const TEXT: &str = "
struct Uniforms { window: i32 }
fn is_global(at: At, place: i32) -> bool {
    return place >= 0 && place < i32(at.kv_len) && globals_at(at.batch, at.head, 0u, u32(place));
}
fn mask_mod(at: At) -> bool {
    let key = i32(at.key);
    return abs(at.position - key) <= uniforms().window || is_global(at, key) || is_global(at, at.position);
}";
    let window = size("window", window)?;
    let (globals, table) = bools("globals", globals, [ANY, ANY, ONE, ANY])?;
    MaskPreset::new("global_sliding", TEXT, &[window], vec![table], move |at| {
        let mut tokens = [Some(at.key), standing(at)].into_iter().flatten();
        behind(at).abs() <= i64::from(window) || tokens.any(|token| globals.at([at.batch, at.head, 0, token]))
    })
}

/// Prefix-LM: causal, and every query sees the first `prefix` keys: `j ≤ p` or `j < prefix`.
/// Source: Raffel et al. 2020, "Exploring the limits of transfer learning", 3.2.1.
///
/// `prefix` is `[batch, heads, q_len, 1]`, any may be 1. `[batch, 1, 1, 1]` is a length per
/// sequence.
///
/// Built in: `Mask::causal().prefix(prefix)`.
///
/// # Errors
/// A table of another shape or length.
pub fn prefix_lm(prefix: HostTensor<u32>) -> Result<MaskPreset, Error> {
    const TEXT: &str = "
fn mask_mod(at: At) -> bool {
    return i32(at.key) <= at.position || at.key - at.sequence_start < prefix_at(at.batch, at.head, at.query, 0u);
}";
    let (prefix, table) = numbers("prefix", prefix, [ANY, ANY, ANY, ONE])?;
    MaskPreset::new("prefix_lm", TEXT, &[], vec![table], move |at| {
        behind(at) >= 0 || places(at)[1] < i64::from(prefix.at([at.batch, at.head, at.query, 0]))
    })
}

/// Documents: a query sees the tokens of its document, `ids[p] = ids[j]`. Documents need not be
/// contiguous.
///
/// `ids` is `[batch, heads, 1, kv_len]`, the first two may be 1.
///
/// Built in: [`Mask::documents`](crate::Mask::documents), or for contiguous documents
/// [`Mask::packed`](crate::Mask::packed). With `packed`, positions count from the start of each
/// document, as in attention-gym's `generate_doc_mask_mod`.
///
/// # Errors
/// A table of another shape or length.
pub fn documents(ids: HostTensor<u32>) -> Result<MaskPreset, Error> {
    const TEXT: &str = "
fn mask_mod(at: At) -> bool {
    return at.position >= 0 && at.position < i32(at.kv_len)
        && ids_at(at.batch, at.head, 0u, u32(at.position)) == ids_at(at.batch, at.head, 0u, at.key);
}";
    let (ids, table) = numbers("ids", ids, [ANY, ANY, ONE, ANY])?;
    MaskPreset::new("documents", TEXT, &[], vec![table], move |at| {
        let id = |token| ids.at([at.batch, at.head, 0, token]);
        standing(at).is_some_and(|p| id(p) == id(at.key))
    })
}

/// Shared prompt: `j ≤ p`, and `documents[j]` is `documents[p]` or `prompts[p]`. Several responses
/// follow one prompt and do not see each other. The prompt is computed once, as in reinforcement
/// learning with groups of samples (`shared_prefix` in attention-gym).
///
/// Both tables are `[batch, 1, 1, kv_len]`, batch may be 1. `documents` holds the document of each
/// token. `prompts` holds the document of its prompt; for a token of a prompt this is its document.
///
/// # Errors
/// Tables of another shape or length.
pub fn shared_prefix(documents: HostTensor<u32>, prompts: HostTensor<u32>) -> Result<MaskPreset, Error> {
    const TEXT: &str = "
fn mask_mod(at: At) -> bool {
    if i32(at.key) > at.position || at.position >= i32(at.kv_len) { return false; }
    let own = u32(at.position);
    let document = documents_at(at.batch, 0u, 0u, at.key);
    return document == documents_at(at.batch, 0u, 0u, own) || document == prompts_at(at.batch, 0u, 0u, own);
}";
    let (documents, first) = numbers("documents", documents, [ANY, ONE, ONE, ANY])?;
    let (prompts, second) = numbers("prompts", prompts, [ANY, ONE, ONE, ANY])?;
    MaskPreset::new("shared_prefix", TEXT, &[], vec![first, second], move |at| {
        let document = |token| documents.at([at.batch, 0, 0, token]);
        let own = standing(at).filter(|own| at.key <= *own);
        own.is_some_and(|own| {
            document(at.key) == document(own) || document(at.key) == prompts.at([at.batch, 0, 0, own])
        })
    })
}

/// Block diffusion, in training: `len` noised tokens, then the same `len` clean tokens, in blocks
/// of `block`. A noised token sees its block of noised tokens and the clean blocks before it. A
/// clean token sees the clean blocks up to and including its block (Arriola et al. 2025, "Block
/// diffusion", 3.1).
///
/// # Errors
/// A block or a length of 0, numbers of 2^29 or more.
pub fn block_diffusion(len: usize, block: usize) -> Result<MaskPreset, Error> {
    const TEXT: &str = "
struct Uniforms { len: u32, block: u32 }
fn mask_mod(at: At) -> bool {
    let len = uniforms().len;
    let q = u32(at.position) - at.sequence_start;
    let k = at.key - at.sequence_start;
    if q >= 2u * len || k >= 2u * len { return false; }
    let own = q % len / uniforms().block;
    let other = k % len / uniforms().block;
    if k < len { return q < len && own == other; }
    return other < own || (q >= len && own == other);
}";
    let (len, block) = (divisor("len", len)?, divisor("block", block)?);
    MaskPreset::new("block_diffusion", TEXT, &[len, block], vec![], move |at| {
        let (len, block) = (i64::from(len), i64::from(block));
        let [q, k] = places(at);
        if ![q, k].iter().all(|place| (0..2 * len).contains(place)) {
            return false;
        }
        let [own, other] = [q, k].map(|place| place % len / block);
        match [q < len, k < len] {
            [true, true] => own == other,
            [true, false] => other < own,
            [false, true] => false,
            [false, false] => other <= own,
        }
    })
}

/// Tree of drafts, for speculative decoding. The last keys are the nodes of a tree. A node sees
/// itself, its ancestors and all older keys (Miao et al. 2024, "SpecInfer").
///
/// `parents` has `batch` trees with the same number of nodes, one after the other. It holds the
/// parent of each node, counted in its tree, or `None` for a root. A parent comes before its
/// children.
///
/// On a device the table is `[batch, 1, nodes, 2]`, with intervals instead of parents. Node `k` is
/// node `q` or an ancestor of it if `nodes[k][0] ≤ nodes[q][0] < nodes[k][1]`. So each pair takes
/// two reads in any tree, where parents would need a walk.
///
/// The positions of the queries are those of the nodes. With the bottom-right alignment the queries
/// are the last rows. Packed sequences exclude this preset.
///
/// Built in: [`Mask::tree`](crate::Mask::tree), with `nodes²` booleans. It does not read the table
/// for older keys.
///
/// # Errors
/// No tree, trees of different sizes, a parent that does not come before its child.
pub fn tree(parents: &[Option<u32>], batch: usize) -> Result<MaskPreset, Error> {
    const TEXT: &str = "
struct Uniforms { nodes: i32 }
fn mask_mod(at: At) -> bool {
    let older = i32(at.kv_len) - uniforms().nodes;
    let q = at.position - older;
    let k = i32(at.key) - older;
    if q < 0 || q >= uniforms().nodes { return false; }
    if k < 0 { return true; }
    let own = nodes_at(at.batch, 0u, u32(q), 0u);
    return nodes_at(at.batch, 0u, u32(k), 0u) <= own && own < nodes_at(at.batch, 0u, u32(k), 1u);
}";
    if batch == 0 || parents.is_empty() {
        return Err(Error::ZeroSize { tensor: "parents", axis: if batch == 0 { "batch" } else { "nodes" } });
    }
    if !parents.len().is_multiple_of(batch) {
        return Err(Error::NotDivisible {
            what: "the length of `parents`",
            value: parents.len(),
            by: "batch",
            divisor: batch,
        });
    }
    let nodes = parents.len() / batch;
    let mut intervals = Vec::with_capacity(2 * parents.len());
    for tree in parents.chunks_exact(nodes) {
        intervals.extend(tree_intervals(tree)?);
    }
    let nodes = size("nodes", nodes)?;
    let tensor = HostTensor::new(&intervals, [batch, 1, nodes as usize, 2]);
    let (intervals, table) = numbers("nodes", tensor, [ANY; 4])?;
    MaskPreset::new("tree", TEXT, &[nodes], vec![table], move |at| {
        let (nodes, older) = (i64::from(nodes), i64::from(at.kv_len) - i64::from(nodes));
        let [q, k] = [i64::from(at.position) - older, i64::from(at.key) - older];
        let of = |node: i64, n: u32| intervals.at([at.batch, 0, node as u32, n]);
        (0..nodes).contains(&q) && (k < 0 || (of(k, 0)..of(k, 1)).contains(&of(q, 0)))
    })
}

/// Returns for each node its number in depth-first order, and the number after its last descendant.
fn tree_intervals(parents: &[Option<u32>]) -> Result<Vec<u32>, Error> {
    // The number of nodes in the subtree of each node, with the node.
    let mut sizes = vec![1u32; parents.len()];
    for (n, parent) in parents.iter().enumerate().rev() {
        let Some(parent) = parent.map(|parent| parent as usize) else { continue };
        if parent >= n {
            let expected = "before its child; sort nodes so that parents come first";
            return Err(Error::Option { option: "the parent of a node", value: parent as f64, expected });
        }
        sizes[parent] += sizes[n];
    }
    // The number of the next child of each node.
    let mut next = vec![0u32; parents.len()];
    let mut roots = 0;
    let mut intervals = Vec::with_capacity(2 * parents.len());
    for (n, parent) in parents.iter().enumerate() {
        let free = parent.map_or(&mut roots, |parent| &mut next[parent as usize]);
        let first = *free;
        *free += sizes[n];
        next[n] = first + 1;
        intervals.extend([first, first + sizes[n]]);
    }
    Ok(intervals)
}

/// Blocks of drafts, in training. Queries are blocks of `block` tokens that all follow the same
/// `prefix` keys. Blocks do not see each other. In its block a token sees itself and earlier tokens
/// (JetSpec 2026, "training mask").
///
/// Keys are the prefix, then the queries' keys. The queries' positions follow the prefix, as with
/// the bottom-right alignment.
///
/// # Errors
/// A block of 0 tokens, numbers of 2^29 or more.
pub fn draft_blocks(prefix: usize, block: usize) -> Result<MaskPreset, Error> {
    const TEXT: &str = "
struct Uniforms { prefix: i32, block: i32 }
fn mask_mod(at: At) -> bool {
    let first = i32(at.sequence_start) + uniforms().prefix;
    let q = at.position - first;
    let k = i32(at.key) - first;
    return q >= 0 && (k < 0 || (k <= q && k / uniforms().block == q / uniforms().block));
}";
    let (prefix, block) = (size("prefix", prefix)?, divisor("block", block)?);
    MaskPreset::new("draft_blocks", TEXT, &[prefix, block], vec![], move |at| {
        let [q, k] = places(at).map(|place| place - i64::from(prefix));
        q >= 0 && (k < 0 || k <= q && k / i64::from(block) == q / i64::from(block))
    })
}

/// Pictures in a text, for cross attention. Keys are `picture` tokens for each picture. Text token
/// `i` sees a picture if `intervals[picture][0] ≤ i < intervals[picture][1]` (Alayrac et al. 2022,
/// "Flamingo").
///
/// `intervals` is `[batch, 1, pictures, 2]`, batch may be 1. [`picture_intervals`] makes intervals
/// with which a text token sees the pictures of the last marker before it.
///
/// # Errors
/// A picture of 0 tokens, a table of another shape or length.
pub fn flamingo(intervals: HostTensor<u32>, picture: usize) -> Result<MaskPreset, Error> {
    const TEXT: &str = "
struct Uniforms { picture: u32, pictures: u32 }
fn mask_mod(at: At) -> bool {
    let n = at.key / uniforms().picture;
    return n < uniforms().pictures && intervals_at(at.batch, 0u, n, 0u) <= at.query
        && at.query < intervals_at(at.batch, 0u, n, 1u);
}";
    let picture = divisor("picture", picture)?;
    let (intervals, table) = numbers("intervals", intervals, [ANY, ONE, ANY, Some(2)])?;
    let pictures = size("pictures", table.shape()[2])?;
    MaskPreset::new("flamingo", TEXT, &[picture, pictures], vec![table], move |at| {
        let n = at.key / picture;
        let of = |end| intervals.at([at.batch, 0, n, end]);
        n < pictures && (of(0)..of(1)).contains(&at.query)
    })
}

/// Returns the interval of text tokens that see each picture, for [`flamingo`].
///
/// An interval extends from a picture's marker to the next marker, or to the end of the text.
/// Adjacent markers count as one marker of several pictures. `markers` are their tokens, ascending.
///
/// # Errors
/// Markers that do not ascend, or lie past the text.
pub fn picture_intervals(markers: &[u32], text_len: u32) -> Result<Vec<u32>, Error> {
    let mut intervals = vec![0; 2 * markers.len()];
    let mut end = text_len;
    for (n, marker) in markers.iter().enumerate().rev() {
        let next = markers.get(n + 1);
        if *marker >= *next.unwrap_or(&text_len) {
            let expected = "before the next marker and inside the text";
            return Err(Error::Option { option: "a picture's marker", value: f64::from(*marker), expected });
        }
        // If the next marker is adjacent, both intervals have the same end.
        end = next.filter(|next| **next != marker + 1).copied().unwrap_or(end);
        intervals[2 * n..2 * n + 2].copy_from_slice(&[*marker, end]);
    }
    Ok(intervals)
}

/// Selected tiles for each head: `selected[⌊p / tile⌋, ⌊j / tile⌋]`, for tiles of `tile`
/// consecutive tokens. Use it for VSA, MoBA and selected attention. Source: Zhang et al. 2025,
/// "VSA", whose tiles are cubes of a video's tokens in that order.
///
/// `selected` is `[batch, heads, ⌈kv_len / tile⌉, ⌈kv_len / tile⌉]`, the first two may be 1. To
/// hide padding in tiles, use [`Mask::key_padding_mask`](crate::Mask::key_padding_mask).
///
/// Built in: [`Mask::blocks`](crate::Mask::blocks), with which kernels do not load the keys of
/// other tiles.
///
/// # Errors
/// A tile of 0 tokens, a table of another length.
pub fn selected_tiles(selected: HostTensor<bool>, tile: usize) -> Result<MaskPreset, Error> {
    const TEXT: &str = "
struct Uniforms { tile: u32 }
fn mask_mod(at: At) -> bool {
    return at.position >= 0 && at.position < i32(at.kv_len)
        && selected_at(at.batch, at.head, u32(at.position) / uniforms().tile, at.key / uniforms().tile);
}";
    let tile = divisor("tile", tile)?;
    let (selected, table) = bools("selected", selected, [ANY; 4])?;
    MaskPreset::new("selected_tiles", TEXT, &[tile], vec![table], move |at| {
        standing(at).is_some_and(|p| selected.at([at.batch, at.head, p / tile, at.key / tile]))
    })
}

/// Spatial heads of a video: `|p − j| < reach`. The first `prompt` tokens see all tokens, and all
/// tokens see them. With `sink`, all tokens also see the first frame (Xi et al. 2025, "Sparse
/// VideoGen").
///
/// The paper's `reach` is two frames of `frame` tokens, rounded down to a multiple of 128.
///
/// # Errors
/// Numbers of 2^29 or more.
pub fn svg_spatial(prompt: usize, frame: usize, reach: usize, sink: bool) -> Result<MaskPreset, Error> {
    const TEXT: &str = "
struct Uniforms { prompt: i32, seen: i32, reach: i32 }
fn mask_mod(at: At) -> bool {
    let q = at.position - i32(at.sequence_start);
    let k = i32(at.key - at.sequence_start);
    return q < uniforms().prompt || k < uniforms().seen || abs(q - k) < uniforms().reach;
}";
    let (prompt, frame, reach) = (size("prompt", prompt)?, size("frame", frame)?, size("reach", reach)?);
    let seen = if sink { prompt + frame } else { prompt };
    MaskPreset::new("svg_spatial", TEXT, &[prompt, seen, reach], vec![], move |at| {
        let [q, k] = places(at);
        q < i64::from(prompt) || k < i64::from(seen) || (q - k).abs() < i64::from(reach)
    })
}

/// Temporal heads of a video: tokens see each other if their places in their frames are less than
/// `reach` apart. A frame has `frame` tokens. The first `prompt` tokens see all tokens, and all
/// tokens see them (Xi et al. 2025, "Sparse VideoGen").
///
/// # Errors
/// A frame of 0 tokens, numbers of 2^29 or more.
pub fn svg_temporal(prompt: usize, frame: usize, reach: usize) -> Result<MaskPreset, Error> {
    const TEXT: &str = "
struct Uniforms { prompt: i32, frame: i32, reach: i32 }
fn mask_mod(at: At) -> bool {
    let q = at.position - i32(at.sequence_start) - uniforms().prompt;
    let k = i32(at.key - at.sequence_start) - uniforms().prompt;
    return q < 0 || k < 0 || abs(q % uniforms().frame - k % uniforms().frame) < uniforms().reach;
}";
    let (prompt, frame, reach) = (size("prompt", prompt)?, divisor("frame", frame)?, size("reach", reach)?);
    MaskPreset::new("svg_temporal", TEXT, &[prompt, frame, reach], vec![], move |at| {
        let [q, k] = places(at).map(|place| place - i64::from(prompt));
        let frame = i64::from(frame);
        q < 0 || k < 0 || (q % frame - k % frame).abs() < i64::from(reach)
    })
}
