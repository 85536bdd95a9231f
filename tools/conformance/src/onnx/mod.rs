//! ONNX's node cases.

mod attention;
mod cache;
mod recurrent;
mod rows;

use std::collections::BTreeMap;

use wgpu_attention::{DType, Error, Gpu};

use crate::case::Case;
use crate::tensor::Tensor;

/// The end of a case.
pub enum Outcome {
    /// The outputs that the library computed. The others are not outputs of its operator.
    Computed(BTreeMap<&'static str, Vec<f64>>),
    /// The library does not do this, and why.
    Refused(&'static str),
}

/// A case that could not be run.
#[derive(Debug)]
pub struct Failed(pub String);

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Failed(error.to_string())
    }
}

impl From<String> for Failed {
    fn from(why: String) -> Self {
        Failed(why)
    }
}

/// The result of a case's operator.
pub type Ran = Result<Outcome, Failed>;

/// Runs a case on a device.
pub fn run(gpu: &Gpu, case: &Case) -> Ran {
    if case.inputs.values().any(|t| t.dtype == safetensors::Dtype::F64) {
        return Ok(Outcome::Refused("WGSL has no f64"));
    }
    match case.operator.as_str() {
        "Attention" => attention::attention(gpu, case),
        "FlexAttention" => attention::flex(gpu, case),
        "Softmax" => rows::softmax(gpu, case),
        "LayerNormalization" | "RMSNormalization" => rows::norm(gpu, case),
        "Gelu" | "Swish" => rows::activation(gpu, case),
        "RotaryEmbedding" => rows::rotary(gpu, case),
        "CausalConvWithState" => recurrent::convolution(gpu, case),
        "LinearAttention" => recurrent::linear_attention(gpu, case),
        "TensorScatter" => cache::scatter(gpu, case),
        other => Err(Failed(format!("the operator {other} is not known"))),
    }
}

/// Returns the type of a tensor of floats.
fn float(tensor: &Tensor) -> Result<DType, Failed> {
    tensor.float().ok_or_else(|| Failed(format!("a tensor of type {:?}", tensor.dtype)))
}
