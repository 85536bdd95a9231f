//! attention-gym's masks, score functions and references.

mod gather;
mod masks;

use wgpu_attention::{Attention, Config, Gpu};

use crate::calls::{self, CallTensors, Heads};
use crate::case::Case;
use crate::fla;
use crate::outcome::{Failed, Outcome, Ran};
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

/// Uploads queries, keys, values and the gradient of the output.
fn tensors(gpu: &Gpu, inputs: [&Tensor; 4]) -> Result<CallTensors, Failed> {
    let [q, k, v, d_out] = inputs.map(|tensor| Heads::new(gpu, tensor, None));
    Ok(CallTensors::new(gpu, [q?, k?, v?, d_out?])?)
}

/// Computes the results and the gradients, and writes the gradient of the tensor that a score
/// function captures first.
fn run_calls(
    gpu: &Gpu,
    tensors: &CallTensors,
    config: Config,
    function: &Function,
    d_table: Option<&Placed>,
) -> Result<(), Failed> {
    let attention = Attention::with_pipelines(gpu.pipelines(), config)?;
    let forward = tensors.forward(function.mask()?);
    calls::forward(gpu, &attention, &forward)?;
    let mut backward = tensors.backward(forward);
    if let Some(d_table) = d_table {
        backward = backward.d_captured(&[Some(d_table.view()), None]);
    }
    Ok(calls::backward(gpu, &attention, &backward)?)
}

fn attention(gpu: &Gpu, case: &Case) -> Ran {
    let [q, k, v, d_out] = ["q", "k", "v", "d_o"].map(|name| case.input(name));
    let (q, k, v, d_out) = (q?, k?, v?, d_out?);
    let tensors = tensors(gpu, [q, k, v, d_out])?;
    let function = Function::new(gpu, case)?;
    let d_table = function.d_table(gpu)?;
    run_calls(gpu, &tensors, tensors.config().softcap(function.softcap), &function, d_table.as_ref())?;
    let mut outputs = tensors.results(gpu)?;
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
    let dim = q.four()[3];
    let factor = case.number("factor").ok_or_else(|| Failed("no factor".into()))? * (dim as f64).sqrt();
    let wide_q = joined(q, case.input("q_rope")?, factor);
    let wide_k = joined(k, case.input("k_rope")?, 1.0);
    let width = wide_q.shape[3];
    let tensors = tensors(gpu, [&wide_q, &wide_k, v, d_out])?;
    let config = tensors.config().value_dim(dim).scale(1.0 / (dim as f64).sqrt());
    run_calls(gpu, &tensors, config, &Function::none(), None)?;
    let mut outputs = tensors.results(gpu)?;
    for (name, rotated, factor) in [("d_q", "d_q_rope", factor), ("d_k", "d_k_rope", 1.0)] {
        let [left, right] = parts(&outputs[name], width, dim, factor);
        outputs.extend([(name, left), (rotated, right)]);
    }
    Ok(Outcome::Computed(outputs))
}
