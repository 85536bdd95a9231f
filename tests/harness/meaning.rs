//! The meaning of a mask, written a second time from the builder's documentation. It works row by
//! row, in positions that count from the query's sequence.

use std::ops::Range;

use wgpu_attention::mask::block_map::state;
use wgpu_attention::mask::{Pattern, PatternPart};
use wgpu_attention::{Alignment, Shape};

use super::case::{Case, HostData, Rules};

/// Returns the element at `index`. Axes of length 1 are broadcast.
pub fn at<T: Copy>(part: &HostData<T>, index: [usize; 4]) -> T {
    let flat = (0..4).fold(0, |n, a| n * part.shape[a] + index[a] % part.shape[a]);
    part.data[flat]
}

/// Returns the ranges of queries and keys of the sequence that query `i` belongs to.
fn sequence(rules: &Rules, shape: &Shape, b: usize, i: usize) -> Option<[Range<usize>; 2]> {
    let Some([queries, keys]) = &rules.packed else { return Some([0..shape.q_len, 0..shape.kv_len]) };
    let range = |part, s| at(part, [b, 0, 0, s]) as usize..at(part, [b, 0, 0, s + 1]) as usize;
    let mut all = (0..queries.shape[3] - 1).map(|s| [range(queries, s), range(keys, s)]);
    all.find(|[queries, _]| queries.contains(&i))
}

/// Returns the position of query `i` of a sequence.
fn position(rules: &Rules, [queries, keys]: &[Range<usize>; 2], b: usize, i: usize) -> i64 {
    if let Some(past) = &rules.query_offsets {
        // The documentation gives this limit.
        return (at(past, [b, 0, 0, 0]) as usize).min((1 << 29) - 1) as i64 + i as i64;
    }
    let first = match rules.alignment {
        Alignment::Offset(past) => past,
        Alignment::TopLeft => 0,
        Alignment::BottomRight => keys.len() as i64 - queries.len() as i64,
        other => panic!("no meaning is written down for {other:?}"),
    };
    first + (i - queries.start) as i64
}

/// True if the pattern has key `j` for a query at `position`.
fn in_pattern(pattern: Pattern, h: usize, position: i64, j: i64) -> bool {
    let multiple = |n: usize| (position - j) % n as i64 == 0;
    // A position before the first key is in no block of keys.
    let same_block = |n: usize| position >= 0 && position / n as i64 == j / n as i64;
    let parts = |part, near: bool, far: bool| match part {
        PatternPart::Near => near,
        PatternPart::Far => far,
        PatternPart::Both => near | far,
        PatternPart::ByHead => [near, far][h % 2],
        other => panic!("no meaning is written down for {other:?}"),
    };
    match pattern {
        Pattern::Dilated { dilation } => multiple(dilation),
        Pattern::Local { block } => same_block(block),
        Pattern::Strided { stride, part } => {
            parts(part, (position - j).abs() <= stride as i64, multiple(stride))
        }
        Pattern::Fixed { stride, summary, part } => {
            let last = (stride - summary..stride).contains(&(j as usize % stride));
            parts(part, same_block(stride), last)
        }
        other => panic!("no meaning is written down for {other:?}"),
    }
}

/// True if query `i` sees key `j`.
pub fn sees(rules: &Rules, shape: &Shape, [b, h, i, j]: [usize; 4]) -> bool {
    let Some(own) = sequence(rules, shape, b, i) else { return false };
    let (keys, position) = (own[1].clone(), position(rules, &own, b, i));
    if !keys.contains(&j) {
        return false;
    }
    let key = (j - keys.start) as i64;
    let before = |part: &HostData<u32>| key < i64::from(at(part, [b, h, i, 0]));
    if !rules.lengths.as_ref().is_none_or(before) {
        return false;
    }
    let in_prefix = rules.prefix.as_ref().is_some_and(before);
    let past = !rules.causal || key <= position;
    let block = rules.blocks.as_ref().map(|(map, [m, n])| at(map, [b, h, i / m, j / n]));
    match block {
        Some(state::HIDDEN) => return false,
        Some(state::FULL) => return past || in_prefix,
        _ => {}
    }
    let global = |j: usize| rules.globals.as_ref().is_some_and(|part| at(part, [b, h, 0, j]));
    let stands_global = (0..keys.len() as i64).contains(&position) && global(keys.start + position as usize);
    let in_window = rules.window.is_none_or(|[left, right]| {
        let (left, right) = (left.min(1 << 30) as i64, right.min(1 << 30) as i64);
        (position - left..=position + right).contains(&key)
    });
    let in_band = in_window && rules.pattern.is_none_or(|p| in_pattern(p, h, position, key));
    let permitted = in_prefix || past && (in_band || global(j) || stands_global);
    let document = rules.documents.as_ref();
    // The queries' keys, by their index among the queries. The tree does not restrict older keys.
    let place = key - (position - (i - own[0].start) as i64);
    let in_tree = rules.tree.as_ref().is_none_or(|tree| {
        let asked = (0..own[0].len() as i64).contains(&place);
        !asked || at(tree, [b, h, i, own[0].start + place as usize])
    });
    permitted
        && in_tree
        && !(rules.exclude_self && key == position)
        && document.is_none_or(|[queries, keys]| at(queries, [b, h, i, 0]) == at(keys, [b, h, 0, j]))
        && [&rules.attn_mask, &rules.key_padding_mask]
            .into_iter()
            .flatten()
            .all(|part| at(part, [b, h, i, j]))
}

/// Returns the number that the mask adds to the score of a pair.
pub fn adds(rules: &Rules, shape: &Shape, [b, h, i, j]: [usize; 4]) -> f32 {
    let Some(own) = sequence(rules, shape, b, i) else { return 0.0 };
    let distance = j as i64 - own[1].start as i64 - position(rules, &own, b, i);
    let full =
        rules.blocks.as_ref().is_some_and(|(map, [m, n])| at(map, [b, h, i / m, j / n]) == state::FULL);
    let bias = rules.bias.as_ref().filter(|_| !full).map_or(0.0, |part| at(part, [b, h, i, j]));
    let alibi = rules.slopes.as_ref().map_or(0.0, |slopes| {
        let steps = if rules.symmetric { -distance.abs() } else { distance };
        at(slopes, [b, h, 0, 0]) * steps as f32
    });
    let relative = rules.relative.as_ref().map_or(0.0, |table| {
        let reach = table.shape[3] as i64 / 2;
        at(table, [b, h, 0, (reach + distance.max(-reach).min(reach)) as usize])
    });
    bias + alibi + relative
}

/// Returns the same mask as a dense keep and a dense bias, with the same sinks.
pub fn dense(rules: &Rules, shape: &Shape) -> Rules {
    let pairs = shape.weights();
    Rules {
        attn_mask: Some(HostData::of(pairs, |index| sees(rules, shape, index))),
        bias: Some(HostData::of(pairs, |index| adds(rules, shape, index))),
        sinks: rules.sinks.clone(),
        ..Default::default()
    }
}

/// Checks that the reference gives the same bits for the rules of `case` as for their meaning. The
/// additions must be exact in f32.
#[track_caller]
pub fn follows(case: &Case) {
    let by_rules = case.reference::<f64>();
    let by_pairs = case.clone().with(|c| c.rules = dense(&case.rules, &case.shape)).reference::<f64>();
    assert!(by_rules.weights == by_pairs.weights, "{}: weights {:?}", case.name, case.rules);
    assert!(by_rules.lse == by_pairs.lse, "{}: lse {:?}", case.name, case.rules);
}
