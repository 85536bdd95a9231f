//! Problems of native sparse attention.

use crate::attention::Config;
use crate::check::bench::{Bench, Tensor, both, judged};
use crate::check::data::Outcome;
use crate::gpu::Gpu;
use crate::reference::{self, NativeSparseInputs};
use crate::selected::{
    NativeSparseAttention, NativeSparseBackward, NativeSparseBranches, NativeSparseConfig,
    NativeSparseForward,
};
use crate::tensor::{Error, Shape};

const SHAPE: Shape =
    Shape { batch: 1, heads: 4, kv_heads: 2, q_len: 27, kv_len: 53, head_dim: 12, value_dim: 20 };
const COUNT: usize = 4;
const GATES: [usize; 4] = [1, SHAPE.heads, SHAPE.q_len, 3];

fn config() -> NativeSparseConfig {
    let config = NativeSparseConfig::new(Config::of(&SHAPE)).compression(8, 4).selection(8, COUNT);
    config.always(1, 1).window(7)
}

/// The output, and the gradients of keys and values. They depend on means of blocks, their
/// gradient, and the scores of blocks.
pub(super) async fn native_sparse(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let ([q, k, v], gates) = (bench.inputs(&SHAPE)?, bench.noise(GATES, 4)?);
    let d_out = bench.noise(SHAPE.out(), 5)?;
    let (out, d_k, d_v) = (bench.zeros(SHAPE.out())?, bench.zeros(SHAPE.k())?, bench.zeros(SHAPE.v())?);
    let Shape { heads, kv_heads, q_len, value_dim, .. } = SHAPE;
    let branches: Tensor = bench.zeros([3, heads, q_len, value_dim])?;
    let lse: Tensor = bench.zeros([3, heads, q_len, 1])?;
    let indices: Tensor<u32> = bench.zeros([1, kv_heads, q_len, COUNT])?;
    let operator = NativeSparseAttention::with_pipelines(gpu.pipelines(), config())?;
    let call = NativeSparseForward::new(q.view(), k.view(), v.view(), gates.view(), out.view());
    let branches = NativeSparseBranches { out: branches.view(), lse: lse.view(), indices: indices.view() };
    let call = call.branches(branches);
    let back = NativeSparseBackward::new(call, d_out.view()).d_k(d_k.view()).d_v(d_v.view());
    let mut scratch =
        bench.scratch(operator.scratch_size(&call)?.max(operator.backward_scratch_size(&back)?))?;
    let record = |encoder: &mut wgpu::CommandEncoder| {
        operator.forward(encoder, &call, &mut scratch)?;
        operator.backward(encoder, &back, &mut scratch)
    };
    bench.run("native sparse attention", record).await?;
    let both = both!(|q, k, v, gates, d_out| {
        let inputs = NativeSparseInputs { q, k, v, gates, compressed: None, window: None };
        let indices = reference::native_sparse_indices(&inputs, SHAPE, &config())?;
        let all = reference::native_sparse_attention(&inputs, &indices, SHAPE, &config())?;
        let gradients =
            reference::native_sparse_attention_backward(&inputs, &indices, d_out, SHAPE, &config())?;
        [all.out, gradients.d_k, gradients.d_v]
    });
    judged(gpu, [&out, &d_k, &d_v], both).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::data::noise;
    use crate::tensor::{count, widen};

    /// Rounding on a device cannot change the selected blocks.
    #[test]
    fn scores_of_blocks_are_apart() {
        let of = |shape, seed| widen::<f64>(&noise(count(shape), seed));
        let (q, k, v, gates) = (of(SHAPE.q(), 1), of(SHAPE.k(), 2), of(SHAPE.v(), 3), of(GATES, 4));
        let inputs =
            NativeSparseInputs { q: &q, k: &k, v: &v, gates: &gates, compressed: None, window: None };
        let scores = reference::native_sparse_scores(&inputs, SHAPE, &config()).expect("it fits");
        for row in scores.chunks(SHAPE.kv_len.div_ceil(8)) {
            let mut row: Vec<f64> = row.iter().copied().filter(|score| score.is_finite()).collect();
            row.sort_by(f64::total_cmp);
            // Blocks that no compressed key covers yet are equal, and selected by their index.
            assert!(row.windows(2).all(|pair| pair[1] == 0.0 || pair[1] - pair[0] > 1e-4), "{row:?}");
        }
    }
}
