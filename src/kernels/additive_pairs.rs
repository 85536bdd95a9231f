//! Twin of `additive_pairs.wgsl`.

use super::dropout::DropoutKind;
use super::{mask, shader};
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

pub(crate) const WORKGROUP: usize = 64;

/// What changes the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct AdditivePairs {
    pub drop: DropoutKind,
    pub mask: mask::MaskVariant,
}

params! {
    pub(crate) struct Params {
        d_scores: View,
        weights: View,
        dropout: View,
        mask: mask::MaskParams,
        first: [u32; 4],
        end: [u32; 4],
        seed: [u32; 2],
        heads: u32,
        dropout_threshold: u32,
        dropout_scale: f32,
        scale: f32,
        pad: [u32; 2],
    }
}

impl AdditivePairs {
    pub fn describe(&self) -> Kernel {
        let mut bindings = vec![
            Binding::write("d_scores", DType::F32, Width::One),
            Binding::write("weights", DType::F32, Width::One),
            Binding::read("row_stats", DType::F32, Width::One),
        ];
        bindings.extend(self.mask.bindings());
        bindings.extend(self.drop.binding());
        let constants = [
            Constant::U32("WORKGROUP", WORKGROUP as u32),
            Constant::Bool("PER_PAIR_MASK", self.mask.is_per_pair()),
            Constant::Bool("HAS_DROPOUT", self.drop != DropoutKind::None),
        ];
        let mask = self.mask.wgsl_with_slope();
        let parts = [
            shader!("tensor/view"),
            shader!("backward/stats"),
            shader!("backward/pair"),
            shader!("additive_pairs"),
            self.drop.wgsl(),
            &mask,
        ];
        Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32)
    }

    pub fn all() -> impl Iterator<Item = Self> {
        let masks = mask::MaskVariant::all().into_iter().map(mask::MaskVariant::scores_only);
        let masked = masks.map(|mask| AdditivePairs { drop: DropoutKind::None, mask });
        let plain = mask::MaskVariant::default();
        masked.chain(DropoutKind::ALL.into_iter().map(move |drop| AdditivePairs { drop, mask: plain }))
    }
}
