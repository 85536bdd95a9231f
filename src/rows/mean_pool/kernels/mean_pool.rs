//! The host side of `mean_pool.wgsl`, and the parts that it shares with its gradient.

use crate::device::{Families, Family};
use crate::kernel::{Declared, FLOATS, Kernel, Variant, WIDTHS, Width, kernel, shader};
use crate::rows::norm::kernels::norm::{ROWS, combine};
use crate::rows::plan::Rows;
use crate::tensor::DType;

/// The rows that belong to a mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Pooled {
    All,
    Lengths,
    Keep,
    Packed,
}

impl Pooled {
    const ALL: [Pooled; 4] = [Pooled::All, Pooled::Lengths, Pooled::Keep, Pooled::Packed];

    /// The types of `numbers` and of `keep`.
    pub(super) fn types(self) -> [Option<DType>; 2] {
        match self {
            Pooled::All => [None; 2],
            Pooled::Lengths | Pooled::Packed => [Some(DType::U32), None],
            Pooled::Keep => [None, Some(DType::Bool)],
        }
    }

    /// Adds the constants that select the rows.
    pub(super) fn constants(self, declared: Declared) -> Declared {
        declared
            .bool("LENGTHS", self == Pooled::Lengths)
            .bool("PACKED", self == Pooled::Packed)
            .bool("KEEP", self == Pooled::Keep)
    }
}

kernel! {
    /// The mean of the rows of each sequence.
    MeanPool, MeanPoolCall
    tensors {
        x: One Read F32 width view,
        numbers: Opt Read U32 one view,
        keep: Opt Read Bool one view,
        out: One Write F32 width view,
    }
    numbers {
        features: u32,
        length: u32,
        sequences: u32,
        /// The distance from one sequence of a workgroup or an invocation to its next sequence.
        step: u32,
        eps: f32,
    }
    variant {
        rows: Rows,
        pooled: Pooled,
        l2: bool,
        width: Width,
    }
}

impl Variant for MeanPool {
    const LABEL: &'static str = "attention.mean_pool";
    const FAMILIES: Families = Families::of(Family::MeanPools);

    fn describe(&self) -> Kernel {
        let Rows { workgroup, lanes } = self.rows;
        let (combine, workgroup_memory) = combine(self.rows);
        let parts = [
            shader!("tensor/view"),
            shader!("rows/mean_pool/sequence"),
            shader!("rows/mean_pool/mean_pool"),
            combine,
        ];
        self.pooled
            .constants(self.declare())
            .u32("WORKGROUP", workgroup)
            .u32("ROW_LANES", lanes)
            .bool("L2", self.l2)
            .bool("IN_FOURS", self.width == Width::Four)
            .kernel(&parts, workgroup, workgroup_memory)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        each().map(|(rows, pooled, l2, [x, out], width)| {
            let [numbers, keep] = pooled.types();
            MeanPool { x, numbers, keep, out, rows, pooled, l2, width }
        })
    }
}

/// The variants of the kernels of means, for tests. Not every type is combined with every other
/// type.
pub(super) fn each() -> impl Iterator<Item = (Rows, Pooled, bool, [DType; 2], Width)> {
    let [f32, f16, bf16] = FLOATS;
    let dtypes = [[f32; 2], [f16; 2], [bf16; 2], [f32, f16], [bf16, f32]];
    ROWS.into_iter().flat_map(move |rows| {
        Pooled::ALL.into_iter().flat_map(move |pooled| {
            [false, true].into_iter().flat_map(move |l2| {
                dtypes
                    .into_iter()
                    .flat_map(move |dtypes| WIDTHS.map(move |width| (rows, pooled, l2, dtypes, width)))
            })
        })
    })
}
