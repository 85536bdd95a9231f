//! The suites of other projects.

use wgpu_attention::Gpu;

use crate::case::Case;
use crate::onnx;
use crate::outcome::Ran;

pub struct Suite {
    /// The folder of its cases.
    pub folder: &'static str,
    pub title: &'static str,
    /// A sentence for the page: which cases it has.
    pub about: &'static str,
    pub run: fn(&Gpu, &Case) -> Ran,
}

/// All suites, in the order of the page.
pub const SUITES: &[Suite] = &[Suite {
    folder: "onnx",
    title: "ONNX's node cases",
    about: "All cases of these operators in the package. ONNX's reference implementation computes in the case's type, and in f64.",
    run: onnx::run,
}];
