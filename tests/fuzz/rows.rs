//! Stages around attention, row by row: norms, activations, embeddings, means, causal
//! convolutions, logits.

use wgpu_attention::matmul::Activation;
use wgpu_attention::reference::{self, CausalConvInputs, Real, activate, activation_slope};
use wgpu_attention::rows::{
    CausalConv, CausalConvBackward, CausalConvForward, Elementwise, ElementwiseBackward, ElementwiseForward,
    Embedding, EmbeddingBackward, EmbeddingForward, LogSoftmax, LogSoftmaxBackward, LogSoftmaxForward,
    MeanPool, MeanPoolBackward, MeanPoolForward, Norm, NormBackward, NormConfig, NormForward, NormGate,
    PoolMask, TopK, TopKForward,
};
use wgpu_attention::tuning::Target;
use wgpu_attention::{DType, KernelOptions};

use crate::arena::Buf;
use crate::call::{float, largest};
use crate::choices::Choices;
use crate::operands::{Operands, record, record_plain, refuses};
use crate::world::{Outcome, World, refused};

fn form(f: &mut Choices) -> KernelOptions {
    KernelOptions::new().target(f.pick(&[Target::Software, Target::Gpu]))
}

/// Returns a shape with rows of up to 40 elements.
fn rows(c: &mut Choices) -> [usize; 4] {
    [c.between(1, 2), c.between(1, 2), c.between(1, 6), c.pick(&[1, 2, 3, 5, 8, 21, 40])]
}

/// Returns an option that is usually right.
fn option(c: &mut Choices, right: &[f64]) -> f64 {
    if c.one_in(16) { c.float().into() } else { c.pick(right) }
}

pub fn norm(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let [own, of_vectors, other] = [(); 3].map(|()| float(f));
    let [backward, joined, weighed, biased, summed] = [(); 5].map(|()| f.one_in(2));
    let layer = f.one_in(2);
    let (kernel_options, shape) = (form(f), rows(c));
    let vector = [1, 1, 1, shape[3]];
    let eps = option(c, &[1e-5, 1e-12, 0.1]);
    let config = if layer { NormConfig::layer() } else { NormConfig::rms() }.eps(eps);
    let reads = [
        (true, own, shape),
        (joined, own, shape),
        (weighed, of_vectors, vector),
        (biased, of_vectors, vector),
        (backward, other, shape),
        (backward && summed, other, shape),
    ];
    let mut tensors = if backward {
        let [of_x, of_weight] = [f.one_in(3), f.one_in(3)].map(|no| !no);
        let accumulates = c.one_in(3);
        // The call does not read the forward call's output.
        let writes = [
            (of_x || !weighed, other, shape),
            (weighed && of_weight, of_vectors, vector),
            (biased && of_weight, of_vectors, vector),
        ];
        let tensors = Operands::gradients(world, c, accumulates, &reads, &writes);
        (tensors, accumulates)
    } else {
        (Operands::new(world, c, &reads, &[(true, other, shape), (summed, own, shape)]), false)
    };
    tensors.0.spoil(c);
    let (t, accumulates) = tensors;
    *said = format!("{config:?}, {t:?}");
    let operator = match Norm::with_pipelines(world.gpu.pipelines(), config) {
        Ok(operator) => operator.kernel_options(kernel_options),
        Err(e) => return Ok(refused(&e)),
    };
    let call = NormForward::new(t.read(0), if backward { t.read(0) } else { t.written(0) })
        .residual(t.given(1))
        .weight(t.given(2))
        .bias(t.given(3))
        .sum(t.asked(1).filter(|_| !backward));
    let outcome = if backward {
        let call = NormBackward::new(call, t.read(4))
            .d_sum(t.given(5))
            .d_x(t.asked(0))
            .d_weight(t.asked(1))
            .d_bias(t.asked(2))
            .accumulate(accumulates);
        let size = operator.backward_scratch_size(&call);
        t.recorded(world, c, size, (true, &[]), record!(operator, backward, &call))?
    } else {
        t.recorded_plain(world, c, (true, &[]), record_plain!(operator, forward, &call))?
    };
    if !matches!(outcome, Outcome::Judged) {
        return Ok(outcome);
    }
    let features = t.input(0).shape[3];
    fn summed_rows<R: Real>(t: &Operands, world: &World) -> Vec<R> {
        let x = t.wide::<R>(world, 0);
        let Some(residual) = t.wide_if::<R>(world, 1) else { return x };
        x.iter().zip(residual).map(|(x, r)| *x + r).collect()
    }
    let x = summed_rows::<f64>(&t, world);
    // The distance of a row's largest element from the mean's rounding, in units of the divisor.
    let plain = reference::norm(&x, features, None, None, &config).map_err(refuses)?;
    let spread = |row: &[f64]| {
        let mean = if layer { row.iter().sum::<f64>() / features as f64 } else { 0.0 };
        let variance = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / features as f64;
        (variance + eps).sqrt()
    };
    let scale = x.chunks_exact(features).map(|row| 1.0 / spread(row)).fold(0.0, f64::max);
    let lost = x.chunks_exact(features).map(|row| largest(row) / spread(row)).fold(1.0, f64::max);
    let [weight, bias, d_out, d_sum] = [2, 3, 4, 5].map(|n| t.most(world, n));
    let weight = if weighed { weight } else { 1.0 };
    if !backward {
        fn truth<R: Real>(t: &Operands, world: &World, config: &NormConfig) -> Result<Vec<R>, String> {
            let [weight, bias] = [2, 3].map(|n| t.wide_if::<R>(world, n));
            let x = summed_rows::<R>(t, world);
            let features = t.input(0).shape[3];
            reference::norm(&x, features, weight.as_deref(), bias.as_deref(), config).map_err(refuses)
        }
        let (naive, want) = (truth::<f32>(&t, world, &config)?, truth::<f64>(&t, world, &config)?);
        t.judge("out", world, 0, (&naive, &want), lost * weight + bias)?;
        if t.asked(1).is_some() {
            t.judge("sum", world, 1, (&summed_rows::<f32>(&t, world), &x), largest(&x))?;
        }
        return Ok(outcome);
    }
    fn truth<R: Real>(t: &Operands, world: &World, config: &NormConfig) -> Result<[Vec<R>; 3], String> {
        let (x, d_out) = (summed_rows::<R>(t, world), t.wide::<R>(world, 4));
        let weight = t.wide_if::<R>(world, 2);
        let features = t.input(0).shape[3];
        let got = reference::norm_backward(&x, features, weight.as_deref(), config, &d_out);
        let mut got = got.map_err(refuses)?;
        for (d_x, more) in got.d_x.iter_mut().zip(t.wide_if::<R>(world, 5).iter().flatten()) {
            *d_x = *d_x + *more;
        }
        Ok([got.d_x, got.d_weight, got.d_bias])
    }
    let (naive, want) = (truth::<f32>(&t, world, &config)?, truth::<f64>(&t, world, &config)?);
    let (n, g) = (largest(&plain), d_out * weight);
    let count = (x.len() / features) as f64;
    let terms = [scale * g * (2.0 + n * n) * lost + d_sum, count * d_out * n * lost, count * d_out];
    for (k, what) in ["d_x", "d_weight", "d_bias"].into_iter().enumerate() {
        t.judge_gradient(what, world, k, (&naive[k], &want[k]), terms[k])?;
    }
    Ok(outcome)
}

pub fn elementwise(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let [own, second, other] = [(); 3].map(|()| float(f));
    let all = [None, Some(Activation::Relu), Some(Activation::Gelu), Some(Activation::GeluTanh)];
    let activation =
        if f.one_in(5) { Some(f.pick(&[Activation::Silu, Activation::Sigmoid])) } else { f.pick(&all) };
    let (backward, join) = (f.one_in(2), f.below(3));
    let [times, mut plus] = [join == 1, join == 2];
    let shape = rows(c);
    plus |= c.one_in(20);
    let reads = [(true, own, shape), (times, second, shape), (plus, second, shape), (backward, other, shape)];
    let accumulates = backward && c.one_in(3);
    let mut t = if backward {
        let writes = [(true, other, shape), (times, second, shape)];
        Operands::gradients(world, c, accumulates, &reads, &writes)
    } else {
        Operands::new(world, c, &reads, &[(true, other, shape)])
    };
    t.spoil(c);
    *said = format!("{activation:?}, {t:?}");
    let operator = Elementwise::with_pipelines(world.gpu.pipelines());
    let call = ElementwiseForward::new(t.read(0), if backward { t.read(0) } else { t.written(0) })
        .activation(activation)
        .multiply(t.given(1))
        .residual(t.given(2));
    let outcome = if backward {
        let call = ElementwiseBackward::new(call, t.read(3)).d_x(t.asked(0)).d_multiply(t.asked(1));
        let call = call.accumulate(accumulates);
        t.recorded_plain(world, c, (true, &[]), record_plain!(operator, backward, &call))?
    } else {
        t.recorded_plain(world, c, (true, &[]), record_plain!(operator, forward, &call))?
    };
    if !matches!(outcome, Outcome::Judged) {
        return Ok(outcome);
    }
    fn truth<R: Real>(
        t: &Operands,
        world: &World,
        activation: Option<Activation>,
        backward: bool,
    ) -> [Vec<R>; 2] {
        let x = t.wide::<R>(world, 0);
        let of = |n: usize, otherwise: f64| {
            t.wide_if::<R>(world, n).unwrap_or_else(|| vec![R::of(otherwise); x.len()])
        };
        let (times, plus) = (of(1, 1.0), of(2, 0.0));
        let value = |x: R| activation.map_or(x, |a| activate(x, a));
        let slope = |x: R| activation.map_or(R::one(), |a| activation_slope(x, a));
        let each = |value: &dyn Fn(usize) -> R| (0..x.len()).map(value).collect::<Vec<R>>();
        if !backward {
            return [each(&|n| value(x[n]) * times[n] + plus[n]), Vec::new()];
        }
        let d = t.wide::<R>(world, 3);
        [each(&|n| d[n] * slope(x[n]) * times[n]), each(&|n| d[n] * value(x[n]))]
    }
    let naive = truth::<f32>(&t, world, activation, backward);
    let want = truth::<f64>(&t, world, activation, backward);
    let [x, times, plus, d] = [0, 1, 2, 3].map(|n| t.most(world, n).max(1.0));
    if backward {
        t.judge_gradient("d_x", world, 0, (&naive[0], &want[0]), 2.0 * d * times)?;
        t.judge_gradient("d_multiply", world, 1, (&naive[1], &want[1]), x * d)?;
    } else {
        t.judge("out", world, 0, (&naive[0], &want[0]), x * times + plus)?;
    }
    Ok(outcome)
}

pub fn embedding(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let [of_table, of_rows] = [(); 2].map(|()| float(f));
    let backward = f.one_in(2);
    let (batch, length) = (c.between(1, 2), c.between(1, 9));
    let (count, width) = (c.between(1, 12), c.pick(&[1, 2, 4, 5, 20]));
    let scale = option(c, &[1.0, 1.5, 4.472]);
    let (table, picked) = ([1, 1, count, width], [batch, 1, length, width]);
    let ids = (true, DType::U32, [batch, 1, length, 1]);
    let accumulates = c.one_in(3);
    let (reads, writes) = if backward {
        ([ids, (true, of_rows, picked)], [(true, of_table, table)])
    } else {
        ([ids, (true, of_table, table)], [(true, of_rows, picked)])
    };
    let mut t = Operands::gradients(world, c, accumulates, &reads, &writes);
    t.spoil(c);
    // Products with other scales would overflow f32, or be subnormal.
    let tame = (1e-3..1e3).contains(&scale.abs());
    *said = format!("{scale}, {t:?}");
    let operator = Embedding::with_pipelines(world.gpu.pipelines());
    let outcome = if backward {
        let forward = EmbeddingForward::new(t.read(0), t.written(0), t.read(1)).scale(scale);
        let call = EmbeddingBackward::new(forward, t.read(1), t.written(0)).accumulate(accumulates);
        let size = operator.backward_scratch_size(&call);
        t.recorded(world, c, size, (tame, &[]), record!(operator, backward, &call))?
    } else {
        let call = EmbeddingForward::new(t.read(0), t.read(1), t.written(0));
        let call = call.scale(scale).accumulate(accumulates);
        t.recorded_plain(world, c, (tame, &[]), record_plain!(operator, forward, &call))?
    };
    if matches!(outcome, Outcome::Judged) {
        let ids = t.input(0).numbers(&world.arena.before);
        let [_, _, rows, width] = t.output(0).shape;
        fn truth<R: Real>(
            ids: &[u32],
            data: &[R],
            (backward, shape, scale): (bool, [usize; 2], f64),
        ) -> Result<Vec<R>, String> {
            match backward {
                true => reference::embedding_backward(ids, data, shape, scale),
                false => reference::embedding(ids, data, shape[1], scale),
            }
            .map_err(refuses)
        }
        let of = (backward, [rows, width], scale);
        let naive = truth::<f32>(&ids, &t.wide(world, 1), of)?;
        let want = truth::<f64>(&ids, &t.wide(world, 1), of)?;
        let terms = if backward { ids.len() as f64 } else { 1.0 };
        let most = scale.abs() * t.most(world, 1) * terms;
        t.judge_gradient("out", world, 0, (&naive, &want), most)?;
    }
    Ok(outcome)
}

pub fn mean_pool(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let [own, other] = [(); 2].map(|()| float(f));
    let (backward, kind, l2, kernel_options) = (f.one_in(2), f.below(4), f.one_in(2), form(f));
    let batch = if kind == 3 { 1 } else { c.between(1, 3) };
    let (length, features) = (c.between(1, 9), c.pick(&[1, 2, 4, 5, 33]));
    let ends = c.between(2, 5);
    let sequences = if kind == 3 { ends - 1 } else { batch };
    let (x, means) = ([batch, 1, length, features], [sequences, 1, 1, features]);
    let which = [
        (false, own, x),
        (true, DType::U32, [batch, 1, 1, 1]),
        (true, DType::Bool, [batch, 1, 1, length]),
        (true, DType::U32, [1, 1, 1, ends]),
    ][kind];
    let accumulates = backward && c.one_in(3);
    let reads = [(true, own, x), which, (backward, other, means)];
    let writes = [if backward { (true, own, x) } else { (true, other, means) }];
    let mut t = Operands::gradients(world, c, accumulates, &reads, &writes);
    if kind == 3 {
        t.input_mut(1).buf = Buf::Starts;
    }
    t.spoil(c);
    *said = format!("{kind}, l2 {l2}, {t:?}");
    let picked = t.given(1);
    let rows = match (kind, picked) {
        (1, Some(t)) => PoolMask::Lengths(t),
        (2, Some(t)) => PoolMask::Keep(t),
        (3, Some(t)) => PoolMask::Packed(t),
        _ => PoolMask::All,
    };
    let operator = MeanPool::with_pipelines(world.gpu.pipelines()).kernel_options(kernel_options);
    let call =
        MeanPoolForward::new(t.read(0), rows, if backward { t.read(2) } else { t.written(0) }).normalize(l2);
    let outcome = if backward {
        let call = MeanPoolBackward::new(call, t.read(2), t.written(0)).accumulate(accumulates);
        t.recorded_plain(world, c, (true, &[]), record_plain!(operator, backward, &call))?
    } else {
        t.recorded_plain(world, c, (true, &[]), record_plain!(operator, forward, &call))?
    };
    if !matches!(outcome, Outcome::Judged) {
        return Ok(outcome);
    }
    let [batch, _, length, features] = t.input(0).shape;
    let of = |b: usize, kept: &dyn Fn(usize) -> bool| -> Vec<usize> {
        (0..length).filter(|i| kept(*i)).map(|i| b * length + i).collect()
    };
    let each = |kept: &dyn Fn(usize, usize) -> bool| -> Vec<Vec<usize>> {
        (0..batch).map(|b| of(b, &|i| kept(b, i))).collect()
    };
    let numbers = |world: &World| t.input(1).numbers(&world.arena.before);
    let sequences = match kind {
        0 => each(&|_, _| true),
        1 => {
            let lengths = numbers(world);
            each(&|b, i| i < lengths[b] as usize)
        }
        2 => {
            let keep = t.input(1).bools(&world.arena.before);
            each(&|b, i| keep[b * length + i])
        }
        _ => {
            let ends = numbers(world);
            if !ends.is_sorted() {
                // Then the result is unspecified.
                return Ok(Outcome::Ran);
            }
            ends.windows(2).map(|w| of(0, &|i| (w[0] as usize..w[1] as usize).contains(&i))).collect()
        }
    };
    // The shortest mean is the smallest divisor.
    let wide = t.wide::<f64>(world, 0);
    let plain = reference::mean_pool(&wide, features, &sequences, false).map_err(refuses)?;
    let lengths = plain.chunks_exact(features).map(|m| m.iter().map(|x| x * x).sum::<f64>().sqrt());
    let shortest = lengths.filter(|l| *l > 0.0).fold(1.0, f64::min);
    let most = t.most(world, 0);
    let lost = if l2 { 1.0 + most / shortest } else { 1.0 };
    fn truth<R: Real>(
        x: &[R],
        d: Option<&[R]>,
        (features, sequences, l2): (usize, &[Vec<usize>], bool),
    ) -> Result<Vec<R>, String> {
        match d {
            Some(d) => reference::mean_pool_backward(x, features, sequences, l2, d),
            None => reference::mean_pool(x, features, sequences, l2),
        }
        .map_err(refuses)
    }
    let how = (features, &sequences[..], l2);
    let naive = truth::<f32>(&t.wide(world, 0), t.wide_if(world, 2).as_deref(), how)?;
    let want = truth::<f64>(&wide, t.wide_if(world, 2).as_deref(), how)?;
    if backward {
        let each = if l2 { (1.0 + features as f64) / shortest } else { 1.0 };
        // Each row of a packed sequence belongs to one mean.
        t.judge_gradient("d_x", world, 0, (&naive, &want), t.most(world, 2) * each * lost)?;
    } else {
        t.judge("out", world, 0, (&naive, &want), if l2 { lost } else { most })?;
    }
    Ok(outcome)
}

pub fn log_softmax(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let [own, other] = [(); 2].map(|()| float(f));
    let (backward, kernel_options, shape) = (f.one_in(2), form(f), rows(c));
    let accumulates = backward && c.one_in(3);
    let reads = [(true, own, shape), (backward, other, shape)];
    let mut t = Operands::gradients(world, c, accumulates, &reads, &[(true, other, shape)]);
    t.spoil(c);
    *said = format!("{t:?}");
    let operator = LogSoftmax::with_pipelines(world.gpu.pipelines()).kernel_options(kernel_options);
    let outcome = if backward {
        let forward = LogSoftmaxForward::new(t.read(1), t.read(0));
        let call = LogSoftmaxBackward::new(forward, t.read(1), t.written(0)).accumulate(accumulates);
        t.recorded_plain(world, c, (true, &[]), record_plain!(operator, backward, &call))?
    } else {
        let call = LogSoftmaxForward::new(t.read(0), t.written(0));
        t.recorded_plain(world, c, (true, &[]), record_plain!(operator, forward, &call))?
    };
    if matches!(outcome, Outcome::Judged) {
        fn truth<R: Real>(t: &Operands, world: &World) -> Result<Vec<R>, String> {
            let (x, columns) = (t.wide::<R>(world, 0), t.input(0).shape[3]);
            match t.wide_if::<R>(world, 1) {
                Some(d) => reference::log_softmax_backward(&x, columns, &d),
                None => reference::log_softmax(&x, columns),
            }
            .map_err(refuses)
        }
        let (naive, want) = (truth::<f32>(&t, world)?, truth::<f64>(&t, world)?);
        let most = t.most(world, 0);
        if backward {
            let columns = t.input(0).shape[3] as f64;
            let terms = t.most(world, 1) * (1.0 + most.exp() * columns);
            t.judge_gradient("d_x", world, 0, (&naive, &want), terms)?;
        } else {
            t.judge("out", world, 0, (&naive, &want), largest(&want) + 1.0)?;
        }
    }
    Ok(outcome)
}

pub fn top_k(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let [own, other] = [(); 2].map(|()| float(f));
    let (valued, kernel_options, shape) = (f.one_in(2), form(f), rows(c));
    let k = c.between(1, shape[3].min(6));
    let found = [shape[0], shape[1], shape[2], k];
    let writes = [(true, DType::U32, found), (valued, other, found)];
    let mut t = Operands::new(world, c, &[(true, own, shape)], &writes);
    t.spoil(c);
    *said = format!("{t:?}");
    let operator = TopK::with_pipelines(world.gpu.pipelines()).kernel_options(kernel_options);
    let call = TopKForward::new(t.read(0), t.written(0)).values(t.asked(1));
    let outcome = t.recorded_plain(world, c, (true, &[]), record_plain!(operator, forward, &call))?;
    if matches!(outcome, Outcome::Judged) {
        let (x, columns, k) = (t.wide::<f32>(world, 0), t.input(0).shape[3], t.output(0).shape[3]);
        let want = reference::top_k(&x, columns, k).map_err(refuses)?;
        let got = t.output(0).numbers(&world.arena.after);
        if got != want {
            return Err(format!("the largest are at {got:?}, not {want:?}"));
        }
        if valued {
            let at = |(n, i): (usize, &u32)| x[n / k * columns + *i as usize];
            let naive: Vec<f32> = want.iter().enumerate().map(at).collect();
            let want: Vec<f64> = naive.iter().map(|x| f64::from(*x)).collect();
            // The only error is the rounding to the output's type.
            t.judge("values", world, 1, (&naive, &want), 0.0)?;
        }
    }
    Ok(outcome)
}

pub fn gated_norm(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let [own, other] = [(); 2].map(|()| float(f));
    let [backward, layer, weighed, first] = [(); 4].map(|()| f.one_in(2));
    let activation = f.pick(&[Activation::Silu, Activation::Sigmoid]);
    let (kernel_options, shape) = (form(f), rows(c));
    let (vector, eps) = ([1, 1, 1, shape[3]], option(c, &[1e-5, 0.1]));
    let config = if layer { NormConfig::layer() } else { NormConfig::rms() }.eps(eps);
    let accumulates = backward && c.one_in(3);
    let reads = [
        (true, own, shape),
        (true, own, shape),
        (weighed, own, vector),
        (weighed && layer, own, vector),
        (backward, other, shape),
    ];
    let writes = [
        (true, other, shape),
        (backward, other, shape),
        (backward && weighed, own, vector),
        (backward && weighed && layer, own, vector),
    ];
    let mut t = Operands::gradients(world, c, accumulates, &reads, &writes);
    t.spoil(c);
    *said = format!("{config:?}, {activation:?}, first {first}, {t:?}");
    let operator = match Norm::with_pipelines(world.gpu.pipelines(), config) {
        Ok(operator) => operator.kernel_options(kernel_options),
        Err(e) => return Ok(refused(&e)),
    };
    let call = NormForward::new(t.read(0), if backward { t.read(0) } else { t.written(0) })
        .gate(gate_of(t.read(1), activation, first))
        .weight(t.given(2))
        .bias(t.given(3));
    let outcome = if backward {
        let call = NormBackward::new(call, t.read(4))
            .d_x(t.asked(0))
            .d_gate(t.asked(1))
            .d_weight(t.asked(2))
            .d_bias(t.asked(3))
            .accumulate(accumulates);
        let size = operator.backward_scratch_size(&call);
        t.recorded(world, c, size, (true, &[]), record!(operator, backward, &call))?
    } else {
        t.recorded_plain(world, c, (true, &[]), record_plain!(operator, forward, &call))?
    };
    if !matches!(outcome, Outcome::Judged) {
        return Ok(outcome);
    }
    let features = t.input(0).shape[3];
    let [x, gates] = [0, 1].map(|n| t.wide::<f64>(world, n));
    let factors: Vec<f64> = gates.iter().map(|gate| activate(*gate, activation)).collect();
    let input: Vec<f64> = x.iter().zip(&factors).map(|(x, g)| if first { x * g } else { *x }).collect();
    // The distance of a row's largest element from the mean's rounding, in units of the divisor.
    let plain = reference::norm(&input, features, None, None, &config).map_err(refuses)?;
    let spread = |row: &[f64]| {
        let mean = if layer { row.iter().sum::<f64>() / features as f64 } else { 0.0 };
        let variance = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / features as f64;
        (variance + eps).sqrt()
    };
    let scale = input.chunks_exact(features).map(|row| 1.0 / spread(row)).fold(0.0, f64::max);
    let lost = input.chunks_exact(features).map(|row| largest(row) / spread(row)).fold(1.0, f64::max);
    let [weight, bias, d_out] = [2, 3, 4].map(|n| t.most(world, n));
    let (weight, most_gate) = (if weighed { weight } else { 1.0 }, largest(&factors));
    type Results<R> = Result<Vec<Vec<R>>, String>;
    fn truth<R: Real>(
        t: &Operands,
        world: &World,
        (config, activation, first): (&NormConfig, Activation, bool),
    ) -> Results<R> {
        let [x, gate] = [0, 1].map(|n| t.wide::<R>(world, n));
        let [weight, bias, d_out] = [2, 3, 4].map(|n| t.wide_if::<R>(world, n));
        let gate = gate_of(&gate[..], activation, first);
        let (features, weight, bias) = (t.input(0).shape[3], weight.as_deref(), bias.as_deref());
        let Some(d_out) = d_out else {
            return Ok(vec![
                reference::gated_norm(&x, features, weight, bias, config, gate).map_err(refuses)?,
            ]);
        };
        let got = reference::gated_norm_backward(&x, features, weight, bias, config, gate, &d_out);
        let got = got.map_err(refuses)?;
        Ok(vec![got.norm.d_x, got.d_gate, got.norm.d_weight, got.norm.d_bias])
    }
    let how = (&config, activation, first);
    let (naive, want) = (truth::<f32>(&t, world, how)?, truth::<f64>(&t, world, how)?);
    let n = largest(&plain);
    if !backward {
        let most = (lost * n.max(1.0) * weight + bias) * if first { 1.0 } else { most_gate };
        t.judge("out", world, 0, (&naive[0], &want[0]), most)?;
        return Ok(outcome);
    }
    let count = (x.len() / features) as f64;
    let after = if first { 1.0 } else { most_gate };
    let e = scale * d_out * weight * after * (2.0 + n * n) * lost;
    let terms = match first {
        true => [e * most_gate, e * largest(&x) * 1.1],
        false => [e, d_out * (lost * n.max(1.0) * weight + bias) * 1.1],
    };
    let terms = [terms[0], terms[1], count * d_out * after * n.max(1.0) * lost, count * d_out * after];
    for (k, what) in ["d_x", "d_gate", "d_weight", "d_bias"].into_iter().enumerate() {
        t.judge_gradient(what, world, k, (&naive[k], &want[k]), terms[k])?;
    }
    Ok(outcome)
}

fn gate_of<T>(gate: T, activation: Activation, first: bool) -> NormGate<T> {
    if first { NormGate::before(gate, activation) } else { NormGate::after(gate, activation) }
}

pub fn causal_conv(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let [own, other] = [(); 2].map(|()| float(f));
    let (backward, kind, kernel_options) = (f.one_in(2), f.below(3), form(f));
    let [biased, silu, stated, placed] = [(); 4].map(|()| f.one_in(2));
    let width = f.pick(&[1, 2, 4, 7]);
    let stated = stated && width > 1;
    // A state in place, by slots.
    let in_place = stated && placed && !backward;
    let activation = silu.then_some(Activation::Silu);
    let batch = if kind == 2 { 1 } else { c.between(1, 3) };
    let (length, channels) = (c.pick(&[1, 2, 5, 17, 20]), c.pick(&[1, 2, 4, 5, 9]));
    let ends = c.between(2, 5);
    let sequences = if kind == 2 { ends - 1 } else { batch };
    let slots = if in_place { sequences + c.below(3) } else { sequences };
    let (x, filter, vector) = ([batch, 1, length, channels], [1, 1, channels, width], [1, 1, 1, channels]);
    let states = |count| [count, 1, width.max(2) - 1, channels];
    let numbers = [[1; 4], [batch, 1, 1, 1], [1, 1, 1, ends]][kind];
    let reads = [
        (true, own, x),
        (true, own, filter),
        (biased, own, vector),
        (kind > 0, DType::U32, numbers),
        (stated && !in_place, other, states(sequences)),
        (backward, other, x),
        (backward && stated, other, states(sequences)),
        (in_place, DType::U32, [sequences, 1, 1, 1]),
    ];
    let of_weight = backward && c.one_in(2);
    let writes = [
        (true, other, x),
        (stated, other, states(slots)),
        (of_weight, own, filter),
        (of_weight && biased, own, vector),
    ];
    let accumulates = backward && c.one_in(3);
    let mut t = Operands::gradients(world, c, accumulates, &reads, &writes);
    if kind == 2 {
        t.input_mut(3).buf = Buf::Starts;
    }
    t.spoil(c);
    *said = format!("{kind}, {activation:?}, in place {in_place}, {t:?}");
    let operator = CausalConv::with_pipelines(world.gpu.pipelines()).kernel_options(kernel_options);
    let call = CausalConvForward::new(t.read(0), t.read(1), if backward { t.read(0) } else { t.written(0) })
        .bias(t.given(2))
        .activation(activation)
        .lengths(t.given(3).filter(|_| kind == 1))
        .packed(t.given(3).filter(|_| kind == 2))
        .initial_state(t.given(4));
    let outcome = if backward {
        let call = CausalConvBackward::new(call, t.read(5))
            .d_final_state(t.given(6))
            .d_x(t.asked(0))
            .d_initial_state(t.asked(1))
            .d_weight(t.asked(2))
            .d_bias(t.asked(3))
            .accumulate(accumulates);
        let size = operator.backward_scratch_size(&call);
        t.recorded(world, c, size, (true, &[]), record!(operator, backward, &call))?
    } else {
        let state = t.asked(1);
        let call = match in_place {
            true => call.state(state).slots(t.given(7)),
            false => call.final_state(state),
        };
        t.recorded_plain(world, c, (!in_place, &[]), record_plain!(operator, forward, &call))?
    };
    if !matches!(outcome, Outcome::Judged) {
        return Ok(outcome);
    }
    let ([batch, _, length, channels], width) = (t.input(0).shape, t.input(1).shape[3]);
    let numbers = if kind > 0 { t.input(3).numbers(&world.arena.before) } else { Vec::new() };
    if kind == 2 && !numbers.is_sorted() {
        // Then the result is unspecified.
        return Ok(Outcome::Ran);
    }
    let least = |n: u32| (n as usize).min(length);
    let parts: Vec<[usize; 2]> = match kind {
        0 => (0..batch).map(|b| [b * length, (b + 1) * length]).collect(),
        1 => numbers.iter().enumerate().map(|(b, n)| [b * length, b * length + least(*n)]).collect(),
        _ => numbers.windows(2).map(|w| [least(w[0]), least(w[1])]).collect(),
    };
    /// The output and the states, or the gradients in the order of the outputs.
    fn truth<R: Real>(
        t: &Operands,
        world: &World,
        (parts, activation, [channels, width]): (&[[usize; 2]], Option<Activation>, [usize; 2]),
    ) -> Result<[Vec<R>; 4], String> {
        let [x, weight] = [0, 1].map(|n| t.wide::<R>(world, n));
        let [bias, initial, d_out, d_final] = [2, 4, 5, 6].map(|n| t.wide_if::<R>(world, n));
        let kept = (width - 1) * channels;
        let mut of_rows = vec![R::zero(); x.len()];
        let mut of_states = Vec::new();
        let (mut d_weight, mut d_bias) = (vec![R::zero(); weight.len()], vec![R::zero(); channels]);
        for (n, [first, end]) in parts.iter().enumerate() {
            let (range, state) = (first * channels..end * channels, n * kept..(n + 1) * kept);
            let inputs = CausalConvInputs {
                x: &x[range.clone()],
                weight: &weight,
                bias: bias.as_deref(),
                initial_state: initial.as_ref().map(|t| &t[state.clone()]),
                activation,
                channels,
            };
            let Some(d_out) = &d_out else {
                let got = reference::causal_conv(&inputs).map_err(refuses)?;
                of_rows[range].copy_from_slice(&got.out);
                of_states.extend(got.final_state);
                continue;
            };
            let d_final = d_final.as_ref().map(|t| &t[state]);
            let got = reference::causal_conv_backward(&inputs, &d_out[range.clone()], d_final);
            let got = got.map_err(refuses)?;
            of_rows[range].copy_from_slice(&got.d_x);
            of_states.extend(got.d_initial_state);
            let add = |to: &mut Vec<R>, x: &[R]| to.iter_mut().zip(x).for_each(|(to, x)| *to = *to + *x);
            add(&mut d_weight, &got.d_weight);
            add(&mut d_bias, &got.d_bias);
        }
        Ok([of_rows, of_states, d_weight, d_bias])
    }
    let how = (&parts[..], activation, [channels, width]);
    let (naive, want) = (truth::<f32>(&t, world, how)?, truth::<f64>(&t, world, how)?);
    let [most_x, weight, bias, _, initial, d_out, d_final, _] = [0, 1, 2, 3, 4, 5, 6, 7].map(|n| match n {
        3 | 7 => 0.0,
        n => t.most(world, n),
    });
    let (row, terms) = (most_x.max(initial), width as f64);
    let sum = terms * weight * row + bias;
    if !backward {
        t.judge("out", world, 0, (&naive[0], &want[0]), sum)?;
        if t.asked(1).is_some() {
            // States are copies: the only error is the rounding to the output's type.
            t.judge("state", world, 1, (&naive[1], &want[1]), 0.0)?;
        }
        return Ok(outcome);
    }
    // A slope is at most 1.1. It changes by at most half of the error of the sum.
    let e = d_out * if silu { 1.1 + 0.5 * sum } else { 1.0 };
    let of_rows = terms * weight * e + d_final;
    let count = (batch * length) as f64;
    let terms = [of_rows, of_rows, count * e * row, count * e];
    for (k, what) in ["d_x", "d_initial_state", "d_weight", "d_bias"].into_iter().enumerate() {
        t.judge_gradient(what, world, k, (&naive[k], &want[k]), terms[k])?;
    }
    Ok(outcome)
}
