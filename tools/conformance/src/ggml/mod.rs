//! Cases of ggml. Shapes are ggml's in reverse: the last axis is its first.

mod attention;
mod recurrent;
mod rows;

use wgpu_attention::{DType, Error, Gpu, TensorView};

use crate::case::Case;
use crate::outcome::{Failed, Ran};
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

/// Uploads a tensor in its type.
fn place(gpu: &Gpu, tensor: &Tensor) -> Result<Placed, Error> {
    Placed::new(gpu, &tensor.data, tensor.float().unwrap_or(DType::F32), tensor.four())
}

/// Rows of heads. Memory has heads before rows, or rows before heads.
struct Heads {
    placed: Placed,
    /// Batch, heads, rows, channels.
    shape: [usize; 4],
    rows_first: bool,
}

impl Heads {
    fn new(gpu: &Gpu, case: &Case, name: &str, rows_first: bool) -> Result<Self, Failed> {
        let tensor = case.input(name)?;
        let mut shape = tensor.four();
        if rows_first {
            shape.swap(1, 2);
        }
        Ok(Heads { placed: place(gpu, tensor)?, shape, rows_first })
    }

    fn view(&self) -> TensorView<'_> {
        if self.rows_first { self.placed.blhd(self.shape) } else { self.placed.viewed(self.shape) }
    }
}

/// Uploads a tensor that the case may lack.
fn optional(gpu: &Gpu, case: &Case, name: &str, shape: [usize; 4]) -> Result<Option<Placed>, Error> {
    let place = |t: &Tensor| Placed::new(gpu, &t.data, t.float().unwrap_or(DType::F32), shape);
    case.inputs.get(name).map(place).transpose()
}
