//! What a mask means, from the builder's documentation and written down a second time: row by row, in positions
//! that count from the query's own sequence. The reference must agree with it, it must agree with pictures.

use std::ops::Range;

use wgpu_attention::block_map::state;
use wgpu_attention::{Alignment, Pattern, PatternPart, Shape};

use crate::harness::{Case, Part, Rng, Rules};
use crate::property::MaskDraw;

/// The element at `index`, axes of 1 repeated.
pub fn at<T: Copy>(part: &Part<T>, index: [usize; 4]) -> T {
    let flat = (0..4).fold(0, |n, a| n * part.shape[a] + index[a] % part.shape[a]);
    part.data[flat]
}

/// Queries and keys of the sequence that query `i` belongs to.
fn sequence(rules: &Rules, shape: &Shape, b: usize, i: usize) -> Option<[Range<usize>; 2]> {
    let Some([queries, keys]) = &rules.packed else { return Some([0..shape.q_len, 0..shape.kv_len]) };
    let range = |part, s| at(part, [b, 0, 0, s]) as usize..at(part, [b, 0, 0, s + 1]) as usize;
    let mut all = (0..queries.shape[3] - 1).map(|s| [range(queries, s), range(keys, s)]);
    all.find(|[queries, _]| queries.contains(&i))
}

/// Where query `i` of a sequence stands.
fn position(rules: &Rules, [queries, keys]: &[Range<usize>; 2], i: usize) -> i64 {
    let first = match rules.alignment {
        Alignment::TopLeft => 0,
        Alignment::BottomRight => keys.len() as i64 - queries.len() as i64,
    };
    first + (i - queries.start) as i64
}

/// Whether the pattern has key `j` for a query at `position`.
fn in_pattern(pattern: Pattern, h: usize, position: i64, j: i64) -> bool {
    let multiple = |n: usize| (position - j) % n as i64 == 0;
    // A position before the first key is in no block of keys.
    let same_block = |n: usize| position >= 0 && position / n as i64 == j / n as i64;
    let parts = |part, near: bool, far: bool| match part {
        PatternPart::Near => near,
        PatternPart::Far => far,
        PatternPart::Both => near | far,
        PatternPart::ByHead => [near, far][h % 2],
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
    }
}

/// Whether query `i` sees key `j`.
pub fn sees(rules: &Rules, shape: &Shape, [b, h, i, j]: [usize; 4]) -> bool {
    let Some(own) = sequence(rules, shape, b, i) else { return false };
    let (keys, position) = (own[1].clone(), position(rules, &own, i));
    if !keys.contains(&j) {
        return false;
    }
    let key = (j - keys.start) as i64;
    let before = |part: &Part<u32>| key < i64::from(at(part, [b, h, i, 0]));
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
        let (left, right) = (left.min(1 << 40) as i64, right.min(1 << 40) as i64);
        (position - left..=position + right).contains(&key)
    });
    let in_band = in_window && rules.pattern.is_none_or(|p| in_pattern(p, h, position, key));
    let permitted = in_prefix || past && (in_band || global(j) || stands_global);
    let document = rules.documents.as_ref();
    // The queries' own keys, by their place among the queries; older ones are not asked.
    let place = key - (position - (i - own[0].start) as i64);
    let in_tree = rules.tree.as_ref().is_none_or(|tree| {
        let asked = (0..own[0].len() as i64).contains(&place);
        !asked || at(tree, [b, h, i, own[0].start + place as usize])
    });
    permitted
        && in_tree
        && !(rules.exclude_self && key == position)
        && document.is_none_or(|[queries, keys]| at(queries, [b, h, i, 0]) == at(keys, [b, h, 0, j]))
        && [&rules.keep, &rules.keys].into_iter().flatten().all(|part| at(part, [b, h, i, j]))
}

/// What is added to the score of a pair.
pub fn adds(rules: &Rules, shape: &Shape, [b, h, i, j]: [usize; 4]) -> f32 {
    let Some(own) = sequence(rules, shape, b, i) else { return 0.0 };
    let distance = j as i64 - own[1].start as i64 - position(rules, &own, i);
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

/// The same mask as a dense keep and a dense bias, with the same sinks.
pub fn dense(rules: &Rules, shape: &Shape) -> Rules {
    let pairs = shape.weights();
    Rules {
        keep: Some(Part::of(pairs, |index| sees(rules, shape, index))),
        bias: Some(Part::of(pairs, |index| adds(rules, shape, index))),
        sinks: rules.sinks.clone(),
        ..Default::default()
    }
}

/// The reference gives for the rules of `case` what it gives for their meaning, to the bit: what is added must be
/// exact in f32.
#[track_caller]
pub fn follows(case: &Case) {
    let by_rules = case.reference::<f64>();
    let by_pairs = case.clone().with(|c| c.rules = dense(&case.rules, &case.shape)).reference::<f64>();
    assert!(by_rules.weights == by_pairs.weights, "{}: weights {:?}", case.name, case.rules);
    assert!(by_rules.lse == by_pairs.lse, "{}: lse {:?}", case.name, case.rules);
}

#[test]
fn random_masks_mean_what_they_say() {
    for seed in 0..30_000 {
        let rng = &mut Rng::new(seed);
        let kv_heads = rng.between(1, 2);
        let shape = Shape {
            batch: rng.between(1, 2),
            heads: kv_heads * rng.between(1, 2),
            kv_heads,
            q_len: rng.between(1, 24),
            kv_len: rng.between(1, 24),
            head_dim: 2,
            value_dim: 1,
        };
        let rules = MaskDraw::random(rng, shape.kv_len).rules(rng, &shape, 0);
        follows(&Case::random(format!("mask {seed}, {shape:?}"), shape).with(|c| c.rules = rules));
    }
}

/// Head `h` of batch 0: a row per query, `x` where a key is seen.
fn picture(rules: &Rules, q_len: usize, kv_len: usize, h: usize) -> String {
    let shape = Shape { batch: 1, heads: 2, kv_heads: 1, q_len, kv_len, head_dim: 1, value_dim: 1 };
    let row = |i| (0..kv_len).map(|j| if sees(rules, &shape, [0, h, i, j]) { 'x' } else { '.' }).collect();
    (0..q_len).map(row).collect::<Vec<String>>().join(" ")
}

fn causal() -> Rules {
    Rules { causal: true, ..Default::default() }
}

#[test]
fn patterns_look_like_this() {
    let of = |pattern| picture(&Rules { pattern: Some(pattern), ..causal() }, 6, 6, 0);
    let by_head = |pattern, h| picture(&Rules { pattern: Some(pattern), ..causal() }, 6, 6, h);
    use PatternPart::{Both, ByHead, Far, Near};
    assert_eq!(of(Pattern::Dilated { dilation: 2 }), "x..... .x.... x.x... .x.x.. x.x.x. .x.x.x");
    assert_eq!(of(Pattern::Local { block: 4 }), "x..... xx.... xxx... xxxx.. ....x. ....xx");
    let strided = |part| Pattern::Strided { stride: 3, part };
    assert_eq!(of(strided(Near)), "x..... xx.... xxx... xxxx.. .xxxx. ..xxxx");
    assert_eq!(of(strided(Far)), "x..... .x.... ..x... x..x.. .x..x. ..x..x");
    assert_eq!(of(strided(Both)), "x..... xx.... xxx... xxxx.. .xxxx. ..xxxx");
    let fixed = |part| Pattern::Fixed { stride: 3, summary: 1, part };
    assert_eq!(of(fixed(Near)), "x..... xx.... xxx... ...x.. ...xx. ...xxx");
    assert_eq!(of(fixed(Far)), "...... ...... ..x... ..x... ..x... ..x..x");
    assert_eq!(of(fixed(Both)), "x..... xx.... xxx... ..xx.. ..xxx. ..xxxx");
    assert_eq!(by_head(fixed(ByHead), 0), of(fixed(Near)));
    assert_eq!(by_head(fixed(ByHead), 1), of(fixed(Far)));
    // Both sides, and queries that stand before the first key: 6 queries, 4 keys, the last at the last.
    let both_sides = Rules { pattern: Some(strided(Far)), ..Default::default() };
    assert_eq!(picture(&both_sides, 6, 4, 0), ".x.. ..x. x..x .x.. ..x. x..x");
    let blocks = Rules { pattern: Some(Pattern::Local { block: 2 }), ..Default::default() };
    assert_eq!(picture(&blocks, 6, 4, 0), ".... .... xx.. xx.. ..xx ..xx");
}

#[test]
fn prefixes_and_globals_look_like_this() {
    let prefix = Some(Part::new(vec![2], [1; 4]));
    assert_eq!(picture(&Rules { prefix: prefix.clone(), ..causal() }, 4, 4, 0), "xx.. xx.. xxx. xxxx");
    let window = Some([1, 0]);
    let rules = Rules { prefix, window, ..causal() };
    assert_eq!(picture(&rules, 5, 5, 0), "xx... xx... xxx.. xxxx. xx.xx");
    let globals = Some(Part::new(vec![true, false, false, true, false], [1, 1, 1, 5]));
    let rules = Rules { globals: globals.clone(), window: Some([1, 1]), ..Default::default() };
    assert_eq!(picture(&rules, 5, 5, 0), "xxxxx xxxx. xxxx. xxxxx x..xx");
    // The causal rule holds for global tokens too.
    let rules = Rules { globals, window, ..causal() };
    assert_eq!(picture(&rules, 5, 5, 0), "x.... xx... xxx.. xxxx. x..xx");
}

#[test]
fn trees_look_like_this() {
    // Two keys of the past, then four drafts: 1 and 2 follow 0, 3 follows 1.
    let parents = [None, Some(0), Some(0), Some(1)];
    let sees = |i: usize, j: usize| {
        std::iter::successors(Some(i), |n: &usize| parents[*n]).any(|ancestor| ancestor == j)
    };
    let tree = Some(Part::of([1, 1, 4, 4], |[.., i, j]| sees(i, j)));
    let rules = Rules { tree, ..Default::default() };
    assert_eq!(picture(&rules, 4, 6, 0), "xxx... xxxx.. xxx.x. xxxx.x");
    // No past: what lies in the tree only. Past keys alone: nothing of the tree is there to be asked.
    assert_eq!(picture(&rules, 4, 4, 0), "x... xx.. x.x. xx.x");
    let top = Rules { alignment: Alignment::TopLeft, ..rules.clone() };
    assert_eq!(picture(&top, 4, 6, 0), "x...xx xx..xx x.x.xx xx.xxx");
    assert_eq!(picture(&rules, 4, 2, 0), ".. .. x. .x");
    let causal = Rules { causal: true, ..rules };
    assert_eq!(picture(&causal, 4, 6, 0), "xxx... xxxx.. xxx.x. xxxx.x");
}

#[test]
fn documents_and_packed_sequences_look_like_this() {
    let part = |data: &[u32], shape| Part::new(data.to_vec(), shape);
    let documents = Some([part(&[7, 3, 7], [1, 1, 3, 1]), part(&[7, 7, 3, 9], [1, 1, 1, 4])]);
    assert_eq!(picture(&Rules { documents, ..Default::default() }, 3, 4, 0), "xx.. ..x. xx..");
    // Two queries of three keys, none of one, one of two; one more belongs to nobody.
    let packed = Some([part(&[0, 2, 2, 3], [1, 1, 1, 4]), part(&[0, 3, 4, 6], [1, 1, 1, 4])]);
    let rules = Rules { packed, ..Default::default() };
    assert_eq!(picture(&rules, 4, 6, 0), "xxx... xxx... ....xx ......");
    let bottom = Rules { causal: true, ..rules.clone() };
    assert_eq!(picture(&bottom, 4, 6, 0), "xx.... xxx... ....xx ......");
    let top = Rules { alignment: Alignment::TopLeft, ..bottom.clone() };
    assert_eq!(picture(&top, 4, 6, 0), "x..... xx.... ....x. ......");
    // Counted from the sequence's first key.
    let one = Some(part(&[1], [1; 4]));
    let lengths = Rules { lengths: one.clone(), ..rules };
    assert_eq!(picture(&lengths, 4, 6, 0), "x..... x..... ....x. ......");
    let prefix = Rules { prefix: Some(part(&[2], [1; 4])), ..top };
    assert_eq!(picture(&prefix, 4, 6, 0), "xx.... xx.... ....xx ......");
}

#[test]
fn blocks_look_like_this() {
    let map = Part::new(vec![state::FULL, state::HIDDEN, state::MIXED, state::FULL], [1, 1, 2, 2]);
    let blocks = Some((map, [2, 3]));
    let keep = Some(Part::of([1, 1, 4, 5], |[.., i, j]| (i + j) % 2 == 0));
    let rules = Rules { blocks, keep, ..Default::default() };
    assert_eq!(picture(&rules, 4, 5, 0), "xxx.. xxx.. x.xxx .x.xx");
    let rules = Rules { causal: true, alignment: Alignment::TopLeft, ..rules };
    assert_eq!(picture(&rules, 4, 5, 0), "x.... xx... x.x.. .x.x.");
}

#[test]
fn what_is_added_is_this() {
    let shape = Shape { q_len: 2, kv_len: 4, ..Shape::new(1, 1, 1, 1) };
    let row = |rules: &Rules, i| (0..4).map(|j| adds(rules, &shape, [0, 0, i, j])).collect::<Vec<_>>();
    // The last query stands at the last key.
    let mut rules = Rules { slopes: Some(Part::new(vec![0.5], [1; 4])), ..Default::default() };
    assert_eq!(row(&rules, 0), [-1.0, -0.5, 0.0, 0.5]);
    rules.symmetric = true;
    assert_eq!(row(&rules, 0), [-1.0, -0.5, 0.0, -0.5]);
    let table = Part::new(vec![1.0, 2.0, 3.0], [1, 1, 1, 3]);
    assert_eq!(row(&Rules { relative: Some(table), ..Default::default() }, 1), [1.0, 1.0, 1.0, 2.0]);
}
