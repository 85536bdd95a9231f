//! The suites of other projects.

use wgpu_attention::Gpu;

use crate::case::Case;
use crate::outcome::Ran;
use crate::{attention_gym, fla, flash_attention, flashinfer, ggml, onnx};

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
    Suite {
        folder: "flash_attention",
        title: "FlashAttention's parameters",
        about: "Parameters of `tests/test_flash_attn.py` and `tests/cute`, with lengths up to 1024. Each pair of values of two parameters of a row occurs in a case. JAX computes on the CPU, in the case's type and in f64. Its function of attention serves where it has the options, else the published definitions. The tolerance is FlashAttention's: two times JAX's error in the same type, three times for gradients and caches. Its tests have 16-bit types only; f32 is added. Gradients of queries with one key cancel to zero in JAX. In the library, `out` in 16 bits leaves a rest.",
        run: flash_attention::run,
    },
    Suite {
        folder: "flashinfer",
        title: "flashinfer's parameters",
        about: "Parameters of `tests/attention`, pairwise and computed by JAX as above. The tolerance is flashinfer's: 1e-3 in f16, 1e-2 in bf16.",
        run: flashinfer::run,
    },
    Suite {
        folder: "fla",
        title: "Flash Linear Attention's tests",
        about: "A pairwise sample of the parameters of these tests, forward and backward. The package's plain PyTorch functions compute in the case's type, and in f64.",
        run: fla::run,
    },
    Suite {
        folder: "attention_gym",
        title: "attention-gym",
        about: "Its masks and score functions, as FlexAttention defines them, and its references of other attentions, forward and backward. The sizes are a pairwise sample. PyTorch computes in the case's type, and in f64.",
        run: attention_gym::run,
    },
];
