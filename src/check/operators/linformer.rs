//! Linformer.

use crate::attention::Config;
use crate::check::bench::{Bench, both, judged};
use crate::check::data::{FEW, Outcome, PREFILL};
use crate::gpu::Gpu;
use crate::linformer::{Linformer, LinformerForward};
use crate::reference::{self, LengthProjections, Options};
use crate::tensor::{DType, Error, Shape, TensorView};

/// Checks Linformer with every fifth key absent.
pub(super) async fn forward(gpu: &Gpu) -> Result<Outcome, Error> {
    let bench = Bench::new(gpu);
    let shape = Shape { q_len: FEW, kv_len: 23, ..PREFILL };
    let rank = 7;
    let [q, k, v] = bench.inputs(&shape)?;
    let (e, out) = (bench.noise([1, 1, rank, shape.kv_len], 4)?, bench.zeros(shape.out())?);
    let there: Vec<bool> = (0..shape.kv_len).map(|n| n % 5 != 2).collect();
    let of_keys = gpu.upload_bools(&there)?;
    let of_keys = TensorView::new(&of_keys, DType::Bool, [1, 1, 1, shape.kv_len]);
    let operator = Linformer::with_pipelines(gpu.pipelines(), Config::of(&shape), rank)?;
    let call = LinformerForward::new(q.view(), k.view(), v.view(), e.view(), out.view()).key_mask(of_keys);
    let mut scratch = bench.scratch(operator.scratch_size(&call)?)?;
    bench.run("Linformer", |encoder| operator.forward(encoder, &call, &mut scratch)).await?;
    let both = both!(|q, k, v, e| {
        let projections = LengthProjections { e, f: e, rank, per_head: false, key_mask: Some(&there) };
        [reference::linformer(q, k, v, &projections, shape, &Options::new())?.out]
    });
    judged(gpu, [&out], both).await
}
