//! Score vectors of a given length. Differences check the reference, the reference checks the
//! device, and bad calls are refused.

use wgpu_attention::additive::{AdditiveAttention, AdditiveConfig, AdditiveForward};
use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance};
use wgpu_attention::reference::{self, Options, weight_norm, weight_norm_backward, widen};
use wgpu_attention::rows::{WeightNorm, WeightNormBackward, WeightNormForward};
use wgpu_attention::{DType, KernelOptions, Scratch, Shape, TensorView};

use crate::harness::case::{largest, widened};
use crate::harness::gradients::{Compared, Input, compare_differences};
use crate::harness::run::Placed;
use crate::harness::{FORMS, Judged, Layout, Report, Rng, Values, full, stored};

#[test]
fn reference_gradients_match_finite_differences() {
    let mut compared = Compared::new();
    for gains in [1, 3] {
        let rng = &mut Rng::new(gains as u64);
        let mut normals = |n| widen::<f64>(&rng.normals(n));
        let (x, gain, d) = (normals(12), normals(gains), normals(12));
        let [d_x, d_gain] = weight_norm_backward(&x, &gain, &d, 4).expect("it fits");
        let inputs = [Input::new("vector", &x, &d_x), Input::new("gain", &gain, &d_gain)];
        let loss = |x: &[Vec<f64>]| {
            let got = weight_norm(&x[0], &x[1], 4).expect("it fits");
            got.iter().zip(&d).map(|(x, y)| x * y).sum::<f64>()
        };
        compare_differences("weight norm", &inputs, usize::MAX, &mut compared, loss).expect("differences");
    }
    assert!(compared["vector"] > 15 && compared["gain"] > 2, "{compared:?}");
    let got = weight_norm::<f64>(&[3.0, 4.0, 0.0, 0.0], &[10.0], 2).expect("it fits");
    assert_eq!(got, [6.0, 8.0, 0.0, 0.0]);
    assert!(
        weight_norm::<f64>(&[1.0; 6], &[1.0; 2], 2).is_err()
            && weight_norm::<f64>(&[1.0; 5], &[1.0], 2).is_err()
    );
}

#[test]
fn every_size_matches_the_reference() {
    let mut report = Report::new("weight norm");
    let profile = full();
    for (n, [heads, gains, dim]) in [[1, 1, 1], [4, 4, 20], [3, 1, 64], [2, 2, 300]].into_iter().enumerate() {
        let dtype = [DType::F32, DType::F16, DType::BF16, DType::F32][n];
        for layout in [Layout::Dense, Layout::Window(2 * n as u64 + 1)] {
            let accumulates = layout == Layout::Dense;
            let rng = &mut Rng::new(n as u64 + 50);
            let mut normals = |n: usize| stored(&rng.normals(n), dtype);
            let (x, gain) = (normals(heads * dim), normals(gains));
            let (d_out, before) = (
                Rng::new(1).normals(heads * dim),
                [Rng::new(2).normals(heads * dim), Rng::new(3).normals(gains)],
            );
            let (wide, row) = ([1, heads, 1, dim], [1, gains, 1, 1]);
            let at = layout.places([wide, row, wide, wide, wide, row]);
            let input = |x: &[f32], dtype, n: usize| Placed::input(profile, Values::Floats(x), dtype, at[n]);
            let (vector, of_gain) = (input(&x, dtype, 0), input(&gain, dtype, 1));
            let (out, d_placed) = (Placed::output(profile, DType::F32, at[2]), input(&d_out, DType::F32, 3));
            let gradients = [0, 1].map(|n| match accumulates {
                true => Placed::holding(profile, &before[n], DType::F32, at[4 + n]),
                false => Placed::output(profile, DType::F32, at[4 + n]),
            });
            let operator = WeightNorm::with_pipelines(profile.gpu.pipelines());
            let forward = WeightNormForward::new(vector.view(), of_gain.view(), out.view());
            let written = [gradients[0].view(), gradients[1].view()];
            let backward = WeightNormBackward::new(forward, d_placed.view(), written).accumulate(accumulates);
            let run = profile.gpu.submit(|e| {
                operator.forward(e, &forward)?;
                operator.backward(e, &backward)
            });
            let read = |placed: &Placed| pollster::block_on(placed.download_async("a result", profile));
            let check = || {
                run.map_err(|e| e.to_string())?;
                let [wide_x, wide_gain, wide_d] = [&x, &gain, &d_out].map(|x| widen::<f64>(x));
                let want = weight_norm(&wide_x, &wide_gain, dim).expect("it fits");
                let naive = widened(&weight_norm(&x, &gain, dim).expect("it fits"), DType::F32);
                let most = largest(wide_gain.iter().map(|x| x.abs()));
                let mut worst = Judged::new(&naive, want, most).judge(&read(&out)?)?;
                let exact = weight_norm_backward(&wide_x, &wide_gain, &wide_d, dim).expect("it fits");
                let close = weight_norm_backward(&x, &gain, &d_out, dim).expect("it fits");
                // The result sums terms u · d_out over dim, and for a shared gain over the heads
                // too. The shortest |x| divides them.
                let shortest = wide_x.chunks(dim).map(|x| x.iter().map(|x| x * x).sum::<f64>().sqrt());
                let shortest = shortest.fold(f64::INFINITY, f64::min);
                let along = 4.0 * (dim as f64).sqrt();
                let magnitudes = [most / shortest * (4.0 + along), along * (heads / gains) as f64];
                for n in 0..2 {
                    let (mut want, mut naive) = (exact[n].clone(), widened(&close[n], DType::F32));
                    if accumulates {
                        want.iter_mut().zip(&before[n]).for_each(|(x, b)| *x += f64::from(*b));
                        naive.iter_mut().zip(&before[n]).for_each(|(x, b)| *x += f64::from(*b));
                    }
                    let tolerance = Tolerance::gradient(&naive, &want, magnitudes[n] + 4.0, EPSILON_F32);
                    worst = worst.max(Judged { want, tolerance }.judge(&read(&gradients[n])?)?);
                }
                Ok(worst)
            };
            report.record(&format!("{heads}x{gains}x{dim}"), &format!("{dtype:?}, {layout:?}"), check());
        }
    }
    report.finish();
}

/// The squares of large and small numbers do no harm, and zeros stay zeros.
#[test]
fn lengths_do_not_overflow() {
    let gpu = &full().gpu;
    for scale in [1e30f32, 1e-30] {
        let x = gpu.upload(&[3.0 * scale, 4.0 * scale, 0.0, 0.0]).expect("an upload");
        let gain = gpu.upload(&[10.0f32]).expect("an upload");
        let d_out = gpu.upload(&[4.0f32, -3.0, 1.0, 1.0]).expect("an upload");
        let [out, d_x, d_gain] = [4, 4, 1].map(|n| gpu.buffer(4 * n).expect("a buffer"));
        let wide = |buffer| TensorView::new(buffer, DType::F32, [1, 2, 1, 2]);
        let one = |buffer| TensorView::new(buffer, DType::F32, [1, 1, 1, 1]);
        let operator = WeightNorm::with_pipelines(gpu.pipelines());
        let forward = WeightNormForward::new(wide(&x), one(&gain), wide(&out));
        let backward = WeightNormBackward::new(forward, wide(&d_out), [wide(&d_x), one(&d_gain)]);
        gpu.submit(|e| {
            operator.forward(e, &forward)?;
            operator.backward(e, &backward)
        })
        .expect("it runs");
        let read = |buffer, n| gpu.download::<f32>(buffer, n).expect("a read-back");
        for (got, want) in read(&out, 4).into_iter().zip([6.0, 8.0, 0.0, 0.0]) {
            assert!((got - want).abs() < 1e-5, "{got} {want}");
        }
        // Orthogonal to the vector: d_out itself, times 10 / 5.
        for (got, want) in read(&d_x, 4).into_iter().zip([8.0, -6.0, 0.0, 0.0]) {
            assert!((got * scale - want).abs() < 1e-5, "{got} {want}");
        }
        assert!(read(&d_gain, 1)[0].abs() < 1e-5);
    }
}

/// Normalised Bahdanau attention is additive attention with the vector g · v / |v|.
#[test]
fn normalised_attention() {
    let gpu = &full().gpu;
    let shape = Shape { q_len: 5, kv_len: 9, ..Shape::new(2, 2, 9, 6) };
    let rng = &mut Rng::new(77);
    let mut normals = |shape: [usize; 4]| rng.normals(shape.iter().product());
    let data = [shape.q(), shape.k(), shape.v(), [1, 2, 1, 6], [1, 2, 1, 1]].map(&mut normals);
    let [q, k, v, vector, gain] = data.each_ref().map(|x| widen::<f64>(x));
    let by = weight_norm(&vector, &gain, 6).expect("it fits");
    let want = reference::additive_attention(&q, &k, &v, &by, shape, &Options::new()).expect("it fits");
    let buffers = data.each_ref().map(|x| gpu.upload(x).expect("an upload"));
    let [by, out] = [12, want.out.len()].map(|n| gpu.buffer(4 * n).expect("a buffer"));
    let view = |buffer, shape| TensorView::new(buffer, DType::F32, shape);
    for form in FORMS {
        let [q, k, v] = [0, 1, 2].map(|n| view(&buffers[n], [shape.q(), shape.k(), shape.v()][n]));
        let by = view(&by, [1, 2, 1, 6]);
        let norm = WeightNorm::with_pipelines(gpu.pipelines());
        let normed =
            WeightNormForward::new(view(&buffers[3], [1, 2, 1, 6]), view(&buffers[4], [1, 2, 1, 1]), by);
        let config = AdditiveConfig::new(2, 6).kernel_options(KernelOptions::new().target(form));
        let attention = AdditiveAttention::with_pipelines(gpu.pipelines(), config).expect("it is made");
        let call = AdditiveForward::new(q, k, v, by, view(&out, shape.out()));
        let size = attention.scratch_size(&call).expect("it fits");
        let mut scratch = Scratch::new(gpu.device(), size).expect("memory");
        gpu.submit(|e| {
            norm.forward(e, &normed)?;
            attention.forward(e, &call, &mut scratch)
        })
        .expect("it runs");
        let got = gpu.download::<f32>(&out, want.out.len()).expect("a read-back");
        assert!(got.iter().zip(&want.out).all(|(a, b)| (f64::from(*a) - b).abs() < 1e-5), "{form:?}");
    }
}

#[test]
fn bad_calls_are_errors() {
    let gpu = &full().gpu;
    let buffers: Vec<_> = (0..8).map(|_| gpu.buffer(1024).expect("a buffer")).collect();
    let typed = |n: usize, dtype, shape| TensorView::new(&buffers[n], dtype, shape);
    let view = |n: usize, shape| typed(n, DType::F32, shape);
    let (wide, row) = ([1, 4, 1, 6], [1, 1, 1, 1]);
    let (vector, gain, out) = (view(0, wide), view(1, row), view(2, wide));
    let operator = WeightNorm::with_pipelines(gpu.pipelines());
    let refused = |vector, gain, out, words: &[&str]| {
        let call = WeightNormForward::new(vector, gain, out);
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = operator.forward(&mut encoder, &call).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(operator.forward(&mut pass, &call).is_err());
    };
    refused(typed(0, DType::U32, wide), gain, out, &["`vector`", "F32, F16 or BF16"]);
    refused(view(0, [2, 4, 1, 6]), gain, out, &["`vector`", "batch must be 1"]);
    refused(view(0, [1, 4, 2, 6]), gain, out, &["`vector`", "length must be 1"]);
    refused(vector, view(1, [1, 2, 1, 1]), out, &["`gain`", "heads must be 4 or 1", "got 2"]);
    refused(vector, view(1, [1, 4, 1, 6]), out, &["`gain`", "must be 1", "got 6"]);
    refused(vector, typed(1, DType::BF16, row), out, &["`gain`", "F32", "BF16"]);
    refused(vector, gain, view(2, [1, 4, 1, 5]), &["`out`", "must be 6", "got 5"]);
    refused(vector, gain, view(0, wide), &["`out`", "`vector`"]);
    let (d_out, d_vector, d_gain) = (view(3, wide), view(4, wide), view(5, row));
    let refused = |d_out, written, words: &[&str]| {
        let call = WeightNormBackward::new(WeightNormForward::new(vector, gain, out), d_out, written);
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = operator.backward(&mut encoder, &call).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(operator.backward(&mut pass, &call).is_err());
    };
    refused(view(3, row), [d_vector, d_gain], &["`d_out`"]);
    refused(d_out, [view(4, row), d_gain], &["`d_vector`"]);
    refused(d_out, [d_vector, view(5, wide)], &["`d_gain`"]);
    refused(d_out, [d_vector, view(4, row)], &["overlap"]);
    refused(d_out, [view(3, wide), d_gain], &["`d_vector`", "`d_out`"]);
}
