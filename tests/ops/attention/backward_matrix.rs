//! Gradients on matrix units: edges of tiles, every rule of a mask, non-finite numbers, errors.
//! Some gradients of scores grow and shrink over the tiles. Kernels with fragments of 16 × 16 take
//! three times as long to compile, so fewer of them run.

use wgpu_attention::tuning::{MatrixUnits, Target};
use wgpu_attention::{Alignment, DType, Shape};

use crate::harness::backward::{BackwardSetup, stored_problem};
use crate::harness::gradients::Problem;
use crate::harness::{Case, DropoutData, HostData, Layout, Profile, Report, Rng, due, matrices, rest};
use crate::laws::property::{LENGTHS, MaskDraw};
use crate::ops::attention::backward::{bits, run};
use crate::ops::attention::matrix::{finish, runs};
use crate::small::{self, single_masks};

const SHAPE: Shape =
    Shape { batch: 1, heads: 4, kv_heads: 2, q_len: 37, kv_len: 41, head_dim: 16, value_dim: 16 };

/// Returns the profiles for cases that share the kernels of a causal mask.
fn profiles() -> impl Iterator<Item = &'static Profile> {
    matrices().filter(|p| p.compiles_fast() || due("gradients on matrix units of 16 by 16"))
}

fn causal(name: impl Into<String>, shape: Shape) -> Case {
    Case::random(name, shape).with(|c| c.rules.causal = true)
}

/// Lengths around those of tiles.
#[test]
fn lengths() {
    crate::harness::in_turn!();
    let mut report = Report::new("gradients on matrix units, lengths");
    for profile in profiles() {
        for (n, [q_len, kv_len]) in
            [[1, 1], [16, 16], [17, 15], [32, 33], [70, 5], [5, 70], [65, 64]].into_iter().enumerate()
        {
            let case = causal(format!("{q_len}x{kv_len}"), Shape { q_len, kv_len, ..SHAPE });
            report.check_backward(&Problem::new(case, 0, n % 2 == 0), &BackwardSetup::matrix(profile));
        }
    }
    finish(report);
}

#[test]
fn channels() {
    crate::harness::in_turn!();
    let mut report = Report::new("gradients on matrix units, channels");
    let few = [(1, 1), (13, 7), (16, 48), (33, 17)];
    let many = [(64, 64), (80, 96), (3, 200), (128, 128), (255, 256)];
    for profile in matrices() {
        for (n, (head_dim, value_dim)) in few.into_iter().chain(many).enumerate() {
            let shape = Shape { head_dim, value_dim, ..SHAPE };
            let case = causal(format!("{head_dim} and {value_dim} channels"), shape);
            let key = format!("gradients, {}, {}", case.name, profile.name);
            // The first two use the kernels of `lengths`.
            if n < 2 && profile.compiles_fast() || n < few.len() && runs(profile, &key) || rest(&key) {
                let layout = if n % 2 == 0 { Layout::Dense } else { Layout::Window(n as u64) };
                let setup = BackwardSetup { layout, ..BackwardSetup::matrix(profile) };
                report.check_backward(&Problem::new(case, 0, true), &setup);
            }
        }
    }
    finish(report);
}

/// The tiles for GPUs. Each is a kernel that takes long to compile.
#[test]
fn tiles_of_gpus() {
    let mut report = Report::new("gradients on matrix units, tiles of GPUs");
    for profile in matrices() {
        for (q_len, dim) in [(70, 16), (90, 64), (130, 128)] {
            let shape =
                Shape { heads: 2, kv_heads: 1, q_len, kv_len: 150, head_dim: dim, value_dim: dim, ..SHAPE };
            let case = causal(format!("tiles of GPUs {q_len} {dim}"), shape);
            let key = format!("gradients, {}, {}", case.name, profile.name);
            if dim == 16 && profile.compiles_fast() && due(&key) || rest(&key) {
                let setup = BackwardSetup { form: Target::Gpu, ..BackwardSetup::matrix(profile) };
                report.check_backward(&Problem::new(case, 0, true), &setup);
            }
        }
    }
    finish(report);
}

/// Combinations of stored outputs, their types and layouts.
#[test]
fn outputs() {
    crate::harness::in_turn!();
    let mut report = Report::new("gradients on matrix units, outputs");
    for profile in matrices() {
        let plain = BackwardSetup::matrix(profile);
        let setups = [
            BackwardSetup { accumulates: true, ..plain },
            BackwardSetup { gradient: DType::F16, layout: Layout::Blhd, ..plain },
            BackwardSetup { dtype: DType::F32, layout: Layout::Window(7), ..plain },
            BackwardSetup { wanted: [false, true, false], ..plain },
            BackwardSetup { wanted: [false, false, true], accumulates: true, ..plain },
        ];
        for (n, setup) in setups.into_iter().enumerate() {
            let name = format!("matrix outputs {n}");
            if n == 0 && profile.compiles_fast() || runs(profile, &name) {
                // Numbers are exact in f16, in any storage type.
                let halves = BackwardSetup { dtype: DType::F16, ..setup };
                let problem = stored_problem(&Problem::new(causal(name, SHAPE), 0, n % 2 == 0), &halves);
                report.check_backward(&problem, &setup);
            }
        }
    }
    finish(report);
}

#[test]
fn masks() {
    let mut report = Report::new("gradients on matrix units, masks");
    for profile in matrices() {
        for (n, (name, rules)) in single_masks().into_iter().enumerate() {
            let shape = Shape { head_dim: 16, value_dim: 16, ..small::SHAPE };
            let case = Case::random(format!("matrix, {name}"), shape).with(|c| c.rules = rules);
            let key = format!("gradients on matrix units, {name}");
            if profile.compiles_fast() && n % 3 == 0 && due(&key) || rest(&format!("{key}, {}", profile.name))
            {
                report.check_backward(&Problem::new(case, 0, true), &BackwardSetup::matrix(profile));
            }
        }
        for (n, data) in [
            DropoutData::Seeded { p: 0.3, seed: 7 },
            DropoutData::Given {
                p: 0.9,
                keep: HostData::of(SHAPE.weights(), |[_, h, i, j]| (h + i + j) % 10 == 3),
            },
        ]
        .into_iter()
        .enumerate()
        {
            let name = format!("gradients on matrix units, dropout {n}, {}", profile.name);
            if runs(profile, &name) {
                let case = Case::random(name, SHAPE).with(|c| c.dropout = Some(data));
                report.check_backward(&Problem::new(case, 0, true), &BackwardSetup::matrix(profile));
            }
        }
    }
    finish(report);
}

/// Gradients of scores that grow over the tiles by more than f16's range, and that shrink. Some
/// have no gradient in the first tiles.
#[test]
fn moving_scales_match_reference() {
    crate::harness::in_turn!();
    let mut report = Report::new("gradients on matrix units, scales");
    let shape = Shape { q_len: 90, kv_len: 100, ..SHAPE };
    for profile in profiles() {
        for (n, by) in [0.25, -0.25, 0.03].into_iter().enumerate() {
            let case = causal(format!("values grow by {by}"), shape).with(|c| {
                for (row, v) in c.v.chunks_exact_mut(16).enumerate() {
                    // The exponent depends on the key, from 2⁻¹² to 2¹³ at most.
                    let exponent = (row % shape.kv_len) as f32 * by;
                    let factor = if n == 2 && row % shape.kv_len < 40 {
                        0.0
                    } else {
                        (exponent - 12.0 * by.signum()).exp2()
                    };
                    v.iter_mut().for_each(|x| *x *= factor);
                }
            });
            let mut problem = Problem::new(case, 0, false);
            for (row, d_out) in problem.d_out.chunks_exact_mut(16).enumerate() {
                let exponent = (row % shape.q_len) as f64 * f64::from(by);
                d_out.iter_mut().for_each(|x| *x *= exponent.exp2() / 1024.0);
            }
            report.check_backward(&problem, &BackwardSetup::matrix(profile));
        }
    }
    finish(report);
}

/// Hidden elements may hold anything. A visible NaN shows, and nowhere else.
#[test]
fn non_finite_numbers_show() {
    crate::harness::in_turn!();
    let mut report = Report::new("gradients on matrix units, next to NaN");
    for profile in profiles() {
        for (n, poison) in [f32::NAN, f32::INFINITY].into_iter().enumerate() {
            let setup = BackwardSetup::matrix(profile);
            let case = Case::random(format!("matrix hidden {poison}"), SHAPE).with(|c| {
                (c.rules.causal, c.rules.alignment) = (true, Alignment::Offset(0));
                // The last keys are after all queries.
                for row in (0..2).flat_map(|h| (37..41).map(move |j| h * 41 + j)) {
                    c.k[row * 16..][..16].fill(poison);
                    c.v[row * 16..][..16].fill(poison);
                }
            });
            report.check_backward(&Problem::new(case, 0, n == 0), &setup);
            // The later half of the queries sees one NaN. Only they show it, although a tile has
            // all queries.
            let case = Case::random(format!("matrix seen {poison}"), SHAPE).with(|c| {
                (c.rules.causal, c.rules.alignment) = (true, Alignment::Offset(0));
                c.v[20 * 16] = poison;
            });
            let problem = Problem::new(case, 0, true);
            let got = run(&problem, &setup, |kernel_options| kernel_options).expect("it runs");
            let d_q = got[0].as_ref().expect("it was wanted");
            let clean = Problem {
                case: Case {
                    v: problem.case.v.iter().map(|x| if x.is_finite() { *x } else { 0.5 }).collect(),
                    ..problem.case.clone()
                },
                ..problem.clone()
            };
            let want = clean.gradients().d_q;
            for (row, (got, want)) in d_q.chunks_exact(16).zip(want.chunks_exact(16)).enumerate() {
                let (head, i) = (row / 37, row % 37);
                let sees = head < 2 && i >= 20;
                for (got, want) in got.iter().zip(want) {
                    assert_eq!(
                        got.is_nan(),
                        sees,
                        "{} {poison}: head {head}, query {i}: {got}",
                        profile.name
                    );
                    // Its scale does not spoil the neighbours.
                    assert!(
                        sees || (got - want).abs() < 0.05,
                        "{}: head {head}, query {i}: {got} {want}",
                        profile.name
                    );
                }
            }
        }
    }
    finish(report);
}

/// Every run gives the same bits, with any split of the work. These kernels differ from those
/// without matrix units.
#[test]
fn bits_are_the_same() {
    crate::harness::in_turn!();
    let case = causal("matrix, the same bits", Shape { q_len: 90, kv_len: 70, ..SHAPE });
    let problem = Problem::new(case, 0, true);
    for profile in profiles() {
        let setup = BackwardSetup::matrix(profile);
        let first = bits(&run(&problem, &setup, |kernel_options| kernel_options).expect("it runs"));
        for n in 0..20 {
            let again = run(&problem, &setup, |kernel_options| kernel_options).expect("it runs");
            assert!(bits(&again) == first, "other bits in run {n}");
        }
        for limit in [1, 100_000] {
            let cut =
                run(&problem, &setup, |kernel_options| kernel_options.work_limit(limit)).expect("it runs");
            assert!(bits(&cut) == first, "other bits with dispatches of {limit} operations");
        }
        let without = run(&problem, &setup, |t| t.matrix_units(MatrixUnits::Never));
        assert!(bits(&without.expect("it runs")) != first, "{}: the same without them", profile.name);
    }
}

#[test]
fn random_problems() {
    let mut report = Report::new("gradients on matrix units, random problems");
    for profile in matrices() {
        let most = if profile.compiles_fast() { 12 } else { 0 };
        for n in 0..48u64 {
            let name = format!("matrix gradients, draw {n}, {}", profile.name);
            // Six draws share a set of kernels.
            let due = n < most && due(&format!("matrix gradients, draws {}, {}", n / 6, profile.name));
            if !due && !rest(&format!("matrix gradients, draws {}, {}", n / 6, profile.name)) {
                continue;
            }
            let of_kernels = &mut Rng::new(0x3a7e_0000 + n / 6);
            let dims = [of_kernels.between(1, 40), of_kernels.between(1, 40)];
            let mask = MaskDraw::random(of_kernels, 40);
            let rng = &mut Rng::named(&name);
            let kv_heads = rng.between(1, 2);
            let shape = Shape {
                batch: rng.between(1, 2),
                heads: kv_heads * rng.between(1, 2),
                kv_heads,
                q_len: rng.pick(LENGTHS).min(80),
                kv_len: rng.pick(LENGTHS).min(80),
                head_dim: dims[0],
                value_dim: dims[1],
            };
            let case = Case::random(name, shape).with(|c| c.rules = mask.rules(rng, &shape, 0));
            // A problem with more tensors than the device binds is skipped and reported.
            report.check_backward(&Problem::new(case, 0, rng.chance(0.5)), &BackwardSetup::matrix(profile));
        }
    }
    finish(report);
}

#[test]
fn refusals() {
    for profile in matrices() {
        let wide =
            Case::random("matrix gradients, too wide", Shape { head_dim: 257, q_len: 4, kv_len: 4, ..SHAPE });
        let setup = BackwardSetup::matrix(profile);
        let error = run(&Problem::new(wide, 0, false), &setup, |t| t).expect_err("refused");
        assert!(error.contains("at most 256") && error.contains("matrix units"), "{error}");
        let case = Case::random("matrix gradients, f32", Shape { q_len: 4, kv_len: 4, ..SHAPE });
        let setup = BackwardSetup { dtype: DType::F32, ..setup };
        let error =
            run(&Problem::new(case, 0, false), &setup, |t| t.f16_operands(false)).expect_err("refused");
        assert!(error.contains("f16_operands"), "{error}");
    }
}
