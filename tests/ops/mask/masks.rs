//! Every part of a mask, alone and in combination, compared with definitions that are written here
//! a second time.

use wgpu_attention::mask::{Pattern, PatternPart};
use wgpu_attention::tuning::Algorithm;
use wgpu_attention::{Alignment, Attention, Config, DType, Forward, KernelOptions, Mask, Shape};

use crate::harness::meaning::follows;
use crate::harness::run::{Placed, PlacedRules};
use crate::harness::{
    Case, FORMS, HostData, Layout, Place, Report, Rng, Rules, Setup, Weights, defaults, due, profiles, rest,
};

/// More keys than queries, equally many, fewer. No tile divides the lengths.
pub const LENGTHS: [(usize, usize); 4] = [(7, 19), (17, 17), (21, 6), (66, 70)];

pub fn shape((q_len, kv_len): (usize, usize)) -> Shape {
    Shape { batch: 2, heads: 4, kv_heads: 2, q_len, kv_len, head_dim: 5, value_dim: 6 }
}

/// Returns true if query `i` sees key `j`: the definition of a rule.
type Sees = Box<dyn Fn(i64, i64) -> bool>;

/// Returns rules without tensors, and their meaning. `d` is the key at the position of query 0.
fn band_rules(shape: &Shape) -> Vec<(String, Rules, Sees)> {
    let mut all: Vec<(String, Rules, Sees)> = Vec::new();
    for alignment in [Alignment::TopLeft, Alignment::BottomRight, Alignment::Offset(4)] {
        let d = match alignment {
            Alignment::TopLeft => 0,
            Alignment::Offset(n) => n,
            _ => shape.kv_len as i64 - shape.q_len as i64,
        };
        let rules = Rules { alignment, ..Default::default() };
        let causal = Rules { causal: true, ..rules.clone() };
        all.push((format!("causal {alignment:?}"), causal.clone(), Box::new(move |i, j| j <= i + d)));
        let not_self = Rules { exclude_self: true, ..rules.clone() };
        all.push((format!("exclude self {alignment:?}"), not_self, Box::new(move |i, j| j != i + d)));
        let past = Rules { exclude_self: true, ..causal.clone() };
        all.push((format!("strictly causal {alignment:?}"), past, Box::new(move |i, j| j < i + d)));
        for [left, right] in [[0, 0], [3, 0], [0, 2], [2, 5], [1000, 1], [usize::MAX, usize::MAX]] {
            let (l, r) = (left.min(10_000) as i64, right.min(10_000) as i64);
            let window = Some([left, right]);
            let both = Rules { window, ..rules.clone() };
            let name = format!("window {left} {right} {alignment:?}");
            all.push((name, both, Box::new(move |i, j| (i + d - l..=i + d + r).contains(&j))));
            let rules = Rules { window, ..causal.clone() };
            let name = format!("causal window {left} {right} {alignment:?}");
            all.push((name, rules, Box::new(move |i, j| (i + d - l..=i + d).contains(&j))));
        }
    }
    all
}

fn keep_of(shape: &Shape, sees: &Sees) -> HostData<bool> {
    HostData::of([1, 1, shape.q_len, shape.kv_len], |[_, _, i, j]| sees(i as i64, j as i64))
}

#[test]
fn the_reference_follows_the_definitions() {
    for lengths in LENGTHS {
        let shape = shape(lengths);
        for (name, rules, sees) in band_rules(&shape) {
            let case = Case::random("definitions", shape);
            let by_rules = case.clone().with(|c| c.rules = rules).reference::<f64>();
            let by_keep = case.with(|c| c.rules.attn_mask = Some(keep_of(&shape, &sees))).reference::<f64>();
            assert_eq!(by_rules.weights, by_keep.weights, "{name}, {lengths:?}");
            assert_eq!(by_rules.lse, by_keep.lse, "{name}, {lengths:?}");
        }
    }
}

#[test]
fn the_reference_follows_lengths_and_keys() {
    let shape = shape((7, 19));
    let pairs = shape.weights();
    let lens = HostData::of([2, 4, 7, 1], |[b, h, i, _]| ((b * 11 + h * 5 + i * 3) % 23) as u32);
    let keep = HostData::of(pairs, |[b, h, i, j]| j < (b * 11 + h * 5 + i * 3) % 23);
    let case = Case::random("definitions", shape);
    let by_lengths = case.clone().with(|c| c.rules.lengths = Some(lens)).reference::<f64>();
    let by_keep = case.clone().with(|c| c.rules.attn_mask = Some(keep)).reference::<f64>();
    assert_eq!(by_lengths.weights, by_keep.weights);

    let keys = HostData::of([2, 1, 1, 19], |[b, .., j]| (b + j) % 3 != 0);
    let bias =
        HostData::of([2, 1, 1, 19], |[b, .., j]| if (b + j) % 3 != 0 { 0.0 } else { f32::NEG_INFINITY });
    let by_keys = case.clone().with(|c| c.rules.key_padding_mask = Some(keys.clone())).reference::<f64>();
    let by_keep = case.clone().with(|c| c.rules.attn_mask = Some(keys)).reference::<f64>();
    let by_bias = case.with(|c| c.rules.bias = Some(bias)).reference::<f64>();
    assert_eq!(by_keys.weights, by_keep.weights);
    assert_eq!(by_keys.weights, by_bias.weights);
}

/// Checks one device, layout and type each, because a mask's meaning does not depend on them.
/// `property` crosses them.
pub fn check(report: &mut Report, case: &Case) {
    check_paths(report, case, true);
}

/// Like [`check`], but only on the fused path if the staged path would prove nothing new.
pub fn check_paths(report: &mut Report, case: &Case, staged_too: bool) {
    // Cases with the same rules share kernels: for many rows on one target, for few rows on the
    // other.
    let few = case.shape.q_len * case.shape.group() <= 16;
    let own = Rng::named(&case.rules.names().join(" ")).below(2) ^ usize::from(few);
    for (n, form) in FORMS.into_iter().enumerate() {
        if !(n == own && due(&case.rules.names().join(" ")) || rest(&format!("{}, {form:?}", case.name))) {
            continue;
        }
        let staged = Setup {
            layout: if n == 0 { Layout::Blhd } else { Layout::Dense },
            weights: Weights::PerHead(DType::F32),
            ..Setup::plain(profiles()[n], form, Algorithm::Staged)
        };
        let fused = Setup { path: Algorithm::Fused, weights: Weights::None, ..staged };
        let mut truths = Default::default();
        // Both softmax kernels contain the same text for the mask.
        if staged_too && n == own {
            report.check_in(case, &staged, &mut truths);
        }
        report.check_in(case, &fused, &mut truths);
    }
}

#[test]
fn rules_without_tensors() {
    let mut report = Report::new("masks, rules");
    for lengths in LENGTHS {
        let shape = shape(lengths);
        for (name, rules, _) in band_rules(&shape) {
            check(
                &mut report,
                &Case::random(format!("{name}, {lengths:?}"), shape).with(|c| c.rules = rules),
            );
        }
    }
    report.finish();
}

#[test]
fn tensors_broadcast_along_any_axes() {
    let mut report = Report::new("masks, tensors");
    let shape = shape((7, 19));
    let [b, h, i, j] = shape.weights();
    for repeats in 0..16usize {
        let of = |to: [usize; 4]| std::array::from_fn(|a| if repeats >> a & 1 == 1 { 1 } else { to[a] });
        let pairs = of([b, h, i, j]);
        let part = |salt: usize| {
            HostData::of(pairs, |[b, h, i, j]| !(b * 7 + h * 5 + i * 3 + j * 2 + salt).is_multiple_of(4))
        };
        let name = |what: &str| format!("{what} {pairs:?}");
        check(&mut report, &Case::random(name("keep"), shape).with(|c| c.rules.attn_mask = Some(part(1))));
        check(
            &mut report,
            &Case::random(name("keys"), shape).with(|c| c.rules.key_padding_mask = Some(part(2))),
        );
        let both =
            |c: &mut Case| (c.rules.attn_mask, c.rules.key_padding_mask) = (Some(part(1)), Some(part(2)));
        check(&mut report, &Case::random(name("keep and keys"), shape).with(both));
        let bias = HostData::of(pairs, |[b, h, i, j]| match (b + h * 2 + i * 3 + j) % 5 {
            0 => f32::NEG_INFINITY,
            n => n as f32 - 2.0,
        });
        check(&mut report, &Case::random(name("bias"), shape).with(|c| c.rules.bias = Some(bias)));
        if repeats < 8 {
            let lens = HostData::of(of([b, h, i, 1]), |[b, h, i, _]| ((b * 11 + h * 5 + i * 3) % 23) as u32);
            check(&mut report, &Case::random(name("lengths"), shape).with(|c| c.rules.lengths = Some(lens)));
        }
    }
    report.finish();
}

/// Returns every rule that depends on positions. Query offsets differ by batch entry, and some are
/// past every key.
fn offset_rules(shape: &Shape) -> Vec<(String, Rules)> {
    let [b, h, i, j] = shape.weights();
    let none = Rules::default;
    let causal = || Rules { causal: true, ..none() };
    let slopes = || Some(HostData::of([1, h, 1, 1], |[_, h, ..]| 0.25 - 0.125 * h as f32));
    let strided = Pattern::Strided { stride: 3, part: PatternPart::ByHead };
    let globals = Some(HostData::of([1, 1, 1, j], |[.., j]| j % 7 == 3));
    let prefix = Some(HostData::of([b, 1, 1, 1], |[b, ..]| 2 + 3 * b as u32));
    let keep = HostData::of([1, 1, i, i], |[.., i, j]| j == i || j < i && (i + j) % 2 == 1);
    let table = HostData::of([1, h, 1, 9], |[_, h, _, n]| (n as f32 - 2.0 * h as f32) * 0.25);
    let all = vec![
        ("causal", causal()),
        ("window", Rules { window: Some([4, 2]), ..none() }),
        ("causal window", Rules { window: Some([5, 0]), ..causal() }),
        ("no bound", Rules { window: Some([usize::MAX, usize::MAX]), ..none() }),
        ("exclude self", Rules { exclude_self: true, ..causal() }),
        ("strided", Rules { pattern: Some(strided), ..causal() }),
        ("local", Rules { pattern: Some(Pattern::Local { block: 5 }), ..none() }),
        ("alibi", Rules { slopes: slopes(), ..causal() }),
        ("symmetric alibi", Rules { slopes: slopes(), symmetric: true, ..none() }),
        ("relative", Rules { relative: Some(table), ..none() }),
        ("globals", Rules { window: Some([2, 1]), globals, ..none() }),
        ("prefix", Rules { window: Some([3, 0]), prefix, ..causal() }),
        ("tree", Rules { tree: Some(keep), ..causal() }),
        ("lengths", Rules { lengths: Some(HostData::new(vec![5, 0], [b, 1, 1, 1])), ..causal() }),
    ];
    let offsets = [vec![0, 3], vec![j as u32 - 2, 1], vec![6], vec![j as u32 + 9, u32::MAX]];
    let mut rules = Vec::new();
    for (n, (name, of)) in all.into_iter().enumerate() {
        for offsets in [&offsets[n % 3], &offsets[3]] {
            // Far from every key, the slopes' terms are not exact in f32.
            let exact = of.slopes.is_none() || !offsets.contains(&u32::MAX);
            let offsets: Vec<_> = offsets.iter().map(|n| if exact { *n } else { (*n).min(1000) }).collect();
            let name = format!("{name}, offsets {offsets:?}");
            let offsets = HostData { shape: [offsets.len(), 1, 1, 1], data: offsets };
            rules.push((name, Rules { query_offsets: Some(offsets), ..of.clone() }));
        }
        let alignment = [Alignment::Offset(-3), Alignment::Offset(5)][n % 2];
        rules.push((format!("{name}, {alignment:?}"), Rules { alignment, ..of }));
    }
    rules
}

#[test]
fn query_offsets_match_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("masks, query offsets");
    for lengths in LENGTHS {
        let shape = shape(lengths);
        for (name, rules) in offset_rules(&shape) {
            let case = Case::random(format!("{name}, {lengths:?}"), shape).with(|c| c.rules = rules);
            follows(&case);
            // Few queries and many. Kernels take the other differences as parameters.
            if [LENGTHS[0], LENGTHS[3]].contains(&lengths) {
                check(&mut report, &case);
            }
        }
    }
    report.finish();
}

/// Offsets that are equivalent to an alignment give the same bits. They replace the alignment.
#[test]
fn offset_equals_alignment() {
    for (q_len, kv_len) in [(7, 19), (17, 17)] {
        let shape = shape((q_len, kv_len));
        for (alignment, offset) in [(Alignment::BottomRight, kv_len - q_len), (Alignment::TopLeft, 0)] {
            let slopes = HostData::of([1, 4, 1, 1], |[_, h, ..]| 0.5 - 0.25 * h as f32);
            let rules =
                Rules { causal: true, window: Some([5, 0]), slopes: Some(slopes), ..Default::default() };
            let of = |rules| Case::random("alignments", shape).with(|c| c.rules = rules).reference::<f64>();
            let want = of(Rules { alignment, ..rules.clone() });
            let constant = of(Rules { alignment: Alignment::Offset(offset as i64), ..rules.clone() });
            let offsets = HostData::new(vec![offset as u32], [1; 4]);
            let other = if offset == 0 { Alignment::BottomRight } else { Alignment::TopLeft };
            let each = of(Rules { alignment: other, query_offsets: Some(offsets), ..rules });
            assert!(want.weights == constant.weights && want.lse == constant.lse, "{alignment:?}, constant");
            assert!(want.weights == each.weights && want.lse == each.lse, "{alignment:?}, per batch entry");
        }
    }
}

#[test]
fn everything_together() {
    let mut report = Report::new("masks, everything");
    for lengths in LENGTHS {
        let shape = shape(lengths);
        let [b, h, i, j] = shape.weights();
        for alignment in [Alignment::TopLeft, Alignment::BottomRight] {
            let rules = Rules {
                causal: true,
                alignment,
                window: Some([9, 3]),
                exclude_self: true,
                lengths: Some(HostData::of([b, 1, 1, 1], |[b, ..]| (j - b) as u32)),
                attn_mask: Some(HostData::of([1, h, i, j], |[_, h, i, j]| (h + i + 2 * j) % 5 != 0)),
                key_padding_mask: Some(HostData::of([b, 1, 1, j], |[b, .., j]| (b + j) % 7 != 3)),
                bias: Some(HostData::of([1, h, 1, j], |[_, h, _, j]| (h as f32 - 1.5) * 0.1 * j as f32)),
                ..Default::default()
            };
            let case = Case::random(format!("everything, {alignment:?}, {lengths:?}"), shape)
                .with(|c| (c.rules, c.softcap) = (rules, Some(4.0)));
            report.check(&case);
        }
    }
    report.finish();
}

/// A device binds fewer buffers than the fused path needs. The report lists a skip, and the staged
/// path runs.
#[test]
fn many_tensors_take_staged_path() {
    let shape = shape((7, 19));
    let [b, h, i, j] = shape.weights();
    // The tensors q, k, v, out and lse leave three bindings.
    let mut case = Case::random("many tensors", shape).with(|c| {
        c.rules.lengths = Some(HostData::new(vec![17, 12], [b, 1, 1, 1]));
        c.rules.attn_mask = Some(HostData::of([1, 1, i, j], |[_, _, i, j]| (i + 2 * j) % 5 != 0));
        c.rules.key_padding_mask = Some(HostData::of([b, 1, 1, j], |[b, .., j]| (b + j) % 7 != 3));
    });
    let auto = Setup::plain(defaults(), FORMS[1], Algorithm::Auto);
    let fused = Setup { path: Algorithm::Fused, ..auto };
    let mut report = Report::new("masks, many tensors");
    let mut check = |case: &Case, setups: &[Setup]| {
        setups.iter().for_each(|setup| report.check_in(case, setup, &mut Default::default()));
        report.skips()
    };
    assert_eq!(check(&case, &[fused, auto]), 0, "eight buffers fit");
    assert_eq!(scratch_bytes(&case, &auto), 0, "they take the fused path");

    case.name += ", one more";
    case.rules.bias = Some(HostData::of([1, h, 1, j], |[_, h, _, j]| (h as f32 - 1.5) * 0.1 * j as f32));
    assert_eq!(check(&case, &[fused, auto]), 1, "the refusal is named");
    let matrix = b * h * i * j.next_multiple_of(4) * 4;
    assert_eq!(scratch_bytes(&case, &auto), matrix as u64, "Auto takes the staged path");
    assert_eq!(scratch_bytes(&case, &Setup { lse: false, ..auto }), 0, "without lse they fit");
    report.finish();
}

/// Returns the bytes of temporary memory for `case`.
fn scratch_bytes(case: &Case, setup: &Setup) -> u64 {
    let shape = case.shape;
    let [q, k, v, out, lse] = [shape.q(), shape.k(), shape.v(), shape.out(), shape.lse()]
        .map(|shape| Placed::output(setup.profile, DType::F32, Place::dense(shape)));
    let rules = PlacedRules::new(setup.profile, &case.rules, DType::F32, Layout::Dense);
    let call = Forward::new(q.view(), k.view(), v.view(), out.view())
        .mask(rules.mask())
        .lse(setup.lse.then(|| lse.view()));
    let config = Config::of(&shape);
    let attention = Attention::with_pipelines(
        setup.profile.gpu.pipelines(),
        config.kernel_options(KernelOptions::new().algorithm(setup.path)),
    );
    attention.expect("an operator").scratch_size(&call).expect("a size").total()
}

#[test]
fn window_and_causal_intersect() {
    // The order of the builder's calls does not matter.
    let shape = shape((9, 9));
    let case = Case::random("order", shape);
    let masks: [wgpu_attention::mask::HostMask; 2] =
        [Mask::causal().window(4, 2), Mask::none().window(4, 2).and_causal()];
    let [a, b] = masks.map(|mask| {
        let options = case.options().mask(mask);
        let [q, k, v] = [&case.q, &case.k, &case.v].map(|x| wgpu_attention::reference::widen::<f64>(x));
        wgpu_attention::reference::attention(&q, &k, &v, shape, &options)
            .expect("fits")
            .weights
            .expect("asked for")
    });
    assert_eq!(a, b);
    assert!(a.iter().enumerate().all(|(n, w)| (*w > 0.0) == (n % 9 <= n / 9 % 9 && n % 9 + 4 >= n / 9 % 9)));
}
