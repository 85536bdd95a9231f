//! The indexer of sparse attention, and top-k with a scratch.

use wgpu_attention::mask::DeviceMask;
use wgpu_attention::reference::{IndexerInputs, Real, indexer_indices, indexer_scores, top_k};
use wgpu_attention::rows::{TopK, TopKForward};
use wgpu_attention::selected::{Indexer, IndexerBackward, IndexerForward};
use wgpu_attention::tuning::Target;
use wgpu_attention::{DType, KernelOptions, Mask, Shape};

use crate::call::{float, largest};
use crate::choices::Choices;
use crate::operands::{Operands, record, refuses};
use crate::world::{Outcome, World};

fn form(f: &mut Choices) -> KernelOptions {
    KernelOptions::new().target(f.pick(&[Target::Software, Target::Gpu]))
}

pub fn large_k(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let (dtype, other, valued, kernel_options) = (float(f), float(f), f.one_in(2), form(f));
    let columns = c.between(66, 2900);
    let k = if c.one_in(2) { c.between(65, columns.min(200)) } else { columns - c.below(2) };
    let (shape, found) = ([1, 1, 1, columns], [1, 1, 1, k]);
    let writes = [(true, DType::U32, found), (valued, other, found)];
    let mut t = Operands::new(world, c, &[(true, dtype, shape)], &writes);
    t.spoil(c);
    *said = format!("{t:?}");
    let operator = TopK::with_pipelines(world.gpu.pipelines()).kernel_options(kernel_options);
    let call = TopKForward::new(t.read(0), t.written(0)).values(t.asked(1));
    let size = operator.scratch_size(&call);
    let outcome = t.recorded(world, c, size, (true, &[]), record!(operator, forward_with, &call))?;
    if matches!(outcome, Outcome::Judged) {
        let (x, columns, k) = (t.wide::<f32>(world, 0), t.input(0).shape[3], t.output(0).shape[3]);
        let want = top_k(&x, columns, k).map_err(refuses)?;
        let got = t.output(0).numbers(&world.arena.after);
        if got != want {
            return Err(format!("the largest are at {got:?}, not {want:?}"));
        }
    }
    Ok(outcome)
}

pub fn indexer(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let [own, other] = [(); 2].map(|()| float(f));
    let (backward, listed, causal, padded) = (f.one_in(2), f.one_in(2), f.one_in(2), f.one_in(3));
    let (heads, head_dim, kernel_options) = (f.pick(&[1, 3, 4]), f.pick(&[4, 5]), form(f));
    let (batch, q_len, kv_len) = (c.between(1, 2), c.between(1, 5), c.between(1, 80));
    let k = c.between(1, kv_len + 1);
    let (q, keys, w) =
        ([batch, heads, q_len, head_dim], [batch, 1, kv_len, head_dim], [batch, 1, q_len, heads]);
    let (list, matrix) = ([batch, 1, q_len, k], [batch, 1, q_len, kv_len]);
    let reads = [
        (true, own, q),
        (true, own, keys),
        (true, other, w),
        (padded, DType::U32, [batch, 1, 1, 1]),
        (backward, other, if listed { list } else { matrix }),
        (backward && listed, DType::U32, list),
    ];
    let writes = if backward {
        [(true, DType::F32, q), (c.one_in(2), own, keys), (c.one_in(2), other, w)]
    } else {
        [(true, DType::U32, list), (c.one_in(2), other, list), (true, DType::F32, matrix)]
    };
    let mut t = Operands::new(world, c, &reads, &writes);
    t.spoil(c);
    *said = format!("causal {causal}, {heads} heads, {t:?}");
    let operator = Indexer::with_pipelines(world.gpu.pipelines()).kernel_options(kernel_options);
    let mut mask: DeviceMask = if causal { Mask::causal() } else { Mask::none() };
    if let Some(lengths) = t.given(3) {
        mask = mask.lengths(lengths);
    }
    let call = IndexerForward::new(t.read(0), t.read(1), t.read(2)).scale(0.5).mask(mask);
    let outcome = if backward {
        let call = IndexerBackward::new(call, t.read(4)).indices(t.given(5));
        let call = call.d_q(t.asked(0)).d_k(t.asked(1)).d_w(t.asked(2));
        let size = operator.backward_scratch_size(&call);
        t.recorded(world, c, size, (false, &[]), record!(operator, backward, &call))?
    } else {
        let call = call.indices(t.asked(0)).values(t.asked(1)).scores(t.asked(2));
        let size = operator.scratch_size(&call);
        t.recorded(world, c, size, (true, &[]), record!(operator, forward, &call))?
    };
    if !matches!(outcome, Outcome::Judged) {
        return Ok(outcome);
    }
    fn scores<R: Real>(
        t: &Operands,
        world: &World,
        causal: bool,
        is_absolute: bool,
    ) -> Result<Vec<R>, String> {
        let absolute = |x: Vec<R>| x.into_iter().map(|x| if is_absolute { x.abs() } else { x }).collect();
        let [q, k, w]: [Vec<R>; 3] = [0, 1, 2].map(|n| absolute(t.wide::<R>(world, n)));
        let [batch, heads, q_len, head_dim] = t.input(0).shape;
        let kv_len = t.input(1).shape[2];
        let shape = Shape { batch, heads, kv_heads: 1, q_len, kv_len, head_dim, value_dim: head_dim };
        let lengths = t.given(3).map(|_| t.input(3).numbers(&world.arena.before));
        let mut mask = if causal { Mask::causal() } else { Mask::none() };
        if let Some(lengths) = &lengths {
            mask = mask.lengths(wgpu_attention::HostTensor::new(lengths, t.input(3).shape));
        }
        indexer_scores(&IndexerInputs { q: &q, k: &k, w: &w, scale: 0.5, mask }, shape).map_err(refuses)
    }
    let (want, naive) = (scores::<f64>(&t, world, causal, false)?, scores::<f32>(&t, world, causal, false)?);
    let sizes: Vec<f64> =
        scores::<f64>(&t, world, causal, true)?.into_iter().filter(|x| x.is_finite()).collect();
    t.judge("scores", world, 2, (&naive, &want), largest(&sizes))?;
    let (own, k) = (t.output(2).floats(&world.arena.after), t.output(0).shape[3]);
    let want = indexer_indices(&own, t.output(2).shape[3], k).map_err(refuses)?;
    let got = t.output(0).numbers(&world.arena.after);
    if got != want {
        return Err(format!("the best are at {got:?}, not {want:?}"));
    }
    Ok(outcome)
}
