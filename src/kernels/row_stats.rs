//! Twin of `row_stats.wgsl`.

use super::{FLOATS, WIDTHS, shader};
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

pub(crate) const WORKGROUP: usize = 64;

/// What changes the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RowStats {
    pub dtype: DType,
    /// Whether out and its gradient load in fours.
    pub width: Width,
    pub d_lse: bool,
}

params! {
    pub(crate) struct Params {
        out: View,
        d_out: View,
        lse: View,
        d_lse: View,
        heads: u32,
        q_len: u32,
        value_dim: u32,
        first: u32,
        rows: u32,
        neg_inf: f32,
        pad: [u32; 2],
    }
}

impl RowStats {
    pub fn describe(&self) -> Kernel {
        let mut bindings = vec![
            Binding::read("out", self.dtype, self.width),
            Binding::read("d_out", self.dtype, self.width),
            Binding::read("lse", DType::F32, Width::One),
        ];
        if self.d_lse {
            bindings.push(Binding::read("d_lse", DType::F32, Width::One));
        }
        bindings.push(Binding::write("row_stats", DType::F32, Width::One));
        let constants =
            [Constant::U32("WORKGROUP", WORKGROUP as u32), Constant::Bool("HAS_D_LSE", self.d_lse)];
        let d_lse = if self.d_lse { "" } else { "fn d_lse_at(o: u32) -> f32 { return 0.0; }\n" };
        let parts = [shader!("tensor/view"), shader!("row_stats"), d_lse];
        Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32)
    }

    pub fn all() -> impl Iterator<Item = Self> {
        let of = |dtype| {
            WIDTHS
                .into_iter()
                .flat_map(move |width| [false, true].map(|d_lse| RowStats { dtype, width, d_lse }))
        };
        FLOATS.into_iter().flat_map(of)
    }
}
