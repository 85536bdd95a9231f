//! Small cases of the stages around attention: embeddings, means of rows, logits, norms,
//! activations, quantised weights, sorts.

use wgpu_attention::matmul::{
    Activation, QuantizedFormat, QuantizedForward, QuantizedMatrix, QuantizedProjection, QuantizedRows,
};
use wgpu_attention::reference::{self, CausalConvInputs, Real, activate, activation_slope, widen};
use wgpu_attention::rows::{
    CausalConv, CausalConvBackward, CausalConvForward, Elementwise, ElementwiseBackward, ElementwiseForward,
    Embedding, EmbeddingBackward, EmbeddingForward, LogSoftmax, LogSoftmaxBackward, LogSoftmaxForward,
    MeanPool, MeanPoolBackward, MeanPoolForward, Norm, NormBackward, NormConfig, NormForward, NormGate,
    PoolMask, RadixSort, Sort, TopK, TopKForward, WeightNorm, WeightNormBackward, WeightNormForward,
};
use wgpu_attention::tuning::Target;
use wgpu_attention::{DType, Error, KernelOptions, Scratch};

use super::case::Judged;
use super::device::Profile;
use super::memory::{Values, stored};
use super::random::Rng;
use super::run::{Layout, Placed};

fn normals(name: &str, n: usize, dtype: DType) -> Vec<f32> {
    stored(&Rng::named(name).normals(n), dtype)
}

fn placed(profile: &Profile, values: Values, dtype: DType, shape: [usize; 4]) -> Placed {
    let [at] = Layout::Window(7).places([shape]);
    Placed::input(profile, values, dtype, at)
}

fn output(profile: &Profile, dtype: DType, shape: [usize; 4]) -> Placed {
    let [at] = Layout::Window(7).places([shape]);
    Placed::output(profile, dtype, at)
}

/// Returns the error over the tolerance of sums of up to `terms` products of normal variables.
async fn judged(
    profile: &Profile,
    got: &Placed,
    (exact, naive, dtype): (Vec<f64>, Vec<f32>, DType),
    terms: f64,
) -> Result<f64, String> {
    let judged = Judged::gradient([exact, widen(&naive)], None, dtype, 4.0 * terms);
    judged.judge(&got.download_async("a result", profile).await?)
}

fn refused(error: Error) -> String {
    error.to_string()
}

/// Rows of a table, and its gradient.
pub async fn embedding(profile: &'static Profile, dtype: DType) -> Result<f64, String> {
    let (rows, width) = (9, 14);
    let ids: Vec<u32> = vec![3, 0, 8, 3, 9, u32::MAX, 3, 1, 0, 5];
    let table = normals("a table of embeddings", rows * width, dtype);
    let d_out = normals("gradients of embeddings", ids.len() * width, dtype);
    let [ids_at, table_at, d_out_at] = [
        placed(profile, Values::Numbers(&ids), DType::U32, [2, 1, 5, 1]),
        placed(profile, Values::Floats(&table), dtype, [1, 1, rows, width]),
        placed(profile, Values::Floats(&d_out), dtype, [2, 1, 5, width]),
    ];
    let out = output(profile, dtype, [2, 1, 5, width]);
    let d_table = output(profile, dtype, [1, 1, rows, width]);
    let operator = Embedding::with_pipelines(profile.gpu.pipelines());
    let forward = EmbeddingForward::new(ids_at.view(), table_at.view(), out.view()).scale(1.5);
    let backward = EmbeddingBackward::new(forward, d_out_at.view(), d_table.view());
    let size = operator.backward_scratch_size(&backward).map_err(refused)?;
    let mut scratch = Scratch::new(profile.gpu.device(), size).map_err(refused)?;
    let recorded = profile.gpu.submit(|e| {
        operator.forward(e, &forward)?;
        operator.backward(e, &backward, &mut scratch)
    });
    recorded.map_err(refused)?;
    let exact = reference::embedding(&ids, &widen::<f64>(&table), width, 1.5).map_err(refused)?;
    let naive = reference::embedding(&ids, &table, width, 1.5).map_err(refused)?;
    let worst = judged(profile, &out, (exact, naive, dtype), 1.0).await?;
    let shape = [rows, width];
    let exact = reference::embedding_backward(&ids, &widen::<f64>(&d_out), shape, 1.5).map_err(refused)?;
    let naive = reference::embedding_backward(&ids, &d_out, shape, 1.5).map_err(refused)?;
    Ok(worst.max(judged(profile, &d_table, (exact, naive, dtype), 4.0).await?))
}

/// Means of masked rows, divided by their length, and the gradient.
pub async fn mean_pool(profile: &'static Profile, dtype: DType) -> Result<f64, String> {
    let (length, features) = (7, 22);
    let keep: Vec<bool> = (0..2 * length).map(|n| n % 3 != 1).collect();
    let x = normals("rows to average", 2 * length * features, dtype);
    let d_out = normals("gradients of means", 2 * features, dtype);
    let [x_at, keep_at, d_out_at] = [
        placed(profile, Values::Floats(&x), dtype, [2, 1, length, features]),
        placed(profile, Values::Bools(&keep), DType::Bool, [2, 1, 1, length]),
        placed(profile, Values::Floats(&d_out), dtype, [2, 1, 1, features]),
    ];
    let out = output(profile, dtype, [2, 1, 1, features]);
    let d_x = output(profile, dtype, [2, 1, length, features]);
    let operator = MeanPool::with_pipelines(profile.gpu.pipelines());
    let forward =
        MeanPoolForward::new(x_at.view(), PoolMask::Keep(keep_at.view()), out.view()).normalize(true);
    let recorded = profile.gpu.submit(|e| {
        operator.forward(e, &forward)?;
        operator.backward(e, &MeanPoolBackward::new(forward, d_out_at.view(), d_x.view()))
    });
    recorded.map_err(refused)?;
    let of = |b: usize| (b * length..(b + 1) * length).filter(|row| keep[*row]).collect();
    let sequences: [Vec<usize>; 2] = [of(0), of(1)];
    let wide = widen::<f64>(&x);
    let exact = reference::mean_pool(&wide, features, &sequences, true).map_err(refused)?;
    let naive = reference::mean_pool(&x, features, &sequences, true).map_err(refused)?;
    let worst = judged(profile, &out, (exact, naive, dtype), 1.0).await?;
    let d = widen::<f64>(&d_out);
    let exact = reference::mean_pool_backward(&wide, features, &sequences, true, &d).map_err(refused)?;
    let naive = reference::mean_pool_backward(&x, features, &sequences, true, &d_out).map_err(refused)?;
    Ok(worst.max(judged(profile, &d_x, (exact, naive, dtype), 1.0).await?))
}

/// Log-softmax and its gradient, and the top five.
pub async fn logits(profile: &'static Profile, dtype: DType) -> Result<f64, String> {
    let columns = 70;
    let shape = [2, 1, 3, columns];
    let x = normals("logits", 6 * columns, dtype);
    let d_out = normals("gradients of logits", 6 * columns, dtype);
    let x_at = placed(profile, Values::Floats(&x), dtype, shape);
    let d_out_at = placed(profile, Values::Floats(&d_out), dtype, shape);
    let [out, d_x] = [(); 2].map(|()| output(profile, DType::F32, shape));
    let soft = LogSoftmax::with_pipelines(profile.gpu.pipelines());
    let forward = LogSoftmaxForward::new(x_at.view(), out.view());
    let recorded = profile.gpu.submit(|e| {
        soft.forward(e, &forward)?;
        soft.backward(e, &LogSoftmaxBackward::new(forward, d_out_at.view(), d_x.view()))
    });
    recorded.map_err(refused)?;
    let exact = reference::log_softmax(&widen::<f64>(&x), columns).map_err(refused)?;
    let naive = reference::log_softmax(&x, columns).map_err(refused)?;
    let d = widen::<f64>(&d_out);
    let exact_d = reference::log_softmax_backward(&exact, columns, &d).map_err(refused)?;
    let naive_d = reference::log_softmax_backward(&naive, columns, &d_out).map_err(refused)?;
    let worst = judged(profile, &out, (exact, naive, DType::F32), 2.0).await?;
    Ok(worst.max(judged(profile, &d_x, (exact_d, naive_d, DType::F32), 4.0).await?))
}

/// The largest elements of rows.
pub async fn top_k(profile: &'static Profile, columns: usize, k: usize, dtype: DType) -> Result<f64, String> {
    let x = normals("rows of a top-k", 6 * columns, dtype);
    let x_at = placed(profile, Values::Floats(&x), dtype, [2, 1, 3, columns]);
    let indices = output(profile, DType::U32, [2, 1, 3, k]);
    let top = TopK::with_pipelines(profile.gpu.pipelines());
    let call = TopKForward::new(x_at.view(), indices.view());
    let size = top.scratch_size(&call).map_err(refused)?;
    let mut scratch = Scratch::new(profile.gpu.device(), size).map_err(refused)?;
    profile.gpu.submit(|e| top.forward_with(e, &call, &mut scratch)).map_err(refused)?;
    let want = reference::top_k(&x, columns, k).map_err(refused)?;
    let got = indices.download_async("indices", profile).await?;
    if got.iter().copied().eq(want.iter().map(|n| f64::from(*n))) {
        return Ok(0.0);
    }
    Err(format!("the largest are at {got:?}, not {want:?}"))
}

/// Normalised rows of a sum, the sum, and all gradients.
pub async fn norm(profile: &'static Profile, config: NormConfig, dtype: DType) -> Result<f64, String> {
    let (rows, features) = (6, 22);
    let (shape, vector) = ([2, 1, 3, features], [1, 1, 1, features]);
    let of = |name: &str, n| normals(name, n, dtype);
    let x = of("rows to normalise", rows * features);
    let residual = of("what is added to them", rows * features);
    let weight = of("a norm's weight", features);
    let bias = of("a norm's bias", features);
    let d_out = of("gradients of norms", rows * features);
    let d_sum = of("gradients of the sum", rows * features);
    let input = |data: &[f32], shape| placed(profile, Values::Floats(data), dtype, shape);
    let [x_at, residual_at, d_out_at, d_sum_at] = [&x, &residual, &d_out, &d_sum].map(|t| input(t, shape));
    let [weight_at, bias_at] = [&weight, &bias].map(|t| input(t, vector));
    let [out, sum, d_x] = [(); 3].map(|()| output(profile, dtype, shape));
    let [d_weight, d_bias] = [(); 2].map(|()| output(profile, dtype, vector));
    let operator = Norm::with_pipelines(profile.gpu.pipelines(), config).map_err(refused)?;
    let forward = NormForward::new(x_at.view(), out.view())
        .residual(residual_at.view())
        .weight(weight_at.view())
        .bias(bias_at.view())
        .sum(sum.view());
    let backward = NormBackward::new(forward, d_out_at.view())
        .d_sum(d_sum_at.view())
        .d_x(d_x.view())
        .d_weight(d_weight.view())
        .d_bias(d_bias.view());
    let size = operator.backward_scratch_size(&backward).map_err(refused)?;
    let mut scratch = Scratch::new(profile.gpu.device(), size).map_err(refused)?;
    let recorded = profile.gpu.submit(|e| {
        operator.forward(e, &forward)?;
        operator.backward(e, &backward, &mut scratch)
    });
    recorded.map_err(refused)?;
    let truth = |data: [&[f32]; 6]| -> Result<_, Error> {
        fn of<R: Real>(
            data: [&[f32]; 6],
            features: usize,
            config: &NormConfig,
        ) -> Result<[Vec<R>; 5], Error> {
            let [x, residual, weight, bias, d_out, d_sum] = data.map(widen::<R>);
            let added = |a: &[R], b: &[R]| a.iter().zip(b).map(|(a, b)| *a + *b).collect::<Vec<R>>();
            let sum = added(&x, &residual);
            let out = reference::norm(&sum, features, Some(&weight), Some(&bias), config)?;
            let got = reference::norm_backward(&sum, features, Some(&weight), config, &d_out)?;
            Ok([out, sum, added(&got.d_x, &d_sum), got.d_weight, got.d_bias])
        }
        Ok((of::<f64>(data, features, &config)?, of::<f32>(data, features, &config)?))
    };
    let (exact, naive) = truth([&x, &residual, &weight, &bias, &d_out, &d_sum]).map_err(refused)?;
    let mut worst: f64 = 0.0;
    // Terms of d_x are g, its mean, and n times the mean of g · n. Each is a product of two normal
    // variables. The other gradients are sums over rows.
    let results = [(out, 2.0), (sum, 1.0), (d_x, 12.0), (d_weight, 3.0 * rows as f64), (d_bias, rows as f64)];
    for ((result, terms), (exact, naive)) in results.into_iter().zip(exact.into_iter().zip(naive)) {
        worst = worst.max(judged(profile, &result, (exact, naive, dtype), terms).await?);
    }
    Ok(worst)
}

/// Rows of heads, normalised with a gate, and all gradients.
pub async fn gated_norm(profile: &'static Profile, first: bool, dtype: DType) -> Result<f64, String> {
    let (rows, features) = (12, 22);
    let (shape, vector) = ([2, 2, 3, features], [1, 1, 1, features]);
    let [x, gate, d_out] = ["rows with a gate", "their gates", "gradients of gated rows"]
        .map(|name| normals(name, rows * features, dtype));
    let weight = normals("a gated norm's weight", features, dtype);
    let input = |data: &[f32], shape| placed(profile, Values::Floats(data), dtype, shape);
    let [x_at, gate_at, d_out_at] = [&x, &gate, &d_out].map(|t| input(t, shape));
    let weight_at = input(&weight, vector);
    let [out, d_x, d_gate] = [(); 3].map(|()| output(profile, dtype, shape));
    let d_weight = output(profile, dtype, vector);
    fn gate_of<T>(gate: T, first: bool) -> NormGate<T> {
        let silu = Activation::Silu;
        if first { NormGate::before(gate, silu) } else { NormGate::after(gate, silu) }
    }
    let config = NormConfig::rms();
    let operator = Norm::with_pipelines(profile.gpu.pipelines(), config).map_err(refused)?;
    let forward = NormForward::new(x_at.view(), out.view()).weight(weight_at.view());
    let forward = forward.gate(gate_of(gate_at.view(), first));
    let backward = NormBackward::new(forward, d_out_at.view())
        .d_x(d_x.view())
        .d_gate(d_gate.view())
        .d_weight(d_weight.view());
    let size = operator.backward_scratch_size(&backward).map_err(refused)?;
    let mut scratch = Scratch::new(profile.gpu.device(), size).map_err(refused)?;
    let recorded = profile.gpu.submit(|e| {
        operator.forward(e, &forward)?;
        operator.backward(e, &backward, &mut scratch)
    });
    recorded.map_err(refused)?;
    fn truth<R: Real>(data: [&[f32]; 4], features: usize, first: bool) -> Result<[Vec<R>; 4], Error> {
        let [x, gate, weight, d_out] = data.map(widen::<R>);
        let (gate, config) = (gate_of(&gate[..], first), &NormConfig::rms());
        let weight = Some(&weight[..]);
        let out = reference::gated_norm(&x, features, weight, None, config, gate)?;
        let got = reference::gated_norm_backward(&x, features, weight, None, config, gate, &d_out)?;
        Ok([out, got.norm.d_x, got.d_gate, got.norm.d_weight])
    }
    let data = [&x[..], &gate, &weight, &d_out];
    let exact = truth::<f64>(data, features, first).map_err(refused)?;
    let naive = truth::<f32>(data, features, first).map_err(refused)?;
    let mut worst: f64 = 0.0;
    let results = [(out, 4.0), (d_x, 24.0), (d_gate, 24.0), (d_weight, 6.0 * rows as f64)];
    for ((result, terms), (exact, naive)) in results.into_iter().zip(exact.into_iter().zip(naive)) {
        worst = worst.max(judged(profile, &result, (exact, naive, dtype), terms).await?);
    }
    Ok(worst)
}

/// A causal convolution with states, and all gradients. One call has its state in place.
pub async fn causal_conv(profile: &'static Profile, dtype: DType) -> Result<f64, String> {
    let (length, channels, width) = (21, 14, 4);
    let (shape, states) = ([1, 1, length, channels], [1, 1, width - 1, channels]);
    let (filter, vector) = ([1, 1, channels, width], [1, 1, 1, channels]);
    let of = |name: &str, shape: [usize; 4]| normals(name, shape.iter().product(), dtype);
    let [x, d_out] = [("rows to convolve", shape), ("their gradients", shape)].map(|(n, s)| of(n, s));
    let [weight, bias] = [("a filter", filter), ("its bias", vector)].map(|(n, s)| of(n, s));
    let [initial, d_final] = [("a state", states), ("a state's gradient", states)].map(|(n, s)| of(n, s));
    let input = |data: &[f32], shape| placed(profile, Values::Floats(data), dtype, shape);
    let [x_at, d_out_at] = [&x, &d_out].map(|t| input(t, shape));
    let (weight_at, bias_at) = (input(&weight, filter), input(&bias, vector));
    let [initial_at, d_final_at] = [&initial, &d_final].map(|t| input(t, states));
    let [out, steps, d_x] = [(); 3].map(|()| output(profile, dtype, shape));
    let [state, d_initial] = [(); 2].map(|()| output(profile, dtype, states));
    let [held_at] = Layout::Window(7).places([states]);
    let held = Placed::holding(profile, &initial, dtype, held_at);
    let (d_weight, d_bias) = (output(profile, dtype, filter), output(profile, dtype, vector));
    let operator = CausalConv::with_pipelines(profile.gpu.pipelines());
    let plain = |x, out| {
        let call = CausalConvForward::new(x, weight_at.view(), out).bias(bias_at.view());
        call.activation(Activation::Silu)
    };
    let forward = plain(x_at.view(), out.view()).initial_state(initial_at.view());
    let backward = CausalConvBackward::new(forward, d_out_at.view())
        .d_final_state(d_final_at.view())
        .d_x(d_x.view())
        .d_weight(d_weight.view())
        .d_bias(d_bias.view())
        .d_initial_state(d_initial.view());
    let size = operator.backward_scratch_size(&backward).map_err(refused)?;
    let mut scratch = Scratch::new(profile.gpu.device(), size).map_err(refused)?;
    let recorded = profile.gpu.submit(|e| {
        operator.forward(e, &forward.final_state(state.view()))?;
        // A prompt, then a few rows in one dispatch.
        for (first, rows) in [(0, 18), (18, 3)] {
            let [x, steps] = [x_at.view(), steps.view()].map(|t| t.slice(2, first, rows));
            operator.forward(e, &plain(x, steps).state(held.view()))?;
        }
        operator.backward(e, &backward, &mut scratch)
    });
    recorded.map_err(refused)?;
    fn truth<R: Real>(data: [&[f32]; 6], channels: usize) -> Result<[Vec<R>; 6], Error> {
        let [x, weight, bias, initial, d_out, d_final] = data.map(widen::<R>);
        let inputs = CausalConvInputs {
            x: &x,
            weight: &weight,
            bias: Some(&bias),
            initial_state: Some(&initial),
            activation: Some(Activation::Silu),
            channels,
        };
        let got = reference::causal_conv(&inputs)?;
        let back = reference::causal_conv_backward(&inputs, &d_out, Some(&d_final))?;
        Ok([got.out, got.final_state, back.d_x, back.d_weight, back.d_bias, back.d_initial_state])
    }
    let data = [&x[..], &weight, &bias, &initial, &d_out, &d_final];
    let exact = truth::<f64>(data, channels).map_err(refused)?;
    let naive = truth::<f32>(data, channels).map_err(refused)?;
    let again = [(&steps, 5.0, 0), (&held, 1.0, 1)];
    let rows = length as f64;
    let all =
        [(&out, 5.0), (&state, 1.0), (&d_x, 6.0), (&d_weight, rows), (&d_bias, rows), (&d_initial, 6.0)];
    let all = all.into_iter().enumerate().map(|(n, (result, terms))| (result, terms, n));
    let mut worst: f64 = 0.0;
    for (result, terms, n) in all.chain(again) {
        let truth = (exact[n].clone(), naive[n].clone(), dtype);
        worst = worst.max(judged(profile, result, truth, terms).await?);
    }
    Ok(worst)
}

/// An activation times another tensor, its gradients, and an activation and a sum.
pub async fn elementwise(
    profile: &'static Profile,
    activation: Activation,
    dtype: DType,
) -> Result<f64, String> {
    let shape = [2, 3, 5, 14];
    let n = shape.iter().product();
    let [x, other, d_out] =
        ["what is activated", "its factors", "gradients of products"].map(|name| normals(name, n, dtype));
    let input = |data: &[f32]| placed(profile, Values::Floats(data), dtype, shape);
    let [x_at, other_at, d_out_at] = [&x, &other, &d_out].map(|t| input(t));
    let results = [(); 4].map(|()| output(profile, dtype, shape));
    let [product, sum, d_x, d_multiply] = results.each_ref().map(Placed::view);
    let operator = Elementwise::with_pipelines(profile.gpu.pipelines());
    let plain = |out| ElementwiseForward::new(x_at.view(), out).activation(activation);
    let gated = plain(product).multiply(other_at.view());
    let recorded = profile.gpu.submit(|e| {
        operator.forward(e, &gated)?;
        operator.forward(e, &plain(sum).residual(other_at.view()))?;
        operator
            .backward(e, &ElementwiseBackward::new(gated, d_out_at.view()).d_x(d_x).d_multiply(d_multiply))
    });
    recorded.map_err(refused)?;
    fn truth<R: Real>([x, other, d]: [&[f32]; 3], activation: Activation) -> [Vec<R>; 4] {
        let [x, other, d] = [x, other, d].map(widen::<R>);
        let each = |f: &dyn Fn(usize) -> R| (0..x.len()).map(f).collect();
        let value = |n: usize| activate(x[n], activation);
        [
            each(&|n| value(n) * other[n]),
            each(&|n| value(n) + other[n]),
            each(&|n| d[n] * activation_slope(x[n], activation) * other[n]),
            each(&|n| d[n] * value(n)),
        ]
    }
    let data = [&x[..], &other, &d_out];
    let truths = truth::<f64>(data, activation).into_iter().zip(truth::<f32>(data, activation));
    let mut worst: f64 = 0.0;
    for (result, (exact, naive)) in results.iter().zip(truths) {
        worst = worst.max(judged(profile, result, (exact, naive, dtype), 4.0).await?);
    }
    Ok(worst)
}

/// Products of rows with quantised weights, and rows of the same matrix as a table.
pub async fn quantized(
    profile: &'static Profile,
    format: QuantizedFormat,
    rows: usize,
    dtype: DType,
) -> Result<f64, String> {
    let (heads, dim, features) = (2, 5, 64);
    let width = heads * dim;
    let weights = normals("weights to quantise", width * features, DType::F32);
    let bytes = reference::quantize(format, &weights).map_err(refused)?;
    let x = normals("rows of a product", rows * features, dtype);
    // The bytes of a file's other tensors surround it.
    let offset = 12;
    let mut file = vec![0xff; offset];
    file.extend(&bytes);
    file.resize(file.len().next_multiple_of(4) + 16, 0xff);
    let buffer = profile.gpu.upload(&file).map_err(refused)?;
    let matrix = QuantizedMatrix::new(&buffer, format, [width, features]).with_offset(offset);
    let x_at = placed(profile, Values::Floats(&x), dtype, [1, 1, rows, features]);
    let out = output(profile, dtype, [1, heads, rows, dim]);
    let ids: Vec<u32> = vec![3, 0, 9, 3];
    let ids_at = placed(profile, Values::Numbers(&ids), DType::U32, [2, 1, 2, 1]);
    let picked = output(profile, DType::F32, [2, 1, 2, features]);
    let form = if dtype == DType::F32 { Target::Gpu } else { Target::Software };
    let operator = QuantizedProjection::with_pipelines(profile.gpu.pipelines())
        .kernel_options(KernelOptions::new().target(form));
    let recorded = profile.gpu.submit(|e| {
        operator.forward(e, &[QuantizedForward::new(x_at.view(), matrix, out.view())])?;
        operator.rows(e, &QuantizedRows::new(matrix, ids_at.view(), picked.view()))
    });
    recorded.map_err(refused)?;
    let table = reference::dequantize::<f32>(format, &bytes).map_err(refused)?;
    fn truth<R: Real>(
        x: &[f32],
        table: &[f32],
        [rows, heads, dim, features]: [usize; 4],
    ) -> Result<Vec<R>, Error> {
        let all = reference::project(&widen::<R>(x), &widen::<R>(table), None, features, heads * dim)?;
        reference::split_heads(&all, rows, heads, dim)
    }
    let sizes = [rows, heads, dim, features];
    let exact = truth::<f64>(&x, &table, sizes).map_err(refused)?;
    let naive = truth::<f32>(&x, &table, sizes).map_err(refused)?;
    let worst = judged(profile, &out, (exact, naive, dtype), 4.0).await?;
    let want = reference::embedding(&ids, &table, features, 1.0).map_err(refused)?;
    let got = picked.download_async("rows of a table", profile).await?;
    match got.iter().zip(&want).position(|(got, want)| *got != f64::from(*want)) {
        None => Ok(worst),
        Some(n) => Err(format!("element {n} of the table's rows is {}, not {}", got[n], want[n])),
    }
}

/// Rows sorted by some bits of their keys, with ranks.
pub async fn radix_sort(profile: &'static Profile) -> Result<f64, String> {
    let (shape, length, bits) = ([2, 1, 3, 333], 333, 9);
    let rng = &mut Rng::named("numbers to sort");
    let keys: Vec<u32> = (0..6 * length).map(|_| rng.word() as u32).collect();
    let keys_at = placed(profile, Values::Numbers(&keys), DType::U32, shape);
    let [order, ranks] = [(); 2].map(|()| output(profile, DType::U32, shape));
    let operator = RadixSort::with_pipelines(profile.gpu.pipelines());
    let call = Sort::new(keys_at.view(), order.view()).bits(bits).ranks(ranks.view());
    let size = operator.scratch_size(&call).map_err(refused)?;
    let mut scratch = Scratch::new(profile.gpu.device(), size).map_err(refused)?;
    profile.gpu.submit(|e| operator.forward(e, &call, &mut scratch)).map_err(refused)?;
    let order = order.download_async("an order", profile).await?;
    let ranks = ranks.download_async("ranks", profile).await?;
    for (row, keys) in keys.chunks_exact(length).enumerate() {
        let mut want: Vec<usize> = (0..length).collect();
        want.sort_by_key(|i| keys[*i] & ((1 << bits) - 1));
        let at = row * length;
        let wrong = want
            .iter()
            .enumerate()
            .find(|(rank, i)| order[at + rank] != **i as f64 || ranks[at + **i] != *rank as f64);
        if let Some((rank, i)) = wrong {
            return Err(format!("row {row}: {i} is not at {rank} but {}", order[at + rank]));
        }
    }
    Ok(0.0)
}

/// A score vector from its direction and length, and gradients.
pub async fn weight_norm(profile: &'static Profile, dtype: DType) -> Result<f64, String> {
    let (heads, dim) = (3, 70);
    let (wide, row) = ([1, heads, 1, dim], [1, heads, 1, 1]);
    let [vector, gain] =
        [("score vectors", heads * dim), ("their gains", heads)].map(|(name, n)| normals(name, n, dtype));
    let d_out = normals("gradients of vectors", heads * dim, DType::F32);
    let vector_at = placed(profile, Values::Floats(&vector), dtype, wide);
    let gain_at = placed(profile, Values::Floats(&gain), dtype, row);
    let d_out_at = placed(profile, Values::Floats(&d_out), DType::F32, wide);
    let [out, d_vector] = [(); 2].map(|()| output(profile, DType::F32, wide));
    let d_gain = output(profile, DType::F32, row);
    let operator = WeightNorm::with_pipelines(profile.gpu.pipelines());
    let forward = WeightNormForward::new(vector_at.view(), gain_at.view(), out.view());
    let backward = WeightNormBackward::new(forward, d_out_at.view(), [d_vector.view(), d_gain.view()]);
    let recorded = profile.gpu.submit(|e| {
        operator.forward(e, &forward)?;
        operator.backward(e, &backward)
    });
    recorded.map_err(refused)?;
    fn truth<R: Real>([vector, gain, d_out]: [&[f32]; 3], dim: usize) -> Result<[Vec<R>; 3], Error> {
        let [vector, gain, d_out] = [vector, gain, d_out].map(widen::<R>);
        let out = reference::weight_norm(&vector, &gain, dim)?;
        let [d_vector, d_gain] = reference::weight_norm_backward(&vector, &gain, &d_out, dim)?;
        Ok([out, d_vector, d_gain])
    }
    let data = [&vector[..], &gain, &d_out];
    let (exact, naive) =
        (truth::<f64>(data, dim).map_err(refused)?, truth::<f32>(data, dim).map_err(refused)?);
    let mut worst: f64 = 0.0;
    for ((result, exact), naive) in [out, d_vector, d_gain].iter().zip(exact).zip(naive) {
        worst = worst.max(judged(profile, result, (exact, naive, DType::F32), 4.0).await?);
    }
    Ok(worst)
}
