//! Twin of `row_totals.wgsl`.

use super::{FLOATS, WIDTHS, mask, shader};
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

pub(crate) const WORKGROUP: usize = 64;

/// What changes the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RowTotals {
    pub dtype: DType,
    /// Whether q and k load in fours.
    pub width: Width,
    pub mask: mask::MaskVariant,
    /// Of additive scores.
    pub score_vector: Option<DType>,
}

params! {
    pub(crate) struct Params {
        q: View,
        k: View,
        score_vector: View,
        mask: mask::MaskParams,
        heads: u32,
        group: u32,
        head_dim: u32,
        first: u32,
        rows: u32,
        scale: f32,
        pad: [u32; 2],
    }
}

impl RowTotals {
    pub fn describe(&self) -> Kernel {
        let mut bindings =
            vec![Binding::read("q", self.dtype, self.width), Binding::read("k", self.dtype, self.width)];
        bindings.extend(self.score_vector.map(|dtype| Binding::read("score_vector", dtype, Width::One)));
        bindings.push(Binding::write("row_stats", DType::F32, Width::One));
        bindings.extend(self.mask.bindings());
        let constants = [
            Constant::U32("WORKGROUP", WORKGROUP as u32),
            Constant::Bool("PER_PAIR_MASK", self.mask.is_per_pair()),
            Constant::Bool("NATURAL_SCORES", true),
        ];
        let mask = self.mask.wgsl();
        let mut parts = vec![shader!("tensor/view"), shader!("softmax/online"), shader!("row_totals"), &mask];
        parts.extend(match self.score_vector {
            Some(_) => [shader!("backward/additive"), shader!("additive/tanh")].as_slice(),
            None => &[shader!("backward/product")],
        });
        Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32)
    }

    pub fn all() -> impl Iterator<Item = Self> {
        let of = |dtype| {
            let plain = mask::MaskVariant::default();
            WIDTHS.map(|width| RowTotals { dtype, width, mask: plain, score_vector: None })
        };
        let masked = |mask| RowTotals { dtype: DType::F32, width: Width::Four, mask, score_vector: None };
        let additive = FLOATS.map(|dtype| RowTotals {
            dtype,
            width: Width::One,
            mask: mask::MaskVariant::default(),
            score_vector: Some(dtype),
        });
        FLOATS
            .into_iter()
            .flat_map(of)
            .chain(mask::MaskVariant::all().into_iter().map(masked))
            .chain(additive)
    }
}
