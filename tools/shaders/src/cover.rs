//! A part of many kernels that has every three values of their axes that occur together.

use std::collections::{BinaryHeap, HashMap, HashSet};

/// Which of `kernels`, each given by the values of its axes, are in that part: greedily, those first that have most
/// which none before has.
pub fn cover(kernels: &[Vec<&str>]) -> Vec<bool> {
    let mut numbers = HashMap::new();
    let triples: Vec<HashSet<[u16; 3]>> = kernels.iter().map(|axes| triples(axes, &mut numbers)).collect();
    let mut taken = vec![false; kernels.len()];
    let mut seen = HashSet::new();
    // What a kernel adds only shrinks: the first whose number is still true is the best.
    let mut heap: BinaryHeap<_> =
        triples.iter().enumerate().map(|(n, t)| (t.len(), std::cmp::Reverse(n))).collect();
    while let Some((claimed, std::cmp::Reverse(n))) = heap.pop() {
        let adds = triples[n].difference(&seen).count();
        if adds < claimed {
            heap.push((adds, std::cmp::Reverse(n)));
        } else if adds > 0 {
            taken[n] = true;
            seen.extend(&triples[n]);
        }
    }
    taken
}

/// With blanks, so that one or two values are three as well.
fn triples<'a>(axes: &[&'a str], numbers: &mut HashMap<&'a str, u16>) -> HashSet<[u16; 3]> {
    let mut number = |axis| {
        let next = numbers.len() as u16;
        *numbers.entry(axis).or_insert(next)
    };
    let mut values: Vec<u16> = ["", " "].into_iter().chain(axes.iter().copied()).map(&mut number).collect();
    values.sort_unstable();
    values.dedup();
    let mut triples = HashSet::new();
    for (i, a) in values.iter().enumerate() {
        for (j, b) in values.iter().enumerate().skip(i + 1) {
            triples.extend(values[j + 1..].iter().map(|c| [*a, *b, *c]));
        }
    }
    triples
}
