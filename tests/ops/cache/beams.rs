//! Beams: all sequences continue from other sequences in one call.

use wgpu_attention::DType;
use wgpu_attention::cache::{CacheLayout, CacheStorage, ScaleGroup};
use wgpu_attention::position::RowPositions;

use super::{DIMS, LAYOUTS, STORAGES, as_gpu, usual};
use crate::harness::{Ask, Bed, Count, Data, Kind, Layout, Report, Rng, Rules, defaults, due, full};

/// Checks that every sequence holds its tokens in every layer, and that attention sees them.
fn check(bed: &mut Bed, ask: &Ask) -> Result<f64, String> {
    let mut worst = 0f64;
    for layer in 0..bed.kind.layers {
        let places = RowPositions::Start(0);
        worst = worst.max(bed.read(layer, &places, 50, DType::F32, Layout::Dense)?);
    }
    bed.check_sequence_table()?;
    Ok(worst.max(bed.ask(ask)?))
}

/// Identity, exchanges, cycles, one parent for all, and random parents, in every storage and
/// layout. Then new tokens follow.
#[test]
fn reordered_sequences_hold_their_parents_tokens() {
    crate::harness::in_turn!();
    let mut report = Report::new("caches, beams");
    for (s, storage) in STORAGES.into_iter().enumerate() {
        for (l, (layout, capacity)) in LAYOUTS.into_iter().enumerate() {
            if !due(&format!("beams, {storage:?}, {layout:?}")) {
                continue;
            }
            let profile = [full(), defaults(), as_gpu()][(s + l) % 3];
            let [head_dim, value_dim] = DIMS;
            let layout = match layout {
                CacheLayout::Paged { page, .. } => CacheLayout::Paged { page, pages: 20 },
                other => other,
            };
            let kind =
                Kind { batch: 5, layers: 2, head_dim, value_dim, ..Kind::new(storage, layout, capacity) };
            let mut bed = Bed::new(profile, kind, Data::Lossless, 111 + s as u64);
            let rules = Rules { causal: true, ..Default::default() };
            let (form, splits) = usual(s, l);
            let ask = Ask { layer: 1, rows: Some(2), splits, ..Ask::new(form, &rules) };
            // The ring has overwritten tokens of the second and of the last sequence, and the third
            // is empty.
            bed.grow(&Count::Each(vec![3, 30, 0, 17, 25])).expect("room");
            let mut lists = vec![
                vec![0, 1, 2, 3, 4],
                vec![1, 0, 2, 4, 3],
                vec![1, 2, 3, 4, 0],
                vec![4, 0, 1, 1, 3],
                vec![2, 3, 2, 2, 0],
            ];
            let mut rng = Rng::new(7);
            lists.extend((0..4).map(|_| (0..5).map(|_| rng.below(5)).collect::<Vec<_>>()));
            lists.push(vec![3; 5]);
            for (n, parents) in lists.iter().enumerate() {
                let name = format!("{kind:?}, {parents:?}");
                let outcome = match bed.reorder(parents) {
                    Ok(()) => check(&mut bed, &ask),
                    Err(e) => Err(format!("refused: {e}")),
                };
                report.record(&name, &profile.name, outcome);
                let counts = [0, 1, 2, 3, 4].map(|s| (s + n) % 3 % 2 + usize::from(n == 6)).to_vec();
                let grown = match bed.grow(&Count::Each(counts)) {
                    Ok(()) => check(&mut bed, &ask),
                    Err(e) => Err(format!("refused: {e}")),
                };
                report.record(&format!("{name}, then new tokens"), &profile.name, grown);
            }
        }
    }
    report.finish();
}

/// Lengths that only the device knows move with their sequences. Refusals stay.
#[test]
fn reorder_moves_lengths_of_the_device() {
    crate::harness::in_turn!();
    for (layout, capacity) in LAYOUTS {
        let kind = Kind { batch: 3, ..Kind::new(CacheStorage::F32, layout, capacity.min(20)) };
        let mut bed = Bed::new(full(), kind, Data::Lossless, 121);
        let rules = Rules { causal: true, ..Default::default() };
        let ask = Ask { layer: 0, rows: Some(2), ..Ask::new(crate::harness::FORMS[0], &rules) };
        bed.grow(&Count::Each(vec![9, 2, 5])).expect("room");
        bed.grow(&Count::Device { counts: vec![7, 0, 12], most: 12 }).expect("the host cannot know");
        bed.grow(&Count::Device { counts: vec![7, 1, 2], most: 8 }).expect("the host cannot know");
        for parents in [[1, 2, 0], [0, 0, 2], [2, 2, 1]] {
            bed.reorder(&parents).expect("parents");
            let [least, most] = bed.cache.len_bounds(0).expect("a sequence");
            assert!(least < most, "{layout:?}: the host knows {least}..={most}");
            check(&mut bed, &ask).unwrap_or_else(|e| panic!("{layout:?}, {parents:?}: {e}"));
            bed.grow(&Count::Device { counts: vec![1, 0, 1], most: 1 }).expect("the host cannot know");
            check(&mut bed, &ask).unwrap_or_else(|e| panic!("{layout:?}, {parents:?}, then: {e}"));
        }
    }
}

/// Four beams, reordered in one call. Forks in sequence would lose sequences that earlier forks
/// replaced.
#[test]
fn reordered_beams_have_their_parents_lengths() {
    for (layout, capacity) in LAYOUTS {
        let kind = Kind { batch: 4, ..Kind::new(CacheStorage::F16, layout, capacity) };
        let mut bed = Bed::new(full(), kind, Data::Lossless, 131);
        bed.grow(&Count::Each(vec![2, 5, 9, 1])).expect("room");
        bed.reorder(&[2, 1, 1, 0]).expect("parents");
        let lengths = |bed: &Bed| (0..4).map(|s| bed.cache.len(s)).collect::<Vec<_>>();
        assert_eq!(lengths(&bed), [9, 5, 5, 2].map(Some), "{layout:?}");
        assert_eq!(bed.numbers(bed.cache.lengths()), [9, 5, 5, 2], "{layout:?}");
        assert_eq!(bed.numbers(bed.cache.starts()), [9, 5, 5, 2], "{layout:?}");
        // The call records pending changes first.
        bed.cache.truncate(0, 4).expect("shorter");
        bed.sequences[0].return_to(&kind, 4);
        bed.reorder(&[3, 0, 0, 1]).expect("parents");
        assert_eq!(lengths(&bed), [2, 4, 4, 5].map(Some), "{layout:?}");
        let rules = Rules { causal: true, ..Default::default() };
        let ask = Ask { rows: Some(1), ..Ask::new(crate::harness::FORMS[0], &rules) };
        check(&mut bed, &ask).unwrap_or_else(|e| panic!("{layout:?}: {e}"));
    }
}

/// Pages are shared, not copied. Pages that no sequence uses are free.
#[test]
fn reordered_pages_are_shared() {
    let layout = CacheLayout::Paged { page: 16, pages: 9 };
    let kind = Kind { batch: 3, ..Kind::new(CacheStorage::Q8(ScaleGroup::Of(32)), layout, 64) };
    let mut bed = Bed::new(full(), kind, Data::Lossless, 141);
    let rules = Rules { causal: true, ..Default::default() };
    let ask = Ask { rows: Some(1), ..Ask::new(crate::harness::FORMS[1], &rules) };
    bed.grow(&Count::Each(vec![40, 20, 33])).expect("eight pages");
    assert_eq!(bed.cache.free_pages(), 1);
    bed.reorder(&[2, 0, 1]).expect("no page is needed");
    assert_eq!(bed.cache.free_pages(), 1);
    bed.reorder(&[1, 1, 1]).expect("no page is needed");
    assert_eq!(bed.cache.free_pages(), 6, "three share three pages");
    check(&mut bed, &ask).expect("one parent of all");
    bed.grow(&Count::All(1)).expect("two pages");
    assert_eq!(bed.cache.free_pages(), 4, "the last page is copied for two of three");
    check(&mut bed, &ask).expect("copies on write");
    let error = bed.cache.reorder(&mut bed.encoder(), &[0, 1]).expect_err("three sequences");
    assert!(error.to_string().contains("3 elements expected, got 2"), "{error}");
    assert_eq!(bed.cache.free_pages(), 4);
    check(&mut bed, &ask).expect("after a refusal");
}
