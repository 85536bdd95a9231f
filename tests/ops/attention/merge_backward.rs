//! The gradients of merged attention, compared with the reference.

use wgpu_attention::attention::{Merge, MergeBackward, MergeForward, PartGradients, Partial};
use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance};
use wgpu_attention::reference::{merge, merge_backward, widen};
use wgpu_attention::{DType, TensorView, wgpu};

use crate::harness::case::widened;
use crate::harness::run::{Layout, Placed};
use crate::harness::{Judged, Profile, Report, Rng, Values, full, profiles, stored};

/// Merged parts, and their storage.
struct Case {
    profile: &'static Profile,
    layout: Layout,
    shape: [usize; 4],
    parts: usize,
    /// The types of the parts' outputs, the merged output, its gradient, and the parts' gradients.
    dtypes: [DType; 4],
    with_lse: bool,
}

impl Case {
    /// Returns the largest error over tolerance. All `times` runs must agree.
    fn outcome(&self, seed: u64, times: usize) -> Result<f64, String> {
        let Case { profile, layout, shape, parts, dtypes, with_lse } = *self;
        let [batch, heads, q_len, value_dim] = shape;
        let rows = batch * heads * q_len;
        let rng = &mut Rng::new(seed);
        let none = f32::NEG_INFINITY;
        let mut outs: Vec<Vec<f32>> =
            (0..parts).map(|_| stored(&rng.normals(rows * value_dim), dtypes[0])).collect();
        let mut lses: Vec<Vec<f32>> =
            (0..parts).map(|_| rng.normals(rows).iter().map(|x| 3.0 * x).collect()).collect();
        // In some rows one part has no key, and anything in its output. In other rows no part has a
        // key.
        for (n, lse) in lses.iter_mut().enumerate() {
            for row in (0..rows).filter(|row| row % 5 == 4 || parts > 1 && (row + n) % 7 == 3) {
                lse[row] = none;
                outs[n][row * value_dim] = f32::NAN;
            }
        }
        let d_out = stored(&rng.normals(rows * value_dim), dtypes[2]);
        let d_lse = with_lse.then(|| rng.normals(rows));
        let (wide_outs, wide_lses): (Vec<_>, Vec<_>) =
            outs.iter().zip(&lses).map(|(out, lse)| (widen::<f64>(out), widen::<f64>(lse))).unzip();
        let wide: Vec<_> = wide_outs.iter().zip(&wide_lses).map(|(o, l)| (&o[..], &l[..])).collect();
        let narrow: Vec<_> = outs.iter().zip(&lses).map(|(o, l)| (&o[..], &l[..])).collect();
        let (out, lse) = merge(&narrow, value_dim).map_err(|e| e.to_string())?;
        let out = stored(&out, dtypes[1]);
        let wide_d_lse = d_lse.as_ref().map(|d| widen::<f64>(d));
        let exact = merge_backward(&wide, value_dim, &widen::<f64>(&d_out), wide_d_lse.as_deref())
            .map_err(|e| e.to_string())?;

        profile.tidy();
        let lse_shape = [batch, heads, q_len, 1];
        let [wide_at, row_at] = layout.places([shape, lse_shape]);
        let floats = |x: &[f32], dtype| Placed::input(profile, Values::Floats(x), dtype, wide_at);
        let rows_of = |x: &[f32]| Placed::input(profile, Values::Floats(x), DType::F32, row_at);
        let placed: Vec<_> =
            outs.iter().zip(&lses).map(|(o, l)| (floats(o, dtypes[0]), rows_of(l))).collect();
        let merged = (floats(&out, dtypes[1]), rows_of(&lse));
        let d_out_placed = floats(&d_out, dtypes[2]);
        let d_lse_placed = d_lse.as_ref().map(|d| rows_of(d));
        fn part((out, lse): &(Placed, Placed)) -> (TensorView<'_>, TensorView<'_>) {
            (out.view(), lse.view())
        }
        let views: Vec<_> = placed.iter().map(part).map(|(out, lse)| Partial { out, lse }).collect();
        let merged = Partial { out: merged.0.view(), lse: merged.1.view() };
        let operator = Merge::with_pipelines(profile.gpu.pipelines());
        let mut first: Option<Vec<[Vec<f64>; 2]>> = None;
        for _ in 0..times {
            let results: Vec<_> = (0..parts)
                .map(|_| {
                    let d_part = Placed::output(profile, dtypes[3], wide_at);
                    (d_part, Placed::output(profile, DType::F32, row_at))
                })
                .collect();
            let gradients: Vec<_> =
                results.iter().map(part).map(|(d_out, d_lse)| PartGradients { d_out, d_lse }).collect();
            let forward = MergeForward::new(&views, merged);
            let call = MergeBackward::new(forward, d_out_placed.view(), &gradients)
                .d_lse(d_lse_placed.as_ref().map(Placed::view));
            profile.gpu.submit(|e| operator.backward(e, &call)).map_err(|e| e.to_string())?;
            let mut got = Vec::new();
            for (d_part, d_part_lse) in &results {
                let d_part = pollster::block_on(d_part.download_async("d_out", profile))?;
                got.push([d_part, pollster::block_on(d_part_lse.download_async("d_lse", profile))?]);
            }
            if first.as_ref().is_some_and(|first| *first != got) {
                return Err("other numbers the second time".into());
            }
            first = Some(got);
        }

        let mut worst: f64 = 0.0;
        for (n, got) in first.ok_or("never run")?.into_iter().enumerate() {
            // The same in f32, from the output as stored.
            let (mut naive, mut naive_lse) = (vec![0f32; rows * value_dim], vec![0f32; rows]);
            let (mut most, mut most_lse) = (0f64, 0f64);
            for row in (0..rows).filter(|row| lses[n][*row] != none) {
                let share = (lses[n][row] - lse[row]).exp();
                let mut sum = d_lse.as_ref().map_or(0.0, |d| d[row]);
                let mut size = f64::from(sum.abs());
                for d in row * value_dim..(row + 1) * value_dim {
                    naive[d] = share * d_out[d];
                    sum += d_out[d] * (outs[n][d] - out[d]);
                    size += f64::from(d_out[d].abs()) * f64::from(outs[n][d].abs() + out[d].abs());
                    most = most.max(f64::from(naive[d].abs()));
                }
                naive_lse[row] = share * sum;
                most_lse = most_lse.max(f64::from(share) * size);
            }
            let exact = &exact[n];
            for (name, got, want, naive, most) in [
                ("d_out", &got[0], &exact.d_out, widened(&naive, dtypes[3]), most),
                ("d_lse", &got[1], &exact.d_lse, widened(&naive_lse, DType::F32), most_lse),
            ] {
                let tolerance = Tolerance::gradient(&naive, want, most, EPSILON_F32);
                let judged = Judged { want: want.clone(), tolerance };
                worst = worst.max(judged.judge(got).map_err(|e| format!("{name} of part {n}: {e}"))?);
            }
        }
        Ok(worst)
    }
}

#[test]
fn gradients_of_parts_equal_the_reference() {
    let mut report = Report::new("merge backward");
    let [f32, f16, bf16] = [DType::F32, DType::F16, DType::BF16];
    for profile in profiles() {
        for dtypes in [[f32; 4], [f16; 4], [f16, f32, f32, f16], [bf16; 4], [bf16, f32, f32, f32]] {
            for layout in [Layout::Dense, Layout::Blhd, Layout::Window(7)] {
                // The last has more sequences than the workgroups of a device along an axis.
                let many = (dtypes == [f32; 4] && layout == Layout::Dense).then_some((2, [70_000, 1, 1, 4]));
                for (parts, shape) in
                    [(1, [1, 1, 1, 1]), (2, [2, 3, 7, 21]), (5, [1, 2, 9, 64]), (3, [3, 1, 4, 130])]
                        .into_iter()
                        .chain(many)
                {
                    for with_lse in [false, true] {
                        let case = Case { profile, layout, shape, parts, dtypes, with_lse };
                        let setup =
                            format!("{}, {layout:?}, {dtypes:?}, {shape:?}, {with_lse}", profile.name);
                        let times = if dtypes == [f32; 4] && parts == 5 { 20 } else { 1 };
                        report.record(&format!("{parts} parts"), &setup, case.outcome(7, times));
                    }
                }
            }
        }
    }
    report.finish();
}

fn rows(buffer: &wgpu::Buffer) -> TensorView<'_> {
    TensorView::new(buffer, DType::F32, [1, 1, 4, 1])
}

#[test]
fn empty_parts_have_no_gradient() {
    let gpu = &full().gpu;
    let upload = |x: &[f32; 4]| gpu.upload(&x[..]).expect("upload");
    let none = f32::NEG_INFINITY;
    // Rows: visible; hidden, with garbage; a NaN in the log-sum-exp; a NaN in the gradient.
    let part = [upload(&[1.0, f32::NAN, 2.0, 3.0]), upload(&[0.0, none, f32::NAN, 0.0])];
    let merged = [upload(&[0.5, 4.0, f32::NAN, 1.0]), upload(&[1.0, 2.0, f32::NAN, 0.0])];
    let d_out = upload(&[2.0, f32::NAN, 1.0, f32::NAN]);
    let results = [gpu.buffer(16).expect("d_out"), gpu.buffer(16).expect("d_lse")];
    let parts = [Partial { out: rows(&part[0]), lse: rows(&part[1]) }];
    let gradients = [PartGradients { d_out: rows(&results[0]), d_lse: rows(&results[1]) }];
    let into = Partial { out: rows(&merged[0]), lse: rows(&merged[1]) };
    let call = MergeBackward::new(MergeForward::new(&parts, into), rows(&d_out), &gradients);
    let operator = Merge::with_pipelines(gpu.pipelines());
    gpu.submit(|e| operator.backward(e, &call)).expect("gradients");
    let [d_out, d_lse] = results.each_ref().map(|b| gpu.download::<f32>(b, 4).expect("a read-back"));
    let share = (-1f32).exp();
    assert!((d_out[0] - 2.0 * share).abs() < 1e-6 && (d_lse[0] - share).abs() < 1e-6, "{d_out:?} {d_lse:?}");
    assert_eq!((d_out[1], d_lse[1]), (0.0, 0.0));
    assert!(d_out[2..].iter().chain(&d_lse[2..]).all(|x| x.is_nan()), "{d_out:?} {d_lse:?}");
}

#[test]
fn bad_calls_are_errors() {
    let gpu = &full().gpu;
    let buffers: Vec<_> = (0..8).map(|_| gpu.buffer(256).expect("a buffer")).collect();
    let typed = |n: usize, dtype, shape| TensorView::new(&buffers[n], dtype, shape);
    let view = |n: usize, shape| typed(n, DType::F32, shape);
    let (wide, row) = ([1, 1, 2, 4], [1, 1, 2, 1]);
    let part = Partial { out: view(0, wide), lse: view(1, row) };
    let merged = Partial { out: view(2, wide), lse: view(3, row) };
    let (d_out, d_lse) = (view(4, wide), view(5, row));
    let gradients = PartGradients { d_out: view(6, wide), d_lse: view(7, row) };
    let operator = Merge::with_pipelines(gpu.pipelines());
    let refused = |call: &MergeBackward, words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = operator.backward(&mut encoder, call).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(operator.backward(&mut pass, call).is_err());
    };
    let of = |part: Partial, merged, d_out, d_lse: TensorView, gradients, words: &[&str]| {
        refused(
            &MergeBackward::new(MergeForward::new(&[part], merged), d_out, &[gradients]).d_lse(d_lse),
            words,
        );
    };
    let (parts, twice) = ([part; 2], [gradients; 2]);
    let both = MergeForward::new(&parts, merged);
    refused(&MergeBackward::new(MergeForward::new(&[], merged), d_out, &[]), &["parts"]);
    refused(&MergeBackward::new(both, d_out, &[gradients]), &["`gradients`", "2", "got 1"]);
    let short = Partial { out: view(0, [1, 1, 1, 4]), ..part };
    of(short, merged, d_out, d_lse, gradients, &["`parts.out`", "length must be 2", "got 1"]);
    let wrong = Partial { lse: typed(1, DType::U32, row), ..part };
    of(wrong, merged, d_out, d_lse, gradients, &["`parts.lse`", "F32", "U32"]);
    let wrong = Partial { lse: view(3, [1, 1, 2, 2]), ..merged };
    of(part, wrong, d_out, d_lse, gradients, &["`lse`", "must be 1", "got 2"]);
    of(part, merged, view(4, [1, 1, 2, 3]), d_lse, gradients, &["`d_out`", "dim must be 4", "got 3"]);
    of(part, merged, typed(4, DType::Bool, wide), d_lse, gradients, &["`d_out`", "F32, F16 or BF16"]);
    of(part, merged, d_out, view(5, [1, 1, 3, 1]), gradients, &["`d_lse`", "length must be 2", "got 3"]);
    of(part, merged, d_out, d_lse.with_offset(64), gradients, &["`d_lse`", "byte"]);
    let with = |d_out, d_lse| PartGradients { d_out, d_lse };
    let good = gradients;
    of(part, merged, d_out, d_lse, with(view(6, [1, 2, 2, 4]), good.d_lse), &["`gradients.d_out`", "heads"]);
    of(
        part,
        merged,
        d_out,
        d_lse,
        with(good.d_out, typed(7, DType::BF16, row)),
        &["`gradients.d_lse`", "F32"],
    );
    let overlapping = good.d_out.with_strides([0, 0, 0, 1]);
    of(part, merged, d_out, d_lse, with(overlapping, good.d_lse), &["`gradients.d_out`", "share memory"]);
    of(part, merged, d_out, d_lse, with(view(0, wide), good.d_lse), &["`gradients.d_out`", "`parts.out`"]);
    of(part, merged, d_out, d_lse, with(good.d_out, view(5, row)), &["`gradients.d_lse`", "`d_lse`"]);
    of(part, merged, d_out, d_lse, with(good.d_out, view(6, row)), &["overlap"]);
    refused(&MergeBackward::new(both, d_out, &twice), &["overlap"]);
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let (parts, gradients) = ([part], [good]);
    let call = MergeBackward::new(MergeForward::new(&parts, merged), d_out, &gradients).d_lse(d_lse);
    assert!(operator.backward(&mut encoder, &call).is_ok());
}
