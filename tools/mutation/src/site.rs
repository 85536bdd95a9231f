//! A fault that can be put into a file, and the seeded choice among them.

use std::collections::{BTreeMap, BTreeSet};
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

/// A fault, named without the number of its line. Changes elsewhere in the file do not change it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Fault {
    pub file: String,
    pub kind: Kind,
    /// The line of code where it begins.
    pub code: String,
    pub before: String,
    pub after: String,
    /// The number of equal faults before it in the file.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub earlier: usize,
}

fn is_zero(n: &usize) -> bool {
    *n == 0
}

/// A fault, and its place in today's file.
#[derive(Clone, Debug)]
pub struct Site {
    pub fault: Fault,
    pub range: Range<usize>,
    pub line: usize,
}

impl Site {
    pub fn new(file: &str, text: &str, kind: Kind, range: Range<usize>, after: String) -> Self {
        let line = text[..range.start].matches('\n').count() + 1;
        let code = text.lines().nth(line - 1).unwrap_or_default().trim().into();
        let before = text[range.clone()].into();
        Site { fault: Fault { file: file.into(), kind, code, before, after, earlier: 0 }, range, line }
    }

    /// The name for readers.
    pub fn name(&self) -> String {
        let Fault { file, before, after, .. } = &self.fault;
        format!("{file}:{} `{}` → `{}`", self.line, before.trim(), after.trim())
    }
}

/// Numbers equal faults.
pub fn numbered(mut sites: Vec<Site>) -> Vec<Site> {
    let mut seen: BTreeMap<Fault, usize> = BTreeMap::new();
    for site in &mut sites {
        let count = seen.entry(site.fault.clone()).or_default();
        site.fault.earlier = *count;
        *count += 1;
    }
    sites
}

/// The largest number of faults in a file.
const MOST_PER_FILE: usize = 4;

/// Draws `quotas` of each kind, first from the faults of earlier draws. No two overlap.
pub fn draw(sites: &[Site], earlier: &BTreeSet<Fault>, quotas: &[(Kind, usize)], seed: u64) -> Vec<Site> {
    let mut ranked: Vec<_> =
        sites.iter().map(|site| (!earlier.contains(&site.fault), rank(&site.fault, seed), site)).collect();
    ranked.sort_by_key(|(is_new, rank, _)| (*is_new, *rank));
    let mut drawn: Vec<Site> = Vec::new();
    let mut per_file: BTreeMap<&str, usize> = BTreeMap::new();
    for (kind, quota) in quotas {
        let most = drawn.len() + quota;
        for (_, _, site) in ranked.iter().filter(|(_, _, site)| site.fault.kind == *kind) {
            let count = per_file.entry(&site.fault.file).or_default();
            let overlaps = |other: &Site| {
                other.fault.file == site.fault.file
                    && other.range.start < site.range.end
                    && site.range.start < other.range.end
            };
            if drawn.len() < most && *count < MOST_PER_FILE && !drawn.iter().any(overlaps) {
                *count += 1;
                drawn.push((*site).clone());
            }
        }
    }
    drawn
}

/// Returns a number that looks random and depends on the fault alone.
pub fn rank(fault: &Fault, seed: u64) -> u64 {
    let Fault { file, code, before, after, earlier, .. } = fault;
    let name = format!("{file}\n{code}\n{before}\n{after}\n{earlier}");
    let mut state = seed;
    for byte in name.bytes() {
        // FNV-1a.
        state = (state ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    next(state)
}

/// SplitMix64.
fn next(state: u64) -> u64 {
    let mut x = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
