//! Additive and linear attention, attention around positions, and what goes with them.

use wgpu_attention::reference::{self, HostLinear, LocalOptions, Options, Real};
use wgpu_attention::{
    AdditiveAttention, AdditiveBackward, AdditiveConfig, AdditiveForward, AttentionalBackward,
    AttentionalForward, AttentionalVector, DType, DeviceMask, FeatureMap, KernelForm, Linear,
    LinearAttention, LinearBackward, LinearConfig, LinearForward, LinearState, LocalAttention, LocalBackward,
    LocalConfig, LocalForward, PositionPredictor, PredictorBackward, PredictorForward, RandomFeatures, Shape,
    Tuning, UpdateRule, WeightNorm, WeightNormBackward, WeightNormForward,
};

use crate::arena::{Buf, Window, view};
use crate::call::{faults, float, judge, largest, settle};
use crate::choices::Choices;
use crate::gradients::at;
use crate::masks::MaskSpec;
use crate::operands::{record, recorded};
use crate::world::{Outcome, World, refused};

/// Spoils so many of the windows.
fn spoil(c: &mut Choices, reads: &mut [Window], writes: &mut [Window]) {
    for _ in 0..faults(c) {
        let n = c.below(reads.len() + writes.len());
        match n.checked_sub(reads.len()) {
            Some(n) => writes[n].spoil(c),
            None => reads[n].spoil(c),
        }
    }
}

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

/// As the tensors say, which may have other shapes than were planned.
fn shape_of([q, k, v]: [&Window; 3]) -> Shape {
    let [batch, heads, q_len, head_dim] = q.shape;
    let [_, kv_heads, kv_len, _] = k.shape;
    Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim: v.shape[3] }
}

pub fn additive(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let dtype = float(f, world.f16);
    let (backward, masked, each) = (f.one_in(2), f.one_in(3), f.one_in(2));
    let form = f.pick(&[KernelForm::Cpu, KernelForm::Gpu]);
    let shape = attention_shape(f, c);
    let mask = masked.then(|| MaskSpec::new(f, c, &shape, world.f16));
    let of_vector = [1, if each { shape.heads } else { 1 }, 1, shape.head_dim];
    let inputs = [
        (dtype, shape.q()),
        (dtype, shape.k()),
        (dtype, shape.v()),
        (DType::F32, of_vector),
        (dtype, shape.out()),
        (DType::F32, shape.lse()),
        (dtype, shape.out()),
    ];
    // q, k, v, vector; of the backward call out, lse and d_out too.
    let mut reads = inputs.map(|(dtype, shape)| Window::input(c, dtype, shape, false));
    let mut writes = if backward {
        vec![
            at(c, (Buf::OutA, 0), DType::F32, shape.q(), false),
            at(c, (Buf::OutB, 0), dtype, shape.k(), false),
            at(c, (Buf::OutB, 8192), DType::F32, shape.v(), false),
            at(c, (Buf::OutC, 0), DType::F32, of_vector, false),
        ]
    } else {
        vec![
            at(c, (Buf::OutA, 0), dtype, shape.out(), false),
            at(c, (Buf::OutB, 0), DType::F32, shape.lse(), false),
        ]
    };
    spoil(c, &mut reads, &mut writes);
    *said = format!("{shape:?}, {reads:?} to {writes:?}, {mask:?}, {form:?}");
    let config = AdditiveConfig::new(shape.heads, shape.head_dim)
        .kv_heads(shape.kv_heads)
        .value_dim(shape.value_dim)
        .dtype(dtype)
        .tuning(Tuning::new().form(form));
    let operator = match AdditiveAttention::with_pipelines(world.gpu.pipelines(), config) {
        Ok(operator) => operator,
        Err(e) => return Ok(refused(&e)),
    };
    let buffers = world.arena.buffers.clone();
    let of = |w: &Window| view(&buffers, w);
    let [q, k, v, vector, out, lse, d_out] = reads.each_ref().map(of);
    let device_mask = mask.as_ref().map_or(DeviceMask::none(), |mask| mask.device(&buffers));
    let mut all = reads[..if backward { 7 } else { 4 }].to_vec();
    all.extend(&writes);
    all.extend(mask.clone().iter_mut().flat_map(MaskSpec::windows).map(|w| *w));
    if backward {
        let call = AdditiveBackward::new([q, k, v], vector, out, lse, d_out)
            .mask(device_mask)
            .d_q(of(&writes[0]))
            .d_k(of(&writes[1]))
            .d_v(of(&writes[2]))
            .d_score_vector(of(&writes[3]))
            .accumulate(c.one_in(2));
        let size = operator.backward_scratch_size(&call);
        let record = record!(operator, backward, backward_in_pass, &call);
        return recorded(world, c, size, (&all, &writes, false), record);
    }
    let call = AdditiveForward::new(q, k, v, vector, of(&writes[0])).lse(of(&writes[1])).mask(device_mask);
    let size = operator.scratch_size(&call);
    let tame = !masked && reads[..4].iter().all(Window::is_tame) && writes.iter().all(Window::is_watched);
    let record = record!(operator, forward, forward_in_pass, &call);
    let outcome = recorded(world, c, size, (&all, &writes, tame), record)?;
    if matches!(outcome, Outcome::Judged) {
        fn truth<R: Real>(reads: &[Window], bytes: &[Vec<u8>]) -> Result<Vec<R>, String> {
            let [q, k, v, vector] = [0, 1, 2, 3].map(|n| reads[n].wide::<R>(bytes));
            let shape = shape_of([&reads[0], &reads[1], &reads[2]]);
            let got = reference::additive_attention(&q, &k, &v, &vector, shape, &Options::new());
            Ok(got.map_err(|e| format!("the reference refuses it: {e}"))?.out)
        }
        let bytes = &world.arena.before;
        let naive = truth::<f32>(&reads, bytes)?;
        let values = largest(&reads[2].wide(bytes));
        judge("out", world, &writes[0], &naive, &truth::<f64>(&reads, bytes)?, values)?;
    }
    Ok(outcome)
}

pub fn attentional(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let types = [0; 4].map(|_| float(f, world.f16));
    let (backward, biased) = (f.one_in(2), f.one_in(2));
    let [batch, length, context_dim, hidden_dim, out_dim] =
        [c.between(1, 2), c.between(1, 6), c.between(1, 6), c.between(1, 6), c.between(1, 9)];
    let row = |n: usize| [batch, 1, length, n];
    let of_weight = [1, 1, out_dim, context_dim + hidden_dim];
    let inputs = [
        (types[0], row(context_dim)),
        (types[1], row(hidden_dim)),
        (types[2], of_weight),
        (types[2], [1, 1, 1, out_dim]),
        (types[3], row(out_dim)),
        (types[3], row(out_dim)),
    ];
    // context, hidden, weight, bias; of the backward call out and d_out too.
    let mut reads = inputs.map(|(dtype, shape)| Window::input(c, dtype, shape, false));
    let mut writes = if backward {
        vec![
            at(c, (Buf::OutA, 0), DType::F32, row(context_dim), false),
            at(c, (Buf::OutB, 0), DType::F32, row(hidden_dim), false),
            at(c, (Buf::OutC, 0), DType::F32, of_weight, false),
            at(c, (Buf::OutC, 8192), DType::F32, [1, 1, 1, out_dim], false),
        ]
    } else {
        vec![at(c, (Buf::OutA, 0), types[3], row(out_dim), false)]
    };
    spoil(c, &mut reads, &mut writes);
    *said = format!("{reads:?} to {writes:?}, biased {biased}");
    let operator = AttentionalVector::with_pipelines(world.gpu.pipelines());
    let buffers = world.arena.buffers.clone();
    let of = |w: &Window| view(&buffers, w);
    let [context, hidden, weight, bias, out, d_out] = reads.each_ref().map(of);
    if backward {
        let mut all = reads.to_vec();
        all.extend(&writes);
        let call = AttentionalBackward::new(context, hidden, weight, out, d_out)
            .d_context(of(&writes[0]))
            .d_hidden(of(&writes[1]))
            .d_weight(of(&writes[2]))
            .d_bias(of(&writes[3]))
            .accumulate(c.one_in(2));
        let size = operator.backward_scratch_size(&call);
        let record = record!(operator, backward, backward_in_pass, &call);
        return recorded(world, c, size, (&all, &writes, false), record);
    }
    let linear = Linear { weight, bias: biased.then_some(bias) };
    let call = AttentionalForward::new(context, hidden, linear, of(&writes[0]));
    let reads = &reads[..if biased { 4 } else { 3 }];
    let mut all = reads.to_vec();
    all.extend(&writes);
    let tame = reads.iter().all(Window::is_tame) && writes[0].is_watched();
    let size = operator.scratch_size(&call);
    let record = record!(operator, forward, forward_in_pass, &call);
    let outcome = recorded(world, c, size, (&all, &writes, tame), record)?;
    if matches!(outcome, Outcome::Judged) {
        fn truth<R: Real>(reads: &[Window], bytes: &[Vec<u8>], out: usize) -> Result<Vec<R>, String> {
            let all: Vec<Vec<R>> = reads.iter().map(|w| w.wide(bytes)).collect();
            let linear = HostLinear { weight: &all[2], bias: all.get(3).map(|bias| &bias[..]) };
            let [batch, _, length, _] = reads[0].shape;
            let got = reference::attentional(&all[0], &all[1], linear, batch * length, out);
            got.map_err(|e| format!("the reference refuses it: {e}"))
        }
        let (bytes, out) = (&world.arena.before, writes[0].shape[3]);
        let want = truth::<f64>(reads, bytes, out)?;
        // What tanh is taken of, and its slope is 1 at most.
        let terms = reads[2].shape[3] as f64 * largest(&reads[2].wide(bytes));
        let most = largest(&reads[0].wide(bytes)).max(largest(&reads[1].wide(bytes)));
        judge("out", world, &writes[0], &truth::<f32>(reads, bytes, out)?, &want, 2.0 + terms * most)?;
    }
    Ok(outcome)
}

pub fn linear(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let dtype = float(f, world.f16);
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
    // What goes together, most of the time: some of the rest is refused.
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
    let form = f.pick(&[KernelForm::Cpu, KernelForm::Gpu]);
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
    let inputs = [
        (dtype, shape.q()),
        (dtype, shape.k()),
        (dtype, shape.v()),
        (DType::Bool, [batch, 1, 1, kv_len]),
        (DType::U32, [batch, 1, 1, 1]),
        (DType::U32, [1, 1, 1, c.between(2, 4)]),
        (DType::F32, [1, 1, 3, head_dim]),
        (DType::F32, tokens),
        (DType::F32, tokens),
        (dtype, shape.out()),
        (dtype, shape.out()),
    ];
    // q, k, v, key mask, lengths, starts, directions, decay, beta; of the backward call out and d_out too.
    let mut reads = inputs.map(|(dtype, shape)| Window::input(c, dtype, shape, false));
    reads[5].buf = Buf::Starts;
    let mut writes = if backward {
        vec![
            at(c, (Buf::OutA, 0), DType::F32, shape.q(), false),
            at(c, (Buf::OutB, 0), dtype, shape.k(), false),
            at(c, (Buf::OutC, 0), DType::F32, shape.v(), false),
        ]
    } else {
        vec![
            at(c, (Buf::OutA, 0), dtype, shape.out(), false),
            at(c, (Buf::OutB, 0), DType::F32, [batch, kv_heads, features, value_dim], false),
            at(c, (Buf::OutC, 0), DType::F32, [batch, kv_heads, features, 1], false),
            at(c, (Buf::OutC, 8192), DType::F32, [batch, kv_heads, 1, 1], false),
        ]
    };
    spoil(c, &mut reads, &mut writes);
    if c.one_in(12) {
        map = FeatureMap::Random { kind, directions: c.size() };
    }
    *said =
        format!("{map:?}, {rule:?}, {shape:?}, {reads:?} to {writes:?}, causal {causal}, masked {masked}, ");
    *said += &format!("padded {padded}, packed {packed}, kept {kept}, {form:?}");
    let config = LinearConfig::new(heads, head_dim)
        .kv_heads(kv_heads)
        .value_dim(value_dim)
        .dtype(dtype)
        .feature_map(map)
        .update_rule(rule)
        .causal(causal)
        .normalised(normalised)
        .tuning(Tuning::new().form(form));
    let operator = match LinearAttention::with_pipelines(world.gpu.pipelines(), config) {
        Ok(operator) => operator,
        Err(e) => return Ok(refused(&e)),
    };
    let buffers = world.arena.buffers.clone();
    let of = |w: &Window| view(&buffers, w);
    let [q, k, v, mask, lengths, starts, directions, decay, beta, out, d_out] = reads.each_ref().map(of);
    let random = matches!(map, FeatureMap::Random { .. });
    if backward {
        let mut all = reads.to_vec();
        all.extend(&writes);
        let call = LinearBackward::new([q, k, v], out, d_out)
            .key_mask(masked.then_some(mask))
            .lengths(padded.then_some(lengths))
            .packed(packed.then_some(starts))
            .directions(random.then_some(directions))
            .d_q(of(&writes[0]))
            .d_k(of(&writes[1]))
            .d_v(of(&writes[2]))
            .accumulate(c.one_in(2));
        let size = operator.backward_scratch_size(&call);
        let record = record!(operator, backward, backward_in_pass, &call);
        return recorded(world, c, size, (&all, &writes, false), record);
    }
    let scaled = random && kind != RandomFeatures::Fourier;
    let state = LinearState {
        state: of(&writes[1]),
        norm: of(&writes[2]),
        log_scale: scaled.then(|| of(&writes[3])),
    };
    let call = LinearForward::new(q, k, v, of(&writes[0]))
        .key_mask(masked.then_some(mask))
        .lengths(padded.then_some(lengths))
        .packed(packed.then_some(starts))
        .directions(random.then_some(directions))
        .decay(matches!(rule, UpdateRule::Gated | UpdateRule::GatedDelta).then_some(decay))
        .beta((rule == UpdateRule::GatedDelta).then_some(beta))
        .state(kept.then_some(state))
        .begins(kept && c.one_in(2));
    // What the call has.
    let writes = &writes[..match (kept, scaled) {
        (false, _) => 1,
        (true, false) => 3,
        (true, true) => 4,
    }];
    let mut all = reads.to_vec();
    all.extend(writes);
    let size = operator.scratch_size(&call);
    let record = record!(operator, forward, forward_in_pass, &call);
    recorded(world, c, size, (&all, writes, false), record)
}

pub fn local(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let dtype = float(f, world.f16);
    let (backward, padded, weighed, shared) = (f.one_in(2), f.one_in(2), f.one_in(2), f.one_in(2));
    let shape = attention_shape(f, c);
    let mut half_window = c.between(0, 5);
    let sigma = if c.one_in(4) { None } else { Some(c.between(1, 8) as f64 / 3.0) };
    let mut scale = 0.5;
    let of_positions = [shape.batch, if shared { 1 } else { shape.heads }, shape.q_len, 1];
    let inputs = [
        (dtype, shape.q()),
        (dtype, shape.k()),
        (dtype, shape.v()),
        (DType::F32, of_positions),
        (DType::U32, [shape.batch, 1, 1, 1]),
        (dtype, shape.out()),
    ];
    // q, k, v, positions, lengths; of the backward call d_out too.
    let mut reads = inputs.map(|(dtype, shape)| Window::input(c, dtype, shape, false));
    let mut writes = if backward {
        vec![
            at(c, (Buf::OutA, 0), DType::F32, shape.q(), false),
            at(c, (Buf::OutB, 0), dtype, shape.k(), false),
            at(c, (Buf::OutB, 8192), DType::F32, shape.v(), false),
            at(c, (Buf::OutC, 0), DType::F32, of_positions, false),
        ]
    } else {
        vec![
            at(c, (Buf::OutA, 0), dtype, shape.out(), false),
            at(c, (Buf::OutB, 0), DType::F32, shape.weights(), false),
        ]
    };
    spoil(c, &mut reads, &mut writes);
    if c.one_in(10) {
        half_window = c.size();
    }
    if c.one_in(20) {
        scale = f64::from(c.float());
    }
    *said =
        format!("{half_window}, {sigma:?}, {scale}, {shape:?}, {reads:?} to {writes:?}, padded {padded}, ");
    *said += &format!("weighed {weighed}");
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
    let buffers = world.arena.buffers.clone();
    let of = |w: &Window| view(&buffers, w);
    let [q, k, v, positions, lengths, d_out] = reads.each_ref().map(of);
    if backward {
        let mut all = reads.to_vec();
        all.extend(&writes);
        let call = LocalBackward::new([q, k, v], positions, d_out)
            .lengths(padded.then_some(lengths))
            .d_q(of(&writes[0]))
            .d_k(of(&writes[1]))
            .d_v(of(&writes[2]))
            .d_positions(of(&writes[3]))
            .accumulate(c.one_in(2));
        let size = operator.backward_scratch_size(&call);
        let record = record!(operator, backward, backward_in_pass, &call);
        return recorded(world, c, size, (&all, &writes, false), record);
    }
    let call = LocalForward::new([q, k, v], positions, of(&writes[0]))
        .lengths(padded.then_some(lengths))
        .weights(weighed.then(|| of(&writes[1])));
    let writes = &writes[..if weighed { 2 } else { 1 }];
    let reads = &reads[..if padded { 5 } else { 4 }];
    let mut all = reads.to_vec();
    all.extend(writes);
    let tame =
        reads.iter().all(Window::is_tame) && writes.iter().all(Window::is_watched) && (scale as f32) == 0.5;
    let size = operator.scratch_size(&call);
    let record = record!(operator, forward, forward_in_pass, &call);
    let outcome = recorded(world, c, size, (&all, writes, tame), record)?;
    if matches!(outcome, Outcome::Judged) {
        let bytes = &world.arena.before;
        let shape = shape_of([&reads[0], &reads[1], &reads[2]]);
        let lengths = reads.get(4).map(|w| {
            let lengths = w.numbers(bytes);
            if lengths.len() == 1 { lengths.repeat(shape.batch) } else { lengths }
        });
        let options = LocalOptions { half_window, sigma, scale, lengths: lengths.as_deref() };
        fn truth<R: Real>(
            reads: &[Window],
            bytes: &[Vec<u8>],
            (shape, options): (Shape, &LocalOptions),
        ) -> Result<Vec<R>, String> {
            let [q, k, v, positions] = [0, 1, 2, 3].map(|n| reads[n].wide::<R>(bytes));
            let got = reference::local_attention(&q, &k, &v, &positions, shape, options);
            Ok(got.map_err(|e| format!("the reference refuses it: {e}"))?.out)
        }
        let of = (shape, &options);
        let values = largest(&reads[2].wide(bytes));
        let naive = truth::<f32>(reads, bytes, of)?;
        judge("out", world, &writes[0], &naive, &truth::<f64>(reads, bytes, of)?, values)?;
    }
    Ok(outcome)
}

pub fn predictor(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let types = [0; 2].map(|_| float(f, world.f16));
    let (backward, biased, padded) = (f.one_in(2), f.one_in(2), f.one_in(2));
    let [batch, length, features, units] =
        [c.between(1, 2), c.between(1, 6), c.between(1, 6), c.between(1, 9)];
    let kv_len = if c.one_in(10) { c.size() } else { c.between(1, 50) };
    let (row, of_weight, of_vector) = ([batch, 1, length, 1], [1, 1, units, features], [1, 1, 1, units]);
    let of_hidden = [batch, 1, length, features];
    let inputs = [
        (types[0], of_hidden),
        (types[1], of_weight),
        (types[1], of_vector),
        (types[1], of_vector),
        (DType::U32, [batch, 1, 1, 1]),
        (DType::F32, row),
    ];
    // hidden, weight, bias, vector, lengths; of the backward call d_positions too.
    let mut reads = inputs.map(|(dtype, shape)| Window::input(c, dtype, shape, false));
    let mut writes = if backward {
        vec![
            at(c, (Buf::OutA, 0), DType::F32, of_hidden, false),
            at(c, (Buf::OutB, 0), DType::F32, of_weight, false),
            at(c, (Buf::OutC, 0), DType::F32, of_vector, false),
            at(c, (Buf::OutC, 8192), DType::F32, of_vector, false),
        ]
    } else {
        vec![at(c, (Buf::OutA, 0), DType::F32, row, false)]
    };
    spoil(c, &mut reads, &mut writes);
    *said = format!("{kv_len}, {reads:?} to {writes:?}, biased {biased}, padded {padded}");
    let operator = PositionPredictor::with_pipelines(world.gpu.pipelines());
    let buffers = world.arena.buffers.clone();
    let of = |w: &Window| view(&buffers, w);
    let [hidden, weight, bias, vector, lengths, d_positions] = reads.each_ref().map(of);
    let linear = Linear { weight, bias: biased.then_some(bias) };
    let mut all = reads.to_vec();
    all.extend(&writes);
    if backward {
        let call = PredictorBackward::new(hidden, linear, vector, kv_len, d_positions)
            .lengths(padded.then_some(lengths))
            .d_hidden(of(&writes[0]))
            .d_weight(of(&writes[1]))
            .d_bias(of(&writes[2]))
            .d_vector(of(&writes[3]))
            .accumulate(c.one_in(2));
        let size = operator.backward_scratch_size(&call);
        let record = record!(operator, backward, backward_in_pass, &call);
        return recorded(world, c, size, (&all, &writes, false), record);
    }
    let call = PredictorForward::new(hidden, linear, vector, kv_len, of(&writes[0]))
        .lengths(padded.then_some(lengths));
    let size = operator.scratch_size(&call);
    let record = record!(operator, forward, forward_in_pass, &call);
    recorded(world, c, size, (&all, &writes, false), record)
}

pub fn weight_norm(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let dtype = float(f, world.f16);
    let backward = f.one_in(2);
    let (heads, dim, each) = (c.between(1, 4), c.between(1, 70), c.one_in(2));
    let (wide, row) = ([1, heads, 1, dim], [1, if each { heads } else { 1 }, 1, 1]);
    let inputs = [(dtype, wide), (dtype, row), (DType::F32, wide)];
    // vector, gain; of the backward call d_out too.
    let mut reads = inputs.map(|(dtype, shape)| Window::input(c, dtype, shape, false));
    let mut writes = vec![at(c, (Buf::OutA, 0), DType::F32, wide, false)];
    if backward {
        writes.push(at(c, (Buf::OutB, 0), DType::F32, row, false));
    }
    spoil(c, &mut reads, &mut writes);
    *said = format!("{reads:?} to {writes:?}");
    let operator = WeightNorm::with_pipelines(world.gpu.pipelines());
    let buffers = world.arena.buffers.clone();
    let of = |w: &Window| view(&buffers, w);
    let [vector, gain, d_out] = reads.each_ref().map(of);
    let mut encoder = world.encoder();
    let mut scratch = world.scratch();
    let result = if backward {
        let written = [of(&writes[0]), of(&writes[1])];
        let call = WeightNormBackward::new([vector, gain], d_out, written).accumulate(c.one_in(2));
        operator.backward(&mut encoder, &call)
    } else {
        operator.forward(&mut encoder, &WeightNormForward::new(vector, gain, of(&writes[0])))
    };
    let reads = &reads[..if backward { 3 } else { 2 }];
    let mut all = reads.to_vec();
    all.extend(&writes);
    let small = all.iter().all(|w| w.count() < 4000);
    let tame = !backward && reads.iter().all(Window::is_tame) && writes[0].is_watched();
    let outcome = settle(world, result, encoder, &mut scratch, &all, &writes, [small, tame])?;
    if matches!(outcome, Outcome::Judged) {
        fn truth<R: Real>(reads: &[Window], bytes: &[Vec<u8>]) -> Result<Vec<R>, String> {
            let [x, gain] = [0, 1].map(|n| reads[n].wide::<R>(bytes));
            let got = reference::weight_norm(&x, &gain, reads[0].shape[3]);
            got.map_err(|e| format!("the reference refuses it: {e}"))
        }
        let bytes = &world.arena.before;
        let most = largest(&reads[1].wide(bytes));
        judge("out", world, &writes[0], &truth::<f32>(reads, bytes)?, &truth::<f64>(reads, bytes)?, most)?;
    }
    Ok(outcome)
}
