//! The host side of `linear_out.wgsl`.

use super::linear::{LinearForm, LinearNumbers, Phi, Pieces, listed};
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, Width, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The results of linear attention.
    LinearOut, LinearOutCall
    tensors {
        q: One Read F32 width view,
        states: Opt Read F32 four,
        // These tensors only if causal.
        v: Opt Read F32 width view,
        scores: Opt Read F32 four,
        logs: Opt Read F32 one,
        chunks: Opt Read U32 one,
        written: One Write F32 width view,
    }
    numbers {
        numbers: LinearNumbers,
    }
    variant {
        form: LinearForm,
        phi: Phi,
        /// True if results are divided by the norm.
        normalised: bool,
        width: Width,
    }
}

const FEATURE_SIDE: &str =
    "fn feature_side4(b: u32, h: u32, i: u32, f: u32) -> vec4<f32> { return query_feature4(b, h, i, f); }\n";
const OTHER: &str = "fn other4(b: u32, kv: u32, j: u32, c: u32) -> vec4<f32> { return lowered(value4(b, kv, j, c), p.value_exponent); }\n";
pub(super) const NONE_BEFORE: &str =
    "fn add_before(b: u32, kv: u32, chunk: Chunk, tile: Tile, scores_row: u32) {}\n";

impl Variant for LinearOut {
    const LABEL: &'static str = "attention.linear_out";
    const FAMILIES: Families = Families::of(Family::LinearAttention);

    fn describe(&self) -> Kernel {
        let pieces = Pieces::new(self.form, self.width, self.declare())
            .bool("IS_NORMALISED", self.normalised)
            .product()
            .row_logs()
            .phi(self.phi)
            .queries()
            .states()
            .text(FEATURE_SIDE)
            .text(shader!("linear_attention/state_rows"));
        let pieces = if self.form.causal {
            pieces.values().text(OTHER).text(shader!("linear_attention/before"))
        } else {
            pieces.text(NONE_BEFORE)
        };
        pieces
            .chunks(self.logs, "p.q_len")
            .store("p.value_dim")
            .text(shader!("linear_attention/linear_out"))
            .kernel()
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let of = |form: LinearForm, width, dtype, phi, normalised| LinearOut {
            q: dtype,
            states: Some(DType::F32),
            v: form.causal.then_some(dtype),
            scores: form.causal.then_some(DType::F32),
            logs: form.logs().filter(|_| form.causal),
            chunks: form.chunks(),
            written: dtype,
            form,
            phi,
            normalised,
            width,
        };
        let mut all = listed(|form, width, dtype, phi| of(form, width, dtype, phi, phi != Phi::Identity));
        let form = LinearForm { causal: false, ..LinearForm::plain() };
        all.push(of(form, Width::Four, DType::F32, Phi::Elu, false));
        all
    }
}
