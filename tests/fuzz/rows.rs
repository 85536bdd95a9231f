//! Stages around attention, row by row: norms, activations, embeddings, means, logits.

use wgpu_attention::matmul::Activation;
use wgpu_attention::reference::{self, Real, activate, activation_slope};
use wgpu_attention::rows::{
    Elementwise, ElementwiseBackward, ElementwiseForward, Embedding, EmbeddingBackward, EmbeddingForward,
    LogSoftmax, LogSoftmaxBackward, LogSoftmaxForward, MeanPool, MeanPoolBackward, MeanPoolForward, Norm,
    NormBackward, NormConfig, NormForward, PoolMask, TopK, TopKForward,
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
