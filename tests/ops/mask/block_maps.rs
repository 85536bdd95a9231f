//! Block maps: made from masks on the host and on devices, and used instead of them.

use wgpu_attention::mask::Pattern;
use wgpu_attention::mask::block_map::{big_bird, state};
use wgpu_attention::reference::{MultiHeadShape, classify};
use wgpu_attention::tuning::Algorithm;
use wgpu_attention::{DType, Shape};

use crate::harness::classify::classified;
use crate::harness::gradients::LayerProblem;
use crate::harness::layer::{LayerCase, LayerLayout, LayerSetup, Storage};
use crate::harness::layer_backward::LayerBackwardSetup;
use crate::harness::layer_options::LayerOptions;
use crate::harness::{
    Case, FORMS, HostData, Layout, Profile, Report, Rules, Setup, Weights, due, profiles, rest,
};

const SHAPE: Shape =
    Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 70, kv_len: 90, head_dim: 8, value_dim: 12 };

/// Masks with hidden, mixed and full blocks.
fn masks() -> Vec<(&'static str, Rules)> {
    let [b, h, i, j] = SHAPE.weights();
    let none = Rules::default;
    let steps = |[_, _, i, j]: [usize; 4]| match (i / 16 + j / 16) % 3 {
        0 => 0.0,
        1 => f32::NEG_INFINITY,
        _ if j % 16 == 5 => 0.5,
        _ => 0.0,
    };
    vec![
        ("none", none()),
        ("causal", Rules { causal: true, ..none() }),
        ("window", Rules { window: Some([20, 3]), ..none() }),
        (
            "query offsets",
            Rules {
                causal: true,
                window: Some([30, 0]),
                query_offsets: Some(HostData::new(vec![3, 40], [b, 1, 1, 1])),
                ..none()
            },
        ),
        (
            "keep",
            Rules {
                attn_mask: Some(HostData::of([1, 1, i, j], |[_, _, i, j]| i / 16 != j / 16 && j != 3)),
                ..none()
            },
        ),
        (
            "keys",
            Rules {
                key_padding_mask: Some(HostData::of([b, 1, 1, j], |[b, _, _, j]| j < 33 + 20 * b)),
                ..none()
            },
        ),
        (
            "lengths",
            Rules { lengths: Some(HostData::of([1, h, 1, 1], |[_, h, ..]| 16 * h as u32)), ..none() },
        ),
        ("bias", Rules { bias: Some(HostData::of([1, 1, i, j], steps)), ..none() }),
        ("pattern", Rules { pattern: Some(Pattern::Local { block: 32 }), causal: true, ..none() }),
        (
            "documents",
            Rules {
                documents: Some([
                    HostData::of([1, 1, i, 1], |[_, _, i, _]| i as u32 / 20),
                    HostData::of([1, 1, 1, j], |[.., j]| j as u32 / 20),
                ]),
                ..none()
            },
        ),
    ]
}

/// Checks the maps of a mask on these devices. Adds the number of blocks in each state to `states`.
fn check_maps(
    (name, rules): &(&str, Rules),
    profiles: &[&'static Profile],
    size: [usize; 2],
    heads: [usize; 2],
    states: &mut [usize; 3],
) {
    let want = classify(&rules.host(), SHAPE, size, heads).expect("a map");
    want.iter().for_each(|s| states[*s as usize] += 1);
    for profile in profiles {
        let got = pollster::block_on(classified(profile, rules, &SHAPE, size, heads)).expect("a map");
        assert_eq!(got, want, "{name}, {size:?}, {heads:?}, {}", profile.name);
    }
}

#[test]
fn device_maps_equal_reference() {
    crate::harness::in_turn!();
    let mut states = [0; 3];
    for mask in masks() {
        for size in [[16, 16], [7, 33], [1, 90], [1000, 1000]] {
            for heads in [[1, 1], [2, 1], [1, 4], [2, 4]] {
                check_maps(&mask, &profiles(), size, heads, &mut states);
            }
        }
    }
    assert!(states.iter().all(|n| *n > 50), "{states:?}: every state must come up");
}

/// The part of the test above that always runs.
#[test]
fn small_device_maps_equal_reference() {
    let mut states = [0; 3];
    for (n, mask) in masks().iter().enumerate() {
        check_maps(mask, &[profiles()[n % 2]], [16, 16], [2, 4], &mut states);
    }
    assert!(states.iter().all(|n| *n > 50), "{states:?}: every state must come up");
}

#[test]
fn map_with_its_mask_changes_nothing() {
    crate::harness::in_turn!();
    let mut report = Report::new("block maps");
    for (mask, (name, rules)) in masks().into_iter().enumerate() {
        for size in [[16, 16], [64, 64], [33, 20]] {
            let map = classify(&rules.host(), SHAPE, size, [2, 4]).expect("a map");
            let shape = [2, 4, SHAPE.q_len.div_ceil(size[0]), SHAPE.kv_len.div_ceil(size[1])];
            let plain = Case::random(format!("{name}, {size:?}"), SHAPE).with(|c| c.rules = rules.clone());
            let mapped = plain.clone().with(|c| c.rules.blocks = Some((HostData::new(map, shape), size)));
            let (want, got) = (plain.reference::<f64>(), mapped.reference::<f64>());
            assert_eq!(want.out, got.out, "{name}, {size:?}");
            for (n, form) in FORMS.into_iter().enumerate() {
                for (m, path) in [Algorithm::Staged, Algorithm::Fused].into_iter().enumerate() {
                    let key = format!("{}, {form:?}", mapped.name);
                    if !((mask + n + m) % 2 == 0 && due(&key) || rest(&key)) {
                        continue;
                    }
                    let setup = Setup { layout: Layout::Blhd, ..Setup::plain(profiles()[n], form, path) };
                    report.check_in(&mapped, &setup, &mut Default::default());
                }
            }
        }
    }
    report.finish();
}

/// Appended keys are outside every block. A tile past the last full block has them, too.
#[test]
fn appended_keys_stay_outside_blocks() {
    crate::harness::in_turn!();
    let mut report = Report::new("block maps, appended keys");
    let shape = MultiHeadShape { batch: 2, q_len: 200, kv_len: 200 };
    let lengths = HostData::new(vec![200, 150], [2, 1, 1, 1]);
    let all = [
        ("causal", Rules { causal: true, ..Default::default() }),
        ("lengths", Rules { lengths: Some(lengths), ..Default::default() }),
    ];
    for (name, rules) in all {
        let mut config = LayerOptions::new(8, 2);
        config.add_zero_attn = true;
        let mut case = LayerCase::random(format!("appended beside blocks, {name}"), config, shape, true);
        // Full blocks do not lift the causal rule or the lengths, so the map may mark all blocks as
        // full.
        let full = HostData::new(vec![state::FULL; 16], [1, 1, 4, 4]);
        case.rules = Rules { blocks: Some((full, [64, 64])), ..rules.clone() };
        let without = LayerCase { rules, ..case.clone() };
        assert_eq!(case.exact().out, without.exact().out, "{name}");
        for form in FORMS {
            for path in [Algorithm::Fused, Algorithm::Staged] {
                let setup = LayerSetup {
                    profile: profiles()[0],
                    form,
                    path,
                    dtype: DType::F32,
                    weight: DType::F32,
                    bias: DType::F32,
                    layout: LayerLayout::Dense,
                    storage: Storage::Separate,
                    lse: true,
                    weights: Weights::None,
                };
                report.check_layer_in(&case, &setup, &mut Default::default());
            }
        }
    }
    report.finish();
}

/// A full block asks no mask, but its scores change.
#[test]
fn full_blocks_apply_softcap() {
    let mut report = Report::new("block maps, softcap");
    let state = |hides: bool| if hides { state::HIDDEN } else { state::FULL };
    let maps = [
        ("of blocks", HostData::of([1, 1, 5, 6], |[.., m, n]| state((m + n) % 3 == 0))),
        // The heads of a group have the same blocks, and whole tiles have one state.
        ("of heads", HostData::of([1, 4, 5, 6], |[_, h, _, n]| state(n / 4 == h / 2))),
    ];
    for (name, map) in maps {
        let case = Case::random(format!("softcap in full blocks, {name}"), SHAPE)
            .with(|c| (c.softcap, c.rules.blocks) = (Some(1.0), Some((map.clone(), [16, 16]))));
        for form in FORMS {
            let setup = Setup::plain(profiles()[0], form, Algorithm::Fused);
            report.check_in(&case, &setup, &mut Default::default());
        }
    }
    report.finish();
}

/// The map hides the last keys. The appended key is in their tile.
#[test]
fn gradients_keep_appended_keys() {
    let mut report = Report::new("block maps, gradients with an appended key");
    let shape = MultiHeadShape { batch: 1, q_len: 40, kv_len: 40 };
    let config = LayerOptions::new(8, 2);
    let mut case = LayerCase::random("appended beside hidden blocks".into(), config, shape, true);
    let map = HostData::of([1, 1, 3, 3], |[.., n]| if n == 2 { state::HIDDEN } else { state::FULL });
    case.rules = Rules { blocks: Some((map, [16, 16])), ..Default::default() };
    let problem = LayerProblem::new(case, true);
    for form in FORMS {
        report.check_layer_backward(&problem, &LayerBackwardSetup::plain(profiles()[0], form));
    }
    report.finish();
}

#[test]
fn map_alone_equals_mask() {
    // In BigBird every visible block is full, so the map needs no further mask.
    let random = [vec![4], vec![5], vec![2], vec![4], vec![2], vec![5]];
    let map = big_bird(6, 1, &[0], &random).expect("it fits");
    assert!(map.contains(&state::HIDDEN) && map.contains(&state::FULL));
    let shape = Shape { q_len: 6 * 4, kv_len: 6 * 4, ..SHAPE };
    let of = |i: usize, j: usize| {
        let (i, j) = (i / 4, j / 4);
        i.abs_diff(j) <= 1 || i == 0 || j == 0 || random[i].contains(&j)
    };
    let mut report = Report::new("block maps, BigBird");
    let plain = Case::random("BigBird", shape);
    let keep = HostData::of([1, 1, 24, 24], |[_, _, i, j]| of(i, j));
    let by_keep = plain.clone().with(|c| c.rules.attn_mask = Some(keep)).reference::<f64>();
    let mapped = plain.with(|c| c.rules.blocks = Some((HostData::new(map, [1, 1, 6, 6]), [4, 4])));
    assert_eq!(mapped.reference::<f64>().out, by_keep.out);
    report.check(&mapped);
    report.finish();
}
