//! The result of a case.

use std::collections::BTreeMap;

use wgpu_attention::{DType, Error};

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

/// Returns the type of a tensor of floats.
pub fn float(tensor: &Tensor) -> Result<DType, Failed> {
    tensor.float().ok_or_else(|| Failed(format!("a tensor of type {:?}", tensor.dtype)))
}
