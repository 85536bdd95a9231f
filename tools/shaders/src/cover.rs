//! Selects a part of many kernels that covers every combination of one, two or three values of
//! their axes.

use std::collections::{BinaryHeap, HashMap, HashSet};

/// Marks the `kernels` of that part; each kernel is a list of the values of its axes. It is greedy:
/// next comes the kernel with the most new combinations. `values`: 1 to 3.
pub fn cover(kernels: &[Vec<&str>], values: usize) -> Vec<bool> {
    let mut numbers = HashMap::new();
    let triples: Vec<HashSet<[u16; 3]>> =
        kernels.iter().map(|axes| triples(axes, values, &mut numbers)).collect();
    let mut taken = vec![false; kernels.len()];
    let mut seen = HashSet::new();
    // The number of new combinations only shrinks. The first kernel whose number is still true is
    // the best.
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

/// Returns the combinations as triples. With two values every triple has one blank, with one value
/// two blanks.
fn triples<'a>(axes: &[&'a str], values: usize, numbers: &mut HashMap<&'a str, u16>) -> HashSet<[u16; 3]> {
    let mut number = |axis| {
        let next = numbers.len() as u16;
        *numbers.entry(axis).or_insert(next)
    };
    let mut all: Vec<u16> = ["", " "].into_iter().chain(axes.iter().copied()).map(&mut number).collect();
    all.sort_unstable();
    all.dedup();
    let [firsts, seconds] = [if values < 3 { 1 } else { all.len() }, if values < 2 { 2 } else { all.len() }];
    let mut triples = HashSet::new();
    for (i, a) in all.iter().enumerate().take(firsts) {
        for (j, b) in all.iter().enumerate().take(seconds).skip(i + 1) {
            triples.extend(all[j + 1..].iter().map(|c| [*a, *b, *c]));
        }
    }
    triples
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_take_fewer_than_triples() {
        // Three axes of three values.
        let values = [["a0", "a1", "a2"], ["b0", "b1", "b2"], ["c0", "c1", "c2"]];
        let kernels: Vec<Vec<&str>> =
            (0..27).map(|n| vec![values[0][n % 3], values[1][n / 3 % 3], values[2][n / 9]]).collect();
        assert_eq!(cover(&kernels, 3), [true; 27]);
        assert_eq!(cover(&kernels, 1).iter().filter(|taken| **taken).count(), 3);
        let taken = cover(&kernels, 2);
        let taken: Vec<_> = kernels.iter().zip(taken).filter_map(|(k, taken)| taken.then_some(k)).collect();
        assert!(taken.len() < 18, "{}", taken.len());
        for kernel in &kernels {
            for (i, j) in [(0, 1), (0, 2), (1, 2)] {
                assert!(taken.iter().any(|k| k.contains(&kernel[i]) && k.contains(&kernel[j])));
            }
        }
    }
}
