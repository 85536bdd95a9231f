//! Twin of `linear_d_values.wgsl`.

use super::linear::{LinearForm, Phi, Pieces, listed};
use super::linear_d_keys::NONE_AFTER;
use super::shader;
use crate::kernel::Kernel;
use crate::tensor::DType;

/// What changes the text of the gradient of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LinearDValues {
    pub form: LinearForm,
    pub phi: Phi,
    pub k: DType,
    pub d_out: DType,
    pub gradient: DType,
}

const FEATURE_SIDE: &str =
    "fn feature_side4(b: u32, kv: u32, j: u32, f: u32) -> vec4<f32> { return key_feature4(b, kv, j, f); }\n";
const OTHER: &str = "fn other4(b: u32, h: u32, i: u32, c: u32) -> vec4<f32> {\n    \
    return d_out4(b, h, i, c) * stats_of(b, h, i).x;\n}\n";

impl LinearDValues {
    pub fn describe(&self) -> Kernel {
        let pieces = Pieces::new(self.form)
            .product()
            .phi(self.phi)
            .keys(self.k)
            .states()
            .text(FEATURE_SIDE)
            .text(shader!("linear/state_rows"));
        let pieces = if self.form.causal {
            pieces.d_out(self.d_out).stats().scores().text(OTHER).text(shader!("linear/after"))
        } else {
            pieces.text(NONE_AFTER)
        };
        pieces
            .chunks(true, "p.kv_len")
            .store(self.gradient, "p.value_dim")
            .text(shader!("linear_d_values"))
            .kernel()
    }

    pub fn all() -> Vec<Self> {
        listed(|form, dtype, phi| LinearDValues { form, phi, k: dtype, d_out: dtype, gradient: dtype })
    }
}
