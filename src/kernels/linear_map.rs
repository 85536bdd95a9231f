//! Twin of `linear_map.wgsl`.

use super::linear::{Params, Randoms};
use super::shader;
use crate::kernel::{Binding, Constant, Kernel, Width};
use crate::tensor::DType;

/// What changes the text of random features.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LinearMap {
    pub kind: Randoms,
    pub rows: DType,
    /// Whether the logarithms of their scales are kept.
    pub logs: bool,
}

pub(crate) const WORKGROUP: usize = 64;

const KEEP: &str = "fn keep_log(b: u32, h: u32, i: u32, log: f32) { logs_store((b * p.kv_heads + h) * p.kv_len + i, log); }\n";
const NO_LOG: &str = "fn keep_log(b: u32, h: u32, i: u32, log: f32) {}\n";

impl LinearMap {
    pub fn describe(&self) -> Kernel {
        let mut bindings = vec![
            Binding::read("rows", self.rows, Width::One),
            Binding::write("features", DType::F32, Width::One),
        ];
        bindings.extend(self.logs.then(|| Binding::write("logs", DType::F32, Width::One)));
        let constants = [
            Constant::U32("WORKGROUP", WORKGROUP as u32),
            Constant::Bool("IS_UNIT", self.kind == Randoms::Fourier),
        ];
        let half = format!("const HALF_SQUARE: f32 = {};\n", self.kind.half_square());
        let mut parts = vec![
            shader!("tensor/view"),
            shader!("linear/params"),
            shader!("linear/random"),
            shader!("linear_map"),
            &half,
            self.kind.largest(),
            self.kind.features(),
            if self.logs { KEEP } else { NO_LOG },
        ];
        if matches!(self.kind, Randoms::Trigonometric | Randoms::Fourier) {
            parts.push(shader!("linear/sine_cosine"));
        }
        Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32)
    }

    pub fn all() -> impl Iterator<Item = Self> {
        Randoms::ALL.into_iter().flat_map(|kind| {
            super::FLOATS
                .into_iter()
                .flat_map(move |rows| [false, true].map(|logs| LinearMap { kind, rows, logs }))
        })
    }
}
