//! The host side of `linear_scores.wgsl`.

use super::linear::{LinearForm, LinearNumbers, Phi, Pieces, listed};
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, Width, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The products within chunks: of queries and keys, or of d_out and v for the backward pass.
    LinearScores, LinearScoresCall
    tensors {
        q: Opt Read F32 width view,
        k: Opt Read F32 width view,
        d_out: Opt Read F32 width view,
        v: Opt Read F32 width view,
        stats: Opt Read F32 four,
        logs: Opt Read F32 one,
        chunks: Opt Read U32 one,
        scores: Opt Write F32 four,
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

const FEATURES: &str = "fn side_channels() -> u32 { return p.features; }\n\
    fn query_side4(b: u32, h: u32, i: u32, c: u32) -> vec4<f32> { return query_feature4(b, h, i, c); }\n\
    fn key_side4(b: u32, kv: u32, j: u32, c: u32) -> vec4<f32> { return key_feature4(b, kv, j, c); }\n\
    fn side_product(b: u32, h: u32, i: u32, products: vec4<f32>) -> vec4<f32> { return products; }\n";
const GRADIENTS: &str = "fn side_channels() -> u32 { return p.value_dim; }\n\
    fn query_side4(b: u32, h: u32, i: u32, c: u32) -> vec4<f32> { return d_out4(b, h, i, c); }\n\
    fn key_side4(b: u32, kv: u32, j: u32, c: u32) -> vec4<f32> { return value4(b, kv, j, c); }\n\
    fn side_product(b: u32, h: u32, i: u32, products: vec4<f32>) -> vec4<f32> {\n    \
        let stats = stats_of(b, h, i);\n    return products * stats.x + vec4<f32>(stats.y);\n}\n";

impl Variant for LinearScores {
    const LABEL: &'static str = "attention.linear_scores";
    const FAMILIES: Families = Families::of(Family::LinearAttention);

    fn describe(&self) -> Kernel {
        let pieces = Pieces::new(self.form, self.width, self.declare()).product().row_logs();
        let pieces = if self.d_out.is_some() {
            pieces.d_out().values().stats().text(GRADIENTS)
        } else {
            pieces.phi(self.phi).queries().keys().text(FEATURES)
        };
        pieces.chunks(self.logs, "p.kv_len").text(shader!("linear_attention/linear_scores")).kernel()
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let of = |of_gradients: bool| {
            let all = listed(move |form, width, dtype, phi| {
                let [features, gradients] = [!of_gradients, of_gradients].map(|used| used.then_some(dtype));
                LinearScores {
                    q: features,
                    k: features,
                    d_out: gradients,
                    v: gradients,
                    stats: gradients.map(|_| DType::F32),
                    logs: form.logs(),
                    chunks: form.chunks(),
                    scores: Some(DType::F32),
                    form,
                    phi: if of_gradients { Phi::Identity } else { phi },
                    width,
                }
            });
            all.into_iter().filter(|scores| scores.form.causal).collect::<Vec<_>>()
        };
        [of(false), of(true)].concat()
    }
}
