//! Twin of `selected_weights.wgsl`.

use super::selected_keys::hiding_masks;
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, WIDTHS, Width, kernel, shader};
use crate::mask::kernels::{MaskVariant, Masked};
use crate::tensor::DType;

kernel! {
    /// The kernel of the weights of indices.
    SelectedWeights, SelectedWeightsCall
    tensors {
        q: One Read F32 width view,
        k: One Read F32 width view,
        lse: One Read F32 one view,
        indices: One Read U32 one view,
        weights: One Write F32 one view,
    }
    // Only the rules that hide keys.
    groups { mask: Masked MaskVariant, }
    numbers {
        heads: u32,
        out_heads: u32,
        group: u32,
        /// Query heads that share a list.
        heads_each: u32,
        count: u32,
        block: u32,
        head_dim: u32,
        scale: f32,
    }
    variant { width: Width, }
}

/// Invocations of a workgroup.
pub(crate) const WORKGROUP: u32 = 32;

impl Variant for SelectedWeights {
    const LABEL: &'static str = "attention.selected_weights";
    const FAMILIES: Families = Families::of(Family::SelectedKeys);

    fn describe(&self) -> Kernel {
        let parts = [shader!("tensor/view"), shader!("selected/selected_weights"), &self.mask.wgsl()];
        self.declare()
            .u32("WORKGROUP", WORKGROUP)
            .bool("PER_PAIR_MASK", self.mask.is_per_pair())
            .kernel(&parts, WORKGROUP, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let of = |dtype, width, mask| SelectedWeights {
            q: dtype,
            k: dtype,
            lse: DType::F32,
            indices: DType::U32,
            weights: dtype,
            mask,
            width,
        };
        let typed = FLOATS
            .into_iter()
            .flat_map(move |dtype| WIDTHS.map(|width| of(dtype, width, MaskVariant::default())));
        let masks = hiding_masks().skip(1);
        typed
            .chain(masks.map(move |mask| of(DType::F32, Width::Four, mask)))
            .filter(|kernel| kernel.declare().bindings.len() <= 8)
    }
}
