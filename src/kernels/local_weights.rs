//! Twin of `local_weights.wgsl`.

use super::local::{TOTALS_BYTES, WORKGROUP, lengths};
use super::{FLOATS, WIDTHS, shader};
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text of the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LocalWeights {
    pub dtype: DType,
    /// Whether sequences have lengths.
    pub lengths: bool,
    /// Whether weights go to the caller too.
    pub weights: bool,
    /// Of q and k.
    pub width: Width,
}

params! {
    pub(crate) struct Params {
        q: View,
        k: View,
        positions: View,
        lengths: View,
        band: View,
        weights: View,
        q_len: u32,
        kv_len: u32,
        head_dim: u32,
        group: u32,
        half_window: i32,
        step: u32,
        scale: f32,
        narrowness: f32,
    }
}

const NO_WEIGHTS: &str = "fn weights_store(o: u32, x: f32) {}\n";

impl LocalWeights {
    pub fn describe(&self) -> Kernel {
        let mut bindings = vec![
            Binding::read("q", self.dtype, self.width),
            Binding::read("k", self.dtype, self.width),
            Binding::read("positions", DType::F32, Width::One),
        ];
        let mut parts = vec![
            shader!("tensor/view"),
            shader!("local_weights"),
            shader!("local/reach"),
            shader!("local/scores"),
            shader!("local/totals"),
            lengths(self.lengths, &mut bindings),
        ];
        bindings.push(Binding::write("band", DType::F32, Width::One));
        if self.weights {
            bindings.push(Binding::write("weights", DType::F32, Width::One));
        } else {
            parts.push(NO_WEIGHTS);
        }
        let constants =
            [Constant::U32("WORKGROUP", WORKGROUP as u32), Constant::Bool("HAS_WEIGHTS", self.weights)];
        let kernel = Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32);
        Kernel { workgroup_memory: TOTALS_BYTES, ..kernel }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        FLOATS.into_iter().flat_map(|dtype| {
            [[false; 2], [false, true], [true, false], [true; 2]].into_iter().flat_map(
                move |[lengths, weights]| WIDTHS.map(|width| LocalWeights { dtype, lengths, weights, width }),
            )
        })
    }
}
