//! Values near the largest number of f32. Sums and products inside an operator exceed the range,
//! but its results do not.

use wgpu_attention::attention::{Merge, MergeBackward, MergeForward, PartGradients, Partial};
use wgpu_attention::linear_attention::{FeatureMap, LinearAttention, LinearConfig, LinearForward};
use wgpu_attention::lsh::{LshAttention, LshBackward, LshConfig, LshForward};
use wgpu_attention::reference::{self, LinearOptions, LshHashed, LshShape, Options, widen};
use wgpu_attention::rows::{
    LogSoftmax, LogSoftmaxBackward, LogSoftmaxForward, MeanPool, MeanPoolBackward, MeanPoolForward, Norm,
    NormBackward, NormConfig, NormForward, PoolMask,
};
use wgpu_attention::tuning::Algorithm;
use wgpu_attention::{
    Attention, Config, DType, Error, Forward, Gpu, KernelOptions, Scratch, ScratchSize, Shape, TensorView,
};

use crate::harness::{FORMS, full};

/// A tensor of f32.
struct Placed {
    buffer: wgpu::Buffer,
    shape: [usize; 4],
}

impl Placed {
    fn input(gpu: &Gpu, values: &[f32], shape: [usize; 4]) -> Self {
        assert_eq!(values.len(), shape.iter().product::<usize>());
        Placed { buffer: gpu.upload(values).expect("a tensor"), shape }
    }

    /// Makes an output that holds NaN.
    fn output(gpu: &Gpu, shape: [usize; 4]) -> Self {
        Self::input(gpu, &vec![f32::NAN; shape.iter().product()], shape)
    }

    fn view(&self) -> TensorView<'_> {
        TensorView::new(&self.buffer, DType::F32, self.shape)
    }

    fn values(&self, gpu: &Gpu) -> Vec<f32> {
        gpu.download(&self.buffer, self.shape.iter().product()).expect("the values")
    }
}

fn scratch(gpu: &Gpu, size: Result<ScratchSize, Error>) -> Scratch {
    Scratch::new(gpu.device(), size.expect("a size")).expect("scratch")
}

/// Returns numbers between −1 and 1.
fn waves(n: usize, step: f32) -> Vec<f32> {
    (0..n).map(|i| (i as f32 * step + 0.3).sin()).collect()
}

fn times(values: Vec<f32>, factor: f32) -> Vec<f32> {
    values.into_iter().map(|x| x * factor).collect()
}

/// Checks each element within the roundings of `terms` operations on numbers as large as the
/// largest wanted one. Elements outside f32's range are not compared.
fn expect(what: &str, got: &[f32], want: &[f64], terms: usize) {
    assert_eq!(got.len(), want.len(), "{what}");
    let within = |x: f64| (x as f32).is_finite();
    let largest = want.iter().filter(|x| within(**x)).fold(0.0, |most: f64, x| most.max(x.abs()));
    let permitted = terms as f64 * f64::from(f32::EPSILON) * largest + f64::from(f32::MIN_POSITIVE);
    for (n, (got, want)) in got.iter().zip(want).enumerate().filter(|(_, (_, want))| within(**want)) {
        let off = (f64::from(*got) - want).abs();
        assert!(off <= permitted, "{what}: element {n} is {got:e}, wanted {want:e}");
    }
}

/// Returns paths, targets and numbers of splits.
fn tunings() -> impl Iterator<Item = (String, KernelOptions)> {
    let paths = [(Algorithm::Fused, 1), (Algorithm::Fused, 3), (Algorithm::Staged, 1)];
    paths.into_iter().flat_map(|(path, splits)| {
        FORMS.into_iter().map(move |form| {
            let kernel_options = KernelOptions::new().algorithm(path).target(form).splits(splits);
            (format!("{path:?}, {form:?}, {splits} splits"), kernel_options)
        })
    })
}

/// Returns the output and the lse of attention.
fn attend(
    gpu: &Gpu,
    [q, k, v]: [&[f32]; 3],
    shape: Shape,
    scale: Option<f64>,
    kernel_options: KernelOptions,
) -> [Vec<f32>; 2] {
    let config = Config::new(shape.heads, shape.head_dim).kv_heads(shape.kv_heads);
    let config = config.value_dim(shape.value_dim).scale(scale).kernel_options(kernel_options);
    let attention = Attention::with_pipelines(gpu.pipelines(), config).expect("an operator");
    let inputs = [(q, shape.q()), (k, shape.k()), (v, shape.v())];
    let [q, k, v] = inputs.map(|(values, shape)| Placed::input(gpu, values, shape));
    let rows = [shape.batch, shape.heads, shape.q_len, 1];
    let (out, lse) = (Placed::output(gpu, shape.out()), Placed::output(gpu, rows));
    let call = Forward::new(q.view(), k.view(), v.view(), out.view()).lse(lse.view());
    let mut scratch = scratch(gpu, attention.scratch_size(&call));
    gpu.submit(|encoder| attention.forward(encoder, &call, &mut scratch)).expect("a call");
    [out, lse].map(|x| x.values(gpu))
}

/// Weights add up to 1 only up to rounding.
#[test]
fn means_of_largest_number_are_finite() {
    crate::harness::in_turn!();
    let gpu = &full().gpu;
    for (q_len, kv_len) in [(1, 3), (1, 7), (1, 100), (5, 11), (40, 70)] {
        for value in [f32::MAX, f32::MIN] {
            let shape = Shape { kv_heads: 1, kv_len, ..Shape::new(1, 2, q_len, 8) };
            let (q, k) = (waves(2 * q_len * 8, 0.7), waves(kv_len * 8, 1.3));
            let (v, want) = (vec![value; kv_len * 8], vec![f64::from(value); 2 * q_len * 8]);
            for (name, kernel_options) in tunings() {
                let [out, _] = attend(gpu, [&q, &k, &v], shape, None, kernel_options);
                expect(
                    &format!("{name}, {q_len} queries, {kv_len} keys of {value:e}"),
                    &out,
                    &want,
                    kv_len + 8,
                );
            }
        }
    }
}

/// Loops have scores in units of log2 e, and queries times the scale. Both may exceed f32's range
/// although scores do not.
#[test]
fn scores_near_largest_number_match() {
    crate::harness::in_turn!();
    let gpu = &full().gpu;
    // Queries, keys and scale. Each row picks its largest score, except in the last two cases.
    let cases: [(f32, &[f32], f64); 7] = [
        (1.8e19, &[1.8e19, -1.8e19, 1e19], 1.0),
        (1.8e19, &[-1.8e19], 1.0),
        (1.8e19, &[-1.8e19, -1.8e19], 1.0),
        (1.0, &[2.0, 1.0, 2.0], 1.6e38),
        (3e38, &[1e-37, 2e-37], 1.0),
        (1.0, &[1e37, 2e37, 5e36], 1e-37),
        (1e10, &[3e27, 1e27, 5e26], 1e-37),
    ];
    for (q, k, scale) in cases {
        for q_len in [1, 33] {
            let shape = Shape { kv_len: k.len(), q_len, value_dim: 4, ..Shape::new(1, 1, 1, 1) };
            let (q, v) = (vec![q; q_len], waves(4 * k.len(), 0.9));
            let options = Options::new().scale(scale);
            let want = reference::attention::<f64>(&widen(&q), &widen(k), &widen(&v), shape, &options)
                .expect("a truth");
            for (name, kernel_options) in tunings() {
                let [out, lse] = attend(gpu, [&q, k, &v], shape, Some(scale), kernel_options);
                let what = format!("{name}, {q_len} queries of {:e}, keys {k:?}, scale {scale:e}", q[0]);
                // Scores of about 30 are off by their rounding.
                expect(&format!("{what}: out"), &out, &want.out, 128);
                expect(&format!("{what}: lse"), &lse, &want.lse, 8);
            }
        }
    }
}

#[test]
fn merged_means_of_largest_number_are_finite() {
    let gpu = &full().gpu;
    let merge = Merge::with_pipelines(gpu.pipelines());
    let (shape, rows) = ([1, 2, 5, 4], [1, 2, 5, 1]);
    for parts in [2, 3, 7] {
        for signs in [false, true] {
            let value =
                |n: usize, part: usize| if signs && (n + part) % 2 == 1 { f32::MIN } else { f32::MAX };
            let outs: Vec<Vec<f32>> = (0..parts).map(|p| (0..40).map(|n| value(n, p)).collect()).collect();
            let lses: Vec<Vec<f32>> = (0..parts).map(|p| waves(10, 0.3 + p as f32)).collect();
            let placed: Vec<[Placed; 2]> = outs
                .iter()
                .zip(&lses)
                .map(|(out, lse)| [Placed::input(gpu, out, shape), Placed::input(gpu, lse, rows)])
                .collect();
            let of: Vec<Partial> =
                placed.iter().map(|[out, lse]| Partial { out: out.view(), lse: lse.view() }).collect();
            let (out, lse) = (Placed::output(gpu, shape), Placed::output(gpu, rows));
            let merged = Partial { out: out.view(), lse: lse.view() };
            // Its products with differences of values are within range.
            let d_out = times(waves(40, 0.8), 1e-3);
            let placed_d_out = Placed::input(gpu, &d_out, shape);
            let gradients: Vec<[Placed; 2]> =
                (0..parts).map(|_| [Placed::output(gpu, shape), Placed::output(gpu, rows)]).collect();
            let views: Vec<PartGradients> =
                gradients.iter().map(|[a, b]| PartGradients { d_out: a.view(), d_lse: b.view() }).collect();
            let call = MergeForward::new(&of, merged);
            gpu.submit(|encoder| {
                merge.forward(encoder, &call)?;
                merge.backward(encoder, &MergeBackward::new(call, placed_d_out.view(), &views))
            })
            .expect("a call");
            let wide: Vec<[Vec<f64>; 2]> =
                outs.iter().zip(&lses).map(|(out, lse)| [widen(out), widen(lse)]).collect();
            let wide: Vec<(&[f64], &[f64])> = wide.iter().map(|[out, lse]| (&out[..], &lse[..])).collect();
            let (want, _) = reference::merge(&wide, 4).expect("a truth");
            let what = format!("{parts} parts, signs {signs}");
            expect(&what, &out.values(gpu), &want, parts + 16);
            if signs {
                let want = reference::merge_backward(&wide, 4, &widen(&d_out), None).expect("gradients");
                for (part, ([_, d_lse], want)) in gradients.iter().zip(&want).enumerate() {
                    expect(&format!("{what}: d_lse of {part}"), &d_lse.values(gpu), &want.d_lse, 64);
                }
            }
        }
    }
}

#[test]
fn pooled_means_of_large_rows_match() {
    let gpu = &full().gpu;
    let features = 12;
    for form in FORMS {
        let pool =
            MeanPool::with_pipelines(gpu.pipelines()).kernel_options(KernelOptions::new().target(form));
        for (size, l2) in [(f32::MAX, false), (3e38, true), (1e20, true), (1.0, true)] {
            for length in [1, 3, 50] {
                let shape = [2, 1, length, features];
                let x = if l2 {
                    times(waves(2 * length * features, 0.37), size)
                } else {
                    vec![size; 2 * length * features]
                };
                let d_out = waves(2 * features, 0.9);
                let placed = Placed::input(gpu, &x, shape);
                let [out, d_out_view] = [
                    Placed::output(gpu, [2, 1, 1, features]),
                    Placed::input(gpu, &d_out, [2, 1, 1, features]),
                ];
                let d_x = Placed::output(gpu, shape);
                let call = MeanPoolForward::new(placed.view(), PoolMask::All, out.view()).normalize(l2);
                let backward = MeanPoolBackward::new(call, d_out_view.view(), d_x.view());
                gpu.submit(|encoder| {
                    pool.forward(encoder, &call)?;
                    pool.backward(encoder, &backward)
                })
                .expect("a call");
                let rows: Vec<Vec<usize>> =
                    (0..2).map(|b| (b * length..(b + 1) * length).collect()).collect();
                let want = reference::mean_pool::<f64>(&widen(&x), features, &rows, l2).expect("a truth");
                let what = format!("{form:?}, {length} rows of {size:e}, l2 {l2}");
                // Rows of both signs cancel, by up to their number.
                expect(&what, &out.values(gpu), &want, 64 * length);
                let want =
                    reference::mean_pool_backward::<f64>(&widen(&x), features, &rows, l2, &widen(&d_out));
                expect(&format!("{what}: d_x"), &d_x.values(gpu), &want.expect("gradients"), 256 * length);
            }
        }
    }
}

#[test]
fn norms_of_large_rows_match() {
    crate::harness::in_turn!();
    let gpu = &full().gpu;
    for config in [NormConfig::layer(), NormConfig::rms()] {
        for form in FORMS {
            let norm = Norm::with_pipelines(gpu.pipelines(), config)
                .expect("an operator")
                .kernel_options(KernelOptions::new().target(form));
            // The sizes of x and of d_out.
            for (size, gradient) in [(1e20, 1.0), (1e30, 1.0), (3e38, 1e8), (1.0, 1e37), (1.0, 1.0)] {
                for features in [3, 300] {
                    let shape = [1, 1, 4, features];
                    let x = times(waves(4 * features, 0.37), size);
                    let d_out =
                        (0..4 * features).map(|n| gradient * (2.0 + (n as f32).sin())).collect::<Vec<_>>();
                    let weight = waves(features, 0.9);
                    let row = [1, 1, 1, features];
                    let [placed, d_out_view] = [&x, &d_out].map(|values| Placed::input(gpu, values, shape));
                    let weight_view = Placed::input(gpu, &weight, row);
                    let [out, d_x] = [(); 2].map(|()| Placed::output(gpu, shape));
                    let d_weight = Placed::output(gpu, row);
                    let call = NormForward::new(placed.view(), out.view()).weight(weight_view.view());
                    let backward =
                        NormBackward::new(call, d_out_view.view()).d_x(d_x.view()).d_weight(d_weight.view());
                    let mut scratch = scratch(gpu, norm.backward_scratch_size(&backward));
                    gpu.submit(|encoder| {
                        norm.forward(encoder, &call)?;
                        norm.backward(encoder, &backward, &mut scratch)
                    })
                    .expect("a call");
                    let wide: Vec<f64> = widen(&weight);
                    let want = reference::norm(&widen::<f64>(&x), features, Some(&wide), None, &config)
                        .expect("a truth");
                    let what = format!("{config:?}, {form:?}, {features} of {size:e}, gradient {gradient:e}");
                    expect(&what, &out.values(gpu), &want, 32);
                    let want = reference::norm_backward(
                        &widen::<f64>(&x),
                        features,
                        Some(&wide),
                        &config,
                        &widen(&d_out),
                    );
                    let want = want.expect("gradients");
                    expect(&format!("{what}: d_x"), &d_x.values(gpu), &want.d_x, 128);
                    expect(&format!("{what}: d_weight"), &d_weight.values(gpu), &want.d_weight, 128);
                }
            }
        }
    }
}

#[test]
fn logit_gradients_whose_sum_overflows_match() {
    let gpu = &full().gpu;
    for form in FORMS {
        let op =
            LogSoftmax::with_pipelines(gpu.pipelines()).kernel_options(KernelOptions::new().target(form));
        for columns in [2, 5, 300] {
            let shape = [1, 1, 3, columns];
            let (x, d_out) = (waves(3 * columns, 0.7), vec![3e38; 3 * columns]);
            let [placed, d_out_view] = [&x, &d_out].map(|values| Placed::input(gpu, values, shape));
            let [out, d_x] = [(); 2].map(|()| Placed::output(gpu, shape));
            let forward = LogSoftmaxForward::new(placed.view(), out.view());
            gpu.submit(|encoder| {
                op.forward(encoder, &forward)?;
                op.backward(encoder, &LogSoftmaxBackward::new(forward, d_out_view.view(), d_x.view()))
            })
            .expect("a call");
            let out: Vec<f64> = widen(&out.values(gpu));
            let want =
                reference::log_softmax_backward::<f64>(&out, columns, &widen(&d_out)).expect("gradients");
            expect(&format!("{form:?}, {columns} columns"), &d_x.values(gpu), &want, columns + 32);
        }
    }
}

/// A result is divided by the weights of its values. Sums of products with them exceed f32's range.
#[test]
fn linear_means_near_range_ends_match() {
    let gpu = &full().gpu;
    for (size, kv_heads) in [(f32::MAX, 1), (3e38, 2), (1.0, 1), (1e-30, 1)] {
        for (causal, length) in [(false, 1), (true, 1), (false, 150), (true, 150)] {
            for (form, map) in FORMS.into_iter().zip([FeatureMap::Elu, FeatureMap::Relu]) {
                let shape = Shape { kv_heads, ..Shape::new(1, 2, length, 8) };
                let above =
                    |n: usize, step: f32| waves(n, step).iter().map(|x| x.abs() + 0.1).collect::<Vec<_>>();
                let (q, k) = (above(2 * length * 8, 0.7), above(kv_heads * length * 8, 1.3));
                // Only the largest number, because weights add up to 1 only up to rounding.
                let step = if size == f32::MAX { 0.0 } else { 0.2 };
                let v: Vec<f32> =
                    (0..kv_heads * length * 8).map(|n| size * (1.0 - (n % 5) as f32 * step)).collect();
                let config = LinearConfig::new(2, 8).kv_heads(kv_heads).feature_map(map).causal(causal);
                let config = config.kernel_options(KernelOptions::new().target(form));
                let linear = LinearAttention::with_pipelines(gpu.pipelines(), config).expect("an operator");
                let inputs = [(&q, shape.q()), (&k, shape.k()), (&v, shape.v())];
                let [q_view, k_view, v_view] =
                    inputs.map(|(values, shape)| Placed::input(gpu, values, shape));
                let out = Placed::output(gpu, shape.out());
                let call = LinearForward::new(q_view.view(), k_view.view(), v_view.view(), out.view());
                let mut memory = scratch(gpu, linear.scratch_size(&call));
                gpu.submit(|encoder| linear.forward(encoder, &call, &mut memory)).expect("a call");
                let options = LinearOptions { causal, ..LinearOptions::new(map) };
                let want =
                    reference::linear_attention::<f64>(&widen(&q), &widen(&k), &widen(&v), shape, &options);
                let what = format!("{map:?}, {form:?}, causal {causal}, {length} rows of {size:e}");
                expect(&what, &out.values(gpu), &want.expect("a truth").out, length + 64);
            }
        }
    }
}

/// Keys are divided by their lengths, whose squares exceed f32's range.
#[test]
fn hashed_attention_of_long_keys_matches() {
    let gpu = &full().gpu;
    for size in [1e20f32, 1e30, 1.0] {
        let (rounds, length) = (2, 40);
        let (dims, rows) = ([1, 2, length, 8], [1, 2, length, 1]);
        let shape = LshShape { batch: 1, heads: 2, length, head_dim: 8, value_dim: 8 };
        let scale = Some(f64::from(0.35 / size));
        let config = LshConfig::new(2, 8, rounds, 4, 8).scale(scale);
        let attention = LshAttention::with_pipelines(gpu.pipelines(), config).expect("an operator");
        let (qk, v, d_out) = (times(waves(640, 0.37), size), waves(640, 0.9), waves(640, 1.7));
        let buckets: Vec<u32> =
            (0..2 * rounds * length).map(|i| (i * 7 + i / length * 3) as u32 % 4).collect();
        let numbers = gpu.upload(&buckets).expect("buckets");
        let numbers = TensorView::new(&numbers, DType::U32, [1, 2, rounds, length]);
        let [qk_view, v_view, d_out_view] = [&qk, &v, &d_out].map(|values| Placed::input(gpu, values, dims));
        let [out, d_qk, d_v] = [(); 3].map(|()| Placed::output(gpu, dims));
        let lse = Placed::output(gpu, rows);
        let call =
            LshForward::with_buckets(qk_view.view(), v_view.view(), numbers, out.view()).lse(lse.view());
        let mut memory = scratch(gpu, attention.scratch_size(&call));
        gpu.submit(|encoder| attention.forward(encoder, &call, &mut memory)).expect("a call");
        let backward = LshBackward::new(call, d_out_view.view());
        let backward = backward.d_qk(d_qk.view()).d_v(d_v.view());
        let mut memory = scratch(gpu, attention.backward_scratch_size(&backward));
        gpu.submit(|encoder| attention.backward(encoder, &backward, &mut memory)).expect("gradients");
        let hashed = LshHashed {
            buckets: &buckets,
            rounds,
            chunk: Some(8),
            causal: false,
            scale,
            lengths: None,
            keys: None,
        };
        let [qk, v, d_out] = [&qk, &v, &d_out].map(|x| widen::<f64>(x));
        let want = reference::lsh_attention(&qk, &v, &hashed, shape).expect("a truth");
        expect(&format!("keys of {size:e}"), &out.values(gpu), &want.out, 64);
        let want =
            reference::lsh_attention_backward(&qk, &v, &d_out, None, &hashed, shape).expect("gradients");
        expect(&format!("keys of {size:e}: d_v"), &d_v.values(gpu), &want.d_v, 64);
        expect(&format!("keys of {size:e}: d_qk"), &d_qk.values(gpu), &want.d_qk, 256);
    }
}
