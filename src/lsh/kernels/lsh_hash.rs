//! The host side of `lsh_hash.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Variant, kernel, shader};
use crate::tensor::DType;

kernel! {
    /// The bucket of each token in each round of hashing.
    LshHash, LshHashCall
    tensors {
        qk: One Read F32 one view,
        rotations: One Read F32 one view,
        lengths: Opt Read U32 one repeating,
        buckets: One Write U32 one view,
    }
    numbers {
        rounds: u32,
        length: u32,
        head_dim: u32,
        /// Columns of a rotation: half of the buckets.
        half: u32,
    }
    variant {}
}

/// Invocations of a workgroup, here and in `lsh_codes.wgsl`.
pub(crate) const WORKGROUP: usize = 64;

/// Returns the WGSL function `length_of`: the number of tokens of a sequence.
pub(super) fn length_of(lengths: Option<DType>) -> &'static str {
    if lengths.is_some() {
        "fn length_of(b: u32) -> u32 { return lengths_at(view_at(p.lengths, b, 0u, 0u, 0u)); }\n"
    } else {
        "fn length_of(b: u32) -> u32 { return p.length; }\n"
    }
}

impl Variant for LshHash {
    const LABEL: &'static str = "attention.lsh_hash";
    const FAMILIES: Families = Families::of(Family::Lsh);

    fn describe(&self) -> Kernel {
        let parts = [shader!("tensor/view"), shader!("lsh/lsh_hash"), length_of(self.lengths)];
        self.declare().u32("WORKGROUP", WORKGROUP as u32).kernel(&parts, WORKGROUP as u32, 0)
    }

    fn all() -> impl IntoIterator<Item = Self> {
        let buckets = DType::U32;
        FLOATS.into_iter().flat_map(move |qk| {
            FLOATS.into_iter().flat_map(move |rotations| {
                [None, Some(DType::U32)].map(|lengths| LshHash { qk, rotations, lengths, buckets })
            })
        })
    }
}
