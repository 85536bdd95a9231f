//! Attentional vectors. Differences check the reference, the reference checks the device, and bad
//! calls are refused.

use wgpu_attention::layers::{AttentionalBackward, AttentionalForward, AttentionalVector};
use wgpu_attention::reference::{HostLinear, attentional, attentional_backward, widen};
use wgpu_attention::{DType, Linear, Scratch, TensorView};

use crate::harness::attentional::outcome_async;
use crate::harness::{FORMS, Layout, Report, Rng, full};

#[test]
fn reference_gradients_match_finite_differences() {
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
    crate::harness::in_turn!();
    let mut report = Report::new("attentional vectors");
    let profile = full();
    let [f32, f16, bf16] = [DType::F32, DType::F16, DType::BF16];
    for (n, [batch, length, c, h, out]) in
        [[1, 1, 1, 1, 1], [2, 5, 12, 8, 20], [3, 7, 33, 6, 70], [1, 40, 64, 64, 300]].into_iter().enumerate()
    {
        for (m, form) in FORMS.into_iter().enumerate() {
            let dtype = [f32, f16, bf16, f32][n];
            let layout = [Layout::Dense, Layout::Window(2 * n as u64 + 1)][(n + m) % 2];
            let sizes = [batch, length, c, h, out];
            let outcome = outcome_async(sizes, dtype, layout, form, n % 2 == 1, profile);
            let outcome = pollster::block_on(outcome);
            report.record(
                &format!("{batch}x{length}x{c}x{h}x{out}"),
                &format!("{form:?} {dtype:?}"),
                outcome,
            );
        }
    }
    report.finish();
}

#[test]
fn bad_calls_are_errors() {
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

    let forward = AttentionalForward::new(context, hidden, Linear { weight, bias: Some(bias) }, out);
    let new = AttentionalBackward::new(forward, view(5, [2, 1, 3, 6]));
    let refused = |call: AttentionalBackward, words: &[&str]| {
        let error = operator.backward_scratch_size(&call).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let mut scratch = Scratch::new(gpu.device(), Default::default()).expect("nothing");
        assert!(operator.backward(&mut encoder, &call, &mut scratch).is_err());
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(operator.backward(&mut pass, &call, &mut scratch).is_err());
    };
    refused(new, &["no gradient is requested"]);
    refused(new.d_context(view(6, [2, 1, 3, 5])), &["`d_context`", "dim must be 4"]);
    refused(new.d_hidden(view(6, [2, 1, 3, 4])), &["`d_hidden`", "dim must be 5"]);
    refused(new.d_weight(view(6, [1, 1, 9, 6])), &["`d_weight`", "must be 6"]);
    refused(new.d_bias(view(6, [1, 1, 1, 7])), &["`d_bias`", "6"]);
    refused(new.d_bias(view(5, [1, 1, 1, 6])), &["`d_bias`", "`d_out`"]);
}
