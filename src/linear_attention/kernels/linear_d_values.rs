//! The host side of `linear_d_values.wgsl`.

use super::linear::{LinearForm, LinearNumbers, Phi, Pieces, listed};
use super::linear_d_keys::NONE_AFTER;
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, Width, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The gradient of values.
    LinearDValues, LinearDValuesCall
    tensors {
        k: One Read F32 width view,
        states: Opt Read F32 four,
        // These tensors only if causal.
        d_out: Opt Read F32 width view,
        stats: Opt Read F32 four,
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
        width: Width,
    }
}

const FEATURE_SIDE: &str =
    "fn feature_side4(b: u32, kv: u32, j: u32, f: u32) -> vec4<f32> { return key_feature4(b, kv, j, f); }\n";
const OTHER: &str = "fn other4(b: u32, h: u32, i: u32, c: u32) -> vec4<f32> {\n    \
    return d_out4(b, h, i, c) * stats_of(b, h, i).x;\n}\n";

impl Variant for LinearDValues {
    const LABEL: &'static str = "attention.linear_d_values";
    const FAMILIES: Families = Families::of(Family::LinearGradients);

    fn describe(&self) -> Kernel {
        let pieces = Pieces::new(self.form, self.width, self.declare())
            .product()
            .phi(self.phi)
            .keys()
            .states()
            .text(FEATURE_SIDE)
            .text(shader!("linear_attention/state_rows"));
        let pieces = if self.form.causal {
            pieces.d_out().stats().text(OTHER).text(shader!("linear_attention/after"))
        } else {
            pieces.text(NONE_AFTER)
        };
        pieces
            .chunks(self.logs, "p.kv_len")
            .store("p.value_dim")
            .text(shader!("linear_attention/linear_d_values"))
            .kernel()
    }

    fn all() -> impl IntoIterator<Item = Self> {
        listed(|form, width, dtype, phi| LinearDValues {
            k: dtype,
            states: Some(DType::F32),
            d_out: form.causal.then_some(dtype),
            stats: form.causal.then_some(DType::F32),
            scores: form.causal.then_some(DType::F32),
            logs: form.logs(),
            chunks: form.chunks(),
            written: dtype,
            form,
            phi,
            width,
        })
    }
}
