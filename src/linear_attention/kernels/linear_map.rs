//! The host side of `linear_map.wgsl`.

use super::linear::{LinearNumbers, Randoms};
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// Random features.
    LinearMap, LinearMapCall
    tensors {
        rows: One Read F32 one view,
        row_features: One Write F32 one view,
        // The logarithms of the scales of the features.
        logs: Opt Write F32 one,
    }
    numbers {
        numbers: LinearNumbers,
    }
    variant {
        kind: Randoms,
    }
}

pub(crate) const WORKGROUP: usize = 64;

const KEEP: &str = "fn keep_log(b: u32, h: u32, i: u32, log: f32) { logs_store((b * p.kv_heads + h) * p.kv_len + i, log); }\n";
const NO_LOG: &str = "fn keep_log(b: u32, h: u32, i: u32, log: f32) {}\n";

impl Variant for LinearMap {
    const LABEL: &'static str = "attention.linear_map";
    const FAMILIES: Families = Families::of(Family::LinearAttention);

    fn describe(&self) -> Kernel {
        let half = format!("const HALF_SQUARE: f32 = {};\n", self.kind.half_square());
        let mut parts = vec![
            shader!("tensor/view"),
            shader!("linear_attention/random"),
            shader!("linear_attention/linear_map"),
            &half,
            self.kind.largest(),
            self.kind.features(),
            if self.logs.is_some() { KEEP } else { NO_LOG },
        ];
        if matches!(self.kind, Randoms::Trigonometric | Randoms::Fourier) {
            parts.push(shader!("linear_attention/sine_cosine"));
        }
        self.declare()
            .u32("WORKGROUP", WORKGROUP as u32)
            .bool("IS_UNIT", self.kind == Randoms::Fourier)
            .kernel(&parts, WORKGROUP as u32, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        Randoms::ALL.into_iter().flat_map(|kind| {
            FLOATS.into_iter().flat_map(move |rows| {
                let of = |logs| LinearMap { rows, row_features: DType::F32, logs, kind };
                [None, Some(DType::F32)].map(of)
            })
        })
    }
}
