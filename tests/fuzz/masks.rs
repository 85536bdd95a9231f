//! Masks of any parts.

use wgpu_attention::mask::{At, Blocks, Captured, DeviceMask, MaskMod, Pattern, PatternPart, ScoreMod};
use wgpu_attention::{Alignment, DType, Mask, Shape};

use crate::arena::{Buf, Window, view};
use crate::call::float;
use crate::case::{HostData, Rules};
use crate::choices::Choices;
use crate::mods::{Text, pairs as own_mask, score};

/// The tensors of a mask, in the order of [`MaskSpec::views`].
pub const LENGTHS: usize = 0;
const PREFIX: usize = 1;
const QUERY_OFFSETS: usize = 2;
const QUERY_STARTS: usize = 3;
const KEY_STARTS: usize = 4;
const QUERY_DOCUMENTS: usize = 5;
const KEY_DOCUMENTS: usize = 6;
const BLOCKS: usize = 7;
const ATTN_MASK: usize = 8;
const TREE: usize = 9;
const KEY_PADDING_MASK: usize = 10;
const GLOBALS: usize = 11;
const BIAS: usize = 12;
const SLOPES: usize = 13;
const RELATIVE: usize = 14;
pub const SINKS: usize = 15;
/// The indices of captured tensors, if there are custom functions.
const SCORES: usize = 16;
const SHOWN: usize = 17;

const SCORE_MOD: &str = "fn score_mod(score: f32, at: At) -> f32 {
    return score + table_at(at.batch, at.head, at.query, at.key);
}";
const MASK_MOD: &str = "fn mask_mod(at: At) -> bool {
    return shown_at(at.batch, at.head, at.query, at.key) || at.key % 3u != 1u;
}";

/// Returns the element of `t` at a pair, or the last one on a shorter axis.
fn element<T: Copy>(t: &HostData<T>, at: &At) -> T {
    let index = [at.batch, at.head, at.query, at.key];
    t.data[(0..4).fold(0, |flat, axis| flat * t.shape[axis] + (index[axis] as usize).min(t.shape[axis] - 1))]
}

#[derive(Clone, Debug, Default)]
pub struct MaskSpec {
    pub causal: bool,
    pub top_left: bool,
    pub window: Option<[usize; 2]>,
    pub pattern: Option<Pattern>,
    pub exclude_self: bool,
    pub symmetric: bool,
    pub size: [usize; 2],
    pub views: [Option<Window>; 18],
}

fn pattern(c: &mut Choices, n: usize) -> Pattern {
    let part = c.pick(&[PatternPart::Near, PatternPart::Far, PatternPart::Both, PatternPart::ByHead]);
    match c.below(4) {
        0 => Pattern::Dilated { dilation: n },
        1 => Pattern::Strided { stride: n, part },
        2 => Pattern::Fixed { stride: n, summary: c.between(1, n.clamp(1, 9)), part },
        _ => Pattern::Local { block: n },
    }
}

impl MaskSpec {
    /// Returns a mask that fits. The family `f` decides the kernel, `c` the rest.
    pub fn new(f: &mut Choices, c: &mut Choices, shape: &Shape) -> Self {
        let mut mask = MaskSpec { top_left: c.one_in(3), size: [4, 4], ..Default::default() };
        let [batch, heads, q_len, kv_len] = shape.weights();
        let parts = f.pick(&[0, 1, 1, 1, 2, 2, 3]);
        let float = float(f);
        for _ in 0..parts {
            let mut set = |c: &mut Choices, n: usize, dtype, mut shape: [usize; 4], repeats: &[usize]| {
                repeats.iter().filter(|_| c.one_in(2)).for_each(|axis| shape[*axis] = 1);
                mask.views[n] = Some(Window::input(c, dtype, shape, false));
            };
            let rows = [batch, heads, q_len, 1];
            let pairs = shape.weights();
            let any = &[0, 1, 2, 3];
            match f.below(21) {
                0 | 1 => mask.causal = true,
                2 => mask.window = Some([c.below(kv_len + 3), c.below(kv_len + 3)]),
                3 => mask.exclude_self = true,
                4 => {
                    let n = c.between(1, 9);
                    mask.pattern = Some(pattern(c, n));
                }
                5 => set(c, LENGTHS, DType::U32, rows, any),
                6 => {
                    set(c, PREFIX, DType::U32, rows, any);
                    mask.causal = true;
                }
                7 => {
                    let shape = [batch, 1, 1, c.between(2, 5)];
                    for n in [QUERY_STARTS, KEY_STARTS] {
                        set(c, n, DType::U32, shape, &[0]);
                    }
                    for n in [QUERY_STARTS, KEY_STARTS] {
                        mask.views[n].iter_mut().for_each(|w| {
                            (w.buf, w.strides) = (Buf::Starts, [0, 0, 0, 1 + w.offset % 3]);
                            w.offset = w.offset % 8 * 64;
                        });
                    }
                }
                8 => {
                    set(c, QUERY_DOCUMENTS, DType::U32, rows, any);
                    set(c, KEY_DOCUMENTS, DType::U32, [batch, heads, 1, kv_len], any);
                }
                9 => {
                    let size = [c.between(1, 9), c.between(1, 9)];
                    let shape = [batch, heads, q_len.div_ceil(size[0]), kv_len.div_ceil(size[1])];
                    set(c, BLOCKS, DType::U32, shape, any);
                    mask.size = size;
                }
                10 => set(c, ATTN_MASK, DType::Bool, pairs, any),
                11 => set(c, TREE, DType::Bool, [batch, heads, q_len, q_len], &[0, 1]),
                12 => set(c, KEY_PADDING_MASK, DType::Bool, pairs, any),
                13 => set(c, GLOBALS, DType::Bool, [batch, heads, 1, kv_len], any),
                14 => set(c, BIAS, float, pairs, any),
                15 => {
                    set(c, SLOPES, float, [batch, heads, 1, 1], any);
                    mask.symmetric = f.one_in(2);
                }
                16 => {
                    let shape = [batch, heads, 1, 2 * c.below(9) + 1];
                    set(c, RELATIVE, float, shape, &[0, 1]);
                }
                17 => {
                    set(c, QUERY_OFFSETS, DType::U32, [batch, 1, 1, 1], &[0]);
                    mask.causal = true;
                }
                18 => set(c, SCORES, float, pairs, any),
                19 => set(c, SHOWN, DType::Bool, pairs, any),
                _ => set(c, SINKS, float, [batch, heads, 1, 1], any),
            }
        }
        if mask.views[QUERY_STARTS].is_some() {
            (mask.views[TREE], mask.views[QUERY_OFFSETS]) = (None, None);
        }
        mask
    }

    /// Changes an option that is not a tensor.
    pub fn spoil(&mut self, c: &mut Choices) {
        match c.below(5) {
            0 => self.window = Some([c.size(), c.size()]),
            1 => {
                let n = c.size();
                self.pattern = Some(pattern(c, n));
            }
            2 => self.size[c.below(2)] = c.size(),
            3 => self.top_left = !self.top_left,
            _ => {
                let (n, other) = (c.below(18), c.below(18));
                self.views.swap(n, other);
            }
        }
    }

    pub fn windows(&mut self) -> impl Iterator<Item = &mut Window> {
        self.views.iter_mut().flatten()
    }

    /// Returns its bias, slopes, relative table and sinks.
    pub fn added(&self) -> [Option<Window>; 4] {
        [BIAS, SLOPES, RELATIVE, SINKS].map(|n| self.views[n])
    }

    /// True if results with the mask can be judged.
    pub fn is_tame(&self, bytes: &[Vec<u8>]) -> bool {
        // Half a pair reaches no device, so nobody has checked its place.
        let whole = |a: usize, b: usize| self.views[a].is_some() == self.views[b].is_some();
        whole(QUERY_STARTS, KEY_STARTS)
            && whole(QUERY_DOCUMENTS, KEY_DOCUMENTS)
            && self.views.iter().flatten().all(|w| w.is_tame() && w.count() < 10_000)
            && [QUERY_STARTS, KEY_STARTS]
                .iter()
                .filter_map(|n| self.views[*n].as_ref())
                .all(|w| w.numbers(bytes).chunks(w.shape[3]).all(|starts| starts.is_sorted()))
    }

    pub fn device<'a>(&self, buffers: &'a [wgpu::Buffer]) -> DeviceMask<'a> {
        let mut mask: DeviceMask = Mask::none();
        if self.top_left {
            mask = mask.aligned(Alignment::TopLeft);
        }
        if self.causal {
            mask = mask.and_causal();
        }
        if let Some([left, right]) = self.window {
            mask = mask.window(left, right);
        }
        if let Some(pattern) = self.pattern {
            mask = mask.pattern(pattern);
        }
        if self.exclude_self {
            mask = mask.exclude_self();
        }
        let of = |n: usize| self.views[n].as_ref().map(|w| view(buffers, w));
        let pair = |n: usize, m: usize| Some((of(n)?, of(m)?));
        mask = of(LENGTHS).map_or(mask, |t| mask.lengths(t));
        mask = of(PREFIX).map_or(mask, |t| mask.prefix(t));
        mask = of(QUERY_OFFSETS).map_or(mask, |t| mask.query_offsets(t));
        mask = pair(QUERY_STARTS, KEY_STARTS).map_or(mask, |(q, k)| mask.packed(q, k));
        mask = pair(QUERY_DOCUMENTS, KEY_DOCUMENTS).map_or(mask, |(q, k)| mask.documents(q, k));
        mask = of(BLOCKS).map_or(mask, |t| mask.blocks(Blocks::new(t, self.size)));
        mask = of(ATTN_MASK).map_or(mask, |t| mask.attn_mask(t));
        mask = of(TREE).map_or(mask, |t| mask.tree(t));
        mask = of(KEY_PADDING_MASK).map_or(mask, |t| mask.key_padding_mask(t));
        mask = of(GLOBALS).map_or(mask, |t| mask.globals(t));
        mask = of(BIAS).map_or(mask, |t| mask.bias(t));
        mask =
            of(SLOPES).map_or(mask, |t| if self.symmetric { mask.alibi_symmetric(t) } else { mask.alibi(t) });
        mask = of(RELATIVE).map_or(mask, |t| mask.relative(t));
        mask = of(SCORES).map_or(mask, |t| {
            let own = ScoreMod::capturing(SCORE_MOD, &[Captured::float("table")]).expect("a text");
            mask.score_mod(own.with(&[t]))
        });
        mask = of(SHOWN).map_or(mask, |t| {
            let own = MaskMod::capturing(MASK_MOD, &[Captured::bool("shown")]).expect("a text");
            mask.mask_mod(own.with(&[t]))
        });
        of(SINKS).map_or(mask, |t| mask.sink_logits(t))
    }

    /// Returns the same mask with its elements. Call it only if the mask is tame.
    pub fn rules(&self, bytes: &[Vec<u8>]) -> Rules {
        let numbers = |n: usize| self.views[n].map(|w| HostData::new(w.numbers(bytes), w.shape));
        let bools = |n: usize| self.views[n].map(|w| HostData::new(w.bools(bytes), w.shape));
        let floats = |n: usize| self.views[n].map(|w| HostData::new(w.floats(bytes), w.shape));
        let pair = |n: usize, m: usize| Some([numbers(n)?, numbers(m)?]);
        Rules {
            score_mod: floats(SCORES)
                .map(|t| score(Text::new(SCORE_MOD), move |x, at| x + f64::from(element(&t, at)))),
            mask_mod: bools(SHOWN)
                .map(|t| own_mask(Text::new(MASK_MOD), move |at| element(&t, at) || at.key % 3 != 1)),
            causal: self.causal,
            alignment: if self.top_left { Alignment::TopLeft } else { Alignment::BottomRight },
            window: self.window,
            pattern: self.pattern,
            exclude_self: self.exclude_self,
            lengths: numbers(LENGTHS),
            prefix: numbers(PREFIX),
            query_offsets: numbers(QUERY_OFFSETS),
            packed: pair(QUERY_STARTS, KEY_STARTS),
            documents: pair(QUERY_DOCUMENTS, KEY_DOCUMENTS),
            blocks: numbers(BLOCKS).map(|part| (part, self.size)),
            attn_mask: bools(ATTN_MASK),
            tree: bools(TREE),
            key_padding_mask: bools(KEY_PADDING_MASK),
            globals: bools(GLOBALS),
            bias: floats(BIAS),
            slopes: floats(SLOPES),
            symmetric: self.symmetric,
            relative: floats(RELATIVE),
            sinks: floats(SINKS),
        }
    }
}
