//! Counts the instructions of a subgroup for a tile of keys that every row sees whole. Such a tile
//! has no mask edge, no new maximum and no NaN.
//!
//! The blocks on that path are found without running anything. Blocks with many multiply-adds, or
//! matrix instructions, are the products. The smallest loop that contains all products is the loop
//! over tiles. Two inner loops have products: first the loop over channels (q · kᵀ), last the loop
//! over keys (p · v). Each runs as many turns as the tile's multiply-adds need. If a compiler keeps
//! the loop over what one staging brings, it is a third level of loops. The path takes the
//! shortest way through all other blocks that meets all products. Compilers place the work of rare
//! tiles (edges, new maxima, −∞ and NaN) off this way. Loops without products are passed once, or
//! not at all if possible.
//!
//! The staging of every tile may also depend on a condition of the invocation. Such a block stores
//! vectors to workgroup memory and loads none; blocks for rare tiles do not. The shortest way meets
//! these blocks, except the stores of weights in the loop over keys. An invocation makes those
//! stores only in the part that contains its keys, not in every turn. Work that one subgroup does
//! for the others between two barriers (the maxima of the rows) is not counted.
//!
//! Ways have as many multiply-adds and `exp2` as a tile needs. If no way has, these rules do not
//! hold, and nothing is reported.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap, VecDeque};

use crate::assembly::{Block, Counts, Kind, Loop, loops};
use crate::mad_share;

/// The work of a tile.
#[derive(Clone, Copy, Debug, PartialEq, serde::Deserialize, serde::Serialize)]
pub struct Facts {
    /// Multiply-adds of q · kᵀ and of p · v: for an invocation, or with matrix instructions for a
    /// subgroup.
    pub scores: u64,
    pub sums: u64,
    /// Multiply-adds of one turn: of a staged chunk of channels, and of staged rows of v.
    pub scores_turn: u64,
    pub sums_turn: u64,
    /// True if matrix instructions multiply.
    pub matrix: bool,
    /// Scores of an invocation.
    pub each: u64,
    /// `parts`: the number of parts in which the tile's weights are stored. `same_part`: the
    /// invocations of a subgroup with the same part.
    pub parts: u64,
    pub same_part: u64,
}

/// Instructions of an invocation for a tile.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Deserialize, serde::Serialize)]
pub struct Tile {
    /// Instructions in the loops of the products, or in their blocks.
    pub products: Counts,
    /// All other instructions: the softmax, and the staging of the next tile.
    pub outside: Counts,
    /// Scores of an invocation.
    pub each: u64,
}

impl Tile {
    pub fn all(&self) -> Counts {
        self.products.plus(&self.outside)
    }
}

/// A way through some blocks. The best way does the most work; among those it is the shortest.
#[derive(Clone, Debug, Default)]
struct Way {
    products: Counts,
    outside: Counts,
    /// Multiply-adds of the products on the way, and the bytes that it only stages.
    work: u64,
    staged: u64,
}

impl Way {
    fn exp2(&self) -> u64 {
        self.products.of(Kind::Exp2) + self.outside.of(Kind::Exp2)
    }

    fn cost(&self) -> (Reverse<(u64, u64)>, u64) {
        (Reverse((self.work, self.staged)), self.products.all() + self.outside.all())
    }

    fn plus(&self, other: &Way, times: u64) -> Way {
        Way {
            products: self.products.plus(&other.products.times(times)),
            outside: self.outside.plus(&other.outside.times(times)),
            work: self.work + other.work * times,
            staged: self.staged + other.staged * times,
        }
    }
}

struct Graph<'a> {
    blocks: &'a [Block],
    facts: Facts,
    loops: Vec<Loop>,
    /// The number of turns of each loop with products.
    turns: HashMap<usize, u64>,
}

/// Returns `None` if the text does not have the structure that the module describes.
pub fn count(blocks: &[Block], facts: &Facts, subgroup: u64) -> Option<Tile> {
    if blocks.is_empty() {
        return None;
    }
    let mut graph = Graph { blocks, facts: *facts, loops: loops(blocks), turns: HashMap::new() };
    let inner: Vec<usize> = (0..blocks.len()).filter(|n| graph.work_of(*n) > 0).collect();
    let holds = |l: &Loop| inner.iter().all(|n| l.body.contains(n));
    let smallest = |l: &&usize| graph.loops[**l].body.len();
    let all: Vec<usize> = (0..graph.loops.len()).filter(|l| holds(&graph.loops[*l])).collect();
    let outer = *all.iter().min_by_key(smallest)?;
    // The loops with products in the outer loop.
    let inside: Vec<usize> = (0..graph.loops.len())
        .filter(|l| *l != outer && graph.is_in(*l, outer))
        .filter(|l| inner.iter().any(|n| graph.loops[*l].body.contains(n)))
        .collect();
    let within = |l: usize| inside.iter().copied().filter(|i| graph.is_in(*i, l)).collect::<Vec<_>>();
    // The largest of them, in execution order, each with the loops in it.
    let largest = inside.iter().filter(|l| inside.iter().all(|around| !graph.is_in(**l, *around)));
    let mut found: Vec<(usize, Vec<usize>)> = largest.map(|l| (*l, within(*l))).collect();
    if let [(first, _), (second, _)] = found[..]
        && !graph.leads(first, second, outer)
    {
        found.reverse();
    }
    let (scores, sums) = ((facts.scores, facts.scores_turn), (facts.sums, facts.sums_turn));
    let wholes = match (found.len(), facts.matrix) {
        (0, _) => vec![],
        (1, true) => vec![sums],
        (2, _) => vec![scores, sums],
        _ => return None,
    };
    for ((around, within), (whole, turn)) in found.iter().zip(wholes) {
        let loops = match within[..] {
            [] => vec![(*around, whole)],
            [within] => vec![(within, turn), (*around, whole)],
            _ => return None,
        };
        for (l, work) in loops {
            let lap = graph.lap(l, None)?.work;
            if lap == 0 || work % lap != 0 {
                return None;
            }
            graph.turns.insert(l, work / lap);
        }
    }
    let mut way = graph.lap(outer, Some(facts.each)).filter(|way| way.work == facts.scores + facts.sums)?;
    // The stores of weights: once, or once a part for a subgroup with invocations of all parts.
    if let Some((last, _)) = found.last() {
        let times = if subgroup > facts.same_part { facts.parts } else { 1 };
        let beside = graph.loops[*last].body.iter().filter(|n| graph.is_beside(**n, *last));
        let staging = beside.filter(|n| staged(&blocks[**n]) > 0);
        way.outside = staging.fold(way.outside, |sum, n| sum.plus(&blocks[*n].counts.times(times)));
    }
    Some(Tile { products: way.products, outside: way.outside, each: facts.each })
}

impl Graph<'_> {
    /// Returns the multiply-adds of the products in a block.
    fn work_of(&self, n: usize) -> u64 {
        let block = &self.blocks[n];
        match self.facts.matrix {
            true => block.counts.matrix_multiply_adds,
            false if mad_share::is_inner(block) => block.counts.of(Kind::MultiplyAdd),
            false => 0,
        }
    }

    fn is_in(&self, inner: usize, outer: usize) -> bool {
        let [inner, outer] = [inner, outer].map(|l| &self.loops[l]);
        inner.header != outer.header && inner.body.is_subset(&outer.body)
    }

    /// Returns the largest loops in a loop.
    fn children(&self, l: usize) -> Vec<usize> {
        let within: Vec<usize> = (0..self.loops.len()).filter(|c| self.is_in(*c, l)).collect();
        within.iter().copied().filter(|c| within.iter().all(|d| !self.is_in(*c, *d))).collect()
    }

    /// True if a path leads from one loop to another, in the same turn of the loop around both.
    fn leads(&self, from: usize, to: usize, outer: usize) -> bool {
        let (around, to) = (&self.loops[outer], self.loops[to].header);
        let mut seen = BTreeSet::from([around.header]);
        let mut open = vec![self.loops[from].header];
        while let Some(n) = open.pop() {
            if around.body.contains(&n) && seen.insert(n) {
                open.extend(&self.blocks[n].next);
            }
        }
        seen.contains(&to)
    }

    /// Returns the best turn of a loop, among turns with `exp2` exponentials.
    fn lap(&self, l: usize, exp2: Option<u64>) -> Option<Way> {
        let header = self.loops[l].header;
        let is_end = |n: usize| self.blocks[n].next.contains(&header);
        let turns =
            self.reach(l).into_iter().filter(|((n, e), _)| is_end(*n) && exp2.is_none_or(|exp2| exp2 == *e));
        turns.map(|(_, way)| way).min_by_key(Way::cost)
    }

    /// Returns the best ways from a loop's first block through each of its blocks. The key is the
    /// block and the number of `exp2`.
    fn reach(&self, l: usize) -> HashMap<(usize, u64), Way> {
        let Loop { header, body } = &self.loops[l];
        let children = self.children(l);
        let child_of = |n: usize| children.iter().copied().find(|c| self.loops[*c].body.contains(&n));
        let passes: HashMap<usize, Vec<(usize, Way)>> =
            children.iter().map(|child| (*child, self.passes(*child))).collect();
        let mut best: HashMap<(usize, u64), Way> = HashMap::new();
        // A way that is found again is followed again only if it is better.
        let mut open = VecDeque::from([(*header, Way::default())]);
        while let Some((n, before)) = open.pop_front() {
            let child = child_of(n);
            let ends = match child {
                Some(child) => passes[&child].clone(),
                None => vec![(n, self.block(n))],
            };
            for (end, part) in ends {
                let way = before.plus(&part, 1);
                let place = (end, way.exp2());
                if best.get(&place).is_some_and(|known| known.cost() <= way.cost()) {
                    continue;
                }
                let leaves = |next: &&usize| {
                    *next != header && body.contains(next) && (child.is_none() || child_of(**next) != child)
                };
                open.extend(self.blocks[end].next.iter().filter(leaves).map(|next| (*next, way.clone())));
                best.insert(place, way);
            }
        }
        best
    }

    fn block(&self, n: usize) -> Way {
        let (counts, none, work) = (self.blocks[n].counts, Counts::default(), self.work_of(n));
        let (products, outside) = if work > 0 { (counts, none) } else { (none, counts) };
        let in_products = self.turns.keys().any(|l| self.loops[*l].body.contains(&n));
        Way { products, outside, work, staged: if in_products { 0 } else { staged(&self.blocks[n]) } }
    }

    /// Returns all turns of a loop, up to each block that may leave it.
    fn passes(&self, l: usize) -> Vec<(usize, Way)> {
        let lap = self.lap(l, None).unwrap_or_default();
        let turns = self.turns.get(&l).copied();
        let pass = |((end, _), last): ((usize, u64), Way)| {
            let Some(turns) = turns else { return (end, last) };
            // If the test is at the end of a turn, the last turn is the way out.
            let way = last.plus(&lap, turns - u64::from(last.work > 0));
            (end, Way { products: way.products.plus(&way.outside), outside: Counts::default(), ..way })
        };
        self.reach(l).into_iter().map(pass).collect()
    }

    /// True if a turn of a loop can avoid a block.
    fn is_beside(&self, block: usize, l: usize) -> bool {
        let Loop { header, body } = &self.loops[l];
        let mut seen = BTreeSet::from([*header]);
        let mut open = vec![*header];
        while let Some(n) = open.pop().filter(|n| *n != block) {
            for next in &self.blocks[n].next {
                if next == header {
                    return true;
                }
                if *next != block && body.contains(next) && seen.insert(*next) {
                    open.push(*next);
                }
            }
        }
        false
    }
}

/// Returns the bytes that a block stores to workgroup memory. Returns 0 unless it stores vectors
/// and loads nothing from there.
fn staged(block: &Block) -> u64 {
    let [stores, loads] = [Kind::WorkgroupStore, Kind::WorkgroupLoad].map(|kind| block.counts.of(kind));
    let bytes = block.counts.workgroup_bytes;
    if loads == 0 && stores > 0 && bytes >= 8 * stores { bytes } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::assembly::blocks;
    use crate::gpus::Driver;

    const FACTS: Facts = Facts {
        scores: 64,
        sums: 128,
        scores_turn: 32,
        sums_turn: 32,
        matrix: false,
        each: 1,
        parts: 2,
        same_part: 32,
    };

    /// A loop over tiles with an edge, two products and stores of weights, as RADV's text.
    fn text(edge: usize) -> String {
        let mads = "\tv_fma_f32 v0, v1, v2, v3\n".repeat(32);
        let edge = "\tv_cndmask_b32 v0, v1, v2\n".repeat(edge);
        format!(
            "BB0:\n\tv_mov_b32 v0, 0\n\
             BB1:\n\ts_cbranch_scc1 BB9\n\
             BB2:\n\tds_load_b64 v0, v1\n{mads}\ts_cbranch_scc0 BB2\n\
             \ts_cbranch_scc0 BB4\n\
             BB3:\n{edge}\
             BB4:\n\tv_exp_f32 v0, v1\n\
             BB5:\n\ts_cbranch_scc1 BB8\n\
             \ts_cbranch_execz BB7\n\
             BB6:\n\tds_store_b128 v0, v[1:4]\n\
             BB7:\n{mads}\ts_branch BB5\n\
             BB8:\n\ts_branch BB1\n\
             BB9:\n\ts_endpgm\n"
        )
    }

    #[test]
    fn a_full_tile_goes_the_shortest_way_with_all_products() {
        let of = |subgroup| count(&blocks(Driver::Radv, &text(5)), &FACTS, subgroup).expect("a tile");
        let tile = of(32);
        let product = |kind| tile.products.of(kind);
        // Two turns of the first loop, with its test at the end. Four turns of the second loop, and
        // one more test.
        assert_eq!((product(Kind::MultiplyAdd), product(Kind::WorkgroupLoad)), (64 + 128, 2));
        assert_eq!(product(Kind::Control), 2 + 4 * 3 + 1);
        let outside = |kind| tile.outside.of(kind);
        // The edge does not count.
        assert_eq!((outside(Kind::Select), outside(Kind::Exp2)), (0, 1));
        assert_eq!(outside(Kind::Control), 3);
        // A subgroup with one part stores once; a subgroup with both parts stores twice.
        assert_eq!((outside(Kind::WorkgroupStore), of(64).outside.of(Kind::WorkgroupStore)), (1, 2));
        assert_eq!((tile.outside.workgroup_bytes, tile.products.workgroup_bytes), (16, 16));
    }

    #[test]
    fn inconsistent_counts_are_dropped() {
        let blocks = blocks(Driver::Radv, &text(5));
        assert_eq!(count(&blocks, &Facts { scores: 65, ..FACTS }, 32), None);
        assert_eq!(count(&blocks, &Facts { each: 2, ..FACTS }, 32), None);
        assert_eq!(count(&[], &FACTS, 32), None);
    }

    #[test]
    fn loops_of_a_text() {
        let found = loops(&blocks(Driver::Radv, &text(5)));
        // The blocks before and between labels count.
        let headers: Vec<_> = found.iter().map(|l| (l.header, l.body.len())).collect();
        assert_eq!(headers, [(2, 10), (3, 1), (7, 4)]);
    }
}
