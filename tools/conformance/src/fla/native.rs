//! Native sparse attention.

use wgpu_attention::selected::{
    NativeSparseAttention, NativeSparseBackward, NativeSparseBranches, NativeSparseConfig,
    NativeSparseForward,
};
use wgpu_attention::{Config, DType, Gpu, Scratch};

use super::{computed, input, output};
use crate::case::Case;
use crate::outcome::{Failed, Ran};
use crate::tensor::Placed;

pub fn native_sparse(gpu: &Gpu, case: &Case) -> Ran {
    let [q, k, v, g, d_out] = ["q", "k", "v", "g", "d_o"].map(|name| input(gpu, case, name));
    let (q, k, v, g, d_out) = (q?, k?, v?, g?, d_out?);
    let outputs = ["o", "d_q", "d_k", "d_v", "d_g"].map(|name| output(gpu, case, name));
    let none = || Failed("an output is missing".into());
    let [out, d_q, d_k, d_v, d_g] = outputs.map(|rows| rows?.ok_or_else(none));
    let (out, d_q, d_k, d_v, d_g) = (out?, d_q?, d_k?, d_v?, d_g?);
    let number = |name| case.integer(name).map(|n| n as usize).ok_or_else(|| Failed(format!("no {name}")));
    let (block, count) = (number("block")?, number("count")?);
    let ([batch, heads, length, dim], kv_heads) = (q.shape, k.shape[1]);
    let config = NativeSparseConfig::new(Config::new(heads, dim).kv_heads(kv_heads))
        .compression(block, block)
        .selection(block, count)
        .window(number("window")?);
    let attention = NativeSparseAttention::with_pipelines(gpu.pipelines(), config)?;
    let branches = Placed::output(gpu, DType::F32, [3 * batch, heads, length, dim])?;
    let lse = Placed::output(gpu, DType::F32, [3 * batch, heads, length, 1])?;
    let indices = Placed::output(gpu, DType::U32, [batch, kv_heads, length, count])?;
    let call = NativeSparseForward::new(q.view(), k.view(), v.view(), g.view(), out.view())
        .branches(NativeSparseBranches { out: branches.view(), lse: lse.view(), indices: indices.view() });
    let mut scratch = Scratch::new(gpu.device(), attention.scratch_size(&call)?)?;
    gpu.submit(|e| attention.forward(e, &call, &mut scratch))?;
    let call = NativeSparseBackward::new(call, d_out.view())
        .d_q(d_q.view())
        .d_k(d_k.view())
        .d_v(d_v.view())
        .d_gates(d_g.view());
    let mut scratch = Scratch::new(gpu.device(), attention.backward_scratch_size(&call)?)?;
    gpu.submit(|e| attention.backward(e, &call, &mut scratch))?;
    let rows = [("o", &out), ("d_q", &d_q), ("d_k", &d_k), ("d_v", &d_v), ("d_g", &d_g)];
    computed(gpu, rows.map(|(name, rows)| (name, Some(&rows.placed))))
}
