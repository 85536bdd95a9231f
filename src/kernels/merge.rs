//! Twin of `merge.wgsl`.

use super::shader;
use crate::kernel::{Binding, Constant, Kernel, Slots, View, Width, params, shared};
use crate::tensor::DType;

/// What changes the text of the merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Merge {
    /// How many parts come from buffers of their own.
    pub parts: usize,
    /// Whether out and lse hold one more.
    pub accumulates: bool,
    pub part: DType,
    pub out: DType,
}

/// Parts that one dispatch takes: with out and lse, all the buffers every device binds.
pub(crate) const PARTS: usize = 3;
/// Rows of a workgroup, as in the shader.
pub(crate) const ROWS: usize = 4;

params! {
    pub(crate) struct MergePart {
        out: View,
        lse: View,
    }
}

params! {
    pub(crate) struct Params {
        out: View,
        lse: View,
        parts: [MergePart; PARTS],
        q_len: u32,
        value_dim: u32,
        neg_inf: f32,
        pad: u32,
    }
}
shared! { [MergePart; PARTS] = "array<MergePart, 3>" }

impl Merge {
    pub fn describe(&self) -> Kernel {
        let mut bindings =
            vec![Binding::write("out", self.out, Width::One), Binding::write("lse", DType::F32, Width::One)];
        let mut slots = String::new();
        let of = |dtype| Slots { count: self.parts, dtype };
        of(self.part).declare_as("part_out", Width::One, false, &mut bindings, &mut slots);
        of(DType::F32).declare_as("part_lse", Width::One, false, &mut bindings, &mut slots);
        let constants = [
            Constant::U32("PARTS", self.parts as u32),
            Constant::Bool("ACCUMULATES", self.accumulates),
            Constant::Bool("NATURAL_SCORES", true),
        ];
        let parts = [shader!("tensor/view"), shader!("softmax/online"), shader!("merge"), &slots];
        Kernel::new::<Params>(&constants, bindings, &parts, 64)
    }

    pub fn all() -> impl Iterator<Item = Self> {
        (1..=PARTS).flat_map(|parts| {
            [false, true].into_iter().flat_map(move |accumulates| {
                super::FLOATS.into_iter().flat_map(move |part| {
                    super::FLOATS.into_iter().map(move |out| Merge { parts, accumulates, part, out })
                })
            })
        })
    }
}
