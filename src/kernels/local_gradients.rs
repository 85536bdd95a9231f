//! Twin of `local_gradients.wgsl`.

use super::local::{TOTALS_BYTES, WORKGROUP, lengths};
use super::{FLOATS, WIDTHS, shader};
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text of what the gradients are sums of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LocalGradients {
    pub dtype: DType,
    /// Whether sequences have lengths.
    pub lengths: bool,
    /// Whether positions have a gradient, and whether that is added to what is there.
    pub d_positions: Option<bool>,
    /// Of q, k, v and d_out.
    pub width: Width,
}

params! {
    pub(crate) struct Params {
        q: View,
        k: View,
        v: View,
        d_out: View,
        positions: View,
        lengths: View,
        band: View,
        d_positions: View,
        q_len: u32,
        kv_len: u32,
        head_dim: u32,
        value_dim: u32,
        batch: u32,
        group: u32,
        heads: u32,
        half_window: i32,
        step: u32,
        scale: f32,
        narrowness: f32,
        steepness: f32,
    }
}

const NO_D_POSITIONS: &str = "fn d_positions_at(o: u32) -> f32 { return 0.0; }\n\
     fn d_positions_store(o: u32, x: f32) {}\n";

impl LocalGradients {
    pub fn describe(&self) -> Kernel {
        let read = |name| Binding::read(name, self.dtype, self.width);
        let mut bindings = Vec::from(["q", "k", "v", "d_out"].map(read));
        bindings.push(Binding::read("positions", DType::F32, Width::One));
        let mut parts = vec![
            shader!("tensor/view"),
            shader!("local_gradients"),
            shader!("local/reach"),
            shader!("local/scores"),
            shader!("local/totals"),
            lengths(self.lengths, &mut bindings),
        ];
        bindings.push(Binding::write("band", DType::F32, Width::One));
        if self.d_positions.is_some() {
            bindings.push(Binding::write("d_positions", DType::F32, Width::One));
        } else {
            parts.push(NO_D_POSITIONS);
        }
        let constants = [
            Constant::U32("WORKGROUP", WORKGROUP as u32),
            Constant::Bool("HAS_D_POSITIONS", self.d_positions.is_some()),
            Constant::Bool("ACCUMULATES", self.d_positions == Some(true)),
        ];
        let kernel = Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32);
        Kernel { workgroup_memory: TOTALS_BYTES, ..kernel }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        FLOATS.into_iter().flat_map(|dtype| {
            [false, true].into_iter().flat_map(move |lengths| {
                [None, Some(false), Some(true)].into_iter().flat_map(move |d_positions| {
                    WIDTHS.map(|width| LocalGradients { dtype, lengths, d_positions, width })
                })
            })
        })
    }
}
