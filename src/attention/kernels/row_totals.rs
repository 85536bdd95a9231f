//! Twin of `row_totals.wgsl`.

use super::key_lists;
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Untyped, Variant, WIDTHS, Width, families, kernel, shader};
use crate::mask::Id;
use crate::mask::kernels::{MaskVariant, Masked};
use crate::tensor::DType;

pub(crate) const WORKGROUP: usize = 64;

kernel! {
    /// The kernel of the reference points of weights, and of the sinks relative to them.
    RowTotals, RowTotalsCall
    tensors {
        q: One Read F32 width view,
        k: One Read F32 width view,
        // The vector of additive scores.
        score_vector: Opt Read F32 one repeating,
        row_stats: Raw Write F32 one,
    }
    groups { mask: Masked MaskVariant, }
    numbers {
        /// The places of lists of keys (`keys/lists.wgsl`).
        key_lists: [u32; 4],
        key_batches: [u32; 4],
        heads: u32,
        group: u32,
        head_dim: u32,
        /// Workgroups before those of this dispatch.
        first: u32,
        rows: u32,
        scale: f32,
    }
    variant {
        width: Width,
        /// True if each query has a list of keys.
        listed: bool,
    }
}

impl Variant for RowTotals {
    const LABEL: &'static str = "attention.row_totals";

    fn describe(&self) -> Kernel {
        let mask = self.mask.wgsl();
        let mut parts = vec![
            shader!("tensor/view"),
            shader!("attention/softmax/online"),
            shader!("attention/row_totals"),
            &mask,
        ];
        parts.extend(match self.score_vector {
            Some(_) => [shader!("attention/backward/additive"), shader!("additive/tanh")],
            None => [shader!("attention/backward/product"), key_lists::text(self.listed)],
        });
        self.declare()
            .u32("WORKGROUP", WORKGROUP as u32)
            .bool("PER_PAIR_MASK", self.mask.is_per_pair())
            .bool("NATURAL_SCORES", true)
            .kernel(&parts, WORKGROUP as u32, 0)
    }

    fn families(&self) -> Families {
        families(&[Some(Family::RowStats)], &[self.q, self.k])
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let of = |dtype, width| RowTotals {
            q: dtype,
            k: dtype,
            score_vector: None,
            row_stats: Untyped,
            mask: MaskVariant::default(),
            width,
            listed: false,
        };
        let plain = FLOATS.into_iter().flat_map(move |dtype| WIDTHS.map(|width| of(dtype, width)));
        let masked = move |mask| RowTotals { mask, ..of(DType::F32, Width::Four) };
        let additive = FLOATS.map(|dtype| RowTotals { score_vector: Some(dtype), ..of(dtype, Width::One) });
        let lists = [[Id::Lengths].as_slice(), &[Id::Lengths, Id::SinkLogits]].map(|rules| RowTotals {
            mask: MaskVariant::with_rules(rules.iter().copied()),
            listed: true,
            ..of(DType::F32, Width::Four)
        });
        plain.chain(lists).chain(MaskVariant::all().into_iter().map(masked)).chain(additive)
    }
}
