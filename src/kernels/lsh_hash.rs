//! Twin of `lsh_hash.wgsl`.

use super::shader;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// What changes the text of the hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LshHash {
    pub qk: DType,
    pub rotations: DType,
    /// Whether sequences have lengths.
    pub lengths: bool,
}

/// Invocations of a workgroup, here and in `lsh_codes.wgsl`.
pub(crate) const WORKGROUP: usize = 64;

/// Bindings and text of the lengths of sequences, for kernels that are asked `length_of`.
pub(super) fn lengths(given: bool, bindings: &mut Vec<Binding>) -> &'static str {
    if given {
        bindings.push(Binding::read("lengths", DType::U32, Width::One));
        "fn length_of(b: u32) -> u32 { return lengths_at(view_at(p.lengths, b, 0u, 0u, 0u)); }\n"
    } else {
        "fn length_of(b: u32) -> u32 { return p.length; }\n"
    }
}

params! {
    pub(crate) struct Params {
        qk: View,
        rotations: View,
        lengths: View,
        buckets: View,
        rounds: u32,
        length: u32,
        head_dim: u32,
        half: u32,
    }
}

impl LshHash {
    pub fn describe(&self) -> Kernel {
        let mut bindings = vec![
            Binding::read("qk", self.qk, Width::One),
            Binding::read("rotations", self.rotations, Width::One),
        ];
        let lengths = lengths(self.lengths, &mut bindings);
        bindings.push(Binding::write("buckets", DType::U32, Width::One));
        let constants = [Constant::U32("WORKGROUP", WORKGROUP as u32)];
        let parts = [shader!("tensor/view"), shader!("lsh_hash"), lengths];
        Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32)
    }

    pub fn all() -> impl Iterator<Item = Self> {
        super::FLOATS.into_iter().flat_map(|qk| {
            super::FLOATS.into_iter().flat_map(move |rotations| {
                [false, true].into_iter().map(move |lengths| LshHash { qk, rotations, lengths })
            })
        })
    }
}
