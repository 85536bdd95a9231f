//! Twin of `append_keys.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::{FLOATS, FLOATS_OR_NONE, Kernel, Variant, View, kernel, shader};

kernel! {
    /// The kernel that writes the appended keys and values.
    AppendKeys, AppendKeysCall
    tensors {
        // Keys and values in one buffer, or only one of the two.
        kv: One Write F32 one,
        bias_k: Opt Read F32 one,
        bias_v: Opt Read F32 one,
    }
    numbers {
        k: View,
        v: View,
        kv_heads: u32,
        /// 0 if there are no keys in `kv`.
        head_dim: u32,
        /// 0 if there are no values in `kv`.
        value_dim: u32,
        start: u32,
        /// The first element and the stride.
        bias_k_at: [u32; 2],
        bias_v_at: [u32; 2],
    }
    variant {}
}

/// Invocations of a workgroup. The shader has the same number.
pub(crate) const WORKGROUP: usize = 64;

impl Variant for AppendKeys {
    const LABEL: &'static str = "attention.append_keys";
    const FAMILIES: Families = Families::of(Family::AppendedKeys);

    fn describe(&self) -> Kernel {
        self.declare().kernel(
            &[shader!("tensor/view"), shader!("attention/append_keys")],
            WORKGROUP as u32,
            0,
        )
    }

    fn all() -> impl IntoIterator<Item = Self> {
        FLOATS.into_iter().flat_map(|kv| {
            let of = move |learned| AppendKeys { kv, bias_k: learned, bias_v: learned };
            FLOATS_OR_NONE.into_iter().map(of)
        })
    }
}
