//! The host side of `part_sums.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, families, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// Adds the partial sums of each element of a tensor.
    PartSums, PartSumsCall
    tensors {
        parts: One Read F32 one,
        sums: One Write F32 one view,
    }
    numbers {
        shape: [u32; 4],
        elements: u32,
        /// Partial sums per element.
        count: u32,
        /// Workgroups of earlier dispatches.
        first: u32,
    }
    variant {
        /// True if the sums are added to the values in `sums`.
        accumulates: bool,
    }
}

/// Elements per workgroup.
pub(crate) const WORKGROUP: usize = 64;

impl Variant for PartSums {
    const LABEL: &'static str = "attention.part_sums";

    fn describe(&self) -> Kernel {
        self.declare().u32("WORKGROUP", WORKGROUP as u32).bool("ACCUMULATES", self.accumulates).kernel(
            &[shader!("tensor/view"), shader!("matmul/projection/part_sums")],
            WORKGROUP as u32,
            0,
        )
    }

    fn families(&self) -> Families {
        families(&[Some(Family::ScoreGradients)], &[self.sums])
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let parts = DType::F32;
        FLOATS
            .into_iter()
            .flat_map(move |sums| [false, true].map(|accumulates| PartSums { parts, sums, accumulates }))
    }
}
