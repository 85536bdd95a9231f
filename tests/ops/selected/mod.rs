//! Selected attention: vectors, shapes, lists and gradients.

mod caches;
mod errors;
pub mod indexer;
mod native;

use wgpu_attention::reference::compare::compare;
use wgpu_attention::tuning::Target;
use wgpu_attention::{Alignment, DType, Shape};

use crate::harness::device::full;
use crate::harness::operator_setup::setups;
use crate::harness::selected::SelectedCase;
use crate::harness::{Case, FORMS, HostData, Layout, OperatorSetup, Report, Rng, Vector, due, rest};

pub const FAMILY: &str = "selected";
pub const NAMES: &[&str] = &[
    "selected_blocks16",
    "selected_blocks16_bwd",
    "selected_decode",
    "selected_duplicates",
    "selected_empty",
    "selected_latent",
    "selected_later_keys",
    "selected_per_kv_head",
    "selected_shared",
    "selected_weights",
    "selected_window",
    "selected_window_sinks",
];

fn plain(form: Target) -> OperatorSetup {
    OperatorSetup::plain(full(), form)
}

fn from_vector(vector: &Vector) -> SelectedCase {
    let [batch, heads, q_len, head_dim] = vector.shape4("q");
    let latent = vector.has("kv");
    let keys = if latent { "kv" } else { "k" };
    let [_, kv_heads, kv_len, _] = vector.shape4(keys);
    let value_dim = if latent { vector.size("value_dim") } else { vector.shape4("v")[3] };
    let shape = Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim };
    let mut case = Case::random(&vector.name, shape);
    (case.q, case.k) = (vector.f32("q"), vector.f32(keys));
    if !latent {
        case.v = vector.f32("v");
    }
    case.scale = vector.number("scale");
    case.rules.causal = vector.attrs["causal"].is_string();
    let bottom_right = vector.attrs["causal"] == "bottom_right";
    case.rules.alignment = if bottom_right { Alignment::BottomRight } else { Alignment::TopLeft };
    case.rules.sinks = vector.has("sinks").then(|| HostData::new(vector.f32("sinks"), [1, heads, 1, 1]));
    let indices = vector.f64("indices").into_iter().map(|n| n as i64 as u32).collect();
    let case = SelectedCase {
        case,
        indices: HostData::new(indices, vector.shape4("indices")),
        block: vector.size("block"),
        window: vector.size("window"),
        latent,
        d_out: if vector.has("dout") { vector.f32("dout") } else { Vec::new() },
    };
    case.with(|_| {})
}

#[test]
fn results_match_vectors() {
    let mut report = Report::new("selected attention, vectors");
    for (n, name) in NAMES.iter().enumerate() {
        let vector = Vector::load(FAMILY, name);
        let case = from_vector(&vector);
        let against = |tensor: &str, got: &[f64]| {
            let (want, tolerance) = vector.expected(tensor).expect("in the vector");
            compare(got, &want, tolerance).map_err(|e| format!("{tensor}, against the vector: {e}"))
        };
        let has_weights = vector.has("weights");
        let has_sinks = vector.has("sinks");
        let attended = case.reference::<f64>();
        against("out", &attended.out).unwrap_or_else(|e| panic!("{name}, reference: {e}"));
        // The vectors' lse omits sinks.
        if !has_sinks {
            against("lse", &attended.lse).unwrap_or_else(|e| panic!("{name}, reference: {e}"));
        }
        let backward = !case.d_out.is_empty();
        let d_names = ["dq", if case.latent { "dkv" } else { "dk" }, "dv", "dsinks"];
        if backward {
            for (tensor, got) in
                d_names.into_iter().zip(case.gradients::<f64>()).filter(|(t, _)| vector.has(t))
            {
                against(tensor, &got).unwrap_or_else(|e| panic!("{name}, reference: {e}"));
            }
        }
        for (m, form) in FORMS.into_iter().enumerate() {
            let setup = plain(form);
            if n % 2 != m && !rest(&format!("{name}, {setup}")) {
                continue;
            }
            let judged = case.forward(&setup, false).and_then(|ran| {
                against("out", &ran.out)?;
                if !has_sinks {
                    against("lse", &ran.lse)?;
                }
                if has_weights {
                    against("weights", &ran.weights)?;
                }
                if !backward {
                    return Ok(ran.ratio);
                }
                let (ratio, gradients) = case.backward(&setup)?;
                for (tensor, got) in d_names.into_iter().zip(&gradients).filter(|(t, _)| vector.has(t)) {
                    against(tensor, got)?;
                }
                Ok(ran.ratio.max(ratio))
            });
            report.record(name, &setup, judged);
        }
        for setup in setups(name, n) {
            let case = case.stored(setup.dtype).with(|_| {});
            let judged = case.forward(&setup, n % 2 == 0).and_then(|ran| {
                if backward { Ok(ran.ratio.max(case.backward(&setup)?.0)) } else { Ok(ran.ratio) }
            });
            report.record(name, &setup, judged);
        }
    }
    report.finish();
}

/// A shape from batch, heads, key/value heads, queries, keys, channels of keys and of values.
fn shape([batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim]: [usize; 7]) -> Shape {
    Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim }
}

/// Sizes, heads of lists, indices of a list, keys of a block, and the window.
type Sizes = ([usize; 7], [usize; 2], usize, usize);

const SIZES: [Sizes; 8] = [
    ([1, 8, 1, 5, 300, 64, 64], [1, 40], 1, 0),
    ([2, 4, 2, 7, 90, 12, 20], [2, 9], 1, 5),
    ([1, 4, 2, 3, 70, 16, 8], [4, 12], 1, 0),
    ([3, 6, 3, 1, 130, 32, 33], [1, 17], 4, 3),
    ([1, 2, 2, 40, 40, 7, 5], [2, 3], 16, 1),
    ([1, 16, 1, 2, 500, 40, 32], [1, 100], 1, 20),
    ([2, 4, 4, 9, 64, 128, 128], [1, 5], 3, 0),
    ([1, 12, 2, 4, 1000, 24, 24], [2, 33], 32, 64),
];

fn sized((sizes, lists, block, window): Sizes) -> SelectedCase {
    let name = format!("{sizes:?}, lists {lists:?}, block {block}, window {window}");
    SelectedCase::random(name, shape(sizes), lists, block).with(|c| {
        c.window = window;
        c.case.rules.causal = sizes[3] != 3;
        let mut rng = Rng::named("sinks");
        c.case.rules.sinks = (window > 0).then(|| HostData::new(rng.normals(sizes[1]), [1, sizes[1], 1, 1]));
    })
}

#[test]
fn results_match_reference() {
    let mut report = Report::new("selected attention, shapes");
    for (n, sizes) in SIZES.into_iter().enumerate() {
        let case = sized(sizes);
        let name = case.case.name.clone();
        if n > 3 && !due(&name) {
            continue;
        }
        let mut all = setups(&name, n);
        all.push(plain(FORMS[n % 2]));
        for setup in all {
            let case = case.stored(setup.dtype);
            let judged =
                case.forward(&setup, n % 2 == 1).and_then(|ran| Ok(ran.ratio.max(case.backward(&setup)?.0)));
            report.record(&name, &setup, judged);
        }
    }
    report.finish();
}

/// Latent values, softcap, and masks that hide keys.
#[test]
fn options_match_reference() {
    let mut report = Report::new("selected attention, options");
    let base = |name: &str| {
        SelectedCase::random(name, shape([2, 4, 1, 9, 80, 40, 32]), [1, 14], 1)
            .with(|c| c.case.rules.causal = true)
    };
    let cases = [
        base("latent").with(|c| c.latent = true),
        base("latent, in blocks").with(|c| (c.latent, c.block) = (true, 4)),
        base("softcap").with(|c| c.case.softcap = Some(1.5)),
        base("lengths").with(|c| c.case.rules.lengths = Some(HostData::new(vec![30, 77], [2, 1, 1, 1]))),
        base("query offsets").with(|c| {
            c.window = 6;
            c.case.rules.query_offsets = Some(HostData::new(vec![12, 50], [2, 1, 1, 1]));
        }),
        base("packed").with(|c| {
            c.window = 3;
            let of = |starts: Vec<u32>| HostData::new(starts, [1, 1, 1, 4]);
            c.case.rules.packed = Some([of(vec![0, 3, 3, 9]), of(vec![0, 20, 40, 80])]);
        }),
        base("a tensor of pairs").with(|c| {
            c.case.rules.attn_mask = Some(HostData::of([2, 1, 9, 80], |[b, _, i, j]| (b + i + j) % 3 != 0));
        }),
        base("top left").with(|c| {
            c.window = 2;
            c.case.rules.alignment = Alignment::TopLeft;
        }),
    ];
    for (n, case) in cases.into_iter().enumerate() {
        for setup in
            [plain(FORMS[n % 2]), OperatorSetup { layout: Layout::Window(5), ..plain(FORMS[1 - n % 2]) }]
        {
            let judged =
                case.forward(&setup, false).and_then(|ran| Ok(ran.ratio.max(case.backward(&setup)?.0)));
            report.record(&case.case.name, &setup, judged);
        }
    }
    report.finish();
}

/// Lists in another order, with repetitions, are the same set: the same bits.
#[test]
fn equal_sets_give_equal_bits() {
    for form in FORMS {
        let case = sized(SIZES[1]);
        let other = case.clone().with(|c| {
            let count = c.indices.shape[3];
            let mut rng = Rng::named("order");
            let lists = c.indices.data.chunks(count).flat_map(|list| {
                let mut list = list.to_vec();
                list.extend([list[0], list[3], u32::MAX]);
                let turn = rng.below(list.len());
                list.rotate_left(turn);
                list.reverse();
                list
            });
            let data = lists.collect();
            c.indices.shape[3] = count + 3;
            c.indices = HostData::new(data, c.indices.shape);
        });
        let setup = plain(form);
        let [a, b] = [&case, &other].map(|case| case.forward(&setup, false).expect("a run"));
        assert_eq!((a.out, a.lse), (b.out, b.lse));
        let [a, b] = [&case, &other].map(|case| case.backward(&setup).expect("a run"));
        assert_eq!(a.1, b.1);
    }
}

/// A list of all keys, a window over all keys, and attention to all keys are the same.
#[test]
fn all_keys_are_attention() {
    let setup = plain(Target::Software);
    let sizes = [1, 8, 1, 3, 200, 64, 64];
    let listed = SelectedCase::random("all keys", shape(sizes), [1, 200], 1).with(|c| {
        c.indices = HostData::of([1, 1, 3, 200], |[_, _, _, n]| n as u32);
        c.case.rules.causal = true;
    });
    let near = listed.clone().with(|c| {
        c.window = 200;
        c.indices = HostData::of([1, 1, 3, 1], |_| u32::MAX);
    });
    let [a, b] = [&listed, &near].map(|case| case.forward(&setup, false).expect("a run"));
    assert_eq!((&a.out, &a.lse), (&b.out, &b.lse));
    // The plan of one query is attention's: eight rows, and the keys in order.
    let one = listed.clone().with(|c| {
        c.case = Case::random("one query", shape([1, 8, 1, 1, 200, 64, 64]));
        c.indices = HostData::of([1, 1, 1, 200], |[_, _, _, n]| n as u32);
        c.d_out.truncate(512);
    });
    let ran = one.forward(&setup, false).expect("a run");
    let dense = crate::harness::Setup {
        profile: full(),
        form: Target::Software,
        path: wgpu_attention::tuning::Algorithm::Fused,
        dtype: DType::F32,
        bias: DType::F32,
        layout: Layout::Dense,
        lse: true,
        weights: crate::harness::Weights::None,
    };
    let got = crate::harness::run(&one.case, &dense).expect("a run");
    assert_eq!((got.out, got.lse), (ran.out, Some(ran.lse)));
}

#[test]
fn twenty_runs_are_equal() {
    let case = sized(SIZES[5]);
    for form in FORMS {
        let setup = plain(form);
        let run = || {
            let forward = case.forward(&setup, false).expect("a run");
            (forward.out, forward.lse, case.backward(&setup).expect("a run").1)
        };
        let first = run();
        assert!((1..20).all(|_| run() == first));
    }
}

/// Lists that need several spans of queries.
#[test]
fn runs_match_reference() {
    let mut report = Report::new("selected attention, several spans of queries");
    let many = SelectedCase::random("several runs", shape([1, 2, 1, 300, 700, 128, 128]), [1, 500], 1);
    let more = SelectedCase::random("several batch entries", shape([260, 4, 4, 1, 500, 64, 64]), [1, 300], 1);
    for (case, form) in [(many, FORMS[1]), (more, FORMS[0])] {
        let case = case.with(|c| c.case.rules.causal = true);
        let setup = plain(form);
        report.record(&case.case.name, &setup, case.backward(&setup).map(|(ratio, _)| ratio));
    }
    report.finish();
}

/// Sinks of each sequence, with one query or several of each.
#[test]
fn sinks_of_sequences_match_reference() {
    let mut report = Report::new("selected attention, sinks of sequences");
    for (n, q_len) in [1, 6].into_iter().enumerate() {
        let name = format!("{q_len} queries");
        let case = SelectedCase::random(name, shape([3, 4, 2, q_len, 50, 16, 12]), [1, 12], 1).with(|c| {
            c.case.rules.causal = true;
            c.case.rules.sinks = Some(HostData::new(Rng::named("sinks").normals(12), [3, 4, 1, 1]));
        });
        for accumulates in [false, true] {
            let setup = OperatorSetup { accumulates, ..plain(FORMS[n]) };
            let judged =
                case.forward(&setup, false).and_then(|ran| Ok(ran.ratio.max(case.backward(&setup)?.0)));
            report.record(&case.case.name, &setup, judged);
        }
    }
    report.finish();
}
