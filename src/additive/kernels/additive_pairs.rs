//! Twin of `additive_pairs.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::{Kernel, Untyped, Variant, kernel, shader};
use crate::mask::kernels::dropout::{DropoutKind, Dropped};
use crate::mask::kernels::{MaskVariant, Masked};
use crate::tensor::{Access, DType};

pub(crate) const WORKGROUP: usize = 64;

kernel! {
    /// The gradients of scores and the weights of a rectangle of pairs, or the sums of the weights
    /// of queries.
    AdditivePairs, AdditivePairsCall
    tensors {
        d_scores: Placed Write F32 one view,
        weights: Placed Write F32 one view,
        row_stats: Raw Read F32 one,
    }
    groups {
        mask: Masked MaskVariant,
        drop: Dropped DropoutKind,
    }
    numbers {
        /// Batch entry, query and key of the first pair of the rectangle.
        first: [u32; 4],
        /// Batch entry, query and key past the last pair of the rectangle.
        end: [u32; 4],
        heads: u32,
        scale: f32,
    }
    variant {
        /// True if the kernel sums the weights of queries.
        totals: bool,
    }
}

impl Variant for AdditivePairs {
    const LABEL: &'static str = "attention.additive_pairs";
    const FAMILIES: Families = Families::of(Family::RowStats);

    fn describe(&self) -> Kernel {
        let mask = self.mask.wgsl_with_slope();
        let parts = [
            shader!("tensor/view"),
            shader!("attention/backward/stats"),
            shader!("attention/backward/pair"),
            shader!("additive/additive_pairs"),
            &mask,
            if self.totals { "" } else { "fn row_stats_store(o: u32, x: f32) {}\n" },
        ];
        let access = if self.totals { Access::Write } else { Access::Read };
        self.declare()
            .access("row_stats", access)
            .u32("WORKGROUP", WORKGROUP as u32)
            .bool("TOTALS", self.totals)
            .bool("PER_PAIR_MASK", self.mask.is_per_pair())
            .kernel(&parts, WORKGROUP as u32, 4 * WORKGROUP as u32)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let of = |mask, drop, totals| AdditivePairs {
            d_scores: DType::F32,
            weights: DType::F32,
            row_stats: Untyped,
            mask,
            drop,
            totals,
        };
        let masks = MaskVariant::all().into_iter().map(MaskVariant::scores_only);
        let masked =
            masks.flat_map(move |mask| [false, true].map(|totals| of(mask, DropoutKind::None, totals)));
        let dropped = DropoutKind::ALL.into_iter().map(move |drop| of(MaskVariant::default(), drop, false));
        masked.chain(dropped)
    }
}
