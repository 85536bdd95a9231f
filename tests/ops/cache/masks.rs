//! Every part of a mask over the keys of a cache, with sequences of different lengths.

use wgpu_attention::cache::{CacheLayout, CacheStorage, ScaleGroup};
use wgpu_attention::mask::{Pattern, PatternPart};
use wgpu_attention::{Alignment, DType};

use crate::harness::{
    Ask, Bed, Count, Data, FORMS, HostData, Kind, Layout, Report, Rng, Rules, due, full, profiles, rest,
};

/// Returns name, rules and softcap for `rows` queries. `keys` is the capacity, or 1 for a ring.
fn masks(kind: &Kind, rows: usize, keys: usize) -> Vec<(&'static str, Rules, Option<f64>)> {
    let (batch, heads) = (kind.batch, kind.heads);
    let none = Rules::default;
    let causal = || Rules { causal: true, ..none() };
    let mut rng = Rng::new(5 + rows as u64);
    let mut bools = |shape: [usize; 4], p| Some(HostData::new(rng.bools(shape.iter().product(), p), shape));
    let table = |shape: [usize; 4], f: fn(usize) -> f32| {
        Some(HostData::new((0..shape.iter().product()).map(f).collect(), shape))
    };
    let numbers = |shape: [usize; 4], f: fn(usize) -> u32| {
        Some(HostData::new((0..shape.iter().product()).map(f).collect(), shape))
    };
    let pattern = |pattern| Rules { pattern: Some(pattern), ..causal() };
    let slopes = || table([1, heads, 1, 1], |h| 0.5 / (1 << h) as f32);
    let logits = || table([1, heads, 1, 1], |h| h as f32 - 1.5);
    let bias = |n: usize| if n % 7 == 3 { f32::NEG_INFINITY } else { (n % 5) as f32 * 0.25 };
    let tree = HostData::of([1, 1, rows, rows], |[.., i, j]| j == i || (j < i && (i + j) % 2 == 1));
    let top_left = Rules { alignment: Alignment::TopLeft, ..causal() };
    vec![
        ("nothing", none(), None),
        ("causal", causal(), None),
        ("causal, top left", top_left, None),
        ("window", Rules { window: Some([5, 1]), ..none() }, None),
        ("causal window", Rules { window: Some([3, 0]), ..causal() }, None),
        ("softcap", causal(), Some(1.5)),
        ("alibi", Rules { slopes: slopes(), ..causal() }, None),
        ("symmetric alibi", Rules { slopes: slopes(), symmetric: true, ..none() }, None),
        (
            "relative",
            Rules { relative: table([1, heads, 1, 9], |n| (n % 9) as f32 * 0.5 - 2.0), ..none() },
            None,
        ),
        ("logits", Rules { sinks: logits(), ..causal() }, None),
        ("exclude self", Rules { exclude_self: true, ..causal() }, None),
        ("keep", Rules { attn_mask: bools([batch, 1, rows, keys], 0.6), ..none() }, None),
        ("keys", Rules { key_padding_mask: bools([batch, heads, 1, keys], 0.7), ..causal() }, None),
        ("bias", Rules { bias: table([1, heads, rows, keys], bias), ..causal() }, None),
        ("globals", Rules { globals: bools([1, 1, 1, keys], 0.2), window: Some([2, 0]), ..causal() }, None),
        ("lengths", Rules { lengths: numbers([batch, 1, rows, 1], |n| 3 + 5 * n as u32), ..none() }, None),
        ("prefix", Rules { prefix: numbers([batch, 1, 1, 1], |n| 40 * n as u32 + 5), ..causal() }, None),
        (
            "prefix and window",
            Rules { prefix: numbers([1, 1, rows, 1], |n| 2 * n as u32), window: Some([2, 0]), ..causal() },
            None,
        ),
        ("dilated", pattern(Pattern::Dilated { dilation: 3 }), None),
        ("local", pattern(Pattern::Local { block: 5 }), None),
        ("strided", pattern(Pattern::Strided { stride: 4, part: PatternPart::Both }), None),
        ("fixed", pattern(Pattern::Fixed { stride: 4, summary: 1, part: PatternPart::ByHead }), None),
        (
            "documents",
            Rules {
                documents: numbers([batch, 1, rows, 1], |n| n as u32 % 2)
                    .zip(numbers([1, 1, 1, keys], |n| (n / 3) as u32 % 2))
                    .map(|(q, k)| [q, k]),
                ..none()
            },
            None,
        ),
        ("tree", Rules { tree: Some(tree.clone()), ..none() }, None),
        (
            "everything",
            Rules { tree: Some(tree), window: Some([17, 0]), slopes: slopes(), sinks: logits(), ..causal() },
            Some(4.0),
        ),
    ]
}

/// Few rows, so that every mask is one shader per target.
#[test]
fn every_mask_over_every_layout() {
    crate::harness::in_turn!();
    let mut report = Report::new("caches, masks");
    let names: Vec<_> = masks(&Kind::new(CacheStorage::F32, CacheLayout::Contiguous, 1), 1, 1)
        .into_iter()
        .map(|(name, ..)| name)
        .collect();
    for (l, (layout, storage, capacity)) in [
        (CacheLayout::Contiguous, CacheStorage::F32, 40),
        (CacheLayout::Ring { sink_tokens: 3 }, CacheStorage::Q8(ScaleGroup::Of(32)), 12),
        (CacheLayout::Paged { page: 16, pages: 6 }, CacheStorage::F16, 41),
    ]
    .into_iter()
    .enumerate()
    {
        let kind = Kind::new(storage, layout, capacity);
        let keys = if kind.ring().is_some() { 1 } else { capacity };
        for (n, form) in FORMS.into_iter().enumerate() {
            let mut bed = Bed::new(profiles()[n], kind, Data::Lossless, 51);
            let mut ask = |bed: &mut Bed, rows: Option<usize>| {
                for mask in 0..names.len() {
                    // The usual runs use one layout per target, and different layouts for the two
                    // targets.
                    let name = names[mask];
                    let (usual, key) = ((mask + n) % 3 == l, format!("caches, {name}, {layout:?}, {form:?}"));
                    if !(usual && due(&key) || rest(&key)) {
                        continue;
                    }
                    let (_, rules, softcap) =
                        masks(&kind, rows.unwrap_or(bed.advanced), keys).swap_remove(mask);
                    bed.profile.tidy();
                    let splits = [None, Some(3)][mask % 2];
                    let layout = [Layout::Dense, Layout::Window(2 * mask as u64 + 1)][n];
                    // Queries, the cache's three buffers, out, lse and three tensors would exceed
                    // the bindings of the plain device.
                    let lse = name != "everything";
                    let ask = Ask { rows, softcap, splits, layout, lse, ..Ask::new(form, &rules) };
                    let outcome = bed.ask(&ask);
                    report.record(name, &format!("{layout:?}, {form:?}, {:?}", bed.kind.layout), outcome);
                }
            };
            let grow = |bed: &mut Bed, counts: [usize; 2]| {
                bed.grow(&Count::Each(counts.to_vec())).expect("room");
            };
            grow(&mut bed, [3, 0]);
            ask(&mut bed, None);
            grow(&mut bed, [11, 9]);
            grow(&mut bed, [4, 2]);
            ask(&mut bed, None);
            grow(&mut bed, [14, 0]);
            grow(&mut bed, [1, 1]);
            ask(&mut bed, None);
            ask(&mut bed, Some(3));
        }
    }
    report.finish();
}

/// Tensors that are added to scores, in f16.
#[test]
fn mask_tensors_in_f16() {
    crate::harness::in_turn!();
    let mut report = Report::new("caches, masks in f16");
    let profile = full();
    for form in FORMS {
        let kind = Kind::new(CacheStorage::F32, CacheLayout::Contiguous, 20);
        let mut bed = Bed::new(profile, kind, Data::Lossless, 53);
        bed.grow(&Count::Each(vec![13, 2])).expect("room");
        let added = masks(&kind, 2, 20).into_iter().filter(|(_, rules, _)| rules.floats().count() > 0);
        for (n, (name, rules, softcap)) in added.enumerate() {
            if FORMS[n % 2] != form && !rest(&format!("caches, {name} in f16")) {
                continue;
            }
            let bias = DType::F16;
            let outcome = bed.ask(&Ask { rows: Some(2), softcap, bias, ..Ask::new(form, &rules) });
            report.record(name, &format!("{form:?}"), outcome);
        }
    }
    report.finish();
}
