//! Drivers that compute a family of kernels wrongly. The check finds the family, plans avoid it,
//! and the report names it.

use wgpu_attention::cache::{CacheStorage, ScaleGroup, Tokens};
use wgpu_attention::mask::{Blocks, DeviceMask, HostMask};
use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance, compare};
use wgpu_attention::reference::{self, Options, widen};
use wgpu_attention::tuning::{Family, Target, Verdict};
use wgpu_attention::{
    Attention, Cache, CacheConfig, Config, DType, Error, Gpu, Mask, Pipelines, Shape, TensorView, inspect,
};

use crate::harness::backward::{BackwardSetup, judge, run_backward_async, truth};
use crate::harness::device::{fragments, is_software};
use crate::harness::faults::{FAULTS, Fault, OPERATORS, faulty};
use crate::harness::gradients::Problem;
use crate::harness::{Case, HostData, Profile, defaults, due, full, matrices, rest, runs_in_turn};
use crate::ops::matmul::projection_backward;

fn noise(n: usize, seed: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7919 + seed * 104729) % 1009) as f32 / 504.5 - 1.0).collect()
}

/// Checks that calls of every kind in `Gpu` are right.
fn attends(gpu: &Gpu) {
    let shape = Shape { kv_heads: 2, q_len: 33, value_dim: 24, ..Shape::new(1, 4, 70, 16) };
    for (shape, weights) in [
        (shape, false),
        (Shape { q_len: 2, ..shape }, true),
        (Shape { q_len: 1, kv_len: 700, ..shape }, false),
    ] {
        let count = |shape: [usize; 4]| shape.iter().product();
        let (q, k, v) = (noise(count(shape.q()), 1), noise(count(shape.k()), 2), noise(count(shape.v()), 3));
        let options = Options::new().mask(Mask::causal()).weights(weights);
        let got = gpu.attention(&q, &k, &v, shape, &options).expect("attention");
        let want = reference::attention::<f64>(&widen(&q), &widen(&k), &widen(&v), shape, &options)
            .expect("the same");
        let naive = reference::attention::<f32>(&q, &k, &v, shape, &options).expect("the same");
        let tolerance = Tolerance::from_naive(&widen::<f64>(&naive.out), &want.out, 1.0, EPSILON_F32);
        compare(&got.out, &want.out, tolerance).expect("the truth");
    }
}

/// Families of gradient kernels. The Booleans tell which [`gradients`] are refused without the
/// family.
const OF_GRADIENTS: [(Family, [bool; 3]); 8] = [
    (Family::JointGradients, [false; 3]),
    (Family::GradientsGpu, [false; 3]),
    (Family::GradientsCpu, [false; 3]),
    (Family::ScoreGradients, [false, true, false]),
    (Family::RowStats, [true, true, false]),
    (Family::ProductGradientsGpu, [false; 3]),
    (Family::ProductGradientsCpu, [false; 3]),
    (Family::RowSums, [false, false, true]),
];

/// Returns the largest errors over tolerance of three gradients. These are of q, k and v, of a bias
/// and sinks, and of a projection.
fn gradients(gpu: &Gpu) -> [Result<f64, String>; 3] {
    let profile = Profile { name: "checked", gpu: gpu.clone(), matrix: false };
    let profile = Box::leak(Box::new(profile));
    let shape = Shape { kv_heads: 2, q_len: 33, value_dim: 24, ..Shape::new(1, 4, 40, 16) };
    let of_attention = |added: bool| {
        let case = Case::random(format!("checks, gradients, {added}"), shape).with(|c| {
            c.rules.causal = true;
            if added {
                c.rules.bias = Some(HostData::new(noise(33 * 40, 4), [1, 1, 33, 40]));
                c.rules.sinks = Some(HostData::new(noise(4, 5), [1, 4, 1, 1]));
            }
        });
        let problem = Problem::new(case, 0, true);
        let setup = BackwardSetup {
            wanted: [!added; 3],
            added: [added; 5],
            ..BackwardSetup::plain(profile, Target::Auto)
        };
        let got = pollster::block_on(run_backward_async(&problem, &setup, |kernel_options| kernel_options))?;
        judge(&truth(&problem, &setup), &got)
    };
    [of_attention(false), of_attention(true), projection_backward::plain(profile)]
}

/// Kernels that the driver's compiler refuses are disabled at their first use, without a check.
/// Calls use other kernels.
#[test]
fn refused_kernels_are_replaced_without_check() {
    crate::harness::in_turn!();
    let plain = full();
    let mut refused = 0;
    for family in Family::ALL {
        let pipelines = Pipelines::new(plain.gpu.device());
        let (gpu, changed) = faulty(&plain.gpu, &pipelines, family, Fault::DoesNotCompile);
        attends(&gpu);
        let report = gpu.pipelines().report();
        if *changed.lock().expect("no panic") == 0 {
            continue;
        }
        assert!(matches!(report.verdict(family), Verdict::Wrong { .. }), "{family}\n{report}");
        // A kernel that splits keys or reduces by subgroups belongs to several families. Pipelines
        // disable those families first.
        let first = [Family::SplitKeys, Family::SubgroupReductions];
        assert!(report.wrong().all(|wrong| wrong == family || first.contains(&wrong)), "{report}");
        refused += 1;
    }
    assert!(refused >= 3, "{refused} families");
}

/// The refused kernel belongs to two families, and other kernels are compiled with it. Only the
/// first family is disabled.
#[test]
fn refused_kernels_disable_one_family() {
    let plain = full();
    let pipelines = Pipelines::new(plain.gpu.device());
    let (gpu, changed) = faulty(&plain.gpu, &pipelines, Family::JointGradients, Fault::DoesNotCompile);
    let [of_attention, ..] = gradients(&gpu);
    of_attention.expect("gradients");
    assert!(*changed.lock().expect("no panic") > 0, "no kernel of the family");
    let report = gpu.pipelines().report();
    assert_eq!(report.wrong().collect::<Vec<_>>(), [Family::JointGradients], "{report}");
}

/// If nothing replaces a refused kernel, the error names the kernel and contains the compiler's
/// message.
#[test]
fn refused_kernels_without_replacement_are_an_error() {
    let pipelines =
        inspect::rewritten(&Pipelines::new(full().gpu.device()), |_, text| format!("{text}\nnot WGSL"));
    let gpu = Gpu::with_pipelines(full().gpu.queue().clone(), pipelines);
    let x = noise(4 * 8, 1);
    let error = gpu.attend(&x, &x, &x, Shape::new(1, 1, 4, 8), Mask::none()).expect_err("no kernel");
    let Error::Refused { what, description } = &error else { panic!("{error}") };
    assert!(what.starts_with("attention."), "{error}");
    assert!(description.contains("not WGSL"), "{error}");
}

/// Checks that a fault in `family` is found, and that only this family is disabled. The remaining
/// kernels must be right.
fn is_found(gpu: &Gpu, pipelines: &Pipelines, family: Family, fault: Fault) {
    let (gpu, changed) = faulty(gpu, pipelines, family, fault);
    let report = gpu.check().expect("a device that works");
    assert!(*changed.lock().expect("no panic") > 0, "{family} {fault:?}: no kernel of it");
    assert_eq!(report.wrong().collect::<Vec<_>>(), [family], "{family} {fault:?}\n{report}");
    assert_eq!(report, gpu.pipelines().report());
    let Verdict::Wrong { why } = report.verdict(family) else { panic!("{report}") };
    let says = if fault == Fault::DoesNotCompile { "wgpu refused" } else { "off by more than" };
    assert!(why.contains(says), "{family} {fault:?}: {why}");
    attends(&gpu);
    if let Some((_, refused)) = OF_GRADIENTS.iter().find(|(of, _)| *of == family) {
        for (got, refused) in gradients(&gpu).into_iter().zip(refused) {
            match got {
                Ok(_) => assert!(!refused, "{family}"),
                Err(e) => assert!(
                    *refused && e.contains(&format!("refused: {family}: these kernels are disabled")),
                    "{e}"
                ),
            }
        }
    }
    let refused = |e: Option<Error>| matches!(e, Some(Error::Disabled { family: f }) if f == family);
    match family {
        Family::CacheF32 => assert!(refused(cache(&gpu, CacheStorage::F32).err())),
        Family::CacheF16 => assert!(refused(cache(&gpu, CacheStorage::F16).err())),
        Family::CacheBF16 => assert!(refused(cache(&gpu, CacheStorage::BF16).err())),
        Family::CacheQ8 => assert!(refused(cache(&gpu, CacheStorage::Q8(ScaleGroup::Of(32))).err())),
        Family::CacheQ4 => assert!(refused(cache(&gpu, CacheStorage::Q4(ScaleGroup::Row)).err())),
        Family::CacheF8 => {
            assert!(refused(cache(&gpu, CacheStorage::E4M3(ScaleGroup::Row)).err()));
            assert!(refused(cache(&gpu, CacheStorage::E5M2(ScaleGroup::Row)).err()));
        }
        Family::CacheGaussian4 => {
            assert!(refused(cache(&gpu, CacheStorage::Gaussian4(ScaleGroup::Row)).err()));
        }
        Family::F16Tensors | Family::BF16Tensors => {
            let dtype = if family == Family::F16Tensors { DType::F16 } else { DType::BF16 };
            let config = Config::new(2, 16).dtype(dtype);
            assert!(refused(Attention::with_pipelines(gpu.pipelines(), config).err()));
        }
        _ => drop(cache(&gpu, CacheStorage::Q4(ScaleGroup::Row)).expect("a cache")),
    }
}

/// Returns the family that plans use on this device.
fn of_device(cpu: Family, gpu: Family) -> Family {
    if is_software() { cpu } else { gpu }
}

/// The families of all storages of caches.
const CACHES: [Family; 7] = [
    Family::CacheF32,
    Family::CacheF16,
    Family::CacheBF16,
    Family::CacheQ8,
    Family::CacheQ4,
    Family::CacheF8,
    Family::CacheGaussian4,
];

fn cache(gpu: &Gpu, storage: CacheStorage) -> Result<Cache, Error> {
    Cache::with_pipelines(gpu.pipelines(), CacheConfig::new(2, 64, 16).storage(storage))
}

#[test]
fn check_passes_on_this_device() {
    for profile in [full(), defaults()] {
        let gpu = Gpu::with_pipelines(profile.gpu.queue().clone(), Pipelines::new(profile.gpu.device()));
        assert!(gpu.pipelines().report().findings().all(|(_, verdict)| !verdict.is_disabled()));
        let report = gpu.check().expect("a device that works");
        assert_eq!(report.wrong().count(), 0, "{report}");
        let right = |family| matches!(report.verdict(family), Verdict::Right { share } if *share <= 1.0);
        assert!(CACHES.into_iter().all(right), "{report}");
        let forms = [
            [Family::FusedGpu, Family::FusedCpu],
            [Family::StagedGpu, Family::StagedCpu],
            [Family::ProductsGpu, Family::ProductsCpu],
            [Family::GradientsGpu, Family::GradientsCpu],
            [Family::ProductGradientsGpu, Family::ProductGradientsCpu],
        ];
        for [gpu, cpu] in forms {
            assert_eq!(
                [right(gpu), right(cpu)].into_iter().filter(|right| *right).count(),
                1,
                "{gpu}\n{report}"
            );
        }
        assert!(right(Family::SplitKeys));
        assert!([Family::ScoreGradients, Family::RowStats, Family::RowSums].into_iter().all(right));
        assert!(OPERATORS.into_iter().all(|(family, _)| right(family)), "{report}");
        assert!(right(Family::F16Tensors));
        assert!(right(Family::BF16Tensors));
        // A second check compiles nothing.
        let compiled = gpu.pipelines().compiled();
        gpu.check().expect("a device that works");
        assert_eq!(gpu.pipelines().compiled(), compiled);
    }
}

#[test]
fn wrong_family_of_device_is_disabled() {
    crate::harness::in_turn!();
    let gpu = &full().gpu;
    let pipelines = Pipelines::new(gpu.device());
    let others = [
        Family::SplitKeys,
        of_device(Family::DecodeCpu, Family::DecodeGpu),
        Family::F16Tensors,
        Family::BF16Tensors,
        of_device(Family::FusedCpu, Family::FusedGpu),
        of_device(Family::StagedCpu, Family::StagedGpu),
        of_device(Family::ProductsCpu, Family::ProductsGpu),
        Family::JointGradients,
        of_device(Family::GradientsCpu, Family::GradientsGpu),
        Family::ScoreGradients,
        Family::RowStats,
        of_device(Family::ProductGradientsCpu, Family::ProductGradientsGpu),
        Family::RowSums,
    ];
    for family in CACHES.into_iter().chain(others) {
        if due(&format!("checks, {family}")) {
            is_found(gpu, &pipelines, family, Fault::Scaled);
        }
    }
}

#[test]
fn wrong_family_is_disabled_on_gpus() {
    crate::harness::in_turn!();
    let gpu = &full().gpu;
    let pipelines = inspect::as_gpu(gpu.device(), None);
    for family in [
        Family::SubgroupReductions,
        Family::DecodeGpu,
        Family::FusedGpu,
        Family::StagedGpu,
        Family::ProductsGpu,
        Family::GradientsGpu,
        Family::ProductGradientsGpu,
    ] {
        if due(&format!("checks, {family}")) {
            is_found(gpu, &pipelines, family, Fault::Scaled);
        }
    }
}

#[test]
fn every_fault_is_found() {
    let gpu = &full().gpu;
    let pipelines = Pipelines::new(gpu.device());
    let fused = FAULTS.map(|fault| (of_device(Family::FusedCpu, Family::FusedGpu), fault));
    let others = [
        (Family::CacheQ8, Fault::DoesNotCompile),
        (of_device(Family::StagedCpu, Family::StagedGpu), Fault::NaN),
        (of_device(Family::GradientsCpu, Family::GradientsGpu), Fault::Swapped),
        (Family::JointGradients, Fault::DoesNotCompile),
        (Family::ScoreGradients, Fault::NaN),
        (Family::RowSums, Fault::NaN),
    ];
    for (family, fault) in fused.into_iter().chain(others) {
        if runs_in_turn(&format!("checks, {fault:?} in {family}")) {
            is_found(gpu, &pipelines, family, fault);
        }
    }
}

/// The next test and `recording::calls` check that calls without these kernels are refused.
#[test]
fn wrong_operators_are_found() {
    let gpu = &full().gpu;
    let pipelines = Pipelines::new(gpu.device());
    for (family, fault) in OPERATORS {
        if runs_in_turn(&format!("checks, {family}")) {
            is_found(gpu, &pipelines, family, fault);
        }
    }
}

/// Without their kernels, caches stay unchanged, and calls with masks are refused.
#[test]
fn caches_and_masks_without_kernels_are_refused() {
    let gpu = Gpu::with_pipelines(full().gpu.queue().clone(), Pipelines::new(full().gpu.device()));
    let without = |family, call: &mut dyn FnMut() -> Result<(), Error>| {
        gpu.pipelines().avoid(family);
        let refused = call();
        assert!(
            matches!(refused, Err(Error::Disabled { family: f }) if f == family),
            "{family}: {refused:?}"
        );
        gpu.pipelines().allow(family);
        call().expect("allowed");
    };
    let mut cache = cache(&gpu, CacheStorage::F32).expect("a cache");
    let mut lengths = Vec::new();
    without(Family::CacheLengths, &mut || {
        let advanced = gpu.submit(|encoder| cache.advance(encoder, Tokens::All(3)));
        lengths.push(cache.len(0));
        advanced
    });
    assert_eq!(lengths, [Some(0), Some(3)]);
    without(Family::CacheCopies, &mut || gpu.submit(|encoder| cache.reorder(encoder, &[0])));
    let map = gpu.upload(&[7u32]).expect("an upload");
    let attention = Attention::with_pipelines(gpu.pipelines(), Config::new(1, 8)).expect("an operator");
    let blocks = Blocks::new(TensorView::new(&map, DType::U32, [1; 4]), [8, 8]);
    let mut maps = Vec::new();
    without(Family::Masks, &mut || {
        let classified =
            gpu.submit(|encoder| attention.classify(encoder, &DeviceMask::causal(), [1, 8, 8], &blocks));
        maps.extend(gpu.download::<u32>(&map, 1).expect("a read-back"));
        classified
    });
    assert_eq!(maps, [7, 1]);
    let shape = Shape::new(1, 1, 8, 8);
    let compare = || gpu.compare_masks(&DeviceMask::causal(), &HostMask::causal(), shape, 0.0).map(drop);
    without(Family::Masks, &mut || compare());
}

/// Without kernels of either target, gradients are refused until the application allows one.
#[test]
fn gradients_without_kernels_are_errors() {
    crate::harness::in_turn!();
    let gpu = &full().gpu;
    let gpu = Gpu::with_pipelines(gpu.queue().clone(), Pipelines::new(gpu.device()));
    let refused = |of: [bool; 3], family: &str| {
        for (got, refused) in gradients(&gpu).into_iter().zip(of) {
            let form = if is_software() { "CPU" } else { "GPU" };
            let says = format!("refused: {family}, {form} variant: these kernels are disabled");
            assert_eq!(got.is_err_and(|e| e.contains(&says)), refused, "{family}");
        }
    };
    let avoid = |families: [Family; 2]| families.into_iter().for_each(|f| gpu.pipelines().avoid(f));
    avoid([Family::GradientsGpu, Family::GradientsCpu]);
    // The gradient of a bias divides by the sums of its rows, which the same kernels compute.
    refused([true, true, false], "gradients");
    gpu.pipelines().allow(Family::GradientsGpu);
    avoid([Family::ProductGradientsGpu, Family::ProductGradientsCpu]);
    refused([false, false, true], "gradients of projections");
    gpu.pipelines().allow(Family::ProductGradientsCpu);
    assert!(gradients(&gpu).iter().all(Result::is_ok));
}

/// The faulty kernels multiply the smallest fragments that the device runs. A software driver
/// compiles them for minutes.
fn wrong_matrix_units_are_disabled(family: Family) {
    let mut profiles = fragments().iter().zip(matrices());
    let Some((side, profile)) = profiles.find(|(_, profile)| profile.compiles_fast()) else { return };
    if rest(&format!("checks, {family}")) {
        is_found(&profile.gpu, &inspect::as_gpu(profile.gpu.device(), Some(*side)), family, Fault::Swapped);
    }
}

#[test]
fn wrong_matrix_unit_attention_is_disabled() {
    wrong_matrix_units_are_disabled(Family::MatrixAttention);
}

#[test]
fn wrong_matrix_unit_products_are_disabled() {
    wrong_matrix_units_are_disabled(Family::MatrixProducts);
}

#[test]
fn wrong_matrix_unit_gradients_are_disabled() {
    wrong_matrix_units_are_disabled(Family::MatrixGradients);
}

/// First both fused kernels are wrong, then the staged kernels too.
#[test]
fn calls_without_kernels_are_errors() {
    let gpu = &full().gpu;
    let [fused, staged] = [[Family::FusedGpu, Family::FusedCpu], [Family::StagedGpu, Family::StagedCpu]]
        .map(|forms| forms.to_vec());
    for wrong in [fused.clone(), [fused, staged].concat()] {
        if !runs_in_turn(&format!("checks, nothing replaces {wrong:?}")) {
            continue;
        }
        let all = wrong.clone();
        let pipelines = inspect::rewritten(&Pipelines::new(gpu.device()), move |families, text| {
            let hit = families.iter().any(|family| all.contains(family));
            if hit { Fault::Scaled.in_text(text) } else { text.to_string() }
        });
        let gpu = Gpu::with_pipelines(gpu.queue().clone(), pipelines);
        let report = gpu.check().expect("a device that works");
        assert!(wrong.iter().all(|family| report.wrong().any(|found| found == *family)), "{report}");
        let shape = Shape::new(1, 2, 40, 16);
        let x = noise(2 * 40 * 16, 1);
        let got = gpu.attend(&x, &x, &x, shape, Mask::causal());
        if wrong.len() == 2 {
            got.expect("the stages are right");
        } else {
            assert!(matches!(got, Err(Error::Disabled { .. })), "{got:?}");
            // The application can allow the kernel again.
            gpu.pipelines().allow(Family::FusedCpu);
            gpu.attend(&x, &x, &x, shape, Mask::causal()).expect("what it asked for");
        }
    }
}
