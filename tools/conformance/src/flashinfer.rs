//! The parameters of flashinfer's tests.

use std::collections::BTreeMap;

use wgpu_attention::attention::{Merge, MergeForward, Partial};
use wgpu_attention::cache::{Append, Tokens};
use wgpu_attention::{Attention, Cache, Config, DType, Forward, Gpu, Shape};

use crate::calls::{self, Heads};
use crate::case::Case;
use crate::outcome::{Failed, Outcome, Ran, float};
use crate::tensor::Placed;
use crate::{cached, dense};

pub fn run(gpu: &Gpu, case: &Case) -> Ran {
    if case.inputs.contains_key("k_shared") {
        shared_prefix(gpu, case)
    } else if case.inputs.contains_key("s") {
        merged_states(gpu, case)
    } else if case.inputs.contains_key("k_cache") {
        cached::step(gpu, case)
    } else {
        dense::attend(gpu, case)
    }
}

/// All queries attend to the shared keys as one sequence, and each sequence to its cache. `Merge`
/// combines both.
fn shared_prefix(gpu: &Gpu, case: &Case) -> Ran {
    let place = |name: &str| Heads::blhd(gpu, case.input(name)?);
    let (q, k, v) = (place("q")?, place("k_shared")?, place("v_shared")?);
    let dtype = float(case.input("q")?)?;
    let [batch, heads, q_len, dim] = q.shape;
    let shape = Shape::new(1, heads, batch * q_len, dim);
    let attention = Attention::with_pipelines(gpu.pipelines(), Config::of(&shape).dtype(dtype))?;
    let output = || Heads::output(gpu, dtype, q.shape);
    // Rows of heads come after the rows of queries, so one sequence is a view of all.
    let lse = || Placed::output(gpu, DType::F32, [batch, q_len, heads, 1]);
    let (outs, lses) = ([output()?, output()?, output()?], [lse()?, lse()?, lse()?]);
    let call = Forward::new(q.placed.blhd(shape.q()), k.view(), v.view(), outs[0].placed.blhd(shape.out()))
        .lse(lses[0].blhd([1, heads, batch * q_len, 1]));
    calls::forward(gpu, &attention, &call)?;
    let per_sequence = |n: usize| lses[n].blhd([batch, heads, q_len, 1]);
    let (k, v) = (place("k_cache")?, place("v_cache")?);
    let mut cache = Cache::with_pipelines(gpu.pipelines(), cached::config(case, &k, Some(&v), dtype))?;
    gpu.submit(|e| {
        cache.advance(e, Tokens::All(k.shape[2]))?;
        cache.append(e, 0, &Append::new(k.view(), v.view()))
    })?;
    let call = Forward::with_cache(q.view(), &cache, outs[1].view()).at_end().lse(per_sequence(1));
    calls::forward(gpu, &attention, &call)?;
    let [first, second, all] = [0, 1, 2].map(|n| Partial { out: outs[n].view(), lse: per_sequence(n) });
    let merge = Merge::with_pipelines(gpu.pipelines());
    gpu.submit(|e| merge.forward(e, &MergeForward::new(&[first, second], all)))?;
    let lse = lses[2].download(gpu)?;
    // The expected tensor is [batch, heads, q_len].
    let at = |b: usize, h: usize, i: usize| lse[(b * q_len + i) * heads + h];
    let lse = (0..batch * heads * q_len).map(|n| at(n / q_len / heads, n / q_len % heads, n % q_len));
    let lse = lse.collect();
    Ok(Outcome::Computed(BTreeMap::from([("out", outs[2].placed.download(gpu)?), ("lse", lse)])))
}

/// States are outputs with their log-sum-exps, `[states, 1, heads, q_len, dim]`.
fn merged_states(gpu: &Gpu, case: &Case) -> Ran {
    let (v, s) = (case.input("v")?, case.input("s")?);
    let [states, batch, heads, q_len, dim] = v.shape[..] else { return Err(Failed("other axes".into())) };
    let (shape, dtype) = ([batch, heads, q_len, dim], float(v)?);
    let row = [batch, heads, q_len, 1];
    let mut placed = Vec::new();
    for n in 0..states {
        let part = |data: &[f64]| data[n * data.len() / states..(n + 1) * data.len() / states].to_vec();
        placed.push((
            Placed::new(gpu, &part(&v.data), dtype, shape)?,
            Placed::new(gpu, &part(&s.data), DType::F32, row)?,
        ));
    }
    let parts: Vec<_> = placed.iter().map(|(v, s)| Partial { out: v.view(), lse: s.view() }).collect();
    let (out, lse) = (Placed::output(gpu, DType::F32, shape)?, Placed::output(gpu, DType::F32, row)?);
    let into = Partial { out: out.view(), lse: lse.view() };
    let merge = Merge::with_pipelines(gpu.pipelines());
    gpu.submit(|e| merge.forward(e, &MergeForward::new(&parts, into)))?;
    Ok(Outcome::Computed(BTreeMap::from([("out", out.download(gpu)?), ("lse", lse.download(gpu)?)])))
}
