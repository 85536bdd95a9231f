//! Random sequences of cache calls, compared with a model. The draws are the same in every run.
//! `WGPU_ATTENTION_TEST_SEED` changes them, `WGPU_ATTENTION_TEST_DRAWS` changes their number.

use std::collections::HashSet;

use wgpu_attention::Error;
use wgpu_attention::cache::{CacheLayout, CacheStorage, ScaleGroup};
use wgpu_attention::tuning::Target;

use crate::harness::cached::Sequence;
use crate::harness::{Ask, Bed, Count, Data, Kind, Profile, Report, Rng, Rules, defaults, full};
use crate::laws::property::{Draws, seed};

/// The pages of a cache: those of each sequence, by names that are never reused.
struct Pages {
    size: usize,
    count: usize,
    tables: Vec<Vec<usize>>,
    named: usize,
}

impl Pages {
    fn free(&self) -> usize {
        self.count - self.tables.iter().flatten().collect::<HashSet<_>>().len()
    }

    fn name(&mut self) -> usize {
        self.named += 1;
        self.named
    }

    /// Returns the tables after sequences have grown from `least` to `end`, and the number of new
    /// pages. A sequence that writes into a shared page gets a new page.
    fn grown(&mut self, spans: &[[usize; 2]]) -> (usize, Vec<Vec<usize>>) {
        let mut tables = self.tables.clone();
        let mut needed = 0;
        for (s, [least, end]) in spans.iter().enumerate().filter(|(_, [least, end])| end > least) {
            for n in least / self.size..end.div_ceil(self.size) {
                let own = tables[s].get(n).copied();
                let shared = |own| tables.iter().enumerate().any(|(other, t)| other != s && t.contains(&own));
                if own.is_none_or(shared) {
                    needed += 1;
                    let name = self.name();
                    if n < tables[s].len() {
                        tables[s][n] = name;
                    } else {
                        tables[s].push(name);
                    }
                }
            }
        }
        (needed, tables)
    }
}

/// One random sequence of calls.
struct Play {
    bed: Bed,
    pages: Option<Pages>,
    /// True for sequences whose length the host must know.
    known: Vec<bool>,
    /// The longest length that the host must assume for the sequence's history.
    high: Vec<usize>,
    /// True if a change is not recorded yet.
    pending: bool,
    form: Target,
    splits: Option<usize>,
    trail: Vec<String>,
    refused: usize,
    shared: usize,
    reordered: usize,
}

impl Play {
    fn new(profile: &'static Profile, kind: Kind, form: Target, splits: Option<usize>, seed: u64) -> Self {
        let pages = match kind.layout {
            CacheLayout::Paged { page, pages } => {
                Some(Pages { size: page, count: pages, tables: vec![vec![]; kind.batch], named: 0 })
            }
            _ => None,
        };
        Play {
            bed: Bed::new(profile, kind, Data::Lossless, seed),
            pages,
            known: vec![true; kind.batch],
            high: vec![0; kind.batch],
            pending: false,
            form,
            splits,
            trail: Vec::new(),
            refused: 0,
            shared: 0,
            reordered: 0,
        }
    }

    fn bounds(&self) -> Vec<[usize; 2]> {
        (0..self.bed.kind.batch).map(|s| self.bed.cache.len_bounds(s).expect("a sequence")).collect()
    }

    fn count(&mut self, rng: &mut Rng) -> Count {
        let batch = self.bed.kind.batch;
        let most = if rng.chance(0.85) { rng.between(1, 4) } else { rng.between(5, 30) };
        match rng.below(4) {
            0 | 1 => Count::All(most),
            2 => Count::Each(
                (0..batch).map(|_| if rng.chance(0.4) { 0 } else { rng.between(0, most) }).collect(),
            ),
            // A count above the maximum acts as the maximum.
            _ => {
                Count::Device { counts: (0..batch).map(|_| rng.between(0, most + 2) as u32).collect(), most }
            }
        }
    }

    /// True if the bound on the device's numbers exceeds every sequence's limit.
    fn exceeds(&self, count: &Count) -> bool {
        matches!(count, Count::Device { most, .. } if *most > self.bed.kind.longest())
    }

    /// Advances. The cache must refuse the call exactly when the model refuses it.
    fn grow(&mut self, count: &Count) -> Result<(), String> {
        let bounds = self.bounds();
        let longest = self.bed.kind.longest();
        let known = |s: usize| count.known(s);
        let full = (0..bounds.len()).find(|s| bounds[*s][0].saturating_add(known(*s)[0]) > longest);
        let spans: Vec<_> = bounds
            .iter()
            .enumerate()
            .map(|(s, [least, most])| [*least, most.saturating_add(known(s)[1]).min(longest)])
            .collect();
        let grown = self.pages.as_mut().map(|pages| pages.grown(&spans));
        let free = self.pages.as_ref().map_or(0, Pages::free);
        let got = self.bed.grow(count);
        match (&got, full, &grown) {
            (Err(Error::ZeroSize { tensor: "cache", axis: "rows" }), ..) if count.most() == 0 => {
                return Ok(());
            }
            (Err(Error::Option { option: "most", .. }), ..) if self.exceeds(count) => {}
            (Err(Error::CacheFull { sequence, len, rows, capacity }), Some(s), _)
                if [*sequence, *len, *rows, *capacity] == [s, bounds[s][0], known(s)[0], longest] =>
            {
                self.refused += 1;
            }
            (Err(Error::OutOfPages { needed, free: left }), None, Some((wanted, _)))
                if *wanted > free && [*needed, *left] == [*wanted, free] =>
            {
                self.refused += 1;
            }
            (Ok(()), None, grown)
                if !self.exceeds(count) && grown.as_ref().is_none_or(|(needed, _)| *needed <= free) =>
            {
                if let Some(((_, tables), pages)) = grown.clone().zip(self.pages.as_mut()) {
                    pages.tables = tables;
                }
                for (s, [_, end]) in spans.iter().enumerate() {
                    self.high[s] = self.high[s].max(*end);
                    self.known[s] &= !matches!(count, Count::Device { .. });
                }
                self.pending = false;
            }
            _ => return Err(format!("{got:?}, full {full:?}, pages {grown:?} of {free} from {bounds:?}")),
        }
        if got.is_err() && self.bounds() != bounds {
            return Err(format!("{got:?} changed {bounds:?} to {:?}", self.bounds()));
        }
        Ok(())
    }

    /// Returns the number of positions that a ring of this history has overwritten.
    fn shift(&self, high: usize) -> usize {
        if self.bed.kind.ring().is_some() { high.saturating_sub(self.bed.kind.capacity) } else { 0 }
    }

    /// True if the host must assume that a sequence can go back to `len`.
    fn reaches(&self, s: usize, len: usize) -> bool {
        let thought = Sequence { high: self.high[s], ..Default::default() };
        thought.can_return_to(&self.bed.kind, len)
    }

    fn returned(&mut self, s: usize, len: usize) {
        if self.shift(self.high[s]) == 0 || self.bed.kind.ring().is_none_or(|[sinks, _]| len <= sinks) {
            self.high[s] = len;
        }
    }

    fn rewind(&mut self, count: &Count) -> Result<(), String> {
        let bounds = self.bounds();
        let exact = |s: usize| bounds[s][0] == bounds[s][1] && count.known(s)[0] == count.known(s)[1];
        let refused = (0..bounds.len()).any(|s| {
            let least = count.known(s)[0];
            least > bounds[s][0] || exact(s) && !self.reaches(s, bounds[s][0] - least)
        });
        match self.bed.rewind(count) {
            Err(Error::ZeroSize { .. }) if count.most() == 0 => Ok(()),
            Err(Error::Option { option: "most", .. }) if self.exceeds(count) => Ok(()),
            Err(Error::Option { option: "rows", .. }) if refused => Ok(()),
            Ok(()) if !refused && !self.exceeds(count) => {
                for (s, [least, _]) in bounds.iter().enumerate() {
                    if exact(s) {
                        self.returned(s, least - count.of(s));
                    }
                    self.known[s] &= exact(s);
                }
                self.pending = false;
                Ok(())
            }
            got => Err(format!("{got:?}, from {bounds:?}")),
        }
    }

    fn truncate(&mut self, s: usize, len: usize) -> Result<(), String> {
        let [least, _] = self.bounds()[s];
        let kind = self.bed.kind;
        let there = self.bed.sequences[s].can_return_to(&kind, len);
        match self.bed.cache.truncate(s, len) {
            Err(Error::Option { option: "len", .. }) if len > least || !self.reaches(s, len) => Ok(()),
            Ok(()) if len <= least && there => {
                self.bed.sequences[s].return_to(&kind, len);
                self.returned(s, len);
                self.known[s] = true;
                self.pending = true;
                if let Some(pages) = &mut self.pages {
                    pages.tables[s].truncate(len.div_ceil(pages.size));
                }
                Ok(())
            }
            got => Err(format!("{got:?} for {len} of {least}")),
        }
    }

    fn clear(&mut self, s: usize) -> Result<(), String> {
        self.bed.cache.clear(s).map_err(|e| e.to_string())?;
        let sequence = &mut self.bed.sequences[s];
        sequence.tokens.clear();
        sequence.lost.clear();
        (sequence.high, sequence.fresh, self.high[s], self.known[s]) = (0, 0, 0, true);
        if let Some(pages) = &mut self.pages {
            pages.tables[s].clear();
        }
        self.pending = true;
        Ok(())
    }

    fn fork(&mut self, from: usize, to: usize) -> Result<(), String> {
        let [least, most] = self.bounds()[from];
        let got = self.bed.fork(from, to);
        let Some(pages) = self.pages.as_mut().filter(|_| least == most) else {
            let refused = matches!(got, Err(Error::Unsupported { .. }));
            return if refused { Ok(()) } else { Err(format!("{got:?}")) };
        };
        got.map_err(|e| e.to_string())?;
        if from != to {
            pages.tables[to] = pages.tables[from].clone();
            (self.high[to], self.known[to]) = (self.high[from], true);
            self.pending = true;
            self.shared += 1;
        }
        Ok(())
    }

    fn reorder(&mut self, parents: &[usize]) -> Result<(), String> {
        self.bed.reorder(parents).map_err(|e| e.to_string())?;
        let of = |n: &usize| (self.known[*n], self.high[*n]);
        (self.known, self.high) = parents.iter().map(of).unzip();
        if let Some(pages) = &mut self.pages {
            pages.tables = parents.iter().map(|parent| pages.tables[*parent].clone()).collect();
        }
        self.pending = false;
        self.reordered += usize::from(parents.iter().enumerate().any(|(s, parent)| s != *parent));
        Ok(())
    }

    fn reserve(&mut self, s: usize, tokens: usize) -> Result<(), String> {
        let longest = self.bed.kind.longest();
        let got = self.bed.cache.reserve(s, tokens);
        if tokens > longest {
            let refused = matches!(got, Err(Error::CacheFull { sequence, .. }) if sequence == s);
            return if refused { Ok(()) } else { Err(format!("{got:?}")) };
        }
        let Some(pages) = &mut self.pages else { return got.map_err(|e| e.to_string()) };
        let wanted = tokens.div_ceil(pages.size).saturating_sub(pages.tables[s].len());
        let free = pages.free();
        match got {
            Err(Error::OutOfPages { needed, free: left })
                if wanted > free && [needed, left] == [wanted, free] =>
            {
                Ok(())
            }
            Ok(()) if wanted <= free => {
                for _ in 0..wanted {
                    let name = pages.name();
                    pages.tables[s].push(name);
                }
                self.pending |= wanted > 0;
                Ok(())
            }
            got => Err(format!("{got:?}, {wanted} wanted of {free}")),
        }
    }

    /// Reads lengths back and sets them in the cache.
    fn set_known_len(&mut self) -> Result<(), String> {
        let lengths = self.bed.numbers(self.bed.cache.lengths());
        for (s, len) in lengths.into_iter().enumerate() {
            if !self.known[s] {
                let [_, most] = self.bounds()[s];
                let too_long = self.bed.cache.set_known_len(s, most + 1);
                if !matches!(too_long, Err(Error::Option { option: "len", .. })) {
                    return Err(format!("{too_long:?} of more than is possible"));
                }
                self.bed.cache.set_known_len(s, len as usize).map_err(|e| e.to_string())?;
                self.known[s] = true;
                // A full ring went back by at most its spare tokens.
                let kind = self.bed.kind;
                self.high[s] = self.high[s].min(kind.capacity.max(len as usize + kind.spare));
            }
        }
        Ok(())
    }

    fn step(&mut self, rng: &mut Rng) -> Result<f64, String> {
        let batch = self.bed.kind.batch;
        let s = rng.below(batch);
        let kind = self.bed.kind;
        let note = |play: &mut Self, what: String| play.trail.push(what);
        match rng.below(26) {
            0..12 => {
                let count = self.count(rng);
                note(self, format!("grow {count:?}"));
                self.grow(&count)?;
            }
            12..14 => {
                let count = self.count(rng);
                note(self, format!("rewind {count:?}"));
                self.rewind(&count)?;
            }
            14..17 => {
                let [least, _] = self.bounds()[s];
                let len =
                    if rng.chance(0.5) { rng.below(least + 2) } else { least.saturating_sub(rng.below(5)) };
                note(self, format!("truncate {s} to {len}"));
                self.truncate(s, len)?;
            }
            17 => {
                note(self, format!("clear {s}"));
                self.clear(s)?;
            }
            18..20 => {
                let to = rng.below(batch);
                note(self, format!("fork {s} to {to}"));
                self.fork(s, to)?;
            }
            20 => {
                let tokens = rng.below(kind.capacity + 4);
                note(self, format!("reserve {s} {tokens}"));
                self.reserve(s, tokens)?;
            }
            24.. => {
                let parents: Vec<_> = (0..batch).map(|_| rng.below(batch)).collect();
                note(self, format!("reorder {parents:?}"));
                self.reorder(&parents)?;
            }
            _ => {
                note(self, "set_known_len".into());
                self.set_known_len()?;
            }
        }
        if self.pending && rng.chance(0.5) {
            note(self, "flush".into());
            self.bed.flush();
            self.pending = false;
        }
        self.check(rng)
    }

    fn check(&mut self, rng: &mut Rng) -> Result<f64, String> {
        let free = self.pages.as_ref().map_or(0, Pages::free);
        if self.bed.cache.free_pages() != free {
            return Err(format!("{} pages are free, not {free}", self.bed.cache.free_pages()));
        }
        for (s, sequence) in self.bed.sequences.iter().enumerate() {
            let len = self.bed.cache.len(s);
            if self.known[s] && len != Some(sequence.len()) {
                return Err(format!("{s} has {} tokens, the host knows {len:?}", sequence.len()));
            }
        }
        let empty = (0..self.bed.kind.batch).all(|s| self.bed.cache.len(s) == Some(0));
        if self.bed.cache.is_empty() != empty {
            return Err("is_empty says otherwise".into());
        }
        let rules = Rules { causal: true, ..Default::default() };
        let rows = if (1..=4).contains(&self.bed.advanced) && rng.chance(0.6) {
            None
        } else {
            Some(rng.between(1, 4))
        };
        let layer = rng.below(self.bed.kind.layers);
        let ask = Ask { layer, rows, splits: self.splits, ..Ask::new(self.form, &rules) };
        if self.pending {
            return match self.bed.ask(&ask) {
                Err(e) if e.contains("not recorded") => Ok(0.0),
                other => Err(format!("{other:?} of a cache with changes that are not recorded")),
            };
        }
        self.bed.check_sequence_table()?;
        self.bed.ask(&ask)
    }
}

#[test]
fn random_calls_match_model() {
    crate::harness::in_turn!();
    let seed = seed();
    let mut report = Report::new("caches, random");
    let q8 = CacheStorage::Q8(ScaleGroup::Of(32));
    let paged = |page, pages| CacheLayout::Paged { page, pages };
    let ring = |sinks| CacheLayout::Ring { sink_tokens: sinks };
    let [full, defaults] = [full(), defaults()];
    let kinds = [
        (full, Kind::new(CacheStorage::F32, CacheLayout::Contiguous, 26), Target::Software, None),
        (defaults, Kind { batch: 3, ..Kind::new(q8, ring(3), 14) }, Target::Gpu, Some(2)),
        (
            full,
            Kind { batch: 4, layers: 2, ..Kind::new(CacheStorage::F16, paged(16, 9), 61) },
            Target::Software,
            None,
        ),
        (
            defaults,
            Kind { batch: 3, ..Kind::new(CacheStorage::Q4(ScaleGroup::Row), paged(16, 7), 48) },
            Target::Gpu,
            None,
        ),
        (
            full,
            Kind { layers: 2, spare: 4, ..Kind::new(CacheStorage::F32, ring(0), 9) },
            Target::Software,
            Some(3),
        ),
        (full, Kind { batch: 4, heads: 2, ..Kind::new(q8, paged(32, 11), 100) }, Target::Software, None),
    ];
    let (mut refused, mut shared, mut reordered) = (0, 0, 0);
    let draws = Draws { name: "caches, lives", always: 36, most: 120, group: 1 }.numbers();
    for n in draws.iter().copied() {
        let (profile, kind, form, splits) = kinds[n % kinds.len()];
        let rng = &mut Rng::new(seed.wrapping_add(n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut play = Play::new(profile, kind, form, splits, rng.word());
        for step in 0..100 {
            let outcome = play.step(rng).map_err(|what| {
                let last = &play.trail[play.trail.len().saturating_sub(12)..];
                format!("{what}\n    after {last:?}\n    of {kind:?}")
            });
            let failed = outcome.is_err();
            report.record(&format!("life {n}, step {step}"), &format!("{form:?}"), outcome);
            if failed {
                break;
            }
        }
        (refused, shared) = (refused + play.refused, shared + play.shared);
        reordered += play.reordered;
    }
    report.finish();
    // Calls that are never refused and share nothing would prove nothing.
    assert!(
        draws.len() < 36 || (refused > 20 && shared > 20 && reordered > 20),
        "{refused} refusals, {shared} forks, {reordered} reorders"
    );
}
