//! Recurrent attention, forward and backward.

use wgpu_attention::recurrent::{
    Decay, RecurrentAttention, RecurrentBackward, RecurrentConfig, RecurrentForward,
};
use wgpu_attention::tuning::Target;
use wgpu_attention::{DType, KernelOptions};

use crate::arena::Buf;
use crate::call::float;
use crate::choices::Choices;
use crate::operands::{Operands, record};
use crate::world::{Outcome, World, refused};

pub fn recurrent(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let dtype = float(f);
    let decay = f.pick(&[Decay::None, Decay::PerHead, Decay::PerHead, Decay::PerChannel]);
    let (delta, unit, backward) = (f.one_in(2), f.one_in(2), f.one_in(3));
    let (padded, packed) = (f.one_in(4), f.one_in(4));
    let form = f.pick(&[Target::Software, Target::Gpu]);
    let heads = f.between(1, 2);
    let value_heads = heads * f.between(1, 2);
    let (head_dim, value_dim) = (f.pick(&[4, 5]), f.pick(&[4, 3]));
    let batch = if packed { 1 } else { c.between(1, 2) };
    let length = if c.one_in(2) { c.between(1, 7) } else { c.between(17, 40) };
    let starts = c.between(2, 4);
    let sequences = if packed { starts - 1 } else { batch };
    let (initial, kept) = (c.one_in(2), c.one_in(2));
    let (in_place, named) = (c.one_in(4), c.one_in(3));
    let drafts = !backward && length <= 16 && c.one_in(3);
    let (keys, values) = ([batch, heads, length, head_dim], [batch, value_heads, length, value_dim]);
    let channels = if decay == Decay::PerChannel { head_dim } else { 1 };
    let [of_decay, of_beta] = [channels, 1].map(|channels| [batch, value_heads, length, channels]);
    let count = if named { 5 } else { sequences };
    let states = [count, value_heads, head_dim, value_dim];
    let reads = [
        (true, dtype, keys),
        (true, dtype, keys),
        (true, dtype, values),
        (decay != Decay::None, DType::F32, of_decay),
        (delta, dtype, of_beta),
        (padded && !packed, DType::U32, [batch, 1, 1, 1]),
        (packed, DType::U32, [1, 1, 1, starts]),
        (initial || backward, DType::F32, states),
        (named, DType::U32, [sequences, 1, 1, 1]),
        (backward, dtype, values),
        (backward && kept, DType::F32, states),
    ];
    let accumulates = backward && c.one_in(2);
    let mut t = if backward {
        let writes = [
            (true, DType::F32, keys),
            (true, dtype, keys),
            (true, DType::F32, values),
            (decay != Decay::None, DType::F32, of_decay),
            (delta, DType::F32, of_beta),
            (true, DType::F32, states),
        ];
        Operands::gradients(world, c, accumulates, &reads, &writes)
    } else {
        let writes = [
            (true, dtype, values),
            (kept || in_place || named, DType::F32, states),
            (drafts, DType::F32, [batch * length, value_heads, head_dim, value_dim]),
        ];
        Operands::new(world, c, &reads, &writes)
    };
    if packed {
        t.input_mut(6).buf = Buf::Starts;
    }
    t.spoil(c);
    *said = format!(
        "{decay:?}, delta {delta}, {value_heads} of {heads} heads, {t:?}, in place {in_place}, {form:?}"
    );
    let config = RecurrentConfig::new(heads, head_dim)
        .value_heads(value_heads)
        .value_dim(value_dim)
        .dtype(dtype)
        .decay(decay)
        .delta(delta)
        .normalize_qk(unit.then_some(1e-6))
        .kernel_options(KernelOptions::new().target(form));
    let operator = match RecurrentAttention::with_pipelines(world.gpu.pipelines(), config) {
        Ok(operator) => operator,
        Err(e) => return Ok(refused(&e)),
    };
    let [q, k, v] = [0, 1, 2].map(|n| t.read(n));
    if backward {
        let forward = RecurrentForward::new(q, k, v, t.read(9))
            .decay(t.given(3))
            .beta(t.given(4))
            .lengths(t.given(5))
            .packed(t.given(6))
            .initial_state(t.given(7))
            .slots(t.given(8));
        let call = RecurrentBackward::new(forward, t.read(9))
            .d_final_state(t.given(10))
            .d_q(t.written(0))
            .d_k(t.written(1))
            .d_v(t.written(2))
            .d_decay(t.asked(3))
            .d_beta(t.asked(4))
            .d_initial_state(t.asked(5))
            .accumulate(accumulates);
        let size = operator.backward_scratch_size(&call);
        let record = record!(operator, backward, &call);
        return t.recorded(world, c, size, (false, &[]), record);
    }
    let call = RecurrentForward::new(q, k, v, t.written(0))
        .decay(t.given(3))
        .beta(t.given(4))
        .lengths(t.given(5))
        .packed(t.given(6))
        .slots(t.given(8))
        .states(t.asked(2));
    let call = match in_place {
        true => call.state(t.asked(1)),
        false => call.initial_state(t.given(7)).final_state(t.asked(1)),
    };
    let size = operator.scratch_size(&call);
    let record = record!(operator, forward, &call);
    t.recorded(world, c, size, (false, &[]), record)
}
