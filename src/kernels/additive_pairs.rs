//! Twin of `additive_pairs.wgsl`.

use super::dropout::DropoutKind;
use super::{mask, shader};
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

pub(crate) const WORKGROUP: usize = 64;

/// What changes the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct AdditivePairs {
    /// Whether it sums the weights of queries.
    pub totals: bool,
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
            if self.totals {
                Binding::write("row_stats", DType::F32, Width::One)
            } else {
                Binding::read("row_stats", DType::F32, Width::One)
            },
        ];
        bindings.extend(self.mask.bindings());
        bindings.extend(self.drop.binding());
        let constants = [
            Constant::U32("WORKGROUP", WORKGROUP as u32),
            Constant::Bool("TOTALS", self.totals),
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
            if self.totals { "" } else { "fn row_stats_store(o: u32, x: f32) {}\n" },
        ];
        let kernel = Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32);
        Kernel { workgroup_memory: 4 * WORKGROUP as u32, ..kernel }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        let masks = mask::MaskVariant::all().into_iter().map(mask::MaskVariant::scores_only);
        let drop = DropoutKind::None;
        let masked =
            masks.flat_map(move |mask| [false, true].map(|totals| AdditivePairs { totals, drop, mask }));
        let plain = mask::MaskVariant::default();
        let dropped = move |drop| AdditivePairs { totals: false, drop, mask: plain };
        masked.chain(DropoutKind::ALL.into_iter().map(dropped))
    }
}
