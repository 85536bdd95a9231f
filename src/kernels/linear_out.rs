//! Twin of `linear_out.wgsl`.

use super::linear::{LinearForm, Phi, Pieces, listed};
use super::shader;
use crate::kernel::{Constant, Kernel};
use crate::tensor::DType;

/// What changes the text of linear attention's results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LinearOut {
    pub form: LinearForm,
    pub phi: Phi,
    pub q: DType,
    pub v: DType,
    pub out: DType,
    /// Whether results are divided by the norm.
    pub normalised: bool,
}

const FEATURE_SIDE: &str =
    "fn feature_side4(b: u32, h: u32, i: u32, f: u32) -> vec4<f32> { return query_feature4(b, h, i, f); }\n";
const OTHER: &str = "fn other4(b: u32, kv: u32, j: u32, c: u32) -> vec4<f32> { return value4(b, kv, j, c) * p.value_unit; }\n";
pub(super) const NONE_BEFORE: &str =
    "fn add_before(b: u32, kv: u32, chunk: Chunk, tile: Tile, scores_row: u32) {}\n";

impl LinearOut {
    pub fn describe(&self) -> Kernel {
        let causal = self.form.causal;
        let pieces = Pieces::new(self.form)
            .constant(Constant::Bool("IS_NORMALISED", self.normalised))
            .product()
            .row_logs()
            .phi(self.phi)
            .queries(self.q)
            .states()
            .text(FEATURE_SIDE)
            .text(shader!("linear/state_rows"));
        let pieces = if causal {
            pieces.values(self.v).scores().text(OTHER).text(shader!("linear/before"))
        } else {
            pieces.text(NONE_BEFORE)
        };
        pieces.chunks(causal, "p.q_len").store(self.out, "p.value_dim").text(shader!("linear_out")).kernel()
    }

    pub fn all() -> Vec<Self> {
        let mut all = listed(|form, dtype, phi| LinearOut {
            form,
            phi,
            q: dtype,
            v: dtype,
            out: dtype,
            normalised: phi != Phi::Identity,
        });
        let form = LinearForm { causal: false, ..LinearForm::plain(true) };
        let plain = LinearOut {
            form,
            phi: Phi::Elu,
            q: DType::F32,
            v: DType::F32,
            out: DType::F32,
            normalised: true,
        };
        all.push(LinearOut { normalised: false, ..plain });
        all
    }
}
