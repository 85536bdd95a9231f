//! Twin of `captured_gradients.wgsl`.

use super::dropout::DropoutKind;
use super::{FLOATS, WIDTHS, mask, shader};
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::plan::CapturedGradientsPlan;
use crate::tensor::DType;

const WORKGROUP: u32 = CapturedGradientsPlan::WORKGROUP;
const TILE: u32 = CapturedGradientsPlan::TILE;

/// What changes the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CapturedGradients {
    /// Which tensor of the mask's score function.
    pub captured: usize,
    pub gradient: DType,
    pub dtype: DType,
    /// Whether q, k, v and d_out load in fours along their channels.
    pub width: Width,
    /// Whether scores are summed as the software form of `fused_backward.wgsl` sums them.
    pub chains: bool,
    pub drop: DropoutKind,
    /// Without sinks, which lse has.
    pub mask: mask::MaskVariant,
}

params! {
    pub(crate) struct Params {
        q: View,
        k: View,
        v: View,
        d_out: View,
        gradient: View,
        dropout: View,
        mask: mask::MaskParams,
        shape: [u32; 4],
        seed: [u32; 2],
        heads: u32,
        group: u32,
        head_dim: u32,
        value_dim: u32,
        accumulates: u32,
        dropout_threshold: u32,
        dropout_scale: f32,
        scale: f32,
        first: u32,
        elements: u32,
        rows: u32,
        parts: u32,
        part_rows: u32,
        pad: u32,
    }
}

impl CapturedGradients {
    pub fn describe(&self) -> Kernel {
        let constants = [
            Constant::U32("WORKGROUP", WORKGROUP),
            Constant::U32("TILE", TILE),
            Constant::Bool("IN_FOURS", self.width == Width::Four),
            Constant::Bool("WIDE", true),
            Constant::Bool("IN_CHAINS", self.chains),
            Constant::Bool("PER_PAIR_MASK", self.mask.is_per_pair()),
            Constant::Bool("HAS_DROPOUT", self.drop != DropoutKind::None),
        ];
        let mut bindings: Vec<_> =
            ["q", "k", "v", "d_out"].map(|name| Binding::read(name, self.dtype, self.width)).into();
        bindings.push(Binding::read("row_stats", DType::F32, Width::One));
        bindings.push(Binding::write("gradient", self.gradient, Width::One));
        bindings.extend(self.mask.bindings());
        bindings.extend(self.drop.binding());
        let mask = self.mask.wgsl_with_captured_slope(self.captured);
        let parts = [
            shader!("tensor/view"),
            shader!("backward/stats"),
            shader!("backward/pair"),
            shader!("backward/rows"),
            shader!("captured_gradients"),
            self.drop.wgsl(),
            &mask,
        ];
        // Variables are counted in sixteens.
        let workgroup_memory = 4 * (TILE + 3 * WORKGROUP) + 16;
        Kernel { workgroup_memory, ..Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP) }
    }

    /// Each value of each axis, not their whole product.
    pub fn all() -> Vec<Self> {
        let plain = CapturedGradients {
            captured: 0,
            gradient: DType::F32,
            dtype: DType::F32,
            width: Width::Four,
            chains: false,
            drop: DropoutKind::None,
            mask: mask::MaskVariant::default(),
        };
        let mut all: Vec<_> = FLOATS.map(|gradient| CapturedGradients { gradient, ..plain }).into();
        for dtype in FLOATS {
            all.extend(WIDTHS.map(|width| CapturedGradients { dtype, width, ..plain }));
        }
        all.extend(DropoutKind::ALL.map(|drop| CapturedGradients { drop, ..plain }));
        all.push(CapturedGradients { chains: true, ..plain });
        let masks = mask::MaskVariant::all().into_iter().map(mask::MaskVariant::scores_only);
        all.extend(masks.map(|mask| CapturedGradients { mask, ..plain }));
        all.extend(mask::MaskVariant::listed_score_mod().map(|mask| CapturedGradients { mask, ..plain }));
        // With more tensors than every device binds.
        all.retain(|kernel| kernel.describe().bindings.len() <= 8);
        all
    }
}
