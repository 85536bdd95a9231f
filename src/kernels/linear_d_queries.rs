//! Twin of `linear_d_queries.wgsl`.

use super::linear::{LinearForm, Phi, Pieces, listed};
use super::linear_out::NONE_BEFORE;
use super::shader;
use crate::kernel::Kernel;
use crate::tensor::DType;

/// What changes the text of the gradient of queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LinearDQueries {
    pub form: LinearForm,
    pub phi: Phi,
    /// Of queries and keys.
    pub features: DType,
    pub d_out: DType,
    pub gradient: DType,
}

const VALUE_SIDE: &str =
    "fn value_side4(b: u32, h: u32, i: u32, c: u32) -> vec4<f32> { return d_out4(b, h, i, c); }\n";
const OTHER: &str =
    "fn other4(b: u32, kv: u32, j: u32, c: u32) -> vec4<f32> { return key_feature4(b, kv, j, c); }\n";

impl LinearDQueries {
    pub fn describe(&self) -> Kernel {
        let pieces = Pieces::new(self.form)
            .product()
            .phi(self.phi)
            .slope("q", self.features, self.phi)
            .d_out(self.d_out)
            .states()
            .stats()
            .text(VALUE_SIDE)
            .text(shader!("linear/state_columns"));
        let pieces = if self.form.causal {
            pieces.keys(self.features).scores().text(OTHER).text(shader!("linear/before"))
        } else {
            pieces.text(NONE_BEFORE)
        };
        pieces
            .chunks(false, "p.q_len")
            .store(self.gradient, "p.features")
            .text(shader!("linear_d_queries"))
            .kernel()
    }

    pub fn all() -> Vec<Self> {
        listed(|form, dtype, phi| LinearDQueries {
            form,
            phi,
            features: dtype,
            d_out: dtype,
            gradient: dtype,
        })
    }
}
