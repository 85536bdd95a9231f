//! Additive, linear and local attention, and their operators.

use wgpu_attention::additive::{AdditiveAttention, AdditiveBackward, AdditiveConfig, AdditiveForward};
use wgpu_attention::layers::{AttentionalBackward, AttentionalForward, AttentionalVector};
use wgpu_attention::linear_attention::{
    FeatureMap, LinearAttention, LinearBackward, LinearConfig, LinearForward, LinearState, RandomFeatures,
    UpdateRule,
};
use wgpu_attention::local::{
    LocalAttention, LocalBackward, LocalConfig, LocalForward, PositionPredictor, PredictorBackward,
    PredictorForward,
};
use wgpu_attention::mask::DeviceMask;
use wgpu_attention::reference::{self, HostLinear, LocalOptions, Options, Real};
use wgpu_attention::rows::{WeightNorm, WeightNormBackward, WeightNormForward};
use wgpu_attention::tuning::Target;
use wgpu_attention::{DType, KernelOptions, Linear, Shape};

use crate::arena::{Buf, Window};
use crate::call::float;
use crate::choices::Choices;
use crate::masks::MaskSpec;
use crate::operands::{Operands, record, record_plain, refuses};
use crate::world::{Outcome, World, refused};

fn attention_shape(f: &mut Choices, c: &mut Choices) -> Shape {
    let kv_heads = f.between(1, 2);
    Shape {
        batch: c.between(1, 2),
        heads: kv_heads * f.between(1, 2),
        kv_heads,
        q_len: c.between(1, 7),
        kv_len: c.between(1, 12),
        head_dim: f.pick(&[4, 5]),
        value_dim: f.pick(&[4, 3]),
    }
}

/// Returns the shape of q, k and v, which may differ from the planned shape.
fn shape_of(t: &Operands) -> Shape {
    let [batch, heads, q_len, head_dim] = t.input(0).shape;
    let [_, kv_heads, kv_len, _] = t.input(1).shape;
    Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim: t.input(2).shape[3] }
}

pub fn additive(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let dtype = float(f);
    let (backward, masked, each) = (f.one_in(2), f.one_in(3), f.one_in(2));
    let form = f.pick(&[Target::Software, Target::Gpu]);
    let shape = attention_shape(f, c);
    let mut mask = masked.then(|| MaskSpec::new(f, c, &shape));
    let of_vector = [1, if each { shape.heads } else { 1 }, 1, shape.head_dim];
    let reads = [
        (true, dtype, shape.q()),
        (true, dtype, shape.k()),
        (true, dtype, shape.v()),
        (true, DType::F32, of_vector),
        (backward, dtype, shape.out()),
        (backward, DType::F32, shape.lse()),
        (backward, dtype, shape.out()),
    ];
    let accumulates = backward && c.one_in(2);
    let mut t = if backward {
        let writes = [
            (true, DType::F32, shape.q()),
            (true, dtype, shape.k()),
            (true, DType::F32, shape.v()),
            (true, DType::F32, of_vector),
        ];
        Operands::gradients(world, c, accumulates, &reads, &writes)
    } else {
        Operands::new(world, c, &reads, &[(true, dtype, shape.out()), (true, DType::F32, shape.lse())])
    };
    t.spoil(c);
    *said = format!("{shape:?}, {t:?}, {mask:?}, {form:?}");
    let config = AdditiveConfig::new(shape.heads, shape.head_dim)
        .kv_heads(shape.kv_heads)
        .value_dim(shape.value_dim)
        .dtype(dtype)
        .kernel_options(KernelOptions::new().target(form));
    let operator = match AdditiveAttention::with_pipelines(world.gpu.pipelines(), config) {
        Ok(operator) => operator,
        Err(e) => return Ok(refused(&e)),
    };
    let buffers = world.arena.buffers.clone();
    let of_mask: Vec<Window> = mask.iter_mut().flat_map(MaskSpec::windows).map(|w| *w).collect();
    let mask = mask.as_ref().map_or(DeviceMask::none(), |mask| mask.device(&buffers));
    let [q, k, v, vector] = [0, 1, 2, 3].map(|n| t.read(n));
    if backward {
        let forward = AdditiveForward::new(q, k, v, vector, t.read(4)).lse(t.read(5)).mask(mask);
        let call = AdditiveBackward::new(forward, t.read(6))
            .d_q(t.written(0))
            .d_k(t.written(1))
            .d_v(t.written(2))
            .d_score_vector(t.written(3))
            .accumulate(accumulates);
        let size = operator.backward_scratch_size(&call);
        let record = record!(operator, backward, &call);
        return t.recorded(world, c, size, (false, &of_mask), record);
    }
    let call = AdditiveForward::new(q, k, v, vector, t.written(0)).lse(t.written(1)).mask(mask);
    let size = operator.scratch_size(&call);
    let record = record!(operator, forward, &call);
    let outcome = t.recorded(world, c, size, (!masked, &of_mask), record)?;
    if matches!(outcome, Outcome::Judged) {
        fn truth<R: Real>(t: &Operands, world: &World) -> Result<Vec<R>, String> {
            let [q, k, v, vector] = [0, 1, 2, 3].map(|n| t.wide::<R>(world, n));
            let got = reference::additive_attention(&q, &k, &v, &vector, shape_of(t), &Options::new());
            Ok(got.map_err(refuses)?.out)
        }
        let (naive, want) = (truth::<f32>(&t, world)?, truth::<f64>(&t, world)?);
        t.judge("out", world, 0, (&naive, &want), t.most(world, 2))?;
    }
    Ok(outcome)
}

pub fn attentional(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let types = [0; 4].map(|_| float(f));
    let (backward, biased) = (f.one_in(2), f.one_in(2));
    let [batch, length, context_dim, hidden_dim, out_dim] =
        [c.between(1, 2), c.between(1, 6), c.between(1, 6), c.between(1, 6), c.between(1, 9)];
    let row = |n: usize| [batch, 1, length, n];
    let (of_weight, of_bias) = ([1, 1, out_dim, context_dim + hidden_dim], [1, 1, 1, out_dim]);
    let reads = [
        (true, types[0], row(context_dim)),
        (true, types[1], row(hidden_dim)),
        (true, types[2], of_weight),
        (biased && !backward, types[2], of_bias),
        (backward, types[3], row(out_dim)),
        (backward, types[3], row(out_dim)),
    ];
    let accumulates = backward && c.one_in(2);
    let mut t = if backward {
        let shapes = [row(context_dim), row(hidden_dim), of_weight, of_bias];
        let writes = shapes.map(|shape| (true, DType::F32, shape));
        Operands::gradients(world, c, accumulates, &reads, &writes)
    } else {
        Operands::new(world, c, &reads, &[(true, types[3], row(out_dim))])
    };
    t.spoil(c);
    *said = format!("{t:?}");
    let operator = AttentionalVector::with_pipelines(world.gpu.pipelines());
    let [context, hidden, weight] = [0, 1, 2].map(|n| t.read(n));
    let linear = Linear { weight, bias: t.given(3) };
    if backward {
        let forward = AttentionalForward::new(context, hidden, linear, t.read(4));
        let call = AttentionalBackward::new(forward, t.read(5))
            .d_context(t.written(0))
            .d_hidden(t.written(1))
            .d_weight(t.written(2))
            .d_bias(t.written(3))
            .accumulate(accumulates);
        let size = operator.backward_scratch_size(&call);
        let record = record!(operator, backward, &call);
        return t.recorded(world, c, size, (false, &[]), record);
    }
    let call = AttentionalForward::new(context, hidden, linear, t.written(0));
    let size = operator.scratch_size(&call);
    let record = record!(operator, forward, &call);
    let outcome = t.recorded(world, c, size, (true, &[]), record)?;
    if matches!(outcome, Outcome::Judged) {
        fn truth<R: Real>(t: &Operands, world: &World) -> Result<Vec<R>, String> {
            let [context, hidden, weight] = [0, 1, 2].map(|n| t.wide::<R>(world, n));
            let bias = t.wide_if::<R>(world, 3);
            let linear = HostLinear { weight: &weight, bias: bias.as_deref() };
            let [batch, _, length, _] = t.input(0).shape;
            let got = reference::attentional(&context, &hidden, linear, batch * length, t.output(0).shape[3]);
            got.map_err(refuses)
        }
        let (naive, want) = (truth::<f32>(&t, world)?, truth::<f64>(&t, world)?);
        // The argument of tanh. Its slope is 1 at most.
        let terms = t.input(2).shape[3] as f64 * t.most(world, 2);
        let most = t.most(world, 0).max(t.most(world, 1));
        t.judge("out", world, 0, (&naive, &want), 2.0 + terms * most)?;
    }
    Ok(outcome)
}

pub fn linear(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let dtype = float(f);
    let kind = f.pick(&[RandomFeatures::Positive, RandomFeatures::Trigonometric, RandomFeatures::Fourier]);
    let mut map = f.pick(&[
        FeatureMap::Elu,
        FeatureMap::Elu,
        FeatureMap::Relu,
        FeatureMap::Identity,
        FeatureMap::Random { kind, directions: 3 },
    ]);
    let rule = f.pick(&[UpdateRule::Linear, UpdateRule::Linear, UpdateRule::Gated, UpdateRule::GatedDelta]);
    let (backward, causal, masked, kept) = (f.one_in(3), f.one_in(2), f.one_in(3), f.one_in(3));
    let (mut padded, packed) = (f.one_in(3), f.one_in(4));
    let mut normalised = f.one_in(2);
    // The options usually fit each other. Some combinations are refused.
    let (mut causal, mut rule, mut masked, mut packed) = (causal, rule, masked, packed);
    if !f.one_in(6) {
        if backward || matches!(map, FeatureMap::Random { .. }) {
            rule = UpdateRule::Linear;
        }
        if rule != UpdateRule::Linear {
            (causal, masked, padded, packed) = (true, false, false, false);
        }
        normalised = match rule {
            UpdateRule::GatedDelta => false,
            _ => normalised || matches!(map, FeatureMap::Random { .. }),
        };
    }
    let form = f.pick(&[Target::Software, Target::Gpu]);
    let mut shape = attention_shape(f, c);
    if causal {
        shape.q_len = shape.kv_len;
    }
    if packed {
        (shape.batch, shape.q_len, padded) = (1, shape.kv_len, false);
    }
    let Shape { batch, heads, kv_heads, kv_len, head_dim, value_dim, .. } = shape;
    let features = map.features(head_dim);
    let tokens = [batch, kv_heads, kv_len, 1];
    let random = |map| matches!(map, FeatureMap::Random { .. });
    let scaled = random(map) && kind != RandomFeatures::Fourier;
    let reads = [
        (true, dtype, shape.q()),
        (true, dtype, shape.k()),
        (true, dtype, shape.v()),
        (masked, DType::Bool, [batch, 1, 1, kv_len]),
        (padded, DType::U32, [batch, 1, 1, 1]),
        (packed, DType::U32, [1, 1, 1, c.between(2, 4)]),
        (random(map), DType::F32, [1, 1, 3, head_dim]),
        (matches!(rule, UpdateRule::Gated | UpdateRule::GatedDelta), DType::F32, tokens),
        (rule == UpdateRule::GatedDelta, DType::F32, tokens),
        (backward, dtype, shape.out()),
        (backward, dtype, shape.out()),
    ];
    let accumulates = backward && c.one_in(2);
    let mut t = if backward {
        let writes = [(true, DType::F32, shape.q()), (true, dtype, shape.k()), (true, DType::F32, shape.v())];
        Operands::gradients(world, c, accumulates, &reads, &writes)
    } else {
        let writes = [
            (true, dtype, shape.out()),
            (kept, DType::F32, [batch, kv_heads, features, value_dim]),
            (kept, DType::F32, [batch, kv_heads, features, 1]),
            (kept && scaled, DType::F32, [batch, kv_heads, 1, 1]),
        ];
        Operands::new(world, c, &reads, &writes)
    };
    if packed {
        t.input_mut(5).buf = Buf::Starts;
    }
    t.spoil(c);
    if c.one_in(12) {
        map = FeatureMap::Random { kind, directions: c.size() };
    }
    *said = format!("{map:?}, {rule:?}, {shape:?}, {t:?}, causal {causal}, {form:?}");
    let config = LinearConfig::new(heads, head_dim)
        .kv_heads(kv_heads)
        .value_dim(value_dim)
        .dtype(dtype)
        .feature_map(map)
        .update_rule(rule)
        .causal(causal)
        .normalised(normalised)
        .kernel_options(KernelOptions::new().target(form));
    let operator = match LinearAttention::with_pipelines(world.gpu.pipelines(), config) {
        Ok(operator) => operator,
        Err(e) => return Ok(refused(&e)),
    };
    let [q, k, v] = [0, 1, 2].map(|n| t.read(n));
    if backward {
        let forward = LinearForward::new(q, k, v, t.read(9))
            .key_mask(t.given(3))
            .lengths(t.given(4))
            .packed(t.given(5))
            .directions(t.given(6));
        let call = LinearBackward::new(forward, t.read(10))
            .d_q(t.written(0))
            .d_k(t.written(1))
            .d_v(t.written(2))
            .accumulate(accumulates);
        let size = operator.backward_scratch_size(&call);
        let record = record!(operator, backward, &call);
        return t.recorded(world, c, size, (false, &[]), record);
    }
    let state = kept.then(|| LinearState { state: t.written(1), norm: t.written(2), log_scale: t.asked(3) });
    let call = LinearForward::new(q, k, v, t.written(0))
        .key_mask(t.given(3))
        .lengths(t.given(4))
        .packed(t.given(5))
        .directions(t.given(6))
        .decay(t.given(7))
        .beta(t.given(8))
        .state(state)
        .begins(kept && c.one_in(2));
    let size = operator.scratch_size(&call);
    let record = record!(operator, forward, &call);
    t.recorded(world, c, size, (false, &[]), record)
}

pub fn local(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let dtype = float(f);
    let (backward, padded, weighed, shared) = (f.one_in(2), f.one_in(2), f.one_in(2), f.one_in(2));
    let shape = attention_shape(f, c);
    let mut half_window = c.between(0, 5);
    let sigma = if c.one_in(4) { None } else { Some(c.between(1, 8) as f64 / 3.0) };
    let mut scale = 0.5;
    let of_positions = [shape.batch, if shared { 1 } else { shape.heads }, shape.q_len, 1];
    let reads = [
        (true, dtype, shape.q()),
        (true, dtype, shape.k()),
        (true, dtype, shape.v()),
        (true, DType::F32, of_positions),
        (padded, DType::U32, [shape.batch, 1, 1, 1]),
        (backward, dtype, shape.out()),
    ];
    let accumulates = backward && c.one_in(2);
    let mut t = if backward {
        let writes = [
            (true, DType::F32, shape.q()),
            (true, dtype, shape.k()),
            (true, DType::F32, shape.v()),
            (true, DType::F32, of_positions),
        ];
        Operands::gradients(world, c, accumulates, &reads, &writes)
    } else {
        let writes = [(true, dtype, shape.out()), (weighed, DType::F32, shape.weights())];
        Operands::new(world, c, &reads, &writes)
    };
    t.spoil(c);
    if c.one_in(10) {
        half_window = c.size();
    }
    if c.one_in(20) {
        scale = f64::from(c.float());
    }
    *said = format!("{half_window}, {sigma:?}, {scale}, {shape:?}, {t:?}");
    let config = LocalConfig::new(shape.heads, shape.head_dim, half_window)
        .kv_heads(shape.kv_heads)
        .value_dim(shape.value_dim)
        .dtype(dtype)
        .sigma(sigma)
        .scale(scale);
    let operator = match LocalAttention::with_pipelines(world.gpu.pipelines(), config) {
        Ok(operator) => operator,
        Err(e) => return Ok(refused(&e)),
    };
    let [q, k, v, positions] = [0, 1, 2, 3].map(|n| t.read(n));
    if backward {
        let forward = LocalForward::new([q, k, v], positions, t.read(5)).lengths(t.given(4));
        let call = LocalBackward::new(forward, t.read(5))
            .d_q(t.written(0))
            .d_k(t.written(1))
            .d_v(t.written(2))
            .d_positions(t.written(3))
            .accumulate(accumulates);
        let size = operator.backward_scratch_size(&call);
        let record = record!(operator, backward, &call);
        return t.recorded(world, c, size, (false, &[]), record);
    }
    let call = LocalForward::new([q, k, v], positions, t.written(0)).lengths(t.given(4)).weights(t.asked(1));
    let size = operator.scratch_size(&call);
    let record = record!(operator, forward, &call);
    let outcome = t.recorded(world, c, size, ((scale as f32) == 0.5, &[]), record)?;
    if matches!(outcome, Outcome::Judged) {
        let batch = t.input(0).shape[0];
        let lengths = padded.then(|| {
            let lengths = t.input(4).numbers(&world.arena.before);
            if lengths.len() == 1 { lengths.repeat(batch) } else { lengths }
        });
        let options = LocalOptions { half_window, sigma, scale, lengths: lengths.as_deref() };
        fn truth<R: Real>(t: &Operands, world: &World, options: &LocalOptions) -> Result<Vec<R>, String> {
            let [q, k, v, positions] = [0, 1, 2, 3].map(|n| t.wide::<R>(world, n));
            let got = reference::local_attention(&q, &k, &v, &positions, shape_of(t), options);
            Ok(got.map_err(refuses)?.out)
        }
        let (naive, want) = (truth::<f32>(&t, world, &options)?, truth::<f64>(&t, world, &options)?);
        t.judge("out", world, 0, (&naive, &want), t.most(world, 2))?;
    }
    Ok(outcome)
}

pub fn predictor(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let types = [0; 2].map(|_| float(f));
    let (backward, biased, padded) = (f.one_in(2), f.one_in(2), f.one_in(2));
    let [batch, length, features, units] =
        [c.between(1, 2), c.between(1, 6), c.between(1, 6), c.between(1, 9)];
    let kv_len = if c.one_in(10) { c.size() } else { c.between(1, 50) };
    let (row, of_weight, of_vector) = ([batch, 1, length, 1], [1, 1, units, features], [1, 1, 1, units]);
    let of_hidden = [batch, 1, length, features];
    let reads = [
        (true, types[0], of_hidden),
        (true, types[1], of_weight),
        (biased, types[1], of_vector),
        (true, types[1], of_vector),
        (padded, DType::U32, [batch, 1, 1, 1]),
        (backward, DType::F32, row),
    ];
    let accumulates = backward && c.one_in(2);
    let mut t = if backward {
        let shapes = [of_hidden, of_weight, of_vector, of_vector];
        let writes = shapes.map(|shape| (true, DType::F32, shape));
        Operands::gradients(world, c, accumulates, &reads, &writes)
    } else {
        Operands::new(world, c, &reads, &[(true, DType::F32, row)])
    };
    t.spoil(c);
    *said = format!("{kv_len}, {t:?}");
    let operator = PositionPredictor::with_pipelines(world.gpu.pipelines());
    let (hidden, vector) = (t.read(0), t.read(3));
    let linear = Linear { weight: t.read(1), bias: t.given(2) };
    if backward {
        let forward = PredictorForward::new(hidden, linear, vector, kv_len, t.read(5)).lengths(t.given(4));
        let call = PredictorBackward::new(forward, t.read(5))
            .d_hidden(t.written(0))
            .d_weight(t.written(1))
            .d_bias(t.written(2))
            .d_vector(t.written(3))
            .accumulate(accumulates);
        let size = operator.backward_scratch_size(&call);
        let record = record!(operator, backward, &call);
        return t.recorded(world, c, size, (false, &[]), record);
    }
    let call = PredictorForward::new(hidden, linear, vector, kv_len, t.written(0)).lengths(t.given(4));
    let size = operator.scratch_size(&call);
    let record = record!(operator, forward, &call);
    t.recorded(world, c, size, (false, &[]), record)
}

pub fn weight_norm(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let dtype = float(f);
    let backward = f.one_in(2);
    let (heads, dim, each) = (c.between(1, 4), c.between(1, 70), c.one_in(2));
    let (wide, row) = ([1, heads, 1, dim], [1, if each { heads } else { 1 }, 1, 1]);
    let reads = [(true, dtype, wide), (true, dtype, row), (backward, DType::F32, wide)];
    let accumulates = backward && c.one_in(2);
    let writes = [(true, DType::F32, wide), (backward, DType::F32, row)];
    let mut t = Operands::gradients(world, c, accumulates, &reads, &writes);
    t.spoil(c);
    *said = format!("{t:?}");
    let operator = WeightNorm::with_pipelines(world.gpu.pipelines());
    let call = WeightNormForward::new(t.read(0), t.read(1), t.written(0));
    let outcome = if backward {
        let written = [t.written(0), t.written(1)];
        let call = WeightNormBackward::new(call, t.read(2), written).accumulate(accumulates);
        t.recorded_plain(world, c, (true, &[]), record_plain!(operator, backward, &call))?
    } else {
        t.recorded_plain(world, c, (true, &[]), record_plain!(operator, forward, &call))?
    };
    if matches!(outcome, Outcome::Judged) {
        /// Returns the vectors, or the gradients of direction and length.
        fn truth<R: Real>(t: &Operands, world: &World) -> Result<[Vec<R>; 2], String> {
            let ([x, gain], dim) = ([0, 1].map(|n| t.wide::<R>(world, n)), t.input(0).shape[3]);
            match t.wide_if::<R>(world, 2) {
                Some(d) => reference::weight_norm_backward(&x, &gain, &d, dim),
                None => reference::weight_norm(&x, &gain, dim).map(|out| [out, Vec::new()]),
            }
            .map_err(refuses)
        }
        let (naive, want) = (truth::<f32>(&t, world)?, truth::<f64>(&t, world)?);
        let [x, gain, d] = [0, 1, 2].map(|n| t.most(world, n));
        if backward {
            let dim = t.input(0).shape[3];
            let lengths = t.wide::<f64>(world, 0);
            let lengths = lengths.chunks_exact(dim).map(|x| x.iter().map(|x| x * x).sum::<f64>().sqrt());
            let shortest = lengths.fold(f64::INFINITY, f64::min);
            let along = dim as f64 * d * x / shortest;
            t.judge_gradient("d_vector", world, 0, (&naive[0], &want[0]), gain / shortest * (d + along))?;
            t.judge_gradient("d_gain", world, 1, (&naive[1], &want[1]), along * t.input(0).shape[1] as f64)?;
        } else {
            t.judge("out", world, 0, (&naive[0], &want[0]), gain)?;
        }
    }
    Ok(outcome)
}
