//! Cases of ggml. Shapes are ggml's in reverse: the last axis is its first.

mod attention;
mod recurrent;
mod rows;

use wgpu_attention::Gpu;

use crate::calls::Heads;
use crate::case::Case;
use crate::outcome::{Failed, Ran, float};
use crate::tensor::{Placed, Tensor};

/// Runs a case on a device.
pub fn run(gpu: &Gpu, case: &Case) -> Ran {
    match case.operator.as_str() {
        "FLASH_ATTN_EXT" => attention::flash_attention(gpu, case),
        "SET_ROWS" => attention::set_rows(gpu, case),
        "LIGHTNING_INDEXER" => attention::indexer(gpu, case),
        "GATED_DELTA_NET" => recurrent::gated_delta(gpu, case),
        "GATED_LINEAR_ATTN" => recurrent::linear_attention(gpu, case),
        "SSM_SCAN" => recurrent::selective_scan(gpu, case),
        "SSM_CONV" => recurrent::short_convolution(gpu, case),
        "NORM" | "RMS_NORM" => rows::norm(gpu, case),
        "ROPE" => rows::rotation(gpu, case),
        other => Err(Failed(format!("the operator {other} is not known"))),
    }
}

fn is(case: &Case, attribute: &str) -> bool {
    case.integer(attribute) == Some(1)
}

/// Uploads a tensor, which has heads before rows or rows before heads.
fn place_heads(gpu: &Gpu, case: &Case, name: &str, rows_first: bool) -> Result<Heads, Failed> {
    let tensor = case.input(name)?;
    if rows_first { Heads::blhd(gpu, tensor) } else { Heads::new(gpu, tensor, None) }
}

/// Uploads a tensor that the case may lack.
fn optional(gpu: &Gpu, case: &Case, name: &str, shape: [usize; 4]) -> Result<Option<Placed>, Failed> {
    let place = |t: &Tensor| Ok::<_, Failed>(Placed::new(gpu, &t.data, float(t)?, shape)?);
    case.inputs.get(name).map(place).transpose()
}
