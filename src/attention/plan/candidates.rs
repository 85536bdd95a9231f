//! Plans to measure in addition to the rules' plans.

use super::Outline;
use super::choice::choose_as;
use crate::device::DeviceFacts;
use crate::device::registers::Registers;
use crate::device::tuned::Pick;
use crate::matmul::plan::{ProductOutline, choose_product_as};
use crate::tensor::Error;

/// Returns picks for a call, the rules' own pick first. Each pick leads to a different plan.
/// [`with_other_splits`] then tries other splits of the keys.
///
/// # Errors
/// Returns an error if the rules have no plan for the call.
pub(crate) fn candidates(outline: &Outline, device: &DeviceFacts) -> Result<Vec<Pick>, Error> {
    let asked = if outline.kernel_options.target.is_cpu(device) { for_software(device) } else { for_gpus() };
    apart(Pick::default(), asked, |pick| choose_as(outline, pick, &device.overridden(pick)))
}

/// Returns `winner`, then `winner` with other splits of the keys.
///
/// # Errors
/// The errors of [`candidates`].
pub(crate) fn with_other_splits(
    outline: &Outline,
    winner: Pick,
    device: &DeviceFacts,
) -> Result<Vec<Pick>, Error> {
    let asked = [1, -1, 2, -2].map(|splits| Pick { splits, ..winner });
    apart(winner, asked, |pick| choose_as(outline, pick, &device.overridden(pick)))
}

/// Returns picks for projections, the rules' own pick first. Each pick leads to different tiles.
///
/// # Errors
/// Returns an error if the rules have no plan for the projections.
pub(crate) fn product_candidates(outline: &ProductOutline, device: &DeviceFacts) -> Result<Vec<Pick>, Error> {
    let asked: Vec<Pick> = if outline.kernel_options.target.is_cpu(device) {
        let most = outline.shape.rows.next_power_of_two().min(32) as u32;
        let rows = [most, most / 2, most / 4].into_iter().filter(|rows| *rows > 0);
        let of = |rows| [16, 8, 32, 4].map(|keys| Pick { rows, keys, ..Pick::default() });
        rows.flat_map(of).collect()
    } else {
        let sides = [64, 128].map(|rows| Pick { rows, ..Pick::default() });
        sides.into_iter().chain(sides.map(|pick| Pick { no_matrix: true, ..pick })).collect()
    };
    apart(Pick::default(), asked, |pick| choose_product_as(outline, pick, &device.overridden(pick)))
}

/// Returns `first`, and each of `asked` whose plan differs from all plans before it.
fn apart<P: PartialEq>(
    first: Pick,
    asked: impl IntoIterator<Item = Pick>,
    plan: impl Fn(&Pick) -> Result<P, Error>,
) -> Result<Vec<Pick>, Error> {
    let mut found = vec![(first, plan(&first)?)];
    for pick in asked {
        if let Ok(planned) = plan(&pick)
            && found.iter().all(|(_, other)| *other != planned)
        {
            found.push((pick, planned));
        }
    }
    Ok(found.into_iter().map(|(pick, _)| pick).collect())
}

/// Returns other kernels, then blocks of other sizes, the nearest sizes first.
fn for_software(device: &DeviceFacts) -> Vec<Pick> {
    let blocks = [(3, 2), (4, 2), (2, 2), (4, 4), (3, 1), (2, 1), (2, 4), (1, 2), (1, 1), (1, 4)];
    let blocks = blocks.map(|(queries, keys)| Pick { rows: queries * device.lanes, keys, ..Pick::default() });
    let others = [Pick { no_decode: true, ..Pick::default() }, Pick { staged: true, ..Pick::default() }];
    others.into_iter().chain(blocks).collect()
}

/// Returns other kernels, then tiles of every size for GPUs of every kind.
fn for_gpus() -> Vec<Pick> {
    let mut all = vec![
        Pick { no_matrix: true, ..Pick::default() },
        Pick { no_decode: true, ..Pick::default() },
        Pick { no_subgroups: true, ..Pick::default() },
    ];
    // Tiles of decode kernels depend only on registers. Tiles of matrix units depend on rows and
    // keys.
    all.extend(Registers::ALL.map(|r| Pick { registers: Some(r), ..Pick::default() }));
    for rows in [128, 64, 32, 16] {
        all.extend([32, 16].map(|keys| Pick { rows, keys, ..Pick::default() }));
        let vector =
            |r| Pick { rows, registers: Some(r), no_matrix: true, no_decode: true, ..Pick::default() };
        all.extend([Registers::Wide, Registers::Middle, Registers::Narrow].map(vector));
    }
    all.push(Pick { staged: true, ..Pick::default() });
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::plan::{Choice, KeyLayout, Reach, choose};
    use crate::cache::storage::{LayoutKind, StorageKind};
    use crate::device::Fragment;
    use crate::device::tuned::{Class, Picks};
    use crate::kernel::KernelOptions;
    use crate::matmul::plan::{MatmulShape, choose_product};
    use crate::tensor::Shape;
    use crate::tensor::{DType, Layout};
    use std::sync::Arc;

    fn outline(shape: Shape, dtype: DType, cache: Option<StorageKind>) -> Outline {
        let tensors = KeyLayout::Tensors { dtype, k: Layout::dense(shape.k()), v: Layout::dense(shape.v()) };
        let cached = |storage| KeyLayout::Cache {
            storages: [storage; 2],
            kind: LayoutKind::Contiguous,
            kept: shape.kv_len,
            hadamard: false,
            compacts: false,
        };
        Outline {
            shape,
            dtype,
            keys: cache.map_or(tensors, cached),
            reach: Reach { most: shape.kv_len, window: None },
            masked: false,
            simple: true,
            sinks: false,
            weights: None,
            scores: false,
            additive: false,
            listed: false,
            bindings: 4,
            kernel_options: KernelOptions::default(),
        }
    }

    fn devices() -> [DeviceFacts; 4] {
        let gpu = DeviceFacts {
            f16: true,
            subgroup_min: 32,
            subgroup_max: 32,
            workgroup_memory: 49152,
            max_binding_bytes: 1 << 30,
            ..DeviceFacts::LEAST
        };
        [
            DeviceFacts { software: true, ..gpu.clone() },
            DeviceFacts { software: true, lanes: 16, ..gpu.clone() },
            DeviceFacts { matrix: Some(Fragment::Sixteen), registers: Registers::Wide, ..gpu.clone() },
            gpu,
        ]
    }

    fn with(device: &DeviceFacts, class: Class, pick: Pick) -> DeviceFacts {
        DeviceFacts { tuned: Some(Arc::new(Picks::from([(class, pick)]))), ..device.clone() }
    }

    fn outlines() -> Vec<Outline> {
        let decode = Shape { kv_heads: 8, q_len: 1, ..Shape::new(1, 32, 4096, 128) };
        let mut all = Vec::new();
        for shape in
            [Shape::new(1, 8, 512, 64), Shape::new(2, 4, 37, 80), Shape::new(1, 8, 1024, 128), decode]
        {
            all.push(outline(shape, DType::F32, None));
            all.push(outline(shape, DType::F16, None));
            all.extend(StorageKind::ALL.map(|storage| outline(shape, DType::F32, Some(storage))));
        }
        all
    }

    /// The rules' plan is the first, and each pick leads to a different plan. A device with a
    /// stored pick uses its plan.
    #[test]
    fn every_candidate_is_another_plan_and_is_followed() {
        let mut most = 0;
        for (device, outline) in devices().iter().flat_map(|d| outlines().into_iter().map(move |o| (d, o))) {
            let ruled = choose(&outline, device).expect("a plan");
            let class = outline.class().expect("an open call");
            let picks = candidates(&outline, device).expect("plans");
            assert_eq!(picks[0], Pick::default());
            let plans: Vec<Choice> = picks
                .iter()
                .map(|pick| choose(&outline, &with(device, class, *pick)).expect("a plan"))
                .collect();
            assert_eq!(plans[0], ruled);
            for (n, plan) in plans.iter().enumerate() {
                assert!(plans[..n].iter().all(|other| other != plan), "{outline:?} {:?}", picks[n]);
            }
            most = most.max(plans.len());
            let split = with_other_splits(&outline, picks[0], device).expect("plans");
            assert_eq!(split[0], Pick::default());
            assert!(split.len() <= 5);
        }
        assert!(most >= 10, "{most}");
    }

    #[test]
    fn few_queries_are_split_otherwise() {
        let decode = outline(Shape { q_len: 1, ..Shape::new(1, 1, 8192, 128) }, DType::F32, None);
        for device in devices() {
            let splits = |pick| match choose_as(&decode, &pick, &device.overridden(&pick)) {
                Ok(Choice::Fused(plan)) => (plan.splits, 8192 / plan.tiles.split_step() as usize),
                other => panic!("{other:?}"),
            };
            let (ruled, most) = splits(Pick::default());
            for doublings in -2..=2 {
                let asked = (ruled as f64 * f64::exp2(doublings.into())) as usize;
                let (found, _) = splits(Pick { splits: doublings, ..Pick::default() });
                assert_eq!(found, asked.clamp(1, most.min(128)));
            }
        }
    }

    /// Measurements never override the caller's options or disabled kernels.
    #[test]
    fn explicit_options_win() {
        use crate::kernel::{Algorithm, MatrixUnits, Target};
        let [device, ..] = devices();
        let open = outline(Shape::new(1, 8, 512, 64), DType::F32, None);
        let class = open.class().expect("an open call");
        let staged = with(&device, class, Pick { staged: true, ..Pick::default() });
        assert!(matches!(choose(&open, &staged), Ok(Choice::Staged { .. })));
        for kernel_options in [
            KernelOptions::fixed(),
            KernelOptions::new().target(Target::Software),
            KernelOptions::new().algorithm(Algorithm::Fused),
            KernelOptions::new().matrix_units(MatrixUnits::Never),
            KernelOptions::new().splits(1),
        ] {
            let said = Outline { kernel_options, ..open };
            assert!(matches!(choose(&said, &staged), Ok(Choice::Fused(_))), "{kernel_options:?}");
        }
        // Another class of calls, and a call that only the fused path can compute.
        for other in [
            outline(Shape::new(1, 8, 1024, 64), DType::F32, None),
            outline(Shape::new(1, 8, 512, 80), DType::F32, None),
            Outline { masked: true, ..open },
            Outline { simple: false, ..open },
        ] {
            assert!(matches!(choose(&other, &staged), Ok(Choice::Fused(_))));
        }
        let near = outline(Shape::new(1, 8, 300, 64), DType::F32, None);
        assert!(matches!(choose(&near, &staged), Ok(Choice::Staged { .. })));
        let disabled = [crate::device::Family::StagedCpu, crate::device::Family::StagedGpu];
        let without = DeviceFacts { disabled: disabled.into_iter().collect(), ..staged };
        assert!(matches!(choose(&open, &without), Ok(Choice::Fused(_))));
    }

    #[test]
    fn products_have_candidates() {
        for device in devices() {
            for dtype in [DType::F32, DType::F16] {
                for (batch, rows, cols) in [(1, 1024, 1024), (3, 512, 512), (1, 1, 4096), (1, 50, 44)] {
                    let shape = MatmulShape { batch, rows, cols };
                    let (in_fours, w_along_columns) = (true, false);
                    let kernel_options = KernelOptions::default();
                    let outline = ProductOutline {
                        shape,
                        inner: 512,
                        stored: [dtype; 3],
                        in_fours,
                        w_along_columns,
                        kernel_options,
                    };
                    let picks = product_candidates(&outline, &device).expect("plans");
                    assert_eq!(picks[0], Pick::default());
                    assert!(picks.len() > 1);
                    let class = outline.class().expect("open");
                    let plans =
                        picks.iter().map(|pick| choose_product(&outline, &with(&device, class, *pick)));
                    let plans: Vec<_> = plans.collect::<Result<_, _>>().expect("plans");
                    for (n, plan) in plans.iter().enumerate() {
                        assert!(plans[..n].iter().all(|other| other != plan), "{shape:?} {plan:?}");
                    }
                }
            }
        }
    }
}
