//! Twin of `captured_gradients.wgsl`.

use super::key_lists;
use crate::attention::plan::CapturedGradientsPlan;
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Untyped, Variant, WIDTHS, Width, families, kernel, shader};
use crate::mask::kernels::dropout::{DropoutKind, Dropped};
use crate::mask::kernels::{MaskVariant, Masked};
use crate::tensor::DType;

const WORKGROUP: u32 = CapturedGradientsPlan::WORKGROUP;
const TILE: u32 = CapturedGradientsPlan::TILE;

kernel! {
    /// The kernel of the gradient of a tensor that a score function reads.
    CapturedGradients, CapturedGradientsCall
    tensors {
        q: One Read F32 width view,
        k: One Read F32 width view,
        v: One Read F32 width view,
        d_out: One Read F32 width view,
        row_stats: Raw Read F32 one,
        gradient: Placed Write F32 one view,
    }
    // Without sinks, because lse includes them.
    groups {
        mask: Masked MaskVariant,
        drop: Dropped DropoutKind,
    }
    numbers {
        /// The shape of the gradient.
        shape: [u32; 4],
        heads: u32,
        group: u32,
        head_dim: u32,
        value_dim: u32,
        /// 1 if the gradient is added to the tensor's previous values.
        accumulates: u32,
        scale: f32,
        /// Workgroups before those of this dispatch.
        first: u32,
        elements: u32,
        /// Queries of all heads and batch entries.
        rows: u32,
        /// Parts of an element.
        parts: u32,
        /// Queries of a part.
        part_rows: u32,
    }
    variant {
        /// The index of the tensor among the tensors that the score function reads.
        captured: usize,
        width: Width,
        /// True if scores are summed in the order of the CPU variant of `fused_backward.wgsl`.
        chains: bool,
    }
}

impl Variant for CapturedGradients {
    const LABEL: &'static str = "attention.captured_gradients";

    fn describe(&self) -> Kernel {
        let mask = self.mask.wgsl_with_captured_slope(self.captured);
        let parts = [
            shader!("tensor/view"),
            shader!("attention/backward/stats"),
            shader!("attention/backward/pair"),
            shader!("attention/backward/rows"),
            key_lists::text(false),
            shader!("attention/captured_gradients"),
            &mask,
        ];
        // Each variable takes a multiple of 16 bytes.
        let workgroup_memory = 4 * (TILE + 3 * WORKGROUP) + 16;
        self.declare()
            .u32("WORKGROUP", WORKGROUP)
            .u32("TILE", TILE)
            .bool("IN_FOURS", self.width == Width::Four)
            .bool("WIDE", true)
            .bool("IN_CHAINS", self.chains)
            .bool("PER_PAIR_MASK", self.mask.is_per_pair())
            .kernel(&parts, WORKGROUP, workgroup_memory)
    }

    fn families(&self) -> Families {
        families(&[Some(Family::ScoreGradients)], &[self.q, self.gradient])
    }

    /// Each value of each axis, not all combinations.
    fn all() -> impl IntoIterator<Item = Self> {
        let typed = |dtype, width| CapturedGradients {
            q: dtype,
            k: dtype,
            v: dtype,
            d_out: dtype,
            row_stats: Untyped,
            gradient: DType::F32,
            mask: MaskVariant::default(),
            drop: DropoutKind::None,
            captured: 0,
            width,
            chains: false,
        };
        let plain = typed(DType::F32, Width::Four);
        let mut all: Vec<_> = FLOATS.map(|gradient| CapturedGradients { gradient, ..plain }).into();
        for dtype in FLOATS {
            all.extend(WIDTHS.map(|width| typed(dtype, width)));
        }
        all.extend(DropoutKind::ALL.map(|drop| CapturedGradients { drop, ..plain }));
        all.push(CapturedGradients { chains: true, ..plain });
        let masks = MaskVariant::all().into_iter().map(MaskVariant::scores_only);
        all.extend(masks.map(|mask| CapturedGradients { mask, ..plain }));
        all.extend(MaskVariant::listed_score_mod().map(|mask| CapturedGradients { mask, ..plain }));
        // Drops kernels with more tensors than every device can bind.
        all.retain(|kernel| kernel.declare().bindings.len() <= 8);
        all
    }
}
