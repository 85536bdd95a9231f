//! The host side of `linear_d_queries.wgsl`.

use super::linear::{LinearForm, LinearNumbers, Phi, Pieces, listed};
use super::linear_out::NONE_BEFORE;
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, Width, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The gradient of queries.
    LinearDQueries, LinearDQueriesCall
    tensors {
        // Absent if φ is the identity.
        q: Opt Read F32 width view,
        d_out: One Read F32 width view,
        states: Opt Read F32 four,
        stats: Opt Read F32 four,
        // These tensors only if causal.
        k: Opt Read F32 width view,
        scores: Opt Read F32 four,
        chunks: Opt Read U32 one,
        written: One Write F32 width view,
    }
    numbers {
        numbers: LinearNumbers,
    }
    variant {
        form: LinearForm,
        phi: Phi,
        width: Width,
    }
}

const VALUE_SIDE: &str =
    "fn value_side4(b: u32, h: u32, i: u32, c: u32) -> vec4<f32> { return d_out4(b, h, i, c); }\n";
const OTHER: &str =
    "fn other4(b: u32, kv: u32, j: u32, c: u32) -> vec4<f32> { return key_feature4(b, kv, j, c); }\n";

impl Variant for LinearDQueries {
    const LABEL: &'static str = "attention.linear_d_queries";
    const FAMILIES: Families = Families::of(Family::LinearGradients);

    fn describe(&self) -> Kernel {
        let pieces = Pieces::new(self.form, self.width, self.declare())
            .product()
            .phi(self.phi)
            .slope("q", self.phi)
            .d_out()
            .states()
            .stats()
            .text(VALUE_SIDE)
            .text(shader!("linear_attention/state_columns"));
        let pieces = if self.form.causal {
            pieces.keys().text(OTHER).text(shader!("linear_attention/before"))
        } else {
            pieces.text(NONE_BEFORE)
        };
        pieces
            .chunks(None, "p.q_len")
            .store("p.features")
            .text(shader!("linear_attention/linear_d_queries"))
            .kernel()
    }

    fn all() -> impl IntoIterator<Item = Self> {
        listed(|form, width, dtype, phi| LinearDQueries {
            q: (phi != Phi::Identity).then_some(dtype),
            d_out: dtype,
            states: Some(DType::F32),
            stats: Some(DType::F32),
            k: form.causal.then_some(dtype),
            scores: form.causal.then_some(DType::F32),
            chunks: form.chunks(),
            written: dtype,
            form,
            phi,
            width,
        })
    }
}
