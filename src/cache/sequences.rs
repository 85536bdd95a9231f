//! The host's view of a cache's sequences: their lengths, if known, and their pages.

use std::collections::BTreeMap;

use super::kernels::cache::{
    COUNT, EXCHANGE, HIGH, LENGTH, LIMIT, MOVE_FROM, MOVE_TO, REMOVED, START, STORED, WORDS,
};
use super::pages::Pages;
use super::ring::Ring;
use super::row_moves::{RowMove, row_moves};
use super::{CacheConfig, CacheLayout};
use crate::tensor::Error;

/// The words of the sequence table that the next recording writes, by place.
pub(super) type Edits = BTreeMap<usize, u32>;

/// The bounds of a sequence's move.
#[derive(Clone, Copy, Debug)]
pub(super) struct Move {
    pub least: usize,
    pub most: usize,
}

/// A page that is copied before a sequence writes into it.
#[derive(Clone, Copy, Debug)]
pub(super) struct PageCopy {
    pub from: u32,
    pub to: u32,
    /// The slots that may be in use.
    pub slots: usize,
}

/// Rows that are neighbours before and after a copy: their first rows, and their number.
pub(super) struct Run {
    pub from: usize,
    pub to: usize,
    pub rows: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sequence {
    least: usize,
    most: usize,
    /// The largest length that it may have had since it was empty.
    high: usize,
    /// The number of tokens that compactions have removed.
    removed: usize,
    /// The length at the last compaction. The sequence cannot become shorter.
    compacted: usize,
}

impl Sequence {
    /// The same sequence with other bounds of its length.
    fn moved(self, least: usize, most: usize, high: usize) -> Self {
        Sequence { least, most, high, ..self }
    }

    /// The largest possible number of tokens that were not removed.
    fn stored(&self) -> usize {
        self.most - self.removed
    }

    /// Refuses `what` if only the device knows the length.
    fn check_known(&self, what: &'static str) -> Result<(), Error> {
        if self.least == self.most {
            return Ok(());
        }
        let why = "read the length back and call `Cache::set_known_len` first";
        Err(Error::Unsupported { what, why })
    }
}

/// The changes of the state when sequences move.
pub(super) struct Change {
    pub after: After,
    pub edits: Edits,
    pub copies: Vec<PageCopy>,
}

/// The changes of the state when sequences continue from parents.
pub(super) struct Reorder {
    pub after: After,
    pub edits: Edits,
    /// The number of first slots whose rows the moves in `edits` copy; 0 if no row moves.
    pub slots: usize,
}

fn below_compacted(option: &'static str, value: usize) -> Error {
    let expected = "such that the sequence has at least the length of its last compaction, which has removed older tokens";
    Error::Option { option, value: value as f64, expected }
}

/// The state after a recording.
pub(super) struct After {
    sequences: Vec<Sequence>,
    /// The pages and page tables, if they change.
    pages: Option<(Pages, Vec<Vec<u32>>)>,
}

#[derive(Clone, Debug)]
pub(super) struct Sequences {
    all: Vec<Sequence>,
    /// The pages of each sequence.
    tables: Vec<Vec<u32>>,
    pages: Pages,
    /// Changes that are not recorded yet.
    edits: Edits,
    /// The slots of a page, in a paged cache.
    page: Option<usize>,
    pages_each: usize,
    longest: usize,
    ring: Option<Ring>,
    /// True if tokens can be removed.
    compacts: bool,
}

impl Sequences {
    pub fn new(config: &CacheConfig) -> Self {
        let (page, count) = match config.layout {
            CacheLayout::Paged { page, pages } => (Some(page), pages),
            _ => (None, 0),
        };
        let ring = match config.layout {
            CacheLayout::Ring { sink_tokens } => {
                Some(Ring { sinks: sink_tokens, capacity: config.capacity, spare: config.spare_tokens })
            }
            _ => None,
        };
        // A compacted sequence may be longer than its capacity.
        let longest = if config.compacts { config.capacity } else { config.longest() };
        Sequences {
            all: vec![Sequence::default(); config.batch],
            tables: vec![Vec::new(); config.batch],
            pages: Pages::new(count),
            edits: Edits::new(),
            page,
            pages_each: config.pages_each(),
            longest,
            ring,
            compacts: config.compacts,
        }
    }

    /// Returns the same sequences in a cache of another configuration, and the words of the
    /// sequence table that differ.
    pub fn grown(&self, config: &CacheConfig) -> (Self, Edits) {
        let Sequences { page, pages_each, longest, .. } = Sequences::new(config);
        let count = if page.is_some() { config.pages().0 } else { 0 };
        let mut grown = Sequences {
            pages: self.pages.grown(count),
            edits: Edits::new(),
            pages_each,
            longest,
            ..self.clone()
        };
        (0..grown.all.len()).for_each(|s| grown.edit_limit(s));
        let edits = std::mem::take(&mut grown.edits);
        (grown, edits)
    }

    /// The rows that are in use, and where they lie in a cache of another configuration.
    pub fn runs(&self, from: &CacheConfig, to: &CacheConfig) -> Vec<Run> {
        let [(_, old), (_, new)] = [from, to].map(CacheConfig::pages);
        if self.page.is_some() {
            return vec![Run { from: 0, to: 0, rows: self.pages.used() * old * from.kv_heads }];
        }
        let heads = (0..self.all.len() * from.kv_heads).map(|n| (n, self.slots(n / from.kv_heads)));
        heads.map(|(n, rows)| Run { from: n * old, to: n * new, rows }).collect()
    }

    pub fn bounds(&self, sequence: usize) -> Option<[usize; 2]> {
        self.all.get(sequence).map(|s| [s.least, s.most])
    }

    pub fn stored(&self, sequence: usize) -> Option<usize> {
        let of = self.all.get(sequence).filter(|of| of.least == of.most)?;
        Some(self.ring.map_or(of.stored(), |ring| of.stored().min(ring.capacity)))
    }

    pub fn free_pages(&self) -> usize {
        self.pages.free()
    }

    pub fn edits(&self) -> &Edits {
        &self.edits
    }

    pub fn flushed(&mut self) {
        self.edits.clear();
    }

    fn index(&self, sequence: usize) -> Result<usize, Error> {
        let expected = "the index of a sequence of the cache";
        if sequence < self.all.len() {
            return Ok(sequence);
        }
        Err(Error::Option { option: "sequence", value: sequence as f64, expected })
    }

    /// The word of entry `n` of a sequence's page table in the sequence table.
    fn entry(&self, sequence: usize, n: usize) -> usize {
        self.all.len() * WORDS + sequence * self.pages_each + n
    }

    /// Writes the length of a sequence to the edits.
    fn edit_length(&mut self, sequence: usize) {
        let Sequence { least, high, removed, .. } = self.all[sequence];
        for (word, value) in [(START, least), (LENGTH, least)] {
            self.edits.insert(sequence * WORDS + word, value as u32);
        }
        // The device knows the history of a ring better: `high` may be an upper bound here.
        if self.compacts {
            self.edits.insert(sequence * WORDS + REMOVED, removed as u32);
        } else if high == least {
            self.edits.insert(sequence * WORDS + HIGH, high as u32);
        }
    }

    fn edit_limit(&mut self, sequence: usize) {
        let limit = self.limit(&self.all[sequence], self.tables[sequence].len());
        self.edits.insert(sequence * WORDS + LIMIT, limit);
    }

    /// The largest length of a sequence.
    fn longest(&self, of: &Sequence) -> usize {
        self.longest.saturating_add(of.removed)
    }

    /// The largest length of a sequence with `pages` pages.
    fn limit(&self, of: &Sequence, pages: usize) -> u32 {
        let room = self.page.map_or(self.longest, |page| (pages * page).min(self.longest));
        (room + of.removed) as u32
    }

    pub fn set_known_len(&mut self, sequence: usize, len: usize) -> Result<(), Error> {
        let n = self.index(sequence)?;
        let of = &mut self.all[n];
        if !(of.least..=of.most).contains(&len) {
            let expected = "within the bounds of `Cache::len_bounds`";
            return Err(Error::Option { option: "len", value: len as f64, expected });
        }
        (of.least, of.most) = (len, len);
        if let Some(ring) = self.ring {
            of.high = ring.high(of.high, len);
        }
        Ok(())
    }

    /// True if a ring may have overwritten tokens.
    fn may_be_overwritten(&self, high: usize) -> bool {
        self.ring.is_some_and(|ring| high > ring.capacity)
    }

    /// As [`Ring::high_after`]; other layouts can always go back.
    fn high_after(&self, high: usize, len: usize) -> Option<usize> {
        self.ring.map_or(Some(len), |ring| ring.high_after(high, len))
    }

    pub fn truncate(&mut self, sequence: usize, len: usize) -> Result<(), Error> {
        let n = self.index(sequence)?;
        if len > self.all[n].least {
            let expected = "at most the smallest possible length of the sequence (`Cache::len_bounds`)";
            return Err(Error::Option { option: "len", value: len as f64, expected });
        }
        if len < self.all[n].compacted {
            return Err(below_compacted("len", len));
        }
        let Some(high) = self.high_after(self.all[n].high, len) else {
            let expected = "at most `sink_tokens`, or shorter by at most `spare_tokens`; the ring has overwritten older tokens";
            return Err(Error::Option { option: "len", value: len as f64, expected });
        };
        self.all[n] = self.all[n].moved(len, len, high);
        self.edit_length(n);
        if let Some(page) = self.page {
            self.cut(n, self.all[n].stored().div_ceil(page));
        }
        Ok(())
    }

    /// Reduces a sequence to `pages` pages.
    fn cut(&mut self, n: usize, pages: usize) {
        if self.tables[n].len() > pages {
            for page in self.tables[n].split_off(pages) {
                self.pages.release(page);
            }
            self.edit_limit(n);
        }
    }

    pub fn clear(&mut self, sequence: usize) -> Result<(), Error> {
        let n = self.index(sequence)?;
        self.all[n] = Sequence::default();
        self.edit_length(n);
        self.cut(n, 0);
        if self.compacts {
            self.edit_limit(n);
        }
        Ok(())
    }

    pub fn fork(&mut self, from: usize, to: usize) -> Result<(), Error> {
        let (from, to) = (self.index(from)?, self.index(to)?);
        if self.page.is_none() {
            let why = "only `CacheLayout::Paged` can share tokens; append the tokens again";
            return Err(Error::Unsupported { what: "a fork of a sequence", why });
        }
        self.all[from].check_known("a fork of a sequence whose length only the device knows")?;
        if from == to {
            return Ok(());
        }
        // Pages are shared before old pages are released: they may be the same pages.
        let table = self.tables[from].clone();
        table.iter().for_each(|page| self.pages.share(*page));
        self.cut(to, 0);
        for (k, page) in table.iter().enumerate() {
            self.edits.insert(self.entry(to, k), *page);
        }
        (self.all[to], self.tables[to]) = (self.all[from], table);
        self.edit_length(to);
        self.edit_limit(to);
        Ok(())
    }

    /// Computes the changes after which each sequence continues from its parent. It does not apply
    /// them.
    pub fn reorder(&self, parents: &[usize]) -> Result<Reorder, Error> {
        if parents.len() != self.all.len() {
            return Err(Error::Length { tensor: "parents", expected: self.all.len(), got: parents.len() });
        }
        if let Some(parent) = parents.iter().find(|parent| **parent >= self.all.len()) {
            let expected = "below the number of sequences of the cache";
            return Err(Error::Option { option: "parents", value: *parent as f64, expected });
        }
        let sequences = parents.iter().map(|parent| self.all[*parent]).collect();
        let (mut edits, mut slots) = (self.edits.clone(), 0);
        let pages = self.page.map(|_| {
            let mut pages = self.pages.clone();
            // Pages are shared before they are released: a sequence may be their last owner.
            let tables: Vec<_> = parents.iter().map(|parent| self.tables[*parent].clone()).collect();
            tables.iter().flatten().for_each(|page| pages.share(*page));
            self.tables.iter().flatten().for_each(|page| pages.release(*page));
            for (s, table) in tables.iter().enumerate().filter(|(s, _)| parents[*s] != *s) {
                edits.extend(table.iter().enumerate().map(|(k, page)| (self.entry(s, k), *page)));
            }
            (pages, tables)
        });
        if pages.is_none() {
            let moves = row_moves(parents);
            for (n, RowMove { to, from, exchange }) in moves.iter().enumerate() {
                let both = if *exchange { EXCHANGE } else { 0 };
                edits.extend([
                    (n * WORDS + MOVE_TO, *to as u32),
                    (n * WORDS + MOVE_FROM, *from as u32 | both),
                ]);
                slots = slots.max(self.slots(*from));
                if *exchange {
                    slots = slots.max(self.slots(*to));
                }
            }
            // A move that goes nowhere marks the end.
            if (1..self.all.len()).contains(&moves.len()) {
                edits.extend([MOVE_TO, MOVE_FROM].map(|word| (moves.len() * WORDS + word, 0)));
            }
        }
        Ok(Reorder { after: After { sequences, pages }, edits, slots })
    }

    /// The number of first slots of a sequence that may hold rows, in a cache without pages.
    fn slots(&self, sequence: usize) -> usize {
        let of = &self.all[sequence];
        self.ring.map_or(of.stored(), |ring| of.most.max(of.high).min(ring.capacity))
    }

    fn full(&self, sequence: usize, rows: usize) -> Error {
        let of = &self.all[sequence];
        Error::CacheFull { sequence, len: of.least - of.removed, rows, capacity: self.longest }
    }

    pub fn reserve(&mut self, sequence: usize, tokens: usize) -> Result<(), Error> {
        let n = self.index(sequence)?;
        if tokens > self.longest(&self.all[n]) {
            return Err(self.full(n, tokens.saturating_sub(self.all[n].least)));
        }
        let Some(page) = self.page else { return Ok(()) };
        let wanted = tokens.saturating_sub(self.all[n].removed).div_ceil(page);
        let have = self.tables[n].len();
        let needed = wanted.saturating_sub(have);
        if needed > self.pages.free() {
            return Err(Error::OutOfPages { needed, free: self.pages.free() });
        }
        for k in have..wanted {
            let Some(taken) = self.pages.take() else { break };
            self.tables[n].push(taken);
            self.edits.insert(self.entry(n, k), taken);
        }
        if needed > 0 {
            self.edit_limit(n);
        }
        Ok(())
    }

    /// Computes the changes after which every sequence has grown. It does not apply them.
    pub fn take(&self, rows: impl Fn(usize) -> Move) -> Result<Change, Error> {
        let mut sequences = Vec::with_capacity(self.all.len());
        let mut needs_pages = false;
        for (s, of) in self.all.iter().enumerate() {
            let Move { least, most } = rows(s);
            // If only the device knows the lengths, the device refuses.
            let limit = self.longest(of);
            if of.least.saturating_add(least) > limit {
                return Err(self.full(s, least));
            }
            let longest = of.most.saturating_add(most).min(limit);
            // A longer sequence has no room, and does not change.
            let shortest = if of.most.saturating_add(least) > limit {
                (of.least + least).min(limit - least + 1)
            } else {
                of.least + least
            };
            sequences.push(of.moved(shortest, longest, of.high.max(longest)));
            let table = &self.tables[s];
            needs_pages |= self.entries(of, longest).any(|k| self.must_take(&self.pages, table.get(k)));
        }
        let edits = self.edits.clone();
        let mut taken = Change { after: After { sequences, pages: None }, edits, copies: Vec::new() };
        if needs_pages {
            let ends: Vec<_> = taken.after.sequences.iter().map(|of| of.most).collect();
            self.take_pages(&mut taken, |s| self.entries(&self.all[s], ends[s]))?;
        }
        Ok(taken)
    }

    /// The entries of a sequence's page table that are written when it grows to `end`.
    fn entries(&self, of: &Sequence, end: usize) -> std::ops::Range<usize> {
        match self.page {
            Some(page) if end > of.least => (of.least - of.removed) / page..(end - of.removed).div_ceil(page),
            _ => 0..0,
        }
    }

    /// True if an entry has no page, or a shared page.
    fn must_take(&self, pages: &Pages, entry: Option<&u32>) -> bool {
        entry.is_none_or(|page| pages.is_shared(*page))
    }

    /// Computes the changes before every sequence overwrites `rows` rows from `start` on. It does
    /// not apply them.
    pub fn overwrite(&self, start: usize, rows: usize) -> Result<Change, Error> {
        let end = start.saturating_add(rows);
        if self.all.iter().any(|of| end > of.most) {
            let expected = "small enough that `start + rows` is at most the length of every sequence";
            return Err(Error::Option { option: "start", value: start as f64, expected });
        }
        let mut change = self.no_move();
        if let Some(page) = self.page {
            // The rows of these positions may have moved back by as many rows as were removed.
            let entries = |s: usize| {
                let of = &self.all[s];
                start.saturating_sub(of.removed) / page..end.min(of.stored()).div_ceil(page)
            };
            let shared = |s: usize| {
                let table = self.tables[s].get(entries(s));
                table.is_some_and(|table| table.iter().any(|page| self.pages.is_shared(*page)))
            };
            if (0..self.all.len()).any(shared) {
                self.take_pages(&mut change, entries)?;
            }
        }
        Ok(change)
    }

    /// As [`overwrite`](Self::overwrite), for rows whose positions only the device knows.
    pub fn overwrite_anywhere(&self) -> Result<Change, Error> {
        if self.tables.iter().flatten().any(|page| self.pages.is_shared(*page)) {
            let why = "the host cannot tell which shared pages to copy; pass `RowPositions::Start`, or overwrite before the fork";
            return Err(Error::Unsupported {
                what: "an overwrite at positions that only the device knows",
                why,
            });
        }
        Ok(self.no_move())
    }

    /// The unrecorded changes, with the current lengths.
    fn no_move(&self) -> Change {
        let after = After { sequences: self.all.clone(), pages: None };
        Change { after, edits: self.edits.clone(), copies: Vec::new() }
    }

    /// Takes pages for `entries` of the page tables that have no page or a shared page. The caller
    /// writes into these entries.
    fn take_pages(
        &self,
        taken: &mut Change,
        entries: impl Fn(usize) -> std::ops::Range<usize>,
    ) -> Result<(), Error> {
        let page_len = self.page.unwrap_or(1);
        let mut pages = self.pages.clone();
        let mut tables = self.tables.clone();
        let mut needed = 0;
        for (s, of) in self.all.iter().enumerate() {
            let table = &mut tables[s];
            let before = table.len();
            for k in entries(s) {
                if !self.must_take(&pages, table.get(k)) {
                    continue;
                }
                needed += 1;
                let (old, new) = (table.get(k).copied(), pages.take());
                // The last sequence that shares a page does not copy it.
                old.into_iter().for_each(|old| pages.release(old));
                let Some(new) = new else { continue };
                taken.edits.insert(self.entry(s, k), new);
                let Some(from) = old else {
                    table.push(new);
                    continue;
                };
                table[k] = new;
                let slots = of.stored().saturating_sub(k * page_len).min(page_len);
                if slots > 0 {
                    taken.copies.push(PageCopy { from, to: new, slots });
                }
            }
            if table.len() != before {
                taken.edits.insert(s * WORDS + LIMIT, self.limit(of, table.len()));
            }
        }
        if needed > self.pages.free() {
            return Err(Error::OutOfPages { needed, free: self.pages.free() });
        }
        taken.after.pages = Some((pages, tables));
        Ok(())
    }

    /// Computes the changes after which every sequence has only `counts` stored tokens. Their rows
    /// change from the row `first` on. It does not apply the changes.
    pub fn compact(&self, counts: &[usize], first: impl Fn(usize) -> usize) -> Result<Change, Error> {
        let mut change = self.no_move();
        for (s, (of, count)) in self.all.iter().zip(counts).enumerate() {
            of.check_known("a compaction of a sequence whose length only the device knows")?;
            let stored = of.stored();
            if *count > stored {
                let expected = "at most as many tokens as the sequence has stored";
                return Err(Error::Option { option: "keep", value: *count as f64, expected });
            }
            let after = &mut change.after.sequences[s];
            if *count < stored {
                (after.removed, after.compacted) = (of.least - count, of.least);
            }
            let words = [(COUNT, *count), (START, after.least), (REMOVED, after.removed), (STORED, stored)];
            change.edits.extend(words.map(|(word, value)| (s * WORDS + word, value as u32)));
        }
        if let Some(page) = self.page {
            // Rows move within these pages. Other sequences with these pages must not see it.
            let moved = |s: usize| {
                if counts[s] > first(s) { first(s) / page..counts[s].div_ceil(page) } else { 0..0 }
            };
            self.take_pages(&mut change, moved)?;
            if let Some((pages, tables)) = &mut change.after.pages {
                for (s, table) in tables.iter_mut().enumerate() {
                    if change.after.sequences[s].removed > self.all[s].removed {
                        let left = counts[s].div_ceil(page).min(table.len());
                        table.split_off(left).into_iter().for_each(|page| pages.release(page));
                    }
                }
            }
        }
        for (s, after) in change.after.sequences.iter().enumerate() {
            let pages = change.after.pages.as_ref().map_or(0, |(_, tables)| tables[s].len());
            change.edits.insert(s * WORDS + LIMIT, self.limit(after, pages));
        }
        Ok(change)
    }

    /// Computes the changes after which every sequence has given tokens up. It does not apply them.
    /// Pages stay.
    pub fn give_back(&self, rows: impl Fn(usize) -> Move) -> Result<Change, Error> {
        let mut sequences = Vec::with_capacity(self.all.len());
        for (s, of) in self.all.iter().enumerate() {
            let Move { least, most } = rows(s);
            if least > of.least {
                let expected = "at most the smallest possible length of the sequence (`Cache::len_bounds`)";
                return Err(Error::Option { option: "rows", value: least as f64, expected });
            }
            // The device does not know how far a compacted sequence can go back.
            if of.least.saturating_sub(most) < of.compacted {
                return Err(below_compacted("rows", least));
            }
            let known = least == most && of.least == of.most;
            let high = match self.high_after(of.high, of.least.saturating_sub(most)) {
                Some(high) if known => high,
                None if known => {
                    let expected = "at most `spare_tokens`, or enough to reach `sink_tokens`; the ring has overwritten older tokens";
                    return Err(Error::Option { option: "rows", value: least as f64, expected });
                }
                _ => of.high,
            };
            // If a ring may have to refuse, a sequence may stay unchanged.
            let longest = if known || !self.may_be_overwritten(of.high) { of.most - least } else { of.most };
            sequences.push(of.moved(of.least.saturating_sub(most), longest, high));
        }
        let edits = self.edits.clone();
        Ok(Change { after: After { sequences, pages: None }, edits, copies: Vec::new() })
    }

    /// Applies the changes that were recorded.
    pub fn commit(&mut self, after: After) {
        self.all = after.sequences;
        if let Some((pages, tables)) = after.pages {
            (self.pages, self.tables) = (pages, tables);
        }
        self.edits.clear();
    }
}
