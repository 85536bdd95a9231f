//! Packed sequences. Their definition and separate runs of every sequence check the reference,
//! which checks every path and target.

use wgpu_attention::mask::Pattern;
use wgpu_attention::tuning::Algorithm;
use wgpu_attention::{Alignment, Shape};

use crate::harness::meaning::follows;
use crate::harness::{Case, FORMS, HostData, Report, Rules, Setup, profiles};
use crate::ops::mask::masks::check;

/// Queries and keys of each sequence: shorter and longer than a tile, without queries, without
/// keys, empty.
const SEQUENCES: &[(usize, usize)] =
    &[(5, 5), (0, 0), (3, 7), (4, 0), (0, 6), (7, 2), (0, 0), (67, 90), (1, 1), (0, 3), (2, 0)];

/// Sequences like `SEQUENCES`, with queries and keys before and after them that belong to no
/// sequence.
struct Ragged {
    sequences: &'static [(usize, usize)],
    before: usize,
    after: usize,
}

impl Ragged {
    fn shape(&self) -> Shape {
        let [queries, keys] = self.starts();
        let [q_len, kv_len] = [queries, keys].map(|starts| starts[starts.len() - 1] as usize + self.after);
        Shape { batch: 2, heads: 4, kv_heads: 2, q_len, kv_len, head_dim: 5, value_dim: 6 }
    }

    fn starts(&self) -> [Vec<u32>; 2] {
        let starts = |len: fn(&(usize, usize)) -> usize| {
            let mut ends = vec![self.before as u32];
            ends.extend(self.sequences.iter().scan(self.before, |at, s| {
                *at += len(s);
                Some(*at as u32)
            }));
            ends
        };
        [starts(|s| s.0), starts(|s| s.1)]
    }

    /// Returns the rule, the same for the whole batch.
    fn packed(&self) -> Option<[HostData<u32>; 2]> {
        Some(self.starts().map(|starts| HostData::new(starts.clone(), [1, 1, 1, starts.len()])))
    }
}

const RAGGED: [Ragged; 3] = [
    Ragged { sequences: SEQUENCES, before: 0, after: 0 },
    Ragged { sequences: SEQUENCES, before: 2, after: 3 },
    Ragged { sequences: &[(9, 13)], before: 0, after: 4 },
];

/// Returns rules that combine with packed sequences: parts without a tensor, or with one that all
/// sequences share.
fn partners() -> Vec<(&'static str, Rules)> {
    let plain = Rules::default();
    let some = |n| Some(HostData::new(vec![n], [1; 4]));
    let quarter = |shape| Some(HostData::of(shape, |[_, h, _, n]| 0.25 * h as f32 - 0.5 * n as f32));
    let window = Some([3, 1]);
    let causal = Rules { causal: true, ..plain.clone() };
    vec![
        ("alone", plain.clone()),
        ("causal", causal.clone()),
        ("window", Rules { window, ..plain.clone() }),
        ("causal window", Rules { window, ..causal.clone() }),
        ("no self", Rules { exclude_self: true, ..causal.clone() }),
        ("lengths", Rules { lengths: some(4), ..plain.clone() }),
        ("prefix", Rules { prefix: some(4), ..causal.clone() }),
        ("prefix, lengths", Rules { prefix: some(4), lengths: some(6), window, ..causal.clone() }),
        ("pattern", Rules { pattern: Some(Pattern::Local { block: 4 }), ..plain.clone() }),
        ("dilated", Rules { pattern: Some(Pattern::Dilated { dilation: 3 }), ..causal.clone() }),
        ("alibi", Rules { slopes: quarter([1, 4, 1, 1]), ..causal.clone() }),
        ("alibi symmetric", Rules { slopes: quarter([1, 4, 1, 1]), symmetric: true, ..plain.clone() }),
        ("relative", Rules { relative: quarter([1, 4, 1, 7]), ..plain.clone() }),
        ("sinks", Rules { sinks: quarter([1, 4, 1, 1]), ..causal }),
    ]
}

/// Returns every ragged problem with every partner.
fn cases() -> impl Iterator<Item = (&'static Ragged, Case)> {
    RAGGED.iter().enumerate().flat_map(|(n, ragged)| {
        let both = [Alignment::TopLeft, Alignment::BottomRight];
        both.into_iter().flat_map(move |alignment| {
            partners().into_iter().map(move |(name, rules)| {
                let rules = Rules { packed: ragged.packed(), alignment, ..rules };
                let name = format!("packed {n}, {name}, {alignment:?}");
                (ragged, Case::random(name, ragged.shape()).with(|c| c.rules = rules))
            })
        })
    })
}

#[test]
fn packed_sequences_match_meaning() {
    crate::harness::in_turn!();
    let mut report = Report::new("packed");
    for (_, case) in cases() {
        follows(&case);
        check(&mut report, &case);
    }
    report.finish();
}

/// The part of the test above that always runs.
#[test]
fn both_alignments_match_reference() {
    let mut report = Report::new("packed, both alignments");
    for (n, alignment) in [Alignment::TopLeft, Alignment::BottomRight].into_iter().enumerate() {
        for (ragged, form) in RAGGED[1..].iter().zip(FORMS) {
            let case = Case::random(format!("packed, {alignment:?}, {form:?}"), ragged.shape()).with(|c| {
                c.rules = Rules { packed: ragged.packed(), alignment, causal: true, ..Rules::default() };
            });
            let setup = Setup::plain(profiles()[n], form, [Algorithm::Staged, Algorithm::Fused][n]);
            report.check_in(&case, &setup, &mut Default::default());
        }
    }
    report.finish();
}

/// Returns the rows `from .. from + len` of every head.
fn rows<T: Copy>(data: &[T], [b, h, l, d]: [usize; 4], from: usize, len: usize) -> Vec<T> {
    assert_eq!(data.len(), b * h * l * d);
    data.chunks_exact(l * d).flat_map(|head| head[from * d..(from + len) * d].to_vec()).collect()
}

/// Checks that every sequence of `case` gives the same result as alone. Rows outside sequences give
/// zero.
fn like_alone(ragged: &Ragged, case: &Case) {
    let all = case.reference::<f64>();
    let shape = case.shape;
    let (mut q0, mut k0) = (ragged.before, ragged.before);
    let none = if case.rules.sinks.is_some() { None } else { Some(f64::NEG_INFINITY) };
    let dead = |from, len| {
        assert!(rows(&all.out, shape.out(), from, len).iter().all(|x| *x == 0.0), "{}", case.name);
        let lse = rows(&all.lse, shape.lse(), from, len);
        assert!(none.is_none_or(|none| lse.iter().all(|x| *x == none)), "{}", case.name);
    };
    dead(0, q0);
    for (queries, keys) in ragged.sequences.iter().copied() {
        if queries > 0 && keys > 0 {
            let own = Shape { q_len: queries, kv_len: keys, ..shape };
            let alone = case.clone().with(|c| {
                (c.shape, c.rules.packed) = (own, None);
                c.q = rows(&case.q, shape.q(), q0, queries);
                c.k = rows(&case.k, shape.k(), k0, keys);
                c.v = rows(&case.v, shape.v(), k0, keys);
                let part = |part: &HostData<bool>| {
                    HostData::new(rows(&part.data, [1, 1, shape.kv_len, 1], k0, keys), [1, 1, 1, keys])
                };
                c.rules.globals = case.rules.globals.as_ref().map(part);
            });
            let alone = alone.reference::<f64>();
            let at = format!("{}, queries {q0} + {queries}, keys {k0} + {keys}", case.name);
            assert_eq!(rows(&all.out, shape.out(), q0, queries), alone.out, "{at}");
            assert_eq!(rows(&all.lse, shape.lse(), q0, queries), alone.lse, "{at}");
        } else {
            dead(q0, queries);
        }
        (q0, k0) = (q0 + queries, k0 + keys);
    }
    dead(q0, shape.q_len - q0);
}

#[test]
fn packed_sequences_equal_separate_runs() {
    cases().for_each(|(ragged, case)| like_alone(ragged, &case));
}

/// A query past the keys of its sequence is at no key of the next sequence.
#[test]
fn global_tokens_stay_in_sequence() {
    crate::harness::in_turn!();
    let mut report = Report::new("packed, globals");
    for ragged in &RAGGED {
        let shape = ragged.shape();
        for alignment in [Alignment::TopLeft, Alignment::BottomRight] {
            let case = Case::random(format!("packed, globals, {alignment:?}"), shape).with(|c| {
                (c.rules.packed, c.rules.alignment, c.rules.window) =
                    (ragged.packed(), alignment, Some([1, 0]));
                c.rules.globals = Some(HostData::of([1, 1, 1, shape.kv_len], |[.., j]| j % 4 == 1));
            });
            follows(&case);
            like_alone(ragged, &case);
            check(&mut report, &case);
        }
    }
    report.finish();
}

/// Each batch entry has other sequences. The other parts of the mask count queries and keys through
/// the whole tensor.
#[test]
fn sequences_differ_by_batch() {
    crate::harness::in_turn!();
    let mut report = Report::new("packed, by batch");
    let queries = HostData::new(vec![0, 3, 3, 20, 0, 11, 12, 20], [2, 1, 1, 4]);
    let keys = HostData::new(vec![0, 0, 9, 30, 1, 17, 20, 26], [2, 1, 1, 4]);
    let shape = Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 20, kv_len: 30, head_dim: 5, value_dim: 6 };
    for (n, alignment) in [Alignment::TopLeft, Alignment::BottomRight].into_iter().enumerate() {
        let case = Case::random(format!("packed by batch {n}"), shape).with(|c| {
            c.rules.packed = Some([queries.clone(), keys.clone()]);
            (c.rules.alignment, c.rules.causal) = (alignment, n == 0);
        });
        let with = |what: &str, change: &dyn Fn(&mut Rules)| {
            let mut case = case.clone();
            case.name += what;
            change(&mut case.rules);
            case
        };
        let keep = HostData::of([2, 1, 20, 30], |[b, _, i, j]| (b + i + 2 * j) % 3 != 0);
        let lengths = HostData::of([2, 1, 20, 1], |[b, _, i, _]| (b + i) as u32 % 9);
        let document = |[b, _, i, j]: [usize; 4]| (b + (i + j) / 5) as u32 % 2;
        let documents = [HostData::of([2, 1, 20, 1], document), HostData::of([2, 1, 1, 30], document)];
        let map = HostData::of([2, 1, 4, 5], |[b, _, i, j]| (b + i + 2 * j) as u32 % 3);
        for case in [
            with(", alone", &|_| ()),
            with(", keep", &|r| r.attn_mask = Some(keep.clone())),
            with(", lengths", &|r| r.lengths = Some(lengths.clone())),
            with(", prefix", &|r| r.prefix = Some(lengths.clone())),
            with(", documents", &|r| r.documents = Some(documents.clone())),
            with(", blocks", &|r| r.blocks = Some((map.clone(), [5, 6]))),
        ] {
            follows(&case);
            check(&mut report, &case);
        }
    }
    report.finish();
}
