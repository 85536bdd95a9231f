//! The host side of `lsh_gradients.wgsl`.

use super::lsh_gather::{WORKGROUP, with_rows};
use super::lsh_hash::length_of;
use crate::device::{Families, Family};
use crate::kernel::{FLOATS, FLOATS_OR_NONE, Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The gradients of rows, from the gradients in bucket order.
    LshGradients, LshGradientsCall
    tensors {
        d_keys: One Read F32 one view,
        // Present for queries, which are keys too after normalisation. Values have neither tensor.
        d_queries: Opt Read F32 one view,
        x: Opt Read F32 one view,
        ranks: One Read U32 one view,
        lengths: Opt Read U32 one repeating,
        d_x: One Write F32 one view,
    }
    numbers {
        rounds: u32,
        length: u32,
        chunk: u32,
        ahead: u32,
        dim: u32,
    }
    variant {
        /// True if gradients are added to the contents of `d_x`.
        accumulates: bool,
    }
}

impl Variant for LshGradients {
    const LABEL: &'static str = "attention.lsh_gradients";
    const FAMILIES: Families = Families::of(Family::LshGradients);

    fn describe(&self) -> Kernel {
        with_rows(self.declare()).bool("ACCUMULATES", self.accumulates).kernel(
            &[shader!("tensor/view"), shader!("lsh/lsh_gradients"), length_of(self.lengths)],
            WORKGROUP as u32,
            (4 * WORKGROUP * size_of::<f32>()) as u32,
        )
    }

    fn all() -> impl IntoIterator<Item = Self> {
        FLOATS_OR_NONE.into_iter().flat_map(|x| {
            FLOATS.into_iter().flat_map(move |d_x| {
                [None, Some(DType::U32)].into_iter().flat_map(move |lengths| {
                    [false, true].map(|accumulates| LshGradients {
                        d_keys: DType::F32,
                        d_queries: x.map(|_| DType::F32),
                        x,
                        ranks: DType::U32,
                        lengths,
                        d_x,
                        accumulates,
                    })
                })
            })
        })
    }
}
