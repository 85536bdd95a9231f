//! Patterns, prefixes, global tokens, documents and block maps, alone and in combinations. Their
//! meaning checks the reference, which checks every path and target.

use wgpu_attention::mask::block_map::{big_bird, state};
use wgpu_attention::mask::{Pattern, PatternPart};
use wgpu_attention::{Alignment, Shape};

use crate::harness::meaning::follows;
use crate::harness::{Case, HostData, Report, Rng, Rules};
use crate::ops::mask::masks::{LENGTHS, check, check_paths, shape};

const ALIGNMENTS: [Alignment; 2] = [Alignment::TopLeft, Alignment::BottomRight];

/// Checks `rules` on problems of `lengths`.
fn holds(report: &mut Report, name: &str, lengths: (usize, usize), rules: Rules) {
    let name = format!("{name}, {:?}, causal {}, {lengths:?}", rules.alignment, rules.causal);
    let case = Case::random(name, shape(lengths)).with(|c| c.rules = rules);
    follows(&case);
    check(report, &case);
}

/// Returns `rules` in both alignments, causal and not.
fn in_all_bands(rules: &Rules) -> Vec<Rules> {
    let all = ALIGNMENTS
        .into_iter()
        .flat_map(|alignment| [false, true].map(|causal| Rules { alignment, causal, ..rules.clone() }));
    all.collect()
}

fn patterns() -> Vec<Pattern> {
    use PatternPart::{Both, ByHead, Far, Near};
    let mut all: Vec<_> = [1, 2, 3, 100].map(|dilation| Pattern::Dilated { dilation }).into();
    all.extend([1, 3, 64].map(|block| Pattern::Local { block }));
    for part in [Near, Far, Both, ByHead] {
        all.extend([1, 4, 1000].map(|stride| Pattern::Strided { stride, part }));
        let fixed = |(stride, summary)| Pattern::Fixed { stride, summary, part };
        all.extend([(4, 1), (5, 2), (3, 3), (1000, 990)].map(fixed));
    }
    all
}

#[test]
fn patterns_hold() {
    crate::harness::in_turn!();
    let mut report = Report::new("masks, patterns");
    for pattern in patterns() {
        for lengths in LENGTHS {
            for rules in in_all_bands(&Rules { pattern: Some(pattern), ..Default::default() }) {
                holds(&mut report, &format!("{pattern:?}"), lengths, rules);
            }
        }
    }
    report.finish();
}

#[test]
fn patterns_hold_within_windows() {
    crate::harness::in_turn!();
    let mut report = Report::new("masks, patterns in windows");
    for pattern in patterns() {
        let rules = Rules { pattern: Some(pattern), window: Some([9, 4]), ..Default::default() };
        for rules in in_all_bands(&rules) {
            holds(&mut report, &format!("{pattern:?} in a window"), LENGTHS[3], rules);
        }
    }
    report.finish();
}

#[test]
fn prefixes_hold() {
    crate::harness::in_turn!();
    let mut report = Report::new("masks, prefix");
    let dilated = Some(Pattern::Dilated { dilation: 3 });
    for lengths in LENGTHS {
        let [b, h, i, _] = shape(lengths).weights();
        let some = |[b, h, i, _]: [usize; 4]| [0, 3, 5, 1000, u32::MAX, 4][(b + 2 * h + 3 * i) % 6];
        for prefix in [HostData::of([b, 1, 1, 1], some), HostData::of([b, h, i, 1], some)] {
            let name = |what| format!("prefix {:?} {what}", prefix.shape);
            let plain = Rules { prefix: Some(prefix.clone()), ..Default::default() };
            let window = Some([2, 1]);
            for rules in in_all_bands(&plain) {
                holds(&mut report, &name("alone"), lengths, rules.clone());
                holds(&mut report, &name("window"), lengths, Rules { window, ..rules.clone() });
                let both = Rules { window, pattern: dilated, ..rules };
                holds(&mut report, &name("window and pattern"), lengths, both);
            }
        }
    }
    report.finish();
}

#[test]
fn global_tokens_hold() {
    crate::harness::in_turn!();
    let mut report = Report::new("masks, globals");
    for lengths in LENGTHS {
        let [b, h, _, j] = shape(lengths).weights();
        let few = |[b, h, _, j]: [usize; 4]| j == 0 || (b + h + j) % 5 == 2;
        for globals in [
            HostData::of([1, 1, 1, j], few),
            HostData::of([b, h, 1, j], few),
            HostData::new(vec![true], [1; 4]),
        ] {
            let name = |what| format!("globals {:?} {what}", globals.shape);
            let plain = Rules { globals: Some(globals.clone()), ..Default::default() };
            let window = Some([2, 1]);
            for rules in in_all_bands(&plain) {
                holds(&mut report, &name("window"), lengths, Rules { window, ..rules.clone() });
                let dilated = Rules { pattern: Some(Pattern::Dilated { dilation: 3 }), ..rules };
                holds(&mut report, &name("pattern"), lengths, dilated);
            }
        }
    }
    report.finish();
}

#[test]
fn documents_hold() {
    let mut report = Report::new("masks, documents");
    for lengths in LENGTHS {
        let [b, h, i, j] = shape(lengths).weights();
        let number = |[b, h, i, j]: [usize; 4]| [3, 0, u32::MAX][(b + h + (i + j) / 4) % 3];
        for (queries, keys) in [
            ([b, 1, i, 1], [b, 1, 1, j]),
            ([b, h, i, 1], [1, h, 1, j]),
            ([1, 1, i, 1], [1; 4]),
            ([b, 1, 1, 1], [1, 1, 1, j]),
        ] {
            let documents = Some([HostData::of(queries, number), HostData::of(keys, number)]);
            for rules in in_all_bands(&Rules { documents, ..Default::default() }) {
                holds(&mut report, &format!("documents {queries:?} {keys:?}"), lengths, rules);
            }
        }
    }
    report.finish();
}

/// Returns a map of all three states in equal shares.
fn map(shape: &Shape, size: [usize; 2], repeat: bool) -> HostData<u32> {
    let [b, h, i, j] = shape.weights();
    let [b, h] = if repeat { [1; 2] } else { [b, h] };
    let mut rng = Rng::named(&format!("{size:?}"));
    let shape = [b, h, i.div_ceil(size[0]), j.div_ceil(size[1])];
    let of = |rng: &mut Rng| rng.pick(&[state::HIDDEN, state::MIXED, state::FULL]);
    HostData::new((0..shape.iter().product()).map(|_| of(&mut rng)).collect(), shape)
}

#[test]
fn block_maps_hold() {
    crate::harness::in_turn!();
    let mut report = Report::new("masks, blocks");
    for lengths in LENGTHS {
        let shape = shape(lengths);
        let [b, h, i, j] = shape.weights();
        for (size, repeat) in [
            ([1, 1], true),
            ([3, 3], false),
            ([16, 3], true),
            ([16, 16], false),
            ([64, 64], false),
            ([500, 9999], true),
        ] {
            let plain = Rules { blocks: Some((map(&shape, size, repeat), size)), ..Default::default() };
            let mut with = |what: &str, change: &dyn Fn(&mut Rules)| {
                let mut rules = plain.clone();
                change(&mut rules);
                holds(&mut report, &format!("blocks {size:?} {what}"), lengths, rules);
            };
            let keep = HostData::of([b, 1, i, j], |[b, _, i, j]| (b + i + 2 * j) % 3 != 0);
            let bias = HostData::of([1, h, i, j], |[_, h, i, j]| match (h + 2 * i + j) % 5 {
                0 => f32::NEG_INFINITY,
                n => n as f32 - 2.0,
            });
            with("alone", &|_| ());
            with("keep", &|r| r.attn_mask = Some(keep.clone()));
            with("bias", &|r| r.bias = Some(bias.clone()));
            with("keep, bias", &|r| (r.attn_mask, r.bias) = (Some(keep.clone()), Some(bias.clone())));
            for alignment in ALIGNMENTS {
                with("causal", &|r| (r.causal, r.alignment) = (true, alignment));
                with("window", &|r| (r.window, r.alignment) = (Some([4, 2]), alignment));
                with("no self", &|r| (r.exclude_self, r.causal, r.alignment) = (true, true, alignment));
            }
            with("prefix", &|r| {
                r.causal = true;
                r.prefix = Some(HostData::of([b, 1, 1, 1], |[b, ..]| 2 + 3 * b as u32));
            });
            let lengths = HostData::of([b, 1, i, 1], |[b, _, i, _]| (3 * b + 2 * i) as u32 % 23);
            with("lengths", &|r| r.lengths = Some(lengths.clone()));
        }
    }
    report.finish();
}

/// The rules that a full block lifts, and the others.
#[test]
fn block_maps_hold_with_everything() {
    let mut report = Report::new("masks, blocks and all");
    for lengths in LENGTHS {
        let shape = shape(lengths);
        let [b, h, i, j] = shape.weights();
        let size = [5, 4];
        let rules = Rules {
            blocks: Some((map(&shape, size, false), size)),
            window: Some([6, 3]),
            pattern: Some(Pattern::Strided { stride: 3, part: PatternPart::ByHead }),
            exclude_self: true,
            key_padding_mask: Some(HostData::of([b, 1, 1, j], |[b, .., j]| (b + j) % 7 != 3)),
            globals: Some(HostData::of([1, h, 1, j], |[_, h, _, j]| (h + j) % 6 == 1)),
            slopes: Some(HostData::of([1, h, 1, 1], |[_, h, ..]| 0.25 * h as f32)),
            ..Default::default()
        };
        in_all_bands(&rules).into_iter().for_each(|r| holds(&mut report, "blocks and all", lengths, r));
        let rules = Rules {
            blocks: Some((map(&shape, size, true), size)),
            documents: Some([
                HostData::of([b, 1, i, 1], |[b, _, i, _]| (b + i / 5) as u32 % 3),
                HostData::of([b, 1, 1, j], |[b, .., j]| (b + j / 6) as u32 % 3),
            ]),
            prefix: Some(HostData::of([b, 1, i, 1], |[b, _, i, _]| (b + i) as u32 % 4)),
            relative: Some(HostData::of([1, h, 1, 5], |[_, h, _, n]| 0.5 * (h + n) as f32)),
            ..Default::default()
        };
        in_all_bands(&rules).into_iter().for_each(|r| holds(&mut report, "blocks, documents", lengths, r));
    }
    report.finish();
}

/// Tiles of keys that no query of a tile sees, and tiles that every query sees. Kernels skip the
/// former, and do not test pairs in the latter.
#[test]
fn whole_tiles_hidden_and_full() {
    crate::harness::in_turn!();
    let mut report = Report::new("masks, whole tiles");
    let shape = Shape { batch: 1, heads: 2, kv_heads: 1, q_len: 150, kv_len: 290, head_dim: 5, value_dim: 6 };
    let [_, h, i, j] = shape.weights();
    let numbers = |shape, of: fn([usize; 4]) -> u32| HostData::of(shape, of);
    let starts = |starts: [u32; 5]| HostData::new(starts.to_vec(), [1, 1, 1, 5]);
    let blocks = |size| Some((map(&shape, size, false), size));
    let plain = Rules::default();
    let keep = Some(HostData::of([1, 1, i, j], |[_, _, i, j]| (i + 2 * j) % 3 != 0));
    let bias = Some(HostData::of([1, h, 1, j], |[_, h, _, j]| (h + j % 7) as f32 * 0.25));
    let globals = Some(HostData::of([1, 1, 1, j], |[.., j]| j == 3 || j == 200));
    let long = Some([starts([0, 70, 71, 150, 150]), starts([0, 130, 130, 131, 290])]);
    let short = Some([starts([0, 64, 128, 149, 150]), starts([0, 1, 257, 258, 290])]);
    let all = [
        ("window", Rules { window: Some([10, 0]), ..plain.clone() }),
        ("wide window", Rules { window: Some([100, 70]), ..plain.clone() }),
        ("blocks 64", Rules { blocks: blocks([64, 64]), ..plain.clone() }),
        ("blocks 128", Rules { blocks: blocks([128, 128]), attn_mask: keep.clone(), ..plain.clone() }),
        ("blocks 30", Rules { blocks: blocks([30, 30]), bias: bias.clone(), ..plain.clone() }),
        ("blocks 64 and window", Rules { blocks: blocks([64, 32]), window: Some([20, 90]), ..plain.clone() }),
        (
            "documents",
            Rules {
                documents: Some([
                    numbers([1, 1, i, 1], |[_, _, i, _]| i as u32 / 40),
                    numbers([1, 1, 1, j], |[.., j]| j as u32 / 75),
                ]),
                ..plain.clone()
            },
        ),
        ("long sequences", Rules { packed: long, window: Some([40, 10]), ..plain.clone() }),
        ("short sequences", Rules { packed: short, attn_mask: keep, ..plain.clone() }),
        ("one length", Rules { lengths: Some(HostData::new(vec![65], [1; 4])), ..plain.clone() }),
        (
            "lengths",
            Rules {
                lengths: Some(numbers([1, 1, i, 1], |[_, _, i, _]| [0, 3, 280][i / 20 % 3])),
                ..plain.clone()
            },
        ),
        (
            "prefix",
            Rules { prefix: Some(HostData::new(vec![70], [1; 4])), window: Some([9, 0]), ..plain.clone() },
        ),
        ("globals", Rules { globals, window: Some([9, 9]), ..plain.clone() }),
        ("local", Rules { pattern: Some(Pattern::Local { block: 70 }), bias, ..plain }),
    ];
    for (name, rules) in all {
        for rules in in_all_bands(&rules) {
            let name = format!("{name}, {:?}, causal {}, whole tiles", rules.alignment, rules.causal);
            let case = Case::random(name, shape).with(|c| c.rules = rules);
            follows(&case);
            // The staged path limits keys by the same rules, so half of the shaders are enough.
            check_paths(&mut report, &case, case.rules.causal);
        }
    }
    report.finish();
}

/// Values of keys that these rules hide, from some queries or from all.
#[test]
fn hidden_values_contribute_nothing() {
    crate::harness::in_turn!();
    let mut report = Report::new("masks, hidden values");
    let shape = shape((7, 19));
    let [b, _, i, j] = shape.weights();
    let plain = Rules::default();
    let starts = |starts: [u32; 4]| HostData::new(starts.to_vec(), [1, 1, 1, 4]);
    let document = |[_, _, i, j]: [usize; 4]| u32::from((i + j) % 3 == 2);
    let hidden = [
        ("pattern", Rules { pattern: Some(Pattern::Dilated { dilation: 2 }), ..plain.clone() }),
        ("window", Rules { window: Some([2, 1]), ..plain.clone() }),
        (
            "globals",
            Rules {
                window: Some([2, 1]),
                globals: Some(HostData::of([1, 1, 1, j], |[.., j]| j == 9)),
                ..plain.clone()
            },
        ),
        (
            "prefix",
            Rules { causal: true, prefix: Some(HostData::new(vec![2, 9], [b, 1, 1, 1])), ..plain.clone() },
        ),
        (
            "documents",
            Rules {
                documents: Some([HostData::of([1, 1, i, 1], document), HostData::of([1, 1, 1, j], document)]),
                ..plain.clone()
            },
        ),
        ("packed", Rules { packed: Some([starts([0, 3, 4, 7]), starts([0, 8, 9, 19])]), ..plain.clone() }),
        ("blocks", Rules { blocks: Some((map(&shape, [2, 5], false), [2, 5])), ..plain.clone() }),
        (
            "sinks",
            Rules {
                causal: true,
                sinks: Some(HostData::new(vec![0.5, -0.5, 3.0, 0.0], [1, 4, 1, 1])),
                ..plain
            },
        ),
    ];
    for (name, rules) in hidden {
        for value in [f32::NAN, f32::INFINITY] {
            let case = Case::random(format!("value {value} hidden by {name}"), shape).with(|c| {
                c.rules = rules.clone();
                // Keys 5 and 17, one channel of every head.
                for key in [5, 17] {
                    c.v.iter_mut().skip(key * 6 + 3).step_by(j * 6).for_each(|v| *v = value);
                }
            });
            assert!(case.reference::<f64>().out.iter().any(|x| x.is_finite()), "{}", case.name);
            check(&mut report, &case);
        }
    }
    report.finish();
}

/// Zaheer et al. 2020: the blocks of a row are its neighbours, the global ones and the random ones.
/// Global blocks attend to all.
#[test]
fn big_bird_map_has_its_blocks() {
    let random = vec![vec![4], vec![5], vec![], vec![0, 1], vec![2], vec![1]];
    let [f, o] = [state::FULL, state::HIDDEN];
    let want = [
        [f, f, o, o, f, f],
        [f, f, f, o, o, f],
        [o, f, f, f, o, f],
        [f, f, f, f, f, f],
        [o, o, f, f, f, f],
        [f, f, f, f, f, f],
    ];
    assert_eq!(
        big_bird(6, 1, &[5], &random).expect("it fits").chunks(6).collect::<Vec<_>>(),
        want.each_ref().map(|r| &r[..])
    );
    assert_eq!(big_bird(2, 0, &[], &[]).expect("it fits"), [f, o, o, f]);

    let mut report = Report::new("masks, big bird");
    let map = HostData::new(big_bird(6, 1, &[5], &random).expect("it fits"), [1, 1, 6, 6]);
    let rules = Rules { blocks: Some((map, [3, 3])), ..Default::default() };
    in_all_bands(&rules).into_iter().for_each(|r| holds(&mut report, "big bird", (17, 17), r));
    report.finish();
}

/// Trees of drafts: chains, stars, random ones, and combinations.
#[test]
fn trees_hold() {
    crate::harness::in_turn!();
    let mut report = Report::new("masks, trees");
    let mut rng = Rng::new(17);
    for lengths in LENGTHS {
        let [batch, heads, q_len, kv_len] = shape(lengths).weights();
        let chain = HostData::of([1, 1, q_len, q_len], |[.., i, j]| j <= i);
        let star = HostData::of([1, 1, q_len, q_len], |[.., i, j]| j == 0 || j == i);
        let random = HostData::of([batch, heads, q_len, q_len], |[b, h, i, j]| {
            j == i || j < i && !(7 * b + 5 * h + i * j).is_multiple_of(3)
        });
        let keep = HostData::new(rng.bools(kv_len, 0.8), [1, 1, 1, kv_len]);
        for (name, tree) in [("chain", chain), ("star", star), ("random", random)] {
            let rules = Rules { tree: Some(tree), ..Default::default() };
            for rules in in_all_bands(&rules) {
                holds(&mut report, &format!("tree, {name}"), lengths, rules);
            }
            let slopes = Some(HostData::new(vec![0.5, 0.25, 0.125, 0.0], [1, 4, 1, 1]));
            let window = Some([6, 0]);
            let more = Rules { window, slopes, attn_mask: Some(keep.clone()), causal: true, ..rules.clone() };
            holds(&mut report, &format!("tree, {name}, with others"), lengths, more);
            let prefix = Some(HostData::new(vec![3], [1; 4]));
            holds(
                &mut report,
                &format!("tree, {name}, prefix"),
                lengths,
                Rules { prefix, causal: true, ..rules },
            );
        }
    }
    report.finish();
}
