//! The host side of `linear_d_keys.wgsl`.

use super::linear::{LinearForm, LinearNumbers, Phi, Pieces, listed};
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, Width, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The gradient of keys.
    LinearDKeys, LinearDKeysCall
    tensors {
        // Absent if φ is the identity.
        k: Opt Read F32 width view,
        v: One Read F32 width view,
        states: Opt Read F32 four,
        // These tensors only if causal.
        q: Opt Read F32 width view,
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

const VALUE_SIDE: &str =
    "fn value_side4(b: u32, kv: u32, j: u32, c: u32) -> vec4<f32> { return value4(b, kv, j, c); }\n";
const OTHER: &str =
    "fn other4(b: u32, h: u32, i: u32, c: u32) -> vec4<f32> { return query_feature4(b, h, i, c); }\n";
pub(super) const NONE_AFTER: &str = "fn add_after(b: u32, kv: u32, slot: u32, chunk: Chunk, tile: Tile) {}\n";

impl Variant for LinearDKeys {
    const LABEL: &'static str = "attention.linear_d_keys";
    const FAMILIES: Families = Families::of(Family::LinearGradients);

    fn describe(&self) -> Kernel {
        let pieces = Pieces::new(self.form, self.width, self.declare())
            .product()
            .phi(self.phi)
            .slope("k", self.phi)
            .values()
            .states()
            .text(VALUE_SIDE)
            .text(shader!("linear_attention/state_columns"));
        let pieces = if self.form.causal {
            pieces.queries().text(OTHER).text(shader!("linear_attention/after"))
        } else {
            pieces.text(NONE_AFTER)
        };
        pieces
            .chunks(self.logs, "p.kv_len")
            .store("p.features")
            .text(shader!("linear_attention/linear_d_keys"))
            .kernel()
    }

    fn all() -> impl IntoIterator<Item = Self> {
        listed(|form, width, dtype, phi| LinearDKeys {
            k: (phi != Phi::Identity).then_some(dtype),
            v: dtype,
            states: Some(DType::F32),
            q: form.causal.then_some(dtype),
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
