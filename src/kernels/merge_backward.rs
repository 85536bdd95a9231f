//! Twin of `merge_backward.wgsl`.

use super::shader;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text of the gradients of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MergeBackward {
    /// Of outputs: the part's, the merged one, its gradient, the part's gradient.
    pub part: DType,
    pub out: DType,
    pub d_out: DType,
    pub d_part: DType,
    /// Whether there is a gradient with respect to the merged log-sum-exp.
    pub d_lse: bool,
}

/// Rows of a workgroup, and invocations that share one.
pub(crate) const ROWS: usize = 4;
const ROW_LANES: usize = 16;

const D_LSE: &str =
    "fn d_lse_of(b: u32, h: u32, i: u32) -> f32 { return d_lse_at(view_at(p.d_lse, b, h, i, 0u)); }\n";
const NO_D_LSE: &str = "fn d_lse_of(b: u32, h: u32, i: u32) -> f32 { return 0.0; }\n";

params! {
    pub(crate) struct Params {
        part_out: View,
        part_lse: View,
        out: View,
        lse: View,
        d_out: View,
        d_lse: View,
        d_part_out: View,
        d_part_lse: View,
        q_len: u32,
        value_dim: u32,
        neg_inf: f32,
        pad: u32,
    }
}

impl MergeBackward {
    pub fn describe(&self) -> Kernel {
        let read = |name, dtype| Binding::read(name, dtype, Width::One);
        let write = |name, dtype| Binding::write(name, dtype, Width::One);
        let bindings = [
            Some(read("part_out", self.part)),
            Some(read("part_lse", DType::F32)),
            Some(read("out", self.out)),
            Some(read("lse", DType::F32)),
            Some(read("d_out", self.d_out)),
            self.d_lse.then(|| read("d_lse", DType::F32)),
            Some(write("d_part_out", self.d_part)),
            Some(write("d_part_lse", DType::F32)),
        ];
        let constants = [Constant::U32("ROWS", ROWS as u32), Constant::U32("ROW_LANES", ROW_LANES as u32)];
        let d_lse = if self.d_lse { D_LSE } else { NO_D_LSE };
        let parts = [shader!("tensor/view"), shader!("merge_backward"), d_lse];
        let invocations = ROWS * ROW_LANES;
        let bindings = bindings.into_iter().flatten().collect();
        let kernel = Kernel::new::<Params>(&constants, bindings, &parts, invocations as u32);
        Kernel { workgroup_memory: (invocations * size_of::<f32>()) as u32, ..kernel }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        super::FLOATS.into_iter().flat_map(|part| {
            super::FLOATS.into_iter().flat_map(move |out| {
                [false, true].into_iter().flat_map(move |d_lse| {
                    [[out, part], [DType::F32, part], [out, DType::F32]]
                        .into_iter()
                        .map(move |[d_out, d_part]| MergeBackward { part, out, d_out, d_part, d_lse })
                })
            })
        })
    }
}
