//! Twin of `linear_d_keys.wgsl`.

use super::linear::{LinearForm, Phi, Pieces, listed};
use super::shader;
use crate::kernel::Kernel;
use crate::tensor::DType;

/// What changes the text of the gradient of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LinearDKeys {
    pub form: LinearForm,
    pub phi: Phi,
    /// Of queries and keys.
    pub features: DType,
    pub v: DType,
    pub gradient: DType,
}

const VALUE_SIDE: &str =
    "fn value_side4(b: u32, kv: u32, j: u32, c: u32) -> vec4<f32> { return value4(b, kv, j, c); }\n";
const OTHER: &str =
    "fn other4(b: u32, h: u32, i: u32, c: u32) -> vec4<f32> { return query_feature4(b, h, i, c); }\n";
pub(super) const NONE_AFTER: &str = "fn add_after(b: u32, kv: u32, slot: u32, chunk: Chunk, tile: Tile) {}\n";

impl LinearDKeys {
    pub fn describe(&self) -> Kernel {
        let pieces = Pieces::new(self.form)
            .product()
            .phi(self.phi)
            .slope("k", self.features, self.phi)
            .values(self.v)
            .states()
            .text(VALUE_SIDE)
            .text(shader!("linear/state_columns"));
        let pieces = if self.form.causal {
            pieces.queries(self.features).scores().text(OTHER).text(shader!("linear/after"))
        } else {
            pieces.text(NONE_AFTER)
        };
        pieces
            .chunks(true, "p.kv_len")
            .store(self.gradient, "p.features")
            .text(shader!("linear_d_keys"))
            .kernel()
    }

    pub fn all() -> Vec<Self> {
        listed(|form, dtype, phi| LinearDKeys { form, phi, features: dtype, v: dtype, gradient: dtype })
    }
}
