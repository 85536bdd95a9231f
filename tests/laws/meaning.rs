//! The reference agrees with the meaning of masks. Pictures prove the meaning.

use wgpu_attention::mask::block_map::state;
use wgpu_attention::mask::{Pattern, PatternPart};
use wgpu_attention::{Alignment, Shape};

use crate::harness::meaning::{adds, follows, sees};
use crate::harness::{Case, HostData, Rng, Rules};
use crate::laws::property::MaskDraw;

#[test]
fn random_masks_match_their_meaning() {
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

/// Returns head `h` of batch 0 as a row per query, with an `x` for each visible key.
fn picture(rules: &Rules, q_len: usize, kv_len: usize, h: usize) -> String {
    let shape = Shape { batch: 1, heads: 2, kv_heads: 1, q_len, kv_len, head_dim: 1, value_dim: 1 };
    let row = |i| (0..kv_len).map(|j| if sees(rules, &shape, [0, h, i, j]) { 'x' } else { '.' }).collect();
    (0..q_len).map(row).collect::<Vec<String>>().join(" ")
}

fn causal() -> Rules {
    Rules { causal: true, ..Default::default() }
}

#[test]
fn patterns_match_pictures() {
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
    // Keys on both sides, and queries before the first key: 6 queries, 4 keys, aligned at the end.
    let both_sides = Rules { pattern: Some(strided(Far)), ..Default::default() };
    assert_eq!(picture(&both_sides, 6, 4, 0), ".x.. ..x. x..x .x.. ..x. x..x");
    let blocks = Rules { pattern: Some(Pattern::Local { block: 2 }), ..Default::default() };
    assert_eq!(picture(&blocks, 6, 4, 0), ".... .... xx.. xx.. ..xx ..xx");
}

#[test]
fn prefixes_and_globals_match_pictures() {
    let prefix = Some(HostData::new(vec![2], [1; 4]));
    assert_eq!(picture(&Rules { prefix: prefix.clone(), ..causal() }, 4, 4, 0), "xx.. xx.. xxx. xxxx");
    let window = Some([1, 0]);
    let rules = Rules { prefix, window, ..causal() };
    assert_eq!(picture(&rules, 5, 5, 0), "xx... xx... xxx.. xxxx. xx.xx");
    let globals = Some(HostData::new(vec![true, false, false, true, false], [1, 1, 1, 5]));
    let rules = Rules { globals: globals.clone(), window: Some([1, 1]), ..Default::default() };
    assert_eq!(picture(&rules, 5, 5, 0), "xxxxx xxxx. xxxx. xxxxx x..xx");
    // The causal rule applies to global tokens too.
    let rules = Rules { globals, window, ..causal() };
    assert_eq!(picture(&rules, 5, 5, 0), "x.... xx... xxx.. xxxx. x..xx");
}

#[test]
fn trees_match_pictures() {
    // Two past keys, then four drafts: 1 and 2 follow 0, 3 follows 1.
    let parents = [None, Some(0), Some(0), Some(1)];
    let sees = |i: usize, j: usize| {
        std::iter::successors(Some(i), |n: &usize| parents[*n]).any(|ancestor| ancestor == j)
    };
    let tree = Some(HostData::of([1, 1, 4, 4], |[.., i, j]| sees(i, j)));
    let rules = Rules { tree, ..Default::default() };
    assert_eq!(picture(&rules, 4, 6, 0), "xxx... xxxx.. xxx.x. xxxx.x");
    // Without past keys, only the tree decides. With past keys alone, the tree has no key to decide
    // on.
    assert_eq!(picture(&rules, 4, 4, 0), "x... xx.. x.x. xx.x");
    let top = Rules { alignment: Alignment::TopLeft, ..rules.clone() };
    assert_eq!(picture(&top, 4, 6, 0), "x...xx xx..xx x.x.xx xx.xxx");
    assert_eq!(picture(&rules, 4, 2, 0), ".. .. x. .x");
    let causal = Rules { causal: true, ..rules };
    assert_eq!(picture(&causal, 4, 6, 0), "xxx... xxxx.. xxx.x. xxxx.x");
}

#[test]
fn documents_and_packed_match_pictures() {
    let part = |data: &[u32], shape| HostData::new(data.to_vec(), shape);
    let documents = Some([part(&[7, 3, 7], [1, 1, 3, 1]), part(&[7, 7, 3, 9], [1, 1, 1, 4])]);
    assert_eq!(picture(&Rules { documents, ..Default::default() }, 3, 4, 0), "xx.. ..x. xx..");
    // Two queries of three keys, none of one, one of two. One more query and key have no sequence.
    let packed = Some([part(&[0, 2, 2, 3], [1, 1, 1, 4]), part(&[0, 3, 4, 6], [1, 1, 1, 4])]);
    let rules = Rules { packed, ..Default::default() };
    assert_eq!(picture(&rules, 4, 6, 0), "xxx... xxx... ....xx ......");
    let bottom = Rules { causal: true, ..rules.clone() };
    assert_eq!(picture(&bottom, 4, 6, 0), "xx.... xxx... ....xx ......");
    let top = Rules { alignment: Alignment::TopLeft, ..bottom.clone() };
    assert_eq!(picture(&top, 4, 6, 0), "x..... xx.... ....x. ......");
    // Lengths count from the sequence's first key.
    let one = Some(part(&[1], [1; 4]));
    let lengths = Rules { lengths: one.clone(), ..rules };
    assert_eq!(picture(&lengths, 4, 6, 0), "x..... x..... ....x. ......");
    let prefix = Rules { prefix: Some(part(&[2], [1; 4])), ..top };
    assert_eq!(picture(&prefix, 4, 6, 0), "xx.... xx.... ....xx ......");
}

#[test]
fn blocks_match_pictures() {
    let map = HostData::new(vec![state::FULL, state::HIDDEN, state::MIXED, state::FULL], [1, 1, 2, 2]);
    let blocks = Some((map, [2, 3]));
    let keep = Some(HostData::of([1, 1, 4, 5], |[.., i, j]| (i + j) % 2 == 0));
    let rules = Rules { blocks, attn_mask: keep, ..Default::default() };
    assert_eq!(picture(&rules, 4, 5, 0), "xxx.. xxx.. x.xxx .x.xx");
    let rules = Rules { causal: true, alignment: Alignment::TopLeft, ..rules };
    assert_eq!(picture(&rules, 4, 5, 0), "x.... xx... x.x.. .x.x.");
}

#[test]
fn added_terms_match_examples() {
    let shape = Shape { q_len: 2, kv_len: 4, ..Shape::new(1, 1, 1, 1) };
    let row = |rules: &Rules, i| (0..4).map(|j| adds(rules, &shape, [0, 0, i, j])).collect::<Vec<_>>();
    // The last query is at the last key's position.
    let mut rules = Rules { slopes: Some(HostData::new(vec![0.5], [1; 4])), ..Default::default() };
    assert_eq!(row(&rules, 0), [-1.0, -0.5, 0.0, 0.5]);
    rules.symmetric = true;
    assert_eq!(row(&rules, 0), [-1.0, -0.5, 0.0, -0.5]);
    let table = HostData::new(vec![1.0, 2.0, 3.0], [1, 1, 1, 3]);
    assert_eq!(row(&Rules { relative: Some(table), ..Default::default() }, 1), [1.0, 1.0, 1.0, 2.0]);
}
