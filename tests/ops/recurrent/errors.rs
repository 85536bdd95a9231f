//! Errors name what is wrong, before anything is recorded.

use wgpu_attention::recurrent::{
    Decay, RecurrentAttention, RecurrentBackward, RecurrentConfig, RecurrentForward,
};
use wgpu_attention::{DType, Scratch, TensorView};

use crate::harness::full;

fn says(error: &wgpu_attention::Error, words: &[&str]) {
    let error = error.to_string();
    assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
}

#[test]
fn bad_calls_are_errors() {
    let gpu = &full().gpu;
    let buffers: Vec<_> = (0..16).map(|_| gpu.buffer(65536).expect("a buffer")).collect();
    let typed = |n: usize, dtype, shape| TensorView::new(&buffers[n], dtype, shape);
    let view = |n: usize, shape| typed(n, DType::F32, shape);
    let (keys, values, token) = ([2, 2, 5, 8], [2, 4, 5, 6], [2, 4, 5, 1]);
    let config = RecurrentConfig::new(2, 8).value_heads(4).value_dim(6);
    let gated = config.decay(Decay::PerHead).delta(true);
    let made = |config: RecurrentConfig| RecurrentAttention::with_pipelines(gpu.pipelines(), config);
    let unmade = |config: RecurrentConfig, words: &[&str]| says(&made(config).expect_err("an error"), words);
    unmade(config.value_heads(3), &["value_heads", "heads"]);
    unmade(RecurrentConfig::new(0, 8).value_heads(4), &["heads is 0"]);
    unmade(RecurrentConfig::new(2, 0), &["head_dim"]);
    unmade(config.value_dim(0), &["value_dim"]);
    unmade(config.dtype(DType::Bool), &["Bool"]);
    unmade(config.scale(f64::NAN), &["scale", "finite"]);
    unmade(config.scale(1e300), &["scale", "finite"]);
    unmade(config.normalize_qk(-1.0), &["normalize_qk", "at least 0"]);

    let mut none = Scratch::new(gpu.device(), Default::default()).expect("nothing");
    let mut refused = |config: RecurrentConfig, call: RecurrentForward, words: &[&str]| {
        let operator = made(config).expect("an operator");
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        says(&operator.forward(&mut encoder, &call, &mut none).expect_err("an error"), words);
        assert!(operator.prepare(&call, &mut none).is_err());
    };
    let [q, k, v, out] = [view(0, keys), view(1, keys), view(2, values), view(3, values)];
    let of = RecurrentForward::new;
    let good = of(q, k, v, out);
    refused(config, of(typed(0, DType::F16, keys), k, v, out), &["`q`", "F32", "F16"]);
    refused(config, of(view(0, [2, 4, 5, 8]), k, v, out), &["`q`", "heads must be 2", "got 4"]);
    refused(config, of(q, view(1, [2, 2, 4, 8]), v, out), &["`k`", "length must be 5", "got 4"]);
    refused(config, of(q, k, view(2, keys), out), &["`v`", "heads must be 4", "got 2"]);
    refused(config, of(q, k, v, view(3, [2, 4, 5, 8])), &["`out`", "dim must be 6", "got 8"]);
    refused(config, of(q, k, v, view(2, values)), &["`out`", "`v`"]);
    refused(config, good, &["scratch"]);
    refused(config, good.decay(view(4, token)), &["decay", "no use"]);
    refused(config, good.beta(view(4, token)), &["beta", "no use"]);
    refused(gated, good.beta(view(4, token)), &["without `decay`"]);
    refused(gated, good.decay(view(4, token)), &["without `beta`"]);
    let full = good.decay(view(4, token)).beta(view(5, token));
    refused(gated, full.decay(view(4, [2, 4, 5, 8])), &["`decay`", "dim must be 1"]);
    refused(gated, full.decay(typed(4, DType::U32, token)), &["`decay`", "U32"]);
    refused(gated, full.beta(view(5, [2, 3, 5, 1])), &["`beta`", "heads must be 4 or 1", "got 3"]);
    let by_channel = gated.decay(Decay::PerChannel);
    refused(by_channel, full, &["`decay`", "dim must be 8", "got 1"]);
    refused(gated, full.lengths(typed(6, DType::U32, [1, 1, 1, 2])), &["`lengths`", "batch must be 2"]);
    refused(gated, full.packed(typed(6, DType::U32, [1, 1, 1, 3])), &["`q`", "batch must be 1"]);
    let one = |n, [_, h, l, d]: [usize; 4]| view(n, [1, h, l, d]);
    let single = of(one(0, keys), one(1, keys), one(2, values), one(3, values));
    refused(config, single.packed(typed(6, DType::U32, [1; 4])), &["`packed`", "must be 2"]);
    let both = single.packed(typed(6, DType::U32, [1, 1, 1, 3])).lengths(typed(7, DType::U32, [1; 4]));
    refused(config, both, &["`lengths` with packed sequences"]);
    let states = |n, count| view(n, [count, 4, 8, 6]);
    refused(gated, full.initial_state(states(8, 3)), &["`initial_state`", "batch must be 2", "got 3"]);
    refused(gated, full.final_state(view(8, [2, 4, 6, 8])), &["`final_state`", "must be 8", "got 6"]);
    refused(gated, full.final_state(typed(8, DType::F16, [2, 4, 8, 6])), &["`final_state`", "F32"]);
    refused(
        gated,
        full.initial_state(states(8, 2)).final_state(states(8, 2)),
        &["`final_state`", "`initial_state`"],
    );
    refused(gated, full.final_state(states(3, 2)), &["overlap"]);
    refused(gated, full.state(states(2, 2)), &["`final_state`", "`v`"]);
    let slots = typed(9, DType::U32, [2, 1, 1, 1]);
    refused(gated, full.slots(slots), &["slots without a state"]);
    refused(gated, full.initial_slots(slots).final_state(states(8, 2)), &["slots without a state"]);
    refused(gated, full.initial_slots(slots).state(states(8, 2)), &["`initial_slots` with `state`"]);
    refused(gated, full.slots(typed(9, DType::F32, [2, 1, 1, 1])).state(states(8, 7)), &["`slots`", "U32"]);
    refused(
        gated,
        full.slots(typed(9, DType::U32, [3, 1, 1, 1])).state(states(8, 7)),
        &["`slots`", "must be 2"],
    );
    refused(gated, full.states(states(8, 9)), &["`states`", "must be 10", "got 9"]);
    let long = |n, h, d| view(n, [1, h, 17, d]);
    let long = of(long(0, 2, 8), long(1, 2, 8), long(2, 4, 6), long(3, 4, 6));
    refused(config, long.states(states(8, 17)), &["`states` of this call", "16"]);

    let (d_out, d_q) = (view(10, values), view(11, keys));
    let mut refused = |config: RecurrentConfig, call: RecurrentBackward, words: &[&str]| {
        let operator = made(config).expect("an operator");
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        says(&operator.backward(&mut encoder, &call, &mut none).expect_err("an error"), words);
        assert!(operator.prepare_backward(&call, &mut none).is_err());
    };
    let new = |forward| RecurrentBackward::new(forward, d_out).d_q(d_q);
    refused(gated, RecurrentBackward::new(full, d_out), &["no gradient is requested"]);
    refused(gated, RecurrentBackward::new(full, view(10, keys)).d_q(d_q), &["`d_out`", "heads must be 4"]);
    refused(gated, new(full).d_k(typed(12, DType::F16, keys)), &["`d_k`", "F16"]);
    refused(gated, new(full).d_v(view(12, keys)), &["`d_v`", "heads must be 4"]);
    refused(gated, new(full).d_k(view(1, keys)), &["`d_k`", "`k`"]);
    refused(gated, new(full).d_k(view(11, keys)), &["overlap"]);
    refused(gated, new(full).d_decay(view(12, [1, 4, 1, 1])), &["`d_decay`", "batch must be 2"]);
    refused(config, new(good).d_beta(view(12, token)), &["d_beta", "no such tensor"]);
    refused(gated, new(full).d_initial_state(states(12, 3)), &["`d_initial_state`", "must be 2"]);
    refused(gated, new(full).d_final_state(states(12, 3)), &["`d_final_state`", "must be 2"]);
    refused(gated, new(full.state(states(8, 2))), &["with `state`", "replaced"]);
    let resumed = full.initial_state(states(8, 2)).initial_slots(slots);
    refused(gated, new(resumed), &["`initial_slots`"]);
    refused(gated, new(full), &["scratch"]);
}
