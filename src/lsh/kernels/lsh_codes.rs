//! The host side of `lsh_codes.wgsl`.

use super::lsh_hash::{WORKGROUP, length_of};
use crate::device::{Families, Family};
use crate::kernel::{Kernel, Variant, kernel, shader};
use crate::tensor::DType;

/// The most chunks of a sequence. A code holds bucket and chunk in one number. The chunk number
/// after the last marks the pairs of the first chunk with the last.
pub(crate) const MOST_CHUNKS: usize = 0xffff;

kernel! {
    /// The codes of tokens: the position, then bucket and chunk in each round.
    LshCodes, LshCodesCall
    tensors {
        buckets: One Read U32 one view,
        order: One Read U32 one view,
        ranks: One Read U32 one view,
        lengths: Opt Read U32 one repeating,
        codes: One Write U32 one,
    }
    numbers {
        heads: u32,
        rounds: u32,
        length: u32,
        chunk: u32,
        ahead: u32,
    }
    variant {}
}

impl Variant for LshCodes {
    const LABEL: &'static str = "attention.lsh_codes";
    const FAMILIES: Families = Families::of(Family::Lsh);

    fn describe(&self) -> Kernel {
        let parts = [shader!("tensor/view"), shader!("lsh/lsh_codes"), length_of(self.lengths)];
        self.declare().u32("WORKGROUP", WORKGROUP as u32).kernel(&parts, WORKGROUP as u32, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let [buckets, order, ranks, codes] = [DType::U32; 4];
        [None, Some(DType::U32)].into_iter().map(move |lengths| LshCodes {
            buckets,
            order,
            ranks,
            lengths,
            codes,
        })
    }
}
