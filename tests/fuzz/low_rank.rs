//! Attention to projected keys and within buckets, and the sort alone.

use wgpu_attention::reference::{self, LengthProjections, Options, Real};
use wgpu_attention::{
    Config, DType, Linformer, LinformerBackward, LinformerForward, LshAttention, LshBackward, LshConfig,
    LshForward, RadixSort, Shape, Sort,
};

use crate::arena::{Buf, Window, view};
use crate::call::{faults, float, judge, largest};
use crate::choices::Choices;
use crate::gradients::at;
use crate::operands::recorded;
use crate::world::{Outcome, World, refused};

pub fn linformer(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let dtype = float(f, world.f16);
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
    let inputs = [
        (dtype, shape.q()),
        (dtype, shape.k()),
        (dtype, shape.v()),
        (DType::F32, of_e),
        (DType::F32, of_e),
        (DType::Bool, [shape.batch, 1, 1, shape.kv_len]),
        (dtype, shape.out()),
        (DType::F32, shape.lse()),
        (dtype, shape.out()),
    ];
    // q, k, v, e, f, key mask; of the backward call out, lse and d_out too.
    let mut reads = inputs.map(|(dtype, shape)| Window::input(c, dtype, shape, false));
    let mut writes = if backward {
        vec![
            at(c, (Buf::OutA, 0), dtype, shape.q(), false),
            at(c, (Buf::OutB, 0), DType::F32, shape.k(), false),
            at(c, (Buf::OutB, 8192), DType::F32, shape.v(), false),
            at(c, (Buf::OutC, 0), DType::F32, of_e, false),
        ]
    } else {
        vec![
            at(c, (Buf::OutA, 0), dtype, shape.out(), false),
            at(c, (Buf::OutB, 0), DType::F32, shape.lse(), false),
        ]
    };
    for _ in 0..faults(c) {
        match c.below(4) {
            0 => rank = c.size(),
            1 => {
                let n = c.below(writes.len());
                writes[n].spoil(c);
            }
            _ => reads[c.below(9)].spoil(c),
        }
    }
    *said = format!("{shape:?}, rank {rank}, {reads:?} to {writes:?}, masked {masked}, own f {own}");
    let config = Config::new(heads, head_dim).kv_heads(kv_heads).value_dim(value_dim).dtype(dtype);
    let operator = match Linformer::with_pipelines(world.gpu.pipelines(), config, rank) {
        Ok(operator) => operator,
        Err(e) => return Ok(refused(&e)),
    };
    let buffers = world.arena.buffers.clone();
    let of = |w: &Window| view(&buffers, w);
    let [q, k, v, e, own_f, mask, out, lse, d_out] = reads.each_ref().map(of);
    let mut all = reads[..if backward { 9 } else { 6 }].to_vec();
    all.extend(&writes);
    let tame = reads[..4].iter().all(Window::is_tame)
        && (!own || reads[4].is_tame())
        && (!masked || reads[5].is_tame())
        && writes.iter().all(Window::is_watched);
    if backward {
        let call = LinformerBackward::new([q, k, v], e, out, lse, d_out)
            .f(own.then_some(own_f))
            .key_mask(masked.then_some(mask))
            .d_q(of(&writes[0]))
            .d_k(of(&writes[1]))
            .d_v(of(&writes[2]))
            .d_e(of(&writes[3]))
            .accumulate(c.one_in(2));
        let size = operator.backward_scratch_size(&call);
        return recorded(world, c, size, (&all, &writes, false), |encoder, scratch, pass| match pass {
            true => operator.backward_in_pass(
                &mut encoder.begin_compute_pass(&Default::default()),
                &call,
                scratch,
            ),
            false => operator.backward(encoder, &call, scratch),
        });
    }
    let call = LinformerForward::new(q, k, v, e, of(&writes[0]))
        .f(own.then_some(own_f))
        .key_mask(masked.then_some(mask))
        .lse(of(&writes[1]));
    let size = operator.scratch_size(&call);
    let outcome = recorded(world, c, size, (&all, &writes, tame), |encoder, scratch, pass| match pass {
        true => {
            operator.forward_in_pass(&mut encoder.begin_compute_pass(&Default::default()), &call, scratch)
        }
        false => operator.forward(encoder, &call, scratch),
    })?;
    if matches!(outcome, Outcome::Judged) && dtype == DType::F32 {
        let [naive, exact] = [
            attended::<f32>(world, &reads, rank, masked, own)?.into_iter().map(f64::from).collect(),
            attended::<f64>(world, &reads, rank, masked, own)?,
        ];
        let naive: Vec<f32> = naive.iter().map(|x: &f64| *x as f32).collect();
        let bytes = &world.arena.before;
        let [v, f] = [&reads[2], &reads[if own { 4 } else { 3 }]].map(|w| largest(&w.wide(bytes)));
        judge("out", world, &writes[0], &naive, &exact, v * f * reads[2].shape[2] as f64)?;
    }
    Ok(outcome)
}

/// By the reference, for windows that may have other shapes than were planned.
fn attended<R: Real>(
    world: &World,
    reads: &[Window; 9],
    rank: usize,
    masked: bool,
    own: bool,
) -> Result<Vec<R>, String> {
    let bytes = &world.arena.before;
    let [q, k, v, e] = [0, 1, 2, 3].map(|n| reads[n].wide::<R>(bytes));
    let f = if own { reads[4].wide::<R>(bytes) } else { e.clone() };
    let [_, kv_heads, kv_len, _] = reads[1].shape;
    let [batch, heads, q_len, head_dim] = reads[0].shape;
    let shape = Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim: reads[2].shape[3] };
    // The reference has one for both, or one for each head.
    let expanded = |x: Vec<R>, heads: usize| if heads == 1 { x.repeat(kv_heads) } else { x };
    let (e, f) = (expanded(e, reads[3].shape[1]), expanded(f, reads[if own { 4 } else { 3 }].shape[1]));
    let mask = reads[5].bools(bytes);
    let mask = if reads[5].shape[0] == 1 { mask.repeat(batch) } else { mask };
    let by = LengthProjections { e: &e, f: &f, rank, per_head: true, key_mask: masked.then_some(&mask[..]) };
    let got = reference::linformer(&q, &k, &v, &by, shape, &Options::new());
    Ok(got.map_err(|e| format!("the reference refuses it: {e}"))?.out)
}

pub fn lsh(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let dtype = float(f, world.f16);
    let (backward, padded, given) = (f.one_in(2), f.one_in(2), f.one_in(4));
    let (causal, rounds, head_dim, value_dim) =
        (f.one_in(2), f.between(1, 2), f.pick(&[4, 5]), f.pick(&[4, 3]));
    let (heads, length, batch) = (c.between(1, 2), c.between(1, 20), c.between(1, 2));
    let (mut n_buckets, mut chunk) = (2 * c.between(1, 4), c.between(1, 24));
    let (wide, out) = ([batch, heads, length, head_dim], [batch, heads, length, value_dim]);
    let (hashes, row) = ([batch, heads, rounds, length], [batch, heads, length, 1]);
    let inputs = [
        (dtype, wide),
        (dtype, out),
        (DType::F32, [1, rounds, head_dim, n_buckets / 2]),
        (DType::U32, hashes),
        (DType::U32, [batch, 1, 1, 1]),
        (dtype, out),
        (DType::F32, row),
        (dtype, out),
    ];
    // qk, v, rotations, buckets, lengths; of the backward call out, lse and d_out too.
    let mut reads = inputs.map(|(dtype, shape)| Window::input(c, dtype, shape, false));
    let mut writes = if backward {
        vec![at(c, (Buf::OutA, 0), DType::F32, wide, false), at(c, (Buf::OutB, 0), dtype, out, false)]
    } else {
        vec![
            at(c, (Buf::OutA, 0), dtype, out, false),
            at(c, (Buf::OutB, 0), DType::F32, row, false),
            at(c, (Buf::OutC, 0), DType::U32, hashes, false),
        ]
    };
    for _ in 0..faults(c) {
        match c.below(6) {
            0 => n_buckets = c.size(),
            1 => chunk = c.size(),
            2 => {
                let n = c.below(writes.len());
                writes[n].spoil(c);
            }
            _ => reads[c.below(8)].spoil(c),
        }
    }
    *said = format!("{rounds} rounds, {n_buckets} buckets, chunk {chunk}, causal {causal}, ");
    *said += &format!("{reads:?} to {writes:?}, padded {padded}, given {given}");
    let config = LshConfig::new(heads, head_dim, rounds, n_buckets, chunk);
    let config = config.value_dim(value_dim).dtype(dtype).causal(causal);
    let operator = match LshAttention::with_pipelines(world.gpu.pipelines(), config) {
        Ok(operator) => operator,
        Err(e) => return Ok(refused(&e)),
    };
    let buffers = world.arena.buffers.clone();
    let of = |w: &Window| view(&buffers, w);
    let [qk, v, rotations, buckets, lengths, out, lse, d_out] = reads.each_ref().map(of);
    let lengths = padded.then_some(lengths);
    if backward {
        let mut all = reads.to_vec();
        all.extend(&writes);
        let call = LshBackward::new([qk, v], buckets, out, lse, d_out)
            .lengths(lengths)
            .d_qk(of(&writes[0]))
            .d_v(of(&writes[1]))
            .accumulate(c.one_in(2));
        let size = operator.backward_scratch_size(&call);
        return recorded(world, c, size, (&all, &writes, false), |encoder, scratch, pass| match pass {
            true => operator.backward_in_pass(
                &mut encoder.begin_compute_pass(&Default::default()),
                &call,
                scratch,
            ),
            false => operator.backward(encoder, &call, scratch),
        });
    }
    let call = match given {
        true => LshForward::with_buckets(qk, v, buckets, of(&writes[0])),
        false => LshForward::new(qk, v, rotations, of(&writes[2]), of(&writes[0])),
    };
    let call = call.lse(of(&writes[1])).lengths(lengths);
    let mut all = reads[..5].to_vec();
    let writes = &writes[..if given { 2 } else { 3 }];
    all.extend(writes);
    let size = operator.scratch_size(&call);
    recorded(world, c, size, (&all, writes, false), |encoder, scratch, pass| match pass {
        true => {
            operator.forward_in_pass(&mut encoder.begin_compute_pass(&Default::default()), &call, scratch)
        }
        false => operator.forward(encoder, &call, scratch),
    })
}

pub fn sort(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let ranked = f.one_in(2);
    let shape = [c.between(1, 2), c.between(1, 2), c.between(1, 3), c.between(1, 200)];
    let mut keys = Window::input(c, DType::U32, shape, false);
    let mut writes = [Buf::OutA, Buf::OutB].map(|buf| at(c, (buf, 0), DType::U32, shape, false));
    let mut bits = c.between(1, 32) as u32;
    for _ in 0..faults(c) {
        match c.below(4) {
            0 => bits = c.size() as u32,
            1 => keys.spoil(c),
            _ => writes[c.below(2)].spoil(c),
        }
    }
    *said = format!("{keys:?} to {writes:?}, {bits} bits, ranked {ranked}");
    let operator = RadixSort::with_pipelines(world.gpu.pipelines());
    let buffers = world.arena.buffers.clone();
    let of = |w: &Window| view(&buffers, w);
    let call = Sort::new(of(&keys), of(&writes[0])).bits(bits).ranks(ranked.then(|| of(&writes[1])));
    let size = operator.scratch_size(&call);
    let writes = &writes[..if ranked { 2 } else { 1 }];
    let mut all = vec![keys];
    all.extend(writes);
    let tame = keys.is_tame() && writes.iter().all(Window::is_watched);
    let outcome = recorded(world, c, size, (&all, writes, tame), |encoder, scratch, pass| match pass {
        true => {
            operator.forward_in_pass(&mut encoder.begin_compute_pass(&Default::default()), &call, scratch)
        }
        false => operator.forward(encoder, &call, scratch),
    })?;
    if matches!(outcome, Outcome::Judged) {
        let numbers = keys.numbers(&world.arena.before);
        let mask = ((1u64 << bits) - 1) as u32;
        let order = writes[0].numbers(&world.arena.after);
        for (row, got) in numbers.chunks_exact(keys.shape[3]).zip(order.chunks_exact(keys.shape[3])) {
            let mut want: Vec<u32> = (0..row.len() as u32).collect();
            want.sort_by_key(|i| row[*i as usize] & mask);
            if got != want {
                return Err(format!("order {got:?}, not {want:?}"));
            }
        }
    }
    Ok(outcome)
}
