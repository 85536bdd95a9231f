//! Native sparse attention, forward and backward.

use wgpu_attention::reference::{self, NativeSparseAttended, NativeSparseInputs, Real};
use wgpu_attention::selected::{
    NativeSparseAttention, NativeSparseBackward, NativeSparseBranches, NativeSparseConfig,
    NativeSparseForward,
};
use wgpu_attention::tuning::Target;
use wgpu_attention::{Config, DType, KernelOptions, Shape};

use crate::call::{float, largest};
use crate::choices::Choices;
use crate::operands::{Operands, record, refuses};
use crate::world::{Outcome, World, refused};

/// Inputs of a call.
const Q: usize = 0;
const K: usize = 1;
const V: usize = 2;
const GATES: usize = 3;
const COMPRESSED: usize = 4;
const WINDOW: usize = 6;
/// Results of the branches, which the backward pass reads.
const BRANCHES: usize = 8;
const D_OUT: usize = 11;

/// The outputs of a forward call.
const OUT: usize = 0;
const RESULTS: usize = 1;

pub fn native(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let dtype = float(f);
    let (backward, form) = (f.one_in(2), f.pick(&[Target::Software, Target::Gpu]));
    let kv_heads = f.between(1, 2);
    let q_len = c.between(1, 7);
    let shape = Shape {
        batch: c.between(1, 2),
        heads: kv_heads * f.between(1, 2),
        kv_heads,
        q_len,
        kv_len: q_len + c.between(0, 20),
        head_dim: f.pick(&[4, 8]),
        value_dim: 4,
    };
    let stride = c.pick(&[1, 2, 4]);
    let [mut length, mut block] = [c.between(1, 3) * stride, c.between(1, 3) * stride];
    let (mut count, mut window) = (c.between(1, 5), c.pick(&[1, 3, 9]));
    let [mut initial, mut local] = [0, 0].map(|_| c.between(0, 1).min(count / 2));
    if c.one_in(8) {
        let n = c.below(6);
        *[&mut length, &mut block, &mut count, &mut window, &mut initial, &mut local][n] = c.size();
    }
    let config = Config::of(&shape).dtype(dtype).kernel_options(KernelOptions::new().target(form));
    let config = NativeSparseConfig::new(config)
        .compression(length, stride)
        .selection(block, count)
        .always(initial, local)
        .window(window);
    let own = [f.one_in(3), f.one_in(3)];
    // The call refuses what does not fit in tensors.
    let listed = [shape.batch, kv_heads, q_len, count.min(1 << 20)];
    let compressed = Shape { kv_len: config.compressed_len(shape.kv_len).min(1 << 20), ..shape };
    let of_branches = |dim| [3 * shape.batch, shape.heads, q_len, dim];
    let gates = [shape.batch, shape.heads, q_len, 3];
    let accumulates = backward && c.one_in(2);
    let given = backward || c.below(4) > 0;
    let reads = [
        (true, dtype, shape.q()),
        (true, dtype, shape.k()),
        (true, dtype, shape.v()),
        (true, float(c), gates),
        (own[0], dtype, compressed.k()),
        (own[0], dtype, compressed.v()),
        (own[1], dtype, shape.k()),
        (own[1], dtype, shape.v()),
        (backward, dtype, of_branches(shape.value_dim)),
        (backward, DType::F32, of_branches(1)),
        (backward, DType::U32, listed),
        (backward, dtype, shape.out()),
    ];
    let mut t = if backward {
        let gradient = if f.one_in(2) { DType::F32 } else { dtype };
        let of_compressed = own[0] && f.one_in(2);
        let of_window = own[1] && !of_compressed;
        let (of, d) = if of_compressed { (compressed, of_compressed) } else { (shape, of_window) };
        let writes = [
            (f.below(4) > 0, gradient, shape.q()),
            (f.below(4) > 0, gradient, shape.k()),
            (f.below(4) > 0, gradient, shape.v()),
            (f.one_in(2), DType::F32, gates),
            (d, gradient, of.k()),
            (d, gradient, of.v()),
        ];
        Operands::gradients(world, c, accumulates, &reads, &writes)
    } else {
        let writes = [
            (true, dtype, shape.out()),
            (given, dtype, of_branches(shape.value_dim)),
            (given, DType::F32, of_branches(1)),
            (given, DType::U32, listed),
        ];
        Operands::new(world, c, &reads, &writes)
    };
    t.spoil(c);
    *said = format!("{config:?}, {t:?}, {form:?}");
    let operator = match NativeSparseAttention::with_pipelines(world.gpu.pipelines(), config) {
        Ok(operator) => operator,
        Err(e) => return Ok(refused(&e)),
    };
    let out = if backward { t.read(D_OUT) } else { t.written(OUT) };
    let mut call = NativeSparseForward::new(t.read(Q), t.read(K), t.read(V), t.read(GATES), out);
    if let (Some(k), Some(v)) = (t.given(COMPRESSED), t.given(COMPRESSED + 1)) {
        call = call.compressed(k, v);
    }
    if let (Some(k), Some(v)) = (t.given(WINDOW), t.given(WINDOW + 1)) {
        call = call.window_keys(k, v);
    }
    if backward {
        let [out, lse, indices] = [0, 1, 2].map(|n| t.read(BRANCHES + n));
        call = call.branches(NativeSparseBranches { out, lse, indices });
        let mut call = NativeSparseBackward::new(call, t.read(D_OUT))
            .d_q(t.asked(0))
            .d_k(t.asked(1))
            .d_v(t.asked(2))
            .d_gates(t.asked(3))
            .accumulate(accumulates);
        if let (Some(k), Some(v)) = (t.asked(4), t.asked(5)) {
            // Sometimes a gradient of keys that the call does not have.
            let of_compressed = own[0] != c.one_in(8);
            call = if of_compressed { call.d_compressed(k, v) } else { call.d_window_keys(k, v) };
        }
        let size = operator.backward_scratch_size(&call);
        return t.recorded(world, c, size, (false, &[]), record!(operator, backward, &call));
    }
    if let (Some(out), Some(lse), Some(indices)) =
        (t.asked(RESULTS), t.asked(RESULTS + 1), t.asked(RESULTS + 2))
    {
        call = call.branches(NativeSparseBranches { out, lse, indices });
    }
    let size = operator.scratch_size(&call);
    let outcome = t.recorded(world, c, size, (true, &[]), record!(operator, forward, &call))?;
    // Means and branches of half types are rounded on the way.
    if matches!(outcome, Outcome::Judged) && given && dtype == DType::F32 {
        judge(world, &t, &config)?;
    }
    Ok(outcome)
}

/// Compares the outputs with the reference, which takes the blocks that the device selected.
fn judge(world: &World, t: &Operands, config: &NativeSparseConfig) -> Result<(), String> {
    let indices = t.output(RESULTS + 2).numbers(&world.arena.after);
    let exact = attended::<f64>(world, t, config, &indices)?;
    let naive = attended::<f32>(world, t, config, &indices)?;
    let own = [V, COMPRESSED + 1, WINDOW + 1].map(|n| t.most(world, n));
    let gates = t.most(world, GATES).max(1.0);
    let values = largest(&own);
    t.judge("out", world, OUT, (&naive.out, &exact.out), 3.0 * values * gates)?;
    let (naive, exact) = (naive.branches.concat(), exact.branches.concat());
    t.judge("branches", world, RESULTS, (&naive, &exact), values)
}

fn attended<R: Real>(
    world: &World,
    t: &Operands,
    config: &NativeSparseConfig,
    indices: &[u32],
) -> Result<NativeSparseAttended<R>, String> {
    let of = |n| t.wide::<R>(world, n);
    let (q, k, v, gates) = (of(Q), of(K), of(V), of(GATES));
    let own = [COMPRESSED, WINDOW].map(|n| t.wide_if::<R>(world, n).zip(t.wide_if::<R>(world, n + 1)));
    let [compressed, window] =
        own.each_ref().map(|own| own.as_ref().map(|(k, v)| [k.as_slice(), v.as_slice()]));
    let inputs = NativeSparseInputs { q: &q, k: &k, v: &v, gates: &gates, compressed, window };
    // Windows may have other shapes than the plan.
    let ([batch, heads, q_len, head_dim], [_, kv_heads, kv_len, _]) = (t.input(Q).shape, t.input(K).shape);
    let value_dim = t.input(V).shape[3];
    let shape = Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim };
    reference::native_sparse_attention(&inputs, indices, shape, config).map_err(refuses)
}
