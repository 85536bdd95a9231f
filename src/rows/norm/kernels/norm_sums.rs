//! The host side of `norm_sums.wgsl`.

use super::norm::{Gating, gate_parts, gated, gates};
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The partial sums for the gradients of a norm's weight and bias.
    NormSums, NormSumsCall
    tensors {
        x: One Read F32 one view,
        residual: Opt Read F32 one view,
        gate: Opt Read F32 one view,
        d_out: One Read F32 one view,
        statistics: One Read F32 one,
        parts: One Write F32 one,
    }
    numbers {
        features: u32,
        heads: u32,
        length: u32,
        rows: u32,
        /// Rows of a partial sum, and the number of partial sums.
        part: u32,
        count: u32,
    }
    variant {
        /// The use of `gate`.
        gating: Option<Gating>,
    }
}

/// Columns of a workgroup, and the number of invocations that share the rows of a column.
pub(crate) const COLUMNS: usize = 16;
pub(crate) const STRIPS: usize = 16;

/// Numbers in each row's statistics: the rounded mean, the rest of the mean, the scale.
pub(crate) const STATISTICS: usize = 3;

impl Variant for NormSums {
    const LABEL: &'static str = "attention.norm_sums";
    const FAMILIES: Families = Families::of(Family::NormGradients);

    fn describe(&self) -> Kernel {
        let invocations = COLUMNS * STRIPS;
        let parts = [shader!("tensor/view"), shader!("rows/norm/norm_sums")];
        gated(self.declare(), self.gating).u32("COLUMNS", COLUMNS as u32).u32("STRIPS", STRIPS as u32).kernel(
            &[&parts, gate_parts(self.gating)].concat(),
            invocations as u32,
            (invocations * 8) as u32,
        )
    }

    fn all() -> impl IntoIterator<Item = Self> {
        FLOATS.into_iter().flat_map(|x| {
            FLOATS.into_iter().flat_map(move |d_out| {
                let plain = NormSums {
                    x,
                    residual: None,
                    gate: None,
                    d_out,
                    statistics: DType::F32,
                    parts: DType::F32,
                    gating: None,
                };
                let gated = gates(x).map(move |(gate, gating)| NormSums {
                    gate: Some(gate),
                    gating: Some(gating),
                    ..plain
                });
                [plain, NormSums { residual: Some(x), ..plain }].into_iter().chain(gated)
            })
        })
    }
}
