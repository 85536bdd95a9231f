//! The suites of other projects.

use wgpu_attention::Gpu;

use crate::case::Case;
use crate::outcome::Ran;
use crate::{ggml, onnx};

pub struct Suite {
    /// The folder of its cases.
    pub folder: &'static str,
    pub title: &'static str,
    /// A sentence for the page: which cases it has.
    pub about: &'static str,
    pub run: fn(&Gpu, &Case) -> Ran,
}

/// All suites, in the order of the page.
pub const SUITES: &[Suite] = &[
    Suite {
        folder: "onnx",
        title: "ONNX's node cases",
        about: "All cases of these operators in the package. ONNX's reference implementation computes in the case's type, and in f64.",
        run: onnx::run,
    },
    Suite {
        folder: "ggml",
        title: "ggml's operators",
        about: "Parameters of ggml's `test-backend-ops`. The cases are samples: every pair of values of two parameters occurs. ggml's CPU backend computes the expected outputs. NumPy computes them in f64, from the numbers that ggml stores.",
        run: ggml::run,
    },
];
