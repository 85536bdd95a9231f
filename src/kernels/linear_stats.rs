//! Twin of `linear_stats.wgsl`.

use super::linear::{LinearForm, Phi, Pieces, listed};
use super::shader;
use crate::kernel::{Binding, Kernel, Width};
use crate::tensor::DType;

/// What changes the text of what the backward pass takes of each query.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LinearStats {
    pub form: LinearForm,
    pub phi: Phi,
    pub q: DType,
    pub d_out: DType,
    /// Whether results are divided by the norm.
    pub normalised: bool,
}

const UNNORMALISED: &str = "fn norm_stats(b: u32, h: u32, kv: u32, slot: u32, chunk: Chunk, row: u32, stats: vec4<f32>) -> vec4<f32> {\n    \
    return vec4<f32>(p.scale, 0.0, stats.zw);\n}\n";

impl LinearStats {
    pub fn describe(&self) -> Kernel {
        let pieces = Pieces::new(self.form).phi(self.phi);
        let pieces = if self.normalised {
            pieces
                .queries(self.q)
                .d_out(self.d_out)
                .tensor("out", "x", self.d_out, "out4", "p.value_dim", ["", ""])
                .states()
                .bind_if(self.form.causal, Pieces::scores)
                .bind_if(!self.form.causal, |p| p.text("fn scores_at(o: u32) -> f32 { return 0.0; }\n"))
                .text(shader!("linear/norm_stats"))
        } else {
            pieces.text(UNNORMALISED)
        };
        pieces
            .chunks(self.form.causal, "p.q_len")
            .bind(Binding::write("stats", DType::F32, Width::Four))
            .text(shader!("linear_stats"))
            .kernel()
    }

    pub fn all() -> Vec<Self> {
        let of = |normalised| {
            listed(move |form, dtype, phi| LinearStats { form, phi, q: dtype, d_out: dtype, normalised })
        };
        [of(false), of(true)].concat()
    }
}
