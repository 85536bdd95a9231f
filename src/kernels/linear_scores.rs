//! Twin of `linear_scores.wgsl`.

use super::linear::{LinearForm, Phi, Pieces, listed};
use super::shader;
use crate::kernel::{Binding, Kernel, Width};
use crate::tensor::DType;

/// What changes the text of the products within chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LinearScores {
    pub form: LinearForm,
    pub phi: Phi,
    /// Of the queries' side, and of the keys'.
    pub query_side: DType,
    pub key_side: DType,
    /// Of d_out and v, for the backward pass.
    pub of_gradients: bool,
}

const FEATURES: &str = "fn side_channels() -> u32 { return p.features; }\n\
    fn query_side4(b: u32, h: u32, i: u32, c: u32) -> vec4<f32> { return query_feature4(b, h, i, c); }\n\
    fn key_side4(b: u32, kv: u32, j: u32, c: u32) -> vec4<f32> { return key_feature4(b, kv, j, c); }\n\
    fn side_product(b: u32, h: u32, i: u32, products: vec4<f32>) -> vec4<f32> { return products; }\n";
const GRADIENTS: &str = "fn side_channels() -> u32 { return p.value_dim; }\n\
    fn query_side4(b: u32, h: u32, i: u32, c: u32) -> vec4<f32> { return d_out4(b, h, i, c); }\n\
    fn key_side4(b: u32, kv: u32, j: u32, c: u32) -> vec4<f32> { return value4(b, kv, j, c); }\n\
    fn side_product(b: u32, h: u32, i: u32, products: vec4<f32>) -> vec4<f32> {\n    \
        let stats = stats_of(b, h, i);\n    return products * stats.x + vec4<f32>(stats.y);\n}\n";

impl LinearScores {
    pub fn describe(&self) -> Kernel {
        let pieces = Pieces::new(self.form).product().row_logs();
        let pieces = if self.of_gradients {
            pieces.d_out(self.query_side).values(self.key_side).stats().text(GRADIENTS)
        } else {
            pieces.phi(self.phi).queries(self.query_side).keys(self.key_side).text(FEATURES)
        };
        pieces
            .chunks(true, "p.kv_len")
            .bind(Binding::write("scores", DType::F32, Width::Four))
            .text(shader!("linear_scores"))
            .kernel()
    }

    pub fn all() -> Vec<Self> {
        let of = |of_gradients| {
            let all = listed(move |form, dtype, phi| LinearScores {
                form,
                phi: if of_gradients { Phi::Identity } else { phi },
                query_side: dtype,
                key_side: dtype,
                of_gradients,
            });
            all.into_iter().filter(|scores| scores.form.causal).collect::<Vec<_>>()
        };
        [of(false), of(true)].concat()
    }
}
