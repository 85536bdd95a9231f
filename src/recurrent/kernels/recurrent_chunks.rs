//! The host side of `recurrent_chunks.wgsl`.

use super::numbers::{Pieces, RecurrentNumbers};
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The table of chunks.
    RecurrentChunks, RecurrentChunksCall
    tensors {
        lengths: Opt Read U32 one view,
        starts: Opt Read U32 one view,
        indices: Opt Read U32 one view,
        initial_indices: Opt Read U32 one view,
        chunks: One Write U32 one,
    }
    numbers {
        numbers: RecurrentNumbers,
    }
    variant {
    }
}

pub(crate) const WORKGROUP: usize = 64;
/// Words of a chunk in the table.
pub(crate) const CHUNK_WORDS: usize = 8;

impl Variant for RecurrentChunks {
    const LABEL: &'static str = "attention.recurrent_chunks";
    const FAMILIES: Families = Families::of(Family::Recurrence);

    fn describe(&self) -> Kernel {
        Pieces::new(self.declare(), WORKGROUP as u32).text(shader!("recurrent/recurrent_chunks")).kernel()
    }

    fn all() -> impl IntoIterator<Item = Self> {
        [(false, false), (true, false), (false, true)].into_iter().flat_map(|(lengths, starts)| {
            [(false, false), (true, false), (true, true)].map(|(indices, initial)| {
                let given = |is: bool| is.then_some(DType::U32);
                RecurrentChunks {
                    lengths: given(lengths),
                    starts: given(starts),
                    indices: given(indices),
                    initial_indices: given(initial),
                    chunks: DType::U32,
                }
            })
        })
    }
}
