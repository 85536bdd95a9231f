//! Twin of `classify.wgsl`.

use super::{mask, shader};
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text of the classification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Classify {
    /// Only the parts that a block map stands for.
    pub mask: mask::MaskVariant,
}

params! {
    pub(crate) struct Params {
        map: View,
        mask: mask::MaskParams,
        size: [u32; 2],
        map_heads: u32,
        batches: u32,
        heads: u32,
        pad0: u32,
        pad1: u32,
        pad2: u32,
    }
}

impl Classify {
    pub fn describe(&self) -> Kernel {
        let mut bindings = vec![Binding::write("map", DType::U32, Width::One)];
        bindings.extend(self.mask.bindings());
        let constants = [Constant::Bool("PER_PAIR_MASK", self.mask.is_per_pair())];
        let mask = self.mask.wgsl();
        let parts = [shader!("tensor/view"), shader!("classify"), shader!("mask/document_range"), &mask];
        // A word of each of 64 invocations, and a summary of 40 bytes of each and of eight together.
        Kernel {
            workgroup_memory: 64 * 4 + 72 * 40,
            ..Kernel::new::<Params>(&constants, bindings, &parts, 64)
        }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        mask::MaskVariant::all().into_iter().map(|mask| Classify { mask: mask.blocks_only() })
    }
}
