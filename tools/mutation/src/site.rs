//! A fault that can be put into a file, and the seeded choice among them.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Another comparison, or the minimum in place of the maximum.
    Bound,
    /// Another operator, or swapped operands.
    Operand,
    /// A condition of a mask.
    MaskRule,
    /// A wrong stride or length in an index.
    Stride,
    /// A missing barrier.
    Barrier,
    /// Another number.
    Constant,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Kind::Bound => "bound",
            Kind::Operand => "operand",
            Kind::MaskRule => "mask rule",
            Kind::Stride => "stride",
            Kind::Barrier => "barrier",
            Kind::Constant => "constant",
        })
    }
}

/// A part of a file, and the text that replaces it.
#[derive(Clone, Debug)]
pub struct Site {
    pub file: String,
    pub kind: Kind,
    pub range: Range<usize>,
    pub line: usize,
    pub before: String,
    pub after: String,
}

impl Site {
    /// The name in the file of results.
    pub fn name(&self) -> String {
        let Site { file, line, before, after, range, .. } = self;
        format!("{file}:{line} `{}` → `{}` @{}", before.trim(), after.trim(), range.start)
    }
}

/// The largest number of faults in a file.
const MOST_PER_FILE: usize = 4;

/// Draws `quotas` of each kind. No two overlap.
pub fn draw(sites: &[Site], quotas: &[(Kind, usize)], seed: u64) -> Vec<Site> {
    let mut random = seed;
    let mut drawn: Vec<Site> = Vec::new();
    let mut per_file: BTreeMap<&str, usize> = BTreeMap::new();
    for (kind, quota) in quotas {
        let mut left: Vec<&Site> = sites.iter().filter(|site| site.kind == *kind).collect();
        let most = drawn.len() + quota;
        while drawn.len() < most && !left.is_empty() {
            let site = left.swap_remove((next(&mut random) % left.len() as u64) as usize);
            let count = per_file.entry(&site.file).or_default();
            let overlaps = |other: &Site| {
                other.file == site.file
                    && other.range.start < site.range.end
                    && site.range.start < other.range.end
            };
            if *count < MOST_PER_FILE && !drawn.iter().any(overlaps) {
                *count += 1;
                drawn.push(site.clone());
            }
        }
    }
    drawn
}

/// Returns the items in a random order.
pub fn shuffled<T>(mut items: Vec<T>, seed: u64) -> Vec<T> {
    let mut random = !seed;
    for n in (1..items.len()).rev() {
        items.swap(n, (next(&mut random) % (n as u64 + 1)) as usize);
    }
    items
}

/// SplitMix64.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut x = *state;
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
