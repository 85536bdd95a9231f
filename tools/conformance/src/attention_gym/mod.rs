//! attention-gym's masks, score functions and references.

mod gather;
mod masks;

use std::collections::BTreeMap;

use wgpu_attention::attention::Backward;
use wgpu_attention::{Attention, Config, DType, Forward, Gpu};

use crate::calls::{self, place};
use crate::case::Case;
use crate::fla;
use crate::outcome::{Failed, Outcome, Ran, float};
use crate::tensor::{Placed, Tensor};
use masks::Function;

pub fn run(gpu: &Gpu, case: &Case) -> Ran {
    match case.operator.as_str() {
        "gated delta rule" | "KDA" => fla::recurrent(gpu, case),
        "gather attention" => gather::attention(gpu, case),
        "lightning indexer" => gather::indexer(gpu, case),
        _ if case.text("function") == Some("mla_rope") => latent(gpu, case),
        _ => attention(gpu, case),
    }
}

/// The tensors of an attention.
struct Tensors {
    q: Placed,
    k: Placed,
    v: Placed,
    out: Placed,
    lse: Placed,
    d_out: Placed,
    d_q: Placed,
    d_k: Placed,
    d_v: Placed,
}

impl Tensors {
    fn new(gpu: &Gpu, [q, k, v, d_out]: [&Tensor; 4]) -> Result<Self, Failed> {
        let like = |t: &Tensor| Ok::<_, Failed>(Placed::output(gpu, float(t)?, t.four())?);
        let [batch, heads, length, _] = q.four();
        Ok(Tensors {
            q: place(gpu, q)?,
            k: place(gpu, k)?,
            v: place(gpu, v)?,
            out: like(d_out)?,
            lse: Placed::output(gpu, DType::F32, [batch, heads, length, 1])?,
            d_out: place(gpu, d_out)?,
            d_q: like(q)?,
            d_k: like(k)?,
            d_v: like(v)?,
        })
    }

    /// Computes the results and the gradients, and writes the gradient of the tensor that a score
    /// function captures first.
    fn run(
        &self,
        gpu: &Gpu,
        config: Config,
        function: &Function,
        d_table: Option<&Placed>,
    ) -> Result<(), Failed> {
        let attention = Attention::with_pipelines(gpu.pipelines(), config)?;
        let forward = Forward::new(self.q.view(), self.k.view(), self.v.view(), self.out.view())
            .mask(function.mask()?)
            .lse(self.lse.view());
        calls::forward(gpu, &attention, &forward)?;
        let mut backward = Backward::new(forward, self.d_out.view())
            .d_q(self.d_q.view())
            .d_k(self.d_k.view())
            .d_v(self.d_v.view());
        if let Some(d_table) = d_table {
            backward = backward.d_captured(&[Some(d_table.view()), None]);
        }
        Ok(calls::backward(gpu, &attention, &backward)?)
    }
}

fn attention(gpu: &Gpu, case: &Case) -> Ran {
    let [q, k, v, d_out] = ["q", "k", "v", "d_o"].map(|name| case.input(name));
    let (q, k, v, d_out) = (q?, k?, v?, d_out?);
    let tensors = Tensors::new(gpu, [q, k, v, d_out])?;
    let [_, heads, _, dim] = q.four();
    let function = Function::new(gpu, case)?;
    let config = Config::new(heads, dim).kv_heads(k.shape[1]).dtype(float(q)?).softcap(function.softcap);
    let d_table = function.d_table(gpu)?;
    tensors.run(gpu, config, &function, d_table.as_ref())?;
    let Tensors { out, d_q, d_k, d_v, .. } = &tensors;
    let mut outputs = BTreeMap::new();
    for (name, placed) in [("o", out), ("d_q", d_q), ("d_k", d_k), ("d_v", d_v)] {
        outputs.insert(name, placed.download(gpu)?);
    }
    if let Some(d_table) = d_table {
        outputs.insert("d_table", d_table.download(gpu)?);
    }
    Ok(Outcome::Computed(outputs))
}

/// Returns rows of two tensors side by side. The second ones are multiplied by a factor.
fn joined(a: &Tensor, b: &Tensor, factor: f64) -> Tensor {
    let ([batch, heads, length, left], right) = (a.four(), b.four()[3]);
    let rows = a.data.chunks_exact(left).zip(b.data.chunks_exact(right));
    let data = rows.flat_map(|(a, b)| a.iter().copied().chain(b.iter().map(move |x| x * factor))).collect();
    Tensor { dtype: a.dtype, shape: vec![batch, heads, length, left + right], data }
}

/// Returns the parts of rows, the first of `left` elements. The second ones are multiplied.
fn parts(data: &[f64], width: usize, left: usize, factor: f64) -> [Vec<f64>; 2] {
    let rows = || data.chunks_exact(width);
    [
        rows().flat_map(|row| row[..left].to_vec()).collect(),
        rows().flat_map(|row| row[left..].iter().map(move |x| x * factor)).collect(),
    ]
}

/// Latent attention: rotated channels follow the other ones, with the same scale.
fn latent(gpu: &Gpu, case: &Case) -> Ran {
    let [q, k, v, d_out] = ["q", "k", "v", "d_o"].map(|name| case.input(name));
    let (q, k, v, d_out) = (q?, k?, v?, d_out?);
    let [_, heads, _, dim] = q.four();
    let factor = case.number("factor").ok_or_else(|| Failed("no factor".into()))? * (dim as f64).sqrt();
    let wide_q = joined(q, case.input("q_rope")?, factor);
    let wide_k = joined(k, case.input("k_rope")?, 1.0);
    let width = wide_q.shape[3];
    let tensors = Tensors::new(gpu, [&wide_q, &wide_k, v, d_out])?;
    let config = Config::new(heads, width)
        .value_dim(dim)
        .kv_heads(k.shape[1])
        .dtype(float(q)?)
        .scale(1.0 / (dim as f64).sqrt());
    tensors.run(gpu, config, &Function::none(), None)?;
    let [d_q, d_q_rope] = parts(&tensors.d_q.download(gpu)?, width, dim, factor);
    let [d_k, d_k_rope] = parts(&tensors.d_k.download(gpu)?, width, dim, 1.0);
    Ok(Outcome::Computed(BTreeMap::from([
        ("o", tensors.out.download(gpu)?),
        ("d_q", d_q),
        ("d_q_rope", d_q_rope),
        ("d_k", d_k),
        ("d_k_rope", d_k_rope),
        ("d_v", tensors.d_v.download(gpu)?),
    ])))
}
