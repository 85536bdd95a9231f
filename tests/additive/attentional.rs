//! Attentional vectors: the reference against differences, the device against the reference, refusals.

use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance};
use wgpu_attention::reference::{HostLinear, attentional, attentional_backward, widen};
use wgpu_attention::{
    AttentionalBackward, AttentionalForward, AttentionalVector, DType, Linear, Scratch, TensorView, Tuning,
};

use crate::harness::case::widened;
use crate::harness::run::Placed;
use crate::harness::{FORMS, Judged, Layout, Report, Rng, Values, full, stored};

#[test]
fn the_reference_is_what_differences_say() {
    let (rows, out, c, h) = (3, 4, 2, 5);
    let rng = &mut Rng::new(5);
    let mut normals = |n| widen::<f64>(&rng.normals(n));
    let inputs = [normals(rows * c), normals(rows * h), normals(out * (c + h)), normals(out)];
    let d_out = normals(rows * out);
    let loss = |x: &[Vec<f64>; 4]| -> f64 {
        let linear = HostLinear { weight: &x[2], bias: Some(&x[3]) };
        let got = attentional(&x[0], &x[1], linear, rows, out).expect("it fits");
        got.iter().zip(&d_out).map(|(x, d)| x * d).sum()
    };
    let linear = HostLinear { weight: &inputs[2], bias: Some(&inputs[3]) };
    let got = attentional_backward(&inputs[0], &inputs[1], linear, &d_out, rows, out).expect("it fits");
    for (n, gradient) in [got.d_context, got.d_hidden, got.d_weight, got.d_bias].iter().enumerate() {
        for at in 0..gradient.len() {
            let moved = |step: f64| {
                let mut x = inputs.clone();
                x[n][at] += step;
                loss(&x)
            };
            let want = (moved(1e-6) - moved(-1e-6)) / 2e-6;
            assert!((gradient[at] - want).abs() < 1e-8, "{n} {at}: {} {want}", gradient[at]);
        }
    }
    let short = HostLinear { weight: &inputs[2][1..], bias: None };
    assert!(attentional(&inputs[0], &inputs[1], short, rows, out).is_err());
}

#[test]
fn every_size_matches_the_reference() {
    let mut report = Report::new("attentional vectors");
    let profile = full();
    let [f32, f16, bf16] = [DType::F32, DType::F16, DType::BF16];
    for (n, [batch, length, c, h, out]) in
        [[1, 1, 1, 1, 1], [2, 5, 12, 8, 20], [3, 7, 33, 6, 70], [1, 40, 64, 64, 300]].into_iter().enumerate()
    {
        for (m, form) in FORMS.into_iter().enumerate() {
            let dtype = [f32, f16, bf16, f32][n];
            if n % 2 != m && n != 1 || dtype == f16 && !profile.f16 {
                continue;
            }
            let layout = [Layout::Dense, Layout::Window(2 * n as u64 + 1)][(n + m) % 2];
            let outcome = outcome([batch, length, c, h, out], dtype, layout, form, n % 2 == 1);
            report.record(
                &format!("{batch}x{length}x{c}x{h}x{out}"),
                &format!("{form:?} {dtype:?}"),
                outcome,
            );
        }
    }
    report.finish();
}

/// The largest error over tolerance, forward and backward.
fn outcome(
    [batch, length, c, h, out]: [usize; 5],
    dtype: DType,
    layout: Layout,
    form: wgpu_attention::KernelForm,
    accumulates: bool,
) -> Result<f64, String> {
    let profile = full();
    let rows = batch * length;
    let rng = &mut Rng::new(rows as u64 ^ 0x1009);
    let mut normals = |n: usize, scale: f32| -> Vec<f32> {
        stored(&rng.normals(n).iter().map(|x| x * scale).collect::<Vec<_>>(), dtype)
    };
    let narrow = 1.0 / ((c + h) as f32).sqrt();
    let given =
        [normals(rows * c, 1.0), normals(rows * h, 1.0), normals(out * (c + h), narrow), normals(out, 0.5)];
    let d_out = normals(rows * out, 1.0);
    let shapes = [[batch, 1, length, c], [batch, 1, length, h], [1, 1, out, c + h], [1, 1, 1, out]];
    let places = layout.places([
        shapes[0],
        shapes[1],
        shapes[2],
        shapes[3],
        [batch, 1, length, out],
        [batch, 1, length, out],
        shapes[0],
        shapes[1],
        shapes[2],
        shapes[3],
    ]);
    let placed: Vec<_> =
        (0..4).map(|n| Placed::input(profile, Values::Floats(&given[n]), dtype, places[n])).collect();
    let [context, hidden, weight, bias] = [0, 1, 2, 3].map(|n| placed[n].view());
    let result = Placed::output(profile, dtype, places[4]);
    let d_placed = Placed::input(profile, Values::Floats(&d_out), dtype, places[5]);
    let before: Vec<Vec<f32>> = given.iter().map(|x| normals(x.len(), 1.0)).collect();
    let gradients: Vec<_> = (0..4)
        .map(|n| match accumulates {
            true => Placed::holding(profile, &before[n], DType::F32, places[6 + n]),
            false => Placed::output(profile, DType::F32, places[6 + n]),
        })
        .collect();
    let operator =
        AttentionalVector::with_pipelines(profile.gpu.pipelines()).tuning(Tuning::new().form(form));
    let linear = Linear { weight, bias: Some(bias) };
    let forward = AttentionalForward::new(context, hidden, linear, result.view());
    let backward = AttentionalBackward::new(context, hidden, weight, result.view(), d_placed.view())
        .d_context(gradients[0].view())
        .d_hidden(gradients[1].view())
        .d_weight(gradients[2].view())
        .d_bias(gradients[3].view())
        .accumulate(accumulates);
    let refused = |e: wgpu_attention::Error| e.to_string();
    let size = operator.scratch_size(&forward).map_err(refused)?;
    let size = size.max(operator.backward_scratch_size(&backward).map_err(refused)?);
    let mut scratch = Scratch::new(profile.gpu.device(), size).map_err(refused)?;
    profile
        .gpu
        .submit(|e| {
            operator.forward(e, &forward, &mut scratch)?;
            operator.backward(e, &backward, &mut scratch)
        })
        .map_err(refused)?;
    let read = |placed: &Placed| pollster::block_on(placed.download_async("a result", profile));

    let wide: Vec<Vec<f64>> = given.iter().map(|x| widen(x)).collect();
    let exact = HostLinear { weight: &wide[2][..], bias: Some(&wide[3]) };
    let naive = HostLinear { weight: &given[2][..], bias: Some(&given[3]) };
    let want = attentional(&wide[0], &wide[1], exact, rows, out).map_err(refused)?;
    let close = attentional(&given[0], &given[1], naive, rows, out).map_err(refused)?;
    let mut worst = Judged::new(&widened(&close, dtype), want, 1.0).judge(&read(&result)?)?;
    // From the output as it is stored, of which one is made minus its square.
    let of = |x: &[f64], d: &[f64]| -> Vec<f64> { x.iter().zip(d).map(|(a, b)| a + b).collect() };
    let want = attentional_backward(&wide[0], &wide[1], exact, &widen(&d_out), rows, out).map_err(refused)?;
    let close = attentional_backward(&given[0], &given[1], naive, &d_out, rows, out).map_err(refused)?;
    let wants = [want.d_context, want.d_hidden, want.d_weight, want.d_bias];
    let closes = [close.d_context, close.d_hidden, close.d_weight, close.d_bias];
    let terms = [out, out, rows, rows];
    for n in 0..4 {
        let mut want = wants[n].clone();
        let mut naive = widened(&closes[n], DType::F32);
        if accumulates {
            want = of(&want, &widen(&before[n]));
            naive = of(&naive, &widen(&before[n]));
        }
        // Terms are products of numbers of about 4 at most; an output of fewer bits is off by half a unit in its last place.
        let rounding = match dtype {
            DType::F16 => 4.9e-4,
            DType::BF16 => 3.9e-3,
            _ => 0.0,
        };
        let mut tolerance = Tolerance::gradient(&naive, &want, 16.0 * terms[n] as f64, EPSILON_F32);
        tolerance.absolute += rounding * 2.0 * 16.0 * (terms[n] as f64).sqrt();
        worst = worst
            .max(Judged { want, tolerance }.judge(&read(&gradients[n])?).map_err(|e| format!("{n}: {e}"))?);
    }
    Ok(worst)
}

#[test]
fn bad_calls_are_refused_before_anything_is_recorded() {
    let gpu = &full().gpu;
    let buffers: Vec<_> = (0..8).map(|_| gpu.buffer(1024).expect("a buffer")).collect();
    let view = |n: usize, shape| TensorView::new(&buffers[n], DType::F32, shape);
    let (context, hidden) = (view(0, [2, 1, 3, 4]), view(1, [2, 1, 3, 5]));
    let (weight, bias, out) = (view(2, [1, 1, 6, 9]), view(3, [1, 1, 1, 6]), view(4, [2, 1, 3, 6]));
    let operator = AttentionalVector::with_pipelines(gpu.pipelines());
    let refused = |context, hidden, weight, bias, out, words: &[&str]| {
        let call = AttentionalForward::new(context, hidden, Linear { weight, bias: Some(bias) }, out);
        let error = operator.scratch_size(&call).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let mut scratch = Scratch::new(gpu.device(), Default::default()).expect("nothing");
        assert!(operator.forward(&mut encoder, &call, &mut scratch).is_err());
    };
    refused(view(0, [2, 2, 3, 2]), hidden, weight, bias, out, &["`context`", "heads must be 1"]);
    refused(context, view(1, [2, 1, 2, 5]), weight, bias, out, &["`hidden`", "length must be 3", "got 2"]);
    refused(context, hidden, view(2, [1, 1, 6, 8]), bias, out, &["`linear.weight`", "must be 9", "got 8"]);
    refused(context, hidden, weight, view(3, [1, 1, 1, 5]), out, &["`linear.bias`", "6", "got 5"]);
    refused(context, hidden, weight, bias, view(4, [2, 1, 3, 5]), &["`out`", "dim must be 6", "got 5"]);
    refused(context, hidden, weight, bias, view(0, [2, 1, 3, 6]), &["`out`", "`context`"]);
    refused(context, hidden, weight.with_offset(300), bias, out, &["`linear.weight`", "byte"]);
    let whole = TensorView::new(&buffers[1], DType::Bool, [2, 1, 3, 5]);
    refused(context, whole, weight, bias, out, &["`hidden`", "F32, F16 or BF16"]);

    let new = AttentionalBackward::new(context, hidden, weight, out, view(5, [2, 1, 3, 6]));
    let refused = |call: AttentionalBackward, words: &[&str]| {
        let error = operator.backward_scratch_size(&call).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let mut scratch = Scratch::new(gpu.device(), Default::default()).expect("nothing");
        assert!(operator.backward(&mut encoder, &call, &mut scratch).is_err());
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(operator.backward_in_pass(&mut pass, &call, &mut scratch).is_err());
    };
    refused(new, &["without gradients"]);
    refused(new.d_context(view(6, [2, 1, 3, 5])), &["`d_context`", "dim must be 4"]);
    refused(new.d_hidden(view(6, [2, 1, 3, 4])), &["`d_hidden`", "dim must be 5"]);
    refused(new.d_weight(view(6, [1, 1, 9, 6])), &["`d_weight`", "must be 6"]);
    refused(new.d_bias(view(6, [1, 1, 1, 7])), &["`d_bias`", "6"]);
    refused(new.d_bias(view(5, [1, 1, 1, 6])), &["`d_bias`", "`d_out`"]);
}
