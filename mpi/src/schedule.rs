//! The distribution of tokens over ranks, and the order in which blocks of keys reach a rank. It
//! is pure: no device, no messages.

use std::ops::Range;

use crate::error::Error;

/// The distribution of the sequence over the ranks, and the data that travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Schedule {
    /// Rank `r` of `n` holds the `r`-th of `n` chunks, and keys and values travel round the ring.
    /// Use it without a causal mask: with one, the last rank works `2n − 1` times as long as the
    /// first. Source: Liu et al. 2023, "Ring attention with blockwise transformers".
    Contiguous,
    /// Rank `r` holds the chunks `r` and `2n − 1 − r` of `2n`, and keys and values travel round the
    /// ring. Use it with a causal mask: all ranks then have the same work. Source: Zhu 2024,
    /// "ring-flash-attention".
    Zigzag,
    /// Chunks as in [`Contiguous`](Self::Contiguous), but an all-to-all exchange gives every rank
    /// all tokens of its share of the heads. The number of ranks must divide the number of key
    /// heads. Source: Jacobs et al. 2023, "DeepSpeed Ulysses".
    Ulysses,
}

/// The tokens of each rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shares {
    schedule: Schedule,
    length: usize,
    ranks: usize,
}

impl Shares {
    /// Distributes `length` tokens over `ranks` ranks. The lengths of chunks differ by at most one
    /// token.
    ///
    /// # Errors
    /// There is no rank, or there are fewer tokens than chunks.
    pub fn new(schedule: Schedule, length: usize, ranks: usize) -> Result<Self, Error> {
        let shares = Shares { schedule, length, ranks };
        if ranks == 0 || length < shares.pieces() {
            return Err(Error::TooShort { length, pieces: shares.pieces() });
        }
        Ok(shares)
    }

    fn pieces(&self) -> usize {
        self.ranks.max(1) * if self.schedule == Schedule::Zigzag { 2 } else { 1 }
    }

    fn piece(&self, n: usize) -> Range<usize> {
        let start = |n: usize| (n as u128 * self.length as u128 / self.pieces() as u128) as usize;
        start(n)..start(n + 1)
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// The schedule.
    pub fn schedule(&self) -> Schedule {
        self.schedule
    }

    /// Tokens on all ranks.
    pub fn length(&self) -> usize {
        self.length
    }

    /// The positions that `rank` holds, in the order of its rows.
    pub fn chunks(&self, rank: usize) -> Vec<Range<usize>> {
        match self.schedule {
            Schedule::Contiguous | Schedule::Ulysses => vec![self.piece(rank)],
            Schedule::Zigzag => vec![self.piece(rank), self.piece(2 * self.ranks - 1 - rank)],
        }
    }

    /// The number of tokens of `rank`.
    pub fn tokens(&self, rank: usize) -> usize {
        self.chunks(rank).iter().map(Range::len).sum()
    }

    /// The largest number of tokens of a rank.
    pub fn most_tokens(&self) -> usize {
        (0..self.ranks).map(|rank| self.tokens(rank)).max().unwrap_or(0)
    }

    /// The position of every row of `rank`.
    pub fn positions(&self, rank: usize) -> impl Iterator<Item = usize> {
        self.chunks(rank).into_iter().flatten()
    }
}

/// A mask by positions in the whole sequence.
///
/// ```
/// use wgpu_attention_mpi::SequenceMask;
/// let mask = SequenceMask::causal().window(4095, 0).documents(vec![0, 7000, 9000]);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct SequenceMask {
    pub(crate) causal: bool,
    pub(crate) window: Option<[usize; 2]>,
    pub(crate) documents: Vec<usize>,
}

/// The part of a range of keys that a range of queries sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sight {
    /// No pair is permitted.
    Nothing,
    /// Some pairs are permitted.
    Some,
    /// Every pair is permitted.
    All,
}

impl SequenceMask {
    /// No mask: every query sees every key.
    pub fn none() -> Self {
        Self::default()
    }

    /// A causal mask: query `i` sees keys `j ≤ i`.
    pub fn causal() -> Self {
        SequenceMask { causal: true, ..Self::default() }
    }

    /// A window: a query sees at most `left` keys before its position and `right` after it.
    /// `usize::MAX` means no limit.
    pub fn window(mut self, left: usize, right: usize) -> Self {
        self.window = Some([left, right]);
        self
    }

    /// Packed documents, elsewhere known as `cu_seqlens`. Document `d` has the tokens
    /// `starts[d] .. starts[d + 1]`, and its queries only see its keys. The first start must be 0,
    /// the last the length of the sequence.
    pub fn documents(mut self, starts: Vec<usize>) -> Self {
        self.documents = starts;
        self
    }

    /// # Errors
    /// Documents are empty, do not ascend or do not cover the sequence.
    pub(crate) fn check(&self, length: usize) -> Result<(), Error> {
        let starts = &self.documents;
        let ascends = starts.windows(2).all(|pair| pair[0] < pair[1]);
        if !starts.is_empty()
            && (starts.len() < 2 || starts[0] != 0 || starts.last() != Some(&length) || !ascends)
        {
            return Err(Error::Documents { length });
        }
        Ok(())
    }

    /// The number of positions that a query sees before and after its own.
    fn reach(&self) -> [i128; 2] {
        let [left, right] = self.window.unwrap_or([usize::MAX; 2]);
        [left as i128, if self.causal { 0 } else { right as i128 }]
    }

    /// True if the mask has more than one document.
    pub(crate) fn has_documents(&self) -> bool {
        self.documents.len() > 2
    }

    /// The documents that overlap `range`, each clipped to it. Without documents, the whole range.
    fn cut(&self, range: &Range<usize>) -> Vec<(usize, Range<usize>)> {
        if self.documents.len() < 2 {
            return vec![(0, range.clone())];
        }
        let first = self.documents.partition_point(|start| *start <= range.start).saturating_sub(1);
        let starts = self.documents.windows(2).enumerate().skip(first);
        starts
            .take_while(|(_, pair)| pair[0] < range.end)
            .map(|(n, pair)| (n, pair[0].max(range.start)..pair[1].min(range.end)))
            .filter(|(_, range)| !range.is_empty())
            .collect()
    }

    /// Returns whether queries at the positions `q` see none, some or all of the keys at the
    /// positions `k`. The result is exact.
    pub fn sight(&self, q: &Range<usize>, k: &Range<usize>) -> Sight {
        if q.is_empty() || k.is_empty() {
            return Sight::Nothing;
        }
        let [left, right] = self.reach();
        let (of_q, of_k) = (self.cut(q), self.cut(k));
        let one = of_q.len() == 1 && of_k.len() == 1;
        let mut seen = false;
        for (d, q) in &of_q {
            // The keys of the same document, which are at most one range.
            let Ok(at) = of_k.binary_search_by_key(d, |(d, _)| *d) else { continue };
            let k = &of_k[at].1;
            // The distances key − query of all pairs are `nearest..=furthest`.
            let nearest = k.start as i128 - (q.end as i128 - 1);
            let furthest = k.end as i128 - 1 - q.start as i128;
            seen |= nearest <= right && furthest >= -left;
            if one && nearest >= -left && furthest <= right {
                return Sight::All;
            }
        }
        if seen { Sight::Some } else { Sight::Nothing }
    }

    /// The document number of every position.
    pub(crate) fn numbers(&self, length: usize) -> Vec<u32> {
        let mut numbers = vec![0; length];
        for (n, pair) in self.documents.windows(2).enumerate() {
            numbers[pair[0]..pair[1]].fill(n as u32);
        }
        numbers
    }

    /// The number of permitted pairs of queries at `q` and keys at `k`.
    pub fn pairs(&self, q: &Range<usize>, k: &Range<usize>) -> u64 {
        let [left, right] = self.reach();
        let of_k = self.cut(k);
        let of_row = |d: usize, i: usize| {
            let Ok(at) = of_k.binary_search_by_key(&d, |(d, _)| *d) else { return 0 };
            let k = &of_k[at].1;
            let first = (i as i128 - left).max(k.start as i128);
            let end = (i as i128 + right + 1).min(k.end as i128);
            (end - first).max(0) as u64
        };
        self.cut(q).into_iter().flat_map(|(d, q)| q.map(move |i| (d, i))).map(|(d, i)| of_row(d, i)).sum()
    }
}

/// Attention of some of a rank's queries to some keys of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The index of the chunk of the rank's queries.
    pub chunk: usize,
    /// Rows of the rank's queries.
    pub q: Range<usize>,
    /// Rows of the block.
    pub k: Range<usize>,
    /// Position of the first query.
    pub q_at: usize,
    /// Position of the first key.
    pub k_at: usize,
    /// True if every pair is permitted, so that the part needs no mask.
    pub all: bool,
}

/// A block of keys and values that a rank computes with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Visit {
    /// The number of ranks from the block's owner to this rank, in the order of the ring.
    pub step: usize,
    /// The rank that owns the keys.
    pub owner: usize,
    /// The rank that sends the block; `None` for the rank's own block.
    pub from: Option<usize>,
    /// The rank that gets the block next, if any.
    pub to: Option<usize>,
    /// The attention to compute with the block.
    pub parts: Vec<Part>,
}

/// The row ranges of consecutive chunks.
fn rows(chunks: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut start = 0;
    let next = |chunk: &Range<usize>| {
        let first = start;
        start += chunk.len();
        first..start
    };
    chunks.iter().map(next).collect()
}

fn parts(shares: &Shares, mask: &SequenceMask, rank: usize, owner: usize) -> Vec<Part> {
    let (of_q, of_k) = (shares.chunks(rank), shares.chunks(owner));
    let (q_rows, k_rows) = (rows(&of_q), rows(&of_k));
    let mut found = Vec::new();
    for (chunk, (q, q_row)) in of_q.iter().zip(&q_rows).enumerate() {
        let sights: Vec<Sight> = of_k.iter().map(|k| mask.sight(q, k)).collect();
        let part = |k: Range<usize>, k_at, all| Part { chunk, q: q_row.clone(), k, q_at: q.start, k_at, all };
        if sights.iter().all(|sight| *sight == Sight::All) {
            // One call covers the whole block, at any positions of its chunks.
            found.push(part(0..shares.tokens(owner), of_k[0].start, true));
            continue;
        }
        for ((sight, k), k_row) in sights.iter().zip(&of_k).zip(&k_rows) {
            if *sight != Sight::Nothing {
                found.push(part(k_row.clone(), k.start, *sight == Sight::All));
            }
        }
    }
    found
}

/// The ranks that a block visits: its owner first, then others in the order of the ring. Ranks
/// that see none of its keys are left out.
pub fn visitors(shares: &Shares, mask: &SequenceMask, owner: usize) -> Vec<usize> {
    let ranks = shares.ranks();
    let sees = |rank: &usize| *rank == owner || !parts(shares, mask, *rank, owner).is_empty();
    (0..ranks).map(|step| (owner + step) % ranks).filter(sees).collect()
}

/// The visits of `rank`, step by step: its own block first, then the blocks of the ranks before it.
pub fn visits(shares: &Shares, mask: &SequenceMask, rank: usize) -> Vec<Visit> {
    let ranks = shares.ranks();
    let visit = |step: usize| {
        let owner = (rank + ranks - step) % ranks;
        let visitors = visitors(shares, mask, owner);
        let at = visitors.iter().position(|visitor| *visitor == rank)?;
        let from = at.checked_sub(1).map(|at| visitors[at]);
        let parts = parts(shares, mask, rank, owner);
        Some(Visit { step, owner, from, to: visitors.get(at + 1).copied(), parts })
    };
    (0..ranks).filter_map(visit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn permitted(mask: &SequenceMask, i: usize, j: usize) -> bool {
        let [left, right] = mask.window.unwrap_or([usize::MAX; 2]);
        let document = |at: usize| mask.documents.iter().filter(|start| **start <= at).count();
        (!mask.causal || j <= i)
            && (j >= i || i - j <= left)
            && (j <= i || j - i <= right)
            && document(i) == document(j)
    }

    fn masks(length: usize) -> Vec<SequenceMask> {
        let bare = [SequenceMask::none(), SequenceMask::causal()];
        let windowed = bare.clone().into_iter().chain(
            [[3, 0], [0, 0], [2, 5], [usize::MAX, 1]]
                .into_iter()
                .flat_map(|[left, right]| bare.clone().map(|mask| mask.window(left, right))),
        );
        windowed
            .flat_map(|mask| {
                let documents = vec![0, 1, length / 3, length / 3 + 2, length];
                [mask.clone().documents(documents), mask.documents(vec![])]
            })
            .collect()
    }

    /// Compares with a loop over all pairs.
    #[test]
    fn sight_and_pairs_are_those_of_every_pair() {
        for mask in masks(17) {
            mask.check(17).unwrap();
            for (a, b, c, d) in (0..17 * 17 * 17).map(|n| (n % 17, n / 17 % 17, n / 289, (n * 7 + 3) % 17)) {
                let (q, k) = (a.min(b)..a.max(b) + 1, c.min(d)..c.max(d) + 1);
                let all: Vec<bool> = q
                    .clone()
                    .flat_map(|i| k.clone().map(move |j| (i, j)))
                    .map(|(i, j)| permitted(&mask, i, j))
                    .collect();
                let count = all.iter().filter(|p| **p).count();
                let wanted = match count {
                    0 => Sight::Nothing,
                    n if n == all.len() => Sight::All,
                    _ => Sight::Some,
                };
                let got = mask.sight(&q, &k);
                assert_eq!(mask.pairs(&q, &k), count as u64, "{mask:?} {q:?} {k:?}");
                assert_eq!(got, wanted, "{mask:?} {q:?} {k:?}");
            }
        }
    }

    /// Exactly one part on one rank computes each permitted pair.
    #[test]
    fn parts_cover_every_permitted_pair_once() {
        for schedule in [Schedule::Contiguous, Schedule::Zigzag] {
            for (ranks, length) in [(1, 5), (2, 9), (3, 17), (4, 16), (4, 23), (5, 31)] {
                let shares = Shares::new(schedule, length, ranks).unwrap();
                assert_eq!((0..ranks).map(|rank| shares.tokens(rank)).sum::<usize>(), length);
                for mask in masks(length) {
                    let mut seen = vec![0; length * length];
                    for rank in 0..ranks {
                        let queries: Vec<usize> = shares.positions(rank).collect();
                        for visit in visits(&shares, &mask, rank) {
                            let keys: Vec<usize> = shares.positions(visit.owner).collect();
                            for part in visit.parts {
                                assert_eq!(queries[part.q.start], part.q_at);
                                assert_eq!(keys[part.k.start], part.k_at);
                                for (i, j) in part.q.flat_map(|i| part.k.clone().map(move |j| (i, j))) {
                                    let (i, j) = (queries[i], keys[j]);
                                    let permitted = permitted(&mask, i, j);
                                    assert!(permitted || !part.all);
                                    seen[i * length + j] += usize::from(permitted);
                                }
                            }
                        }
                    }
                    for (n, seen) in seen.into_iter().enumerate() {
                        let wanted = usize::from(permitted(&mask, n / length, n % length));
                        assert_eq!(seen, wanted, "{schedule:?} {ranks} ranks {mask:?} pair {n}");
                    }
                }
            }
        }
    }

    /// The sender and the receiver of every block agree. Ranks receive messages in the order in
    /// which they are sent.
    #[test]
    fn senders_and_receivers_agree() {
        for schedule in [Schedule::Contiguous, Schedule::Zigzag] {
            for ranks in 1..7 {
                let shares = Shares::new(schedule, 41, ranks).unwrap();
                for mask in masks(41) {
                    let all: Vec<Vec<Visit>> = (0..ranks).map(|rank| visits(&shares, &mask, rank)).collect();
                    for (from, to) in (0..ranks * ranks).map(|n| (n / ranks, n % ranks)) {
                        let of = |rank: usize, peer: fn(&Visit) -> Option<usize>, other: usize| {
                            let mine = all[rank].iter().filter(|visit| peer(visit) == Some(other));
                            mine.map(|visit| visit.owner).collect::<Vec<_>>()
                        };
                        assert_eq!(of(from, |visit| visit.to, to), of(to, |visit| visit.from, from));
                    }
                }
            }
        }
    }

    #[test]
    fn a_window_passes_ranks_over() {
        let shares = Shares::new(Schedule::Contiguous, 64, 4).unwrap();
        let mask = SequenceMask::causal().window(15, 0);
        assert_eq!(visitors(&shares, &mask, 0), [0, 1]);
        assert_eq!(visitors(&shares, &mask, 3), [3]);
        assert_eq!(visitors(&shares, &SequenceMask::causal(), 1), [1, 2, 3]);
        // Documents that do not span ranks: nothing travels.
        let apart = SequenceMask::none().documents(vec![0, 16, 32, 48, 64]);
        assert!((0..4).all(|owner| visitors(&shares, &apart, owner) == [owner]));
    }

    #[test]
    fn zigzag_is_balanced_under_a_causal_mask() {
        let work = |schedule| {
            let shares = Shares::new(schedule, 4096, 8).unwrap();
            let mask = SequenceMask::causal();
            let of_rank = |rank: usize| {
                let chunks = shares.chunks(rank);
                chunks.iter().map(|q| mask.pairs(q, &(0..4096))).sum::<u64>()
            };
            let all: Vec<u64> = (0..8).map(of_rank).collect();
            assert_eq!(all.iter().sum::<u64>(), 4096 * 4097 / 2);
            *all.iter().max().unwrap() as f64 / *all.iter().min().unwrap() as f64
        };
        assert!(work(Schedule::Zigzag) == 1.0);
        assert!(work(Schedule::Contiguous) > 14.0);
    }

    #[test]
    fn invalid_schedules_are_refused() {
        assert!(Shares::new(Schedule::Zigzag, 7, 4).is_err());
        assert!(Shares::new(Schedule::Contiguous, 4, 0).is_err());
        for starts in [vec![0], vec![1, 9], vec![0, 8], vec![0, 5, 5, 9], vec![0, 6, 4, 9]] {
            assert!(SequenceMask::none().documents(starts).check(9).is_err());
        }
    }
}
