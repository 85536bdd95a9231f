//! Attention to projected keys and within buckets, and the sort alone.

use wgpu_attention::linformer::{Linformer, LinformerBackward, LinformerForward};
use wgpu_attention::lsh::{LshAttention, LshBackward, LshConfig, LshForward};
use wgpu_attention::reference::{self, LengthProjections, Options, Real};
use wgpu_attention::rows::{RadixSort, Sort};
use wgpu_attention::{Config, DType, Shape};

use crate::call::float;
use crate::choices::Choices;
use crate::operands::{Operands, record, refuses};
use crate::world::{Outcome, World, refused};

pub fn linformer(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let dtype = float(f);
    let (backward, masked, own) = (f.one_in(2), f.one_in(2), f.one_in(2));
    let kv_heads = f.between(1, 2);
    let heads = kv_heads * f.between(1, 2);
    let (head_dim, value_dim) = (f.pick(&[4, 5]), f.pick(&[4, 3]));
    let (mut rank, per_head) = (c.between(1, 6), c.one_in(2));
    let shape = Shape {
        batch: c.between(1, 2),
        heads,
        kv_heads,
        q_len: c.between(1, 6),
        kv_len: c.between(1, 12),
        head_dim,
        value_dim,
    };
    let of_e = [1, if per_head { kv_heads } else { 1 }, rank, shape.kv_len];
    // Inputs: q, k, v, e, f, key mask. The backward call also reads out, lse and d_out.
    let reads = [
        (true, dtype, shape.q()),
        (true, dtype, shape.k()),
        (true, dtype, shape.v()),
        (true, DType::F32, of_e),
        (own, DType::F32, of_e),
        (masked, DType::Bool, [shape.batch, 1, 1, shape.kv_len]),
        (backward, dtype, shape.out()),
        (backward, DType::F32, shape.lse()),
        (backward, dtype, shape.out()),
    ];
    let accumulates = backward && c.one_in(2);
    let mut t = if backward {
        let writes = [
            (true, dtype, shape.q()),
            (true, dtype, shape.k()),
            (true, DType::F32, shape.v()),
            (true, DType::F32, of_e),
        ];
        Operands::gradients(world, c, accumulates, &reads, &writes)
    } else {
        Operands::new(world, c, &reads, &[(true, dtype, shape.out()), (true, DType::F32, shape.lse())])
    };
    if c.one_in(6) {
        rank = c.size();
    }
    t.spoil(c);
    *said = format!("{shape:?}, rank {rank}, {t:?}");
    let config = Config::new(heads, head_dim).kv_heads(kv_heads).value_dim(value_dim).dtype(dtype);
    let operator = match Linformer::with_pipelines(world.gpu.pipelines(), config, rank) {
        Ok(operator) => operator,
        Err(e) => return Ok(refused(&e)),
    };
    let [q, k, v, e] = [0, 1, 2, 3].map(|n| t.read(n));
    if backward {
        let forward = LinformerForward::new(q, k, v, e, t.read(6)).f(t.given(4)).key_mask(t.given(5));
        let call = LinformerBackward::new(forward.lse(t.read(7)), t.read(8))
            .d_q(t.written(0))
            .d_k(t.written(1))
            .d_v(t.written(2))
            .d_e(t.written(3))
            .accumulate(accumulates);
        let size = operator.backward_scratch_size(&call);
        let record = record!(operator, backward, &call);
        return t.recorded(world, c, size, (false, &[]), record);
    }
    let call =
        LinformerForward::new(q, k, v, e, t.written(0)).f(t.given(4)).key_mask(t.given(5)).lse(t.written(1));
    let size = operator.scratch_size(&call);
    let record = record!(operator, forward, &call);
    // Keys in other types have roundings that no naive computation here has.
    let outcome = t.recorded(world, c, size, (dtype == DType::F32, &[]), record)?;
    if matches!(outcome, Outcome::Judged) {
        let naive = attended::<f32>(world, &t, (rank, masked, own))?;
        let want = attended::<f64>(world, &t, (rank, masked, own))?;
        let magnitude = t.most(world, 2) * t.most(world, if own { 4 } else { 3 });
        t.judge("out", world, 0, (&naive, &want), magnitude * t.input(2).shape[2] as f64)?;
    }
    Ok(outcome)
}

/// Runs the reference on windows whose shapes may differ from the plan.
fn attended<R: Real>(
    world: &World,
    t: &Operands,
    (rank, masked, own): (usize, bool, bool),
) -> Result<Vec<R>, String> {
    let [q, k, v, e] = [0, 1, 2, 3].map(|n| t.wide::<R>(world, n));
    let f = t.wide_if::<R>(world, 4).unwrap_or_else(|| e.clone());
    let [_, kv_heads, kv_len, _] = t.input(1).shape;
    let [batch, heads, q_len, head_dim] = t.input(0).shape;
    let shape = Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim: t.input(2).shape[3] };
    // The reference takes one projection for all heads, or one per head.
    let expanded = |x: Vec<R>, n: usize| if t.input(n).shape[1] == 1 { x.repeat(kv_heads) } else { x };
    let (e, f) = (expanded(e, 3), expanded(f, if own { 4 } else { 3 }));
    let mask = masked.then(|| {
        let mask = t.input(5).bools(&world.arena.before);
        if t.input(5).shape[0] == 1 { mask.repeat(batch) } else { mask }
    });
    let by = LengthProjections { e: &e, f: &f, rank, per_head: true, key_mask: mask.as_deref() };
    Ok(reference::linformer(&q, &k, &v, &by, shape, &Options::new()).map_err(refuses)?.out)
}

pub fn lsh(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let dtype = float(f);
    let (backward, padded, given) = (f.one_in(2), f.one_in(2), f.one_in(4));
    let (causal, rounds, head_dim, value_dim) =
        (f.one_in(2), f.between(1, 2), f.pick(&[4, 5]), f.pick(&[4, 3]));
    let (heads, length, batch) = (c.between(1, 2), c.between(1, 20), c.between(1, 2));
    let (mut n_buckets, mut chunk) = (2 * c.between(1, 4), c.between(1, 24));
    let (wide, out) = ([batch, heads, length, head_dim], [batch, heads, length, value_dim]);
    let (hashes, row) = ([batch, heads, rounds, length], [batch, heads, length, 1]);
    let hashed = !given && !backward;
    // Inputs: qk, v, rotations, buckets, lengths. The backward call also reads out, lse and d_out.
    let reads = [
        (true, dtype, wide),
        (true, dtype, out),
        (hashed, DType::F32, [1, rounds, head_dim, n_buckets / 2]),
        (!hashed, DType::U32, hashes),
        (padded, DType::U32, [batch, 1, 1, 1]),
        (backward, dtype, out),
        (backward, DType::F32, row),
        (backward, dtype, out),
    ];
    let accumulates = backward && c.one_in(2);
    let mut t = if backward {
        let writes = [(true, DType::F32, wide), (true, dtype, out)];
        Operands::gradients(world, c, accumulates, &reads, &writes)
    } else {
        let writes = [(true, dtype, out), (true, DType::F32, row), (hashed, DType::U32, hashes)];
        Operands::new(world, c, &reads, &writes)
    };
    if c.one_in(6) {
        *[&mut n_buckets, &mut chunk][c.below(2)] = c.size();
    }
    t.spoil(c);
    *said = format!("{rounds} rounds, {n_buckets} buckets, chunk {chunk}, causal {causal}, {t:?}");
    let config = LshConfig::new(heads, head_dim, rounds, n_buckets, chunk);
    let config = config.value_dim(value_dim).dtype(dtype).causal(causal);
    let operator = match LshAttention::with_pipelines(world.gpu.pipelines(), config) {
        Ok(operator) => operator,
        Err(e) => return Ok(refused(&e)),
    };
    let [qk, v] = [0, 1].map(|n| t.read(n));
    if backward {
        let forward = LshForward::with_buckets(qk, v, t.read(3), t.read(5)).lse(t.read(6));
        let call = LshBackward::new(forward.lengths(t.given(4)), t.read(7))
            .d_qk(t.written(0))
            .d_v(t.written(1))
            .accumulate(accumulates);
        let size = operator.backward_scratch_size(&call);
        let record = record!(operator, backward, &call);
        return t.recorded(world, c, size, (false, &[]), record);
    }
    let call = match given {
        true => LshForward::with_buckets(qk, v, t.read(3), t.written(0)),
        false => LshForward::new(qk, v, t.read(2), t.written(2), t.written(0)),
    };
    let call = call.lse(t.written(1)).lengths(t.given(4));
    let size = operator.scratch_size(&call);
    let record = record!(operator, forward, &call);
    t.recorded(world, c, size, (false, &[]), record)
}

pub fn sort(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let ranked = f.one_in(2);
    let shape = [c.between(1, 2), c.between(1, 2), c.between(1, 3), c.between(1, 200)];
    let writes = [(true, DType::U32, shape), (ranked, DType::U32, shape)];
    let mut t = Operands::new(world, c, &[(true, DType::U32, shape)], &writes);
    let bits = if c.one_in(6) { c.size() } else { c.between(1, 32) } as u32;
    t.spoil(c);
    *said = format!("{t:?}, {bits} bits");
    let operator = RadixSort::with_pipelines(world.gpu.pipelines());
    let call = Sort::new(t.read(0), t.written(0)).bits(bits).ranks(t.asked(1));
    let size = operator.scratch_size(&call);
    let record = record!(operator, forward, &call);
    let outcome = t.recorded(world, c, size, (true, &[]), record)?;
    if matches!(outcome, Outcome::Judged) {
        let numbers = t.input(0).numbers(&world.arena.before);
        let (length, mask) = (t.input(0).shape[3], ((1u64 << bits) - 1) as u32);
        let order = t.output(0).numbers(&world.arena.after);
        for (row, got) in numbers.chunks_exact(length).zip(order.chunks_exact(length)) {
            let mut want: Vec<u32> = (0..row.len() as u32).collect();
            want.sort_by_key(|i| row[*i as usize] & mask);
            if got != want {
                return Err(format!("order {got:?}, not {want:?}"));
            }
        }
    }
    Ok(outcome)
}
