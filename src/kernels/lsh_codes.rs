//! Twin of `lsh_codes.wgsl`.

use super::lsh_hash::{WORKGROUP, lengths};
use super::shader;
use crate::kernel::{Binding, Constant, Kernel, View, Width, params};
use crate::tensor::DType;

/// Chunks of a sequence: bucket and chunk are one number, and the number after the last is for what looks back.
pub(crate) const MOST_CHUNKS: usize = 0xffff;

/// What changes the text of the codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LshCodes {
    /// Whether sequences have lengths.
    pub lengths: bool,
}

params! {
    pub(crate) struct Params {
        buckets: View,
        order: View,
        ranks: View,
        lengths: View,
        heads: u32,
        rounds: u32,
        length: u32,
        chunk: u32,
        ahead: u32,
        pad0: u32,
        pad1: u32,
        pad2: u32,
    }
}

impl LshCodes {
    pub fn describe(&self) -> Kernel {
        let read = |name| Binding::read(name, DType::U32, Width::One);
        let mut bindings = vec![read("buckets"), read("order"), read("ranks")];
        let lengths = lengths(self.lengths, &mut bindings);
        bindings.push(Binding::write("codes", DType::U32, Width::One));
        let constants = [Constant::U32("WORKGROUP", WORKGROUP as u32)];
        let parts = [shader!("tensor/view"), shader!("lsh_codes"), lengths];
        Kernel::new::<Params>(&constants, bindings, &parts, WORKGROUP as u32)
    }

    pub fn all() -> impl Iterator<Item = Self> {
        [false, true].into_iter().map(|lengths| LshCodes { lengths })
    }
}
