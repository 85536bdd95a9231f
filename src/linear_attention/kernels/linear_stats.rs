//! The host side of `linear_stats.wgsl`.

use super::linear::{LinearForm, LinearNumbers, Phi, Pieces, listed};
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, Width, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The statistics of each query that the backward pass reads.
    LinearStats, LinearStatsCall
    tensors {
        // These tensors only if results are divided by the norm.
        q: Opt Read F32 width view,
        d_out: Opt Read F32 width view,
        out: Opt Read F32 width view,
        states: Opt Read F32 four,
        scores: Opt Read F32 four,
        logs: Opt Read F32 one,
        chunks: Opt Read U32 one,
        stats: Opt Write F32 four,
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

const UNNORMALISED: &str = "fn norm_stats(b: u32, h: u32, kv: u32, slot: u32, chunk: Chunk, row: u32, stats: vec4<f32>) -> vec4<f32> {\n    \
    return vec4<f32>(p.scale, 0.0, stats.zw);\n}\n";

impl Variant for LinearStats {
    const LABEL: &'static str = "attention.linear_stats";
    const FAMILIES: Families = Families::of(Family::LinearGradients);

    fn describe(&self) -> Kernel {
        let pieces = Pieces::new(self.form, self.width, self.declare()).phi(self.phi);
        let pieces = if self.q.is_some() {
            pieces
                .queries()
                .d_out()
                .tensor("out", "out4", "p.value_dim", ["", ""])
                .states()
                .text(shader!("linear_attention/norm_stats"))
        } else {
            pieces.text(UNNORMALISED)
        };
        pieces.chunks(self.logs, "p.q_len").text(shader!("linear_attention/linear_stats")).kernel()
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let of = |normalised: bool| {
            listed(move |form, width, dtype, phi| {
                let [rows, floats] = [dtype, DType::F32].map(|dtype| normalised.then_some(dtype));
                LinearStats {
                    q: rows,
                    d_out: rows,
                    out: rows,
                    states: floats,
                    scores: floats.filter(|_| form.causal),
                    logs: form.logs().filter(|_| form.causal),
                    chunks: form.chunks(),
                    stats: Some(DType::F32),
                    form,
                    phi,
                    width,
                }
            })
        };
        [of(false), of(true)].concat()
    }
}
