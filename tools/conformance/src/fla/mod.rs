//! Flash Linear Attention's tests.

mod attention;
mod native;
mod recurrent;
mod rows;

use std::collections::BTreeMap;

pub use recurrent::recurrent;
use wgpu_attention::{DType, Gpu};

use crate::calls::{self, Heads};
use crate::case::Case;
use crate::outcome::{Failed, Outcome, Ran, float};
use crate::tensor::{Placed, Tensor};

pub fn run(gpu: &Gpu, case: &Case) -> Ran {
    match case.operator.as_str() {
        "gated delta rule" | "KDA" | "delta rule" | "GLA" | "simple GLA" | "retention"
        | "linear attention" => recurrent::recurrent(gpu, case),
        "normalised linear attention" => recurrent::normalised(gpu, case),
        "attention" | "forgetting attention" => attention::attention(gpu, case),
        "NSA selection" => attention::selection(gpu, case),
        "DSA" => attention::indexed(gpu, case),
        "NSA" => native::native_sparse(gpu, case),
        "short convolution" => rows::convolution(gpu, case),
        "gated norm" => rows::gated_norm(gpu, case),
        other => Err(Failed(format!("the operator {other} is not known"))),
    }
}

/// Places an input `[batch, length, heads, dim]`, whose `dim` may be left out.
fn input(gpu: &Gpu, case: &Case, name: &str) -> Result<Heads, Failed> {
    Heads::blhd(gpu, case.input(name)?)
}

/// Places an input that the case may lack.
fn optional(gpu: &Gpu, case: &Case, name: &str) -> Result<Option<Heads>, Failed> {
    case.inputs.get(name).map(|tensor| Heads::blhd(gpu, tensor)).transpose()
}

/// Makes the tensor of an output, if the case has it.
fn output(gpu: &Gpu, case: &Case, name: &str) -> Result<Option<Heads>, Failed> {
    case.output(name).map(|output| Heads::like(gpu, &output.expected)).transpose()
}

/// Places a tensor of four axes, or of fewer with ones in front.
fn dense(gpu: &Gpu, case: &Case, name: &str) -> Result<Option<Placed>, Failed> {
    case.inputs.get(name).map(|t| calls::place(gpu, t)).transpose()
}

/// Makes the dense tensor of an output, if the case has it.
fn dense_output(gpu: &Gpu, case: &Case, name: &str) -> Result<Option<Placed>, Failed> {
    let place = |t: &Tensor| Ok::<_, Failed>(Placed::output(gpu, float(t)?, t.four())?);
    case.output(name).map(|output| place(&output.expected)).transpose()
}

/// The starts of packed sequences, and their end.
fn starts(gpu: &Gpu, case: &Case) -> Result<Option<Placed>, Failed> {
    let place = |t: &Tensor| Placed::new(gpu, &t.data, DType::U32, t.four());
    Ok(case.inputs.get("starts").map(place).transpose()?)
}

/// Downloads the results that the case has.
fn computed<const N: usize>(gpu: &Gpu, results: [(&'static str, Option<&Placed>); N]) -> Ran {
    let mut outputs = BTreeMap::new();
    for (name, placed) in results {
        if let Some(placed) = placed {
            outputs.insert(name, placed.download(gpu)?);
        }
    }
    Ok(Outcome::Computed(outputs))
}
