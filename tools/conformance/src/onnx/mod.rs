//! ONNX's node cases.

mod attention;
mod cache;
mod recurrent;
mod rows;

use wgpu_attention::Gpu;

use crate::case::Case;
use crate::outcome::{Failed, Outcome, Ran};

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
