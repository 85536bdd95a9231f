//! The reference of masks: permitted pairs, and the terms that a mask adds to scores.

use super::options::Options;
use crate::mask::block_map::state;
use crate::mask::mods::At;
use crate::mask::{HostMask, Id, check_map};
use crate::tensor::{Error, HostTensor, LONGEST_AXIS, Real, Shape, count};

/// The position of a query among the keys.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// First and past-the-last key of the query's sequence.
    keys: [usize; 2],
    /// The key at the query's position. It may be outside the keys.
    position: i64,
}

/// A term of a score: an element of a mask's tensor, times a factor. The factor is the score's
/// derivative by the element.
#[derive(Clone, Copy, Debug)]
pub(super) struct Term {
    pub id: Id,
    /// The index in the tensor. Axes of 1 repeat.
    pub at: [usize; 4],
    pub factor: i64,
}

impl HostMask<'_> {
    /// Returns the position of a query, from `aligned`, `query_offsets` and `packed`.
    fn place(&self, shape: &Shape, [b, h, i, _]: [usize; 4]) -> Option<Place> {
        let alignment = self.settings().alignment;
        let (Some(queries), Some(keys)) = (self.numbers(Id::Packed, 0), self.numbers(Id::Packed, 1)) else {
            let offset = self.numbers(Id::QueryOffsets, 0).and_then(|t| t.at([b, 0, 0, 0]));
            let diagonal = || alignment.diagonal(shape.q_len, shape.kv_len);
            let position = i as i64 + offset.map_or_else(diagonal, |n| i64::from(n).min(LONGEST_AXIS as i64));
            return Some(Place { keys: [0, shape.kv_len], position });
        };
        let count = queries.shape[3];
        let starts = |s: usize| {
            let at = |t: &HostTensor<u32>, most: usize| {
                t.at([b, h, 0, s]).map_or(most, |n| (n as usize).min(most))
            };
            [at(queries, shape.q_len), at(keys, shape.kv_len)]
        };
        let s = (0..count - 1).rfind(|s| starts(*s)[0] <= i)?;
        let ([q0, k0], [q1, k1]) = (starts(s), starts(s + 1));
        let k1 = k1.max(k0);
        let position = k0 as i64 + (i - q0) as i64 + alignment.diagonal(q1.max(q0) - q0, k1 - k0);
        (i < q1).then_some(Place { keys: [k0, k1], position })
    }

    /// True if the rules permit the pair. `index` must lie inside `shape`.
    pub(crate) fn permits(&self, shape: &Shape, index: [usize; 4]) -> bool {
        let [b, h, i, j] = index;
        let Some(place) = self.place(shape, index) else { return false };
        let [first, end] = place.keys;
        let distance = j as i64 - place.position;
        let settings = self.settings();
        let counted =
            |t: &HostTensor<u32>| t.at([b, h, i, 0]).is_some_and(|n| j < first.saturating_add(n as usize));

        let lengths = self.numbers(Id::Lengths, 0).is_none_or(counted);
        if !(first..end).contains(&j) || !lengths {
            return false;
        }
        let prefix = self.numbers(Id::Prefix, 0).is_some_and(counted);
        let causal = !self.has(Id::Causal) || distance <= 0;
        match self.block(index) {
            Some(state::HIDDEN) => return false,
            Some(state::FULL) => return causal || prefix,
            _ => {}
        }

        // A bound larger than every distance has no effect.
        let reach = |bound: usize| i64::try_from(bound).unwrap_or(i64::MAX);
        let window = settings.left.is_none_or(|left| -distance <= reach(left))
            && settings.right.is_none_or(|right| distance <= reach(right));
        let pattern =
            settings.pattern.is_none_or(|p| p.mask_mod(place.position - first as i64, (j - first) as i64, h));
        let globals = self.bools(Id::Globals).is_some_and(|t| {
            // A query can be a global token only if its position is a key of its sequence.
            let standing = usize::try_from(place.position).ok().filter(|p| (first..end).contains(p));
            [Some(j), standing].into_iter().flatten().any(|j| t.at([b, h, 0, j]) == Some(true))
        });
        let exclude_self = !self.has(Id::ExcludeSelf) || distance != 0;
        let documents = self.numbers(Id::Documents, 0).zip(self.numbers(Id::Documents, 1));
        let documents = documents.is_none_or(|(queries, keys)| {
            let key = keys.at([b, h, 0, j]);
            key.is_some() && key == queries.at([b, h, i, 0])
        });
        let holds = |id: Id| self.bools(id).is_none_or(|t| t.at(index) == Some(true));
        let tree = self.bools(Id::Tree).is_none_or(|t| match usize::try_from(distance + i as i64) {
            Ok(own) if own < shape.q_len => t.at([b, h, i, own]) == Some(true),
            _ => true,
        });
        (prefix || causal && (window && pattern || globals))
            && exclude_self
            && documents
            && tree
            && self.mods().pairs.is_none_or(|sees| sees(&self.at(shape, index)))
            && holds(Id::AttnMask)
            && holds(Id::KeyPaddingMask)
    }

    /// Returns the pair as an argument of the caller's functions.
    fn at(&self, shape: &Shape, [b, h, i, j]: [usize; 4]) -> At {
        let place = self.place(shape, [b, h, i, j]);
        let documents = |n: usize, at| self.numbers(Id::Documents, n).and_then(|t| t.at(at)).unwrap_or(0);
        At {
            batch: b as u32,
            head: h as u32,
            kv_head: (h / shape.group()) as u32,
            query: i as u32,
            key: j as u32,
            position: place.map_or(0, |place| place.position as i32),
            sequence_start: place.map_or(0, |place| place.keys[0] as u32),
            q_len: shape.q_len as u32,
            kv_len: shape.kv_len as u32,
            query_document: documents(0, [b, h, i, 0]),
            key_document: documents(1, [b, h, 0, j]),
        }
    }

    fn block(&self, [b, h, i, j]: [usize; 4]) -> Option<u32> {
        let [rows, cols] = self.settings().block_size;
        self.numbers(Id::Blocks, 0).and_then(|map| map.at([b, h, i / rows, j / cols]))
    }

    /// Returns the `bias` of the pair. Pairs in full blocks have none.
    fn pair_bias(&self, index: [usize; 4]) -> f32 {
        self.floats(Id::Bias).filter(|_| self.has_bias(index)).and_then(|t| t.at(index)).unwrap_or(0.0)
    }

    fn has_bias(&self, index: [usize; 4]) -> bool {
        self.has(Id::Bias) && self.block(index) != Some(state::FULL)
    }

    /// Returns the terms that are added to the pair's score: bias, ALiBi and relative bias.
    fn terms(&self, shape: &Shape, index: [usize; 4]) -> [Option<Term>; 3] {
        let [b, h, ..] = index;
        let bias = self.has_bias(index).then_some(Term { id: Id::Bias, at: index, factor: 1 });
        let Some(place) = self.place(shape, index) else { return [bias, None, None] };
        let distance = index[3] as i64 - place.position;
        let alibi = self.has(Id::Alibi).then(|| {
            let factor = if self.settings().symmetric { -distance.abs() } else { distance };
            Term { id: Id::Alibi, at: [b, h, 0, 0], factor }
        });
        let relative = self.floats(Id::Relative).map(|table| {
            let most = table.shape[3] as i64 / 2;
            let at = [b, h, 0, (distance.clamp(-most, most) + most) as usize];
            Term { id: Id::Relative, at, factor: 1 }
        });
        [bias, alibi, relative]
    }

    /// Returns the score plus the sum of the pair's terms. A kernel adds them one after the other
    /// in f32. If its sum is infinite, so is this sum. A bias of −∞ gives −∞ for any score.
    fn added<R: Real>(&self, score: R, shape: &Shape, index: [usize; 4]) -> R {
        let value = |term: Term| {
            let element = self.floats(term.id).and_then(|t| t.at(term.at)).unwrap_or(0.0);
            R::of(term.factor as f64) * R::of(f64::from(element))
        };
        if self.pair_bias(index) == f32::NEG_INFINITY {
            return R::of(f64::NEG_INFINITY);
        }
        let (mut sum, mut in_kernel) = (R::zero(), in_f32(score));
        for value in self.terms(shape, index).into_iter().flatten().map(value) {
            sum = sum + value;
            in_kernel = in_f32(in_kernel + value);
        }
        if in_kernel.f64().is_finite() { score + sum } else { in_kernel }
    }
}

/// Returns `x`, or infinity if `x` exceeds the range of f32. It does not round `x`.
fn in_f32<R: Real>(x: R) -> R {
    let rounded = x.f64() as f32;
    if rounded.is_infinite() { R::of(f64::from(rounded)) } else { x }
}

/// Returns the block map of a mask over `shape`, as
/// [`Attention::classify`](crate::Attention::classify) computes it. The map is `[map_heads[0],
/// map_heads[1], ⌈q_len / size[0]⌉, ⌈kv_len / size[1]⌉]`. The entries of `map_heads`, batch and
/// heads, are those of `shape`, or 1 if one map holds for all.
///
/// # Errors
/// Returns an error if a mask does not broadcast or a map has another shape. It also returns an
/// error if there are more pairs or blocks than tensors can have.
pub fn classify(
    mask: &HostMask,
    shape: Shape,
    size: [usize; 2],
    map_heads: [usize; 2],
) -> Result<Vec<u32>, Error> {
    shape.check()?;
    shape.check_lengths()?;
    mask.check(shape)?;
    if size.contains(&0) {
        return Err(Error::ZeroSize { tensor: "blocks", axis: "size" });
    }
    let pairs = shape.weights();
    let [batch, heads, q_len, kv_len] = pairs;
    let [map_batch, map_heads] = map_heads;
    let counts = [map_batch, map_heads, q_len.div_ceil(size[0]), kv_len.div_ceil(size[1])];
    check_map(counts, &shape, size)?;
    let blocks = count(counts);
    if blocks as u64 > u64::from(u32::MAX) {
        return Err(Error::Option { option: "blocks", value: blocks as f64, expected: "below 2^32" });
    }
    let steps = [batch / map_batch, heads / map_heads, size[0], size[1]];
    let mut map = Vec::with_capacity(blocks);
    for n in 0..blocks {
        let [_, h, l, d] = counts;
        let at = [n / (l * d) / h, n / (l * d) % h, n / d % l, n % d];
        let range = |a: usize| at[a] * steps[a]..((at[a] + 1) * steps[a]).min(pairs[a]);
        let (mut seen, mut unseen, mut biased) = (false, false, false);
        for b in range(0) {
            for h in range(1) {
                for i in range(2) {
                    for j in range(3) {
                        let index = [b, h, i, j];
                        let bias = mask.pair_bias(index);
                        let sees = mask.permits(&shape, index) && bias != f32::NEG_INFINITY;
                        seen |= sees;
                        unseen |= !sees;
                        biased |= sees && bias != 0.0;
                    }
                }
            }
        }
        map.push(match (seen, unseen || biased) {
            (false, _) => state::HIDDEN,
            (true, false) => state::FULL,
            (true, true) => state::MIXED,
        });
    }
    Ok(map)
}

/// Returns the pair. If the mask permits it, also returns its score and the score's derivative.
pub(crate) fn pair_answers(
    mask: &HostMask,
    shape: &Shape,
    index: [usize; 4],
    score: f64,
) -> (At, Option<[f64; 2]>) {
    let options = Options { mask: *mask, ..Options::default() };
    let changed = options.changed(score, shape, index);
    let answers = changed.map(|changed| [changed, options.capped_slope(score, shape, index)]);
    (mask.at(shape, index), answers)
}

impl Options<'_> {
    /// Returns the softcap in the arithmetic of the reference.
    fn cap<R: Real>(&self) -> Option<R> {
        self.softcap.map(|cap| R::of(f64::from(cap as f32)))
    }

    /// Returns the score after the caller's function and the softcap.
    pub(super) fn capped<R: Real>(&self, score: R, shape: &Shape, index: [usize; 4]) -> R {
        let score = self.modified(score, shape, index);
        self.cap().map_or(score, |cap| cap * (score / cap).tanh())
    }

    /// Returns the score after the caller's function. The function does not apply to appended keys.
    fn modified<R: Real>(&self, score: R, shape: &Shape, index: [usize; 4]) -> R {
        let masked = self.masked(shape);
        let of_pair = self.mask.mods().score.filter(|_| index[3] < masked.kv_len);
        of_pair.map_or(score, |score_mod| R::of(score_mod(score.f64(), &self.mask.at(&masked, index))))
    }

    /// Returns the derivative of the softcap, at the result of the caller's function for `score`.
    pub(super) fn cap_slope<R: Real>(&self, score: R, shape: &Shape, index: [usize; 4]) -> R {
        self.cap().map_or(R::one(), |cap| {
            let tanh = (self.modified(score, shape, index) / cap).tanh();
            R::one() - tanh * tanh
        })
    }

    /// Returns the derivative of [`capped`](Self::capped) at `score`.
    pub(super) fn capped_slope<R: Real>(&self, score: R, shape: &Shape, index: [usize; 4]) -> R {
        let of_cap = self.cap_slope(score, shape, index);
        let masked = self.masked(shape);
        let mods = self.mask.mods();
        let Some(score_mod) = mods.score.filter(|_| index[3] < masked.kv_len) else { return of_cap };
        let (x, at) = (score.f64(), self.mask.at(&masked, index));
        // If the caller has no derivative, a central difference is exact to eight digits.
        let step = 1e-5 * x.abs().max(1.0);
        let difference = || (score_mod(x + step, &at) - score_mod(x - step, &at)) / (2.0 * step);
        of_cap * R::of(mods.slope.map_or_else(difference, |slope| slope(x, &at)))
    }

    /// Returns the part of `shape` that the mask covers. A mask does not cover appended keys.
    pub(super) fn masked(&self, shape: &Shape) -> Shape {
        Shape { kv_len: shape.kv_len - self.appended.min(shape.kv_len), ..*shape }
    }

    /// Returns the score after softcap and bias, or `None` if the mask forbids the pair.
    pub(super) fn changed<R: Real>(&self, score: R, shape: &Shape, index: [usize; 4]) -> Option<R> {
        let capped = self.capped(score, shape, index);
        let masked = self.masked(shape);
        if index[3] >= masked.kv_len {
            return Some(capped);
        }
        self.mask.permits(&masked, index).then(|| self.mask.added(capped, &masked, index))
    }

    /// Returns the terms that [`changed`](Self::changed) adds to the score of a pair.
    pub(super) fn terms(&self, shape: &Shape, index: [usize; 4]) -> impl Iterator<Item = Term> {
        let masked = self.masked(shape);
        let terms = if index[3] < masked.kv_len { self.mask.terms(&masked, index) } else { [None; 3] };
        terms.into_iter().flatten()
    }

    /// Returns the logit that a head's attention sink adds to the sum.
    pub(super) fn sink<R: Real>(&self, b: usize, h: usize) -> Option<R> {
        self.mask.floats(Id::SinkLogits).and_then(|t| t.at([b, h, 0, 0])).map(|s| R::of(f64::from(s)))
    }
}
