//! Twin of `selected_sums.wgsl`.

use crate::device::{Families, Family};
use crate::kernel::{FLOATS, Kernel, Untyped, Variant, kernel, shader};
use crate::tensor::{Access, DType};

kernel! {
    /// The kernel that adds the gradients of a key or value over the queries that have it.
    SelectedSums, SelectedSumsCall
    tensors {
        bitmap: Raw Read U32 one,
        terms: Raw Read F32 four,
        values: OptRaw Read F32 four,
        // Present unless the call has all queries.
        sums: OptRaw Write F32 four,
        // Present if the call has the last queries.
        out: Opt Write F32 one view,
    }
    numbers {
        /// The first batch entry.
        batch: u32,
        /// Queries of a batch entry.
        queries: u32,
        kv_heads: u32,
        kv_len: u32,
        list_heads: u32,
        /// Heads of terms: for each query, and for each head of keys.
        call_heads: u32,
        share: u32,
        capacity: u32,
        bitmap_words: u32,
        channels: u32,
        /// Channels of a row of terms, and of values.
        channels_each: u32,
        values_each: u32,
        /// 1 if `sums` has the sums of earlier queries.
        adds: u32,
        /// 1 if the gradient is added to the contents of `out`.
        accumulates: u32,
    }
    variant {
        lanes: Lanes,
        /// True if there are terms of values, and sums of other calls.
        with_values: bool,
        with_sums: bool,
    }
}

/// Keys of a workgroup, as in the shader.
pub(crate) const KEYS: u32 = 32;

/// Invocations of a workgroup, by channels and by keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Lanes {
    pub channels: u32,
    pub keys: u32,
}

impl Lanes {
    pub const CPU: Lanes = Lanes { channels: 8, keys: 1 };
    pub const GPU: Lanes = Lanes { channels: 16, keys: 4 };
}

impl Variant for SelectedSums {
    const LABEL: &'static str = "attention.selected_sums";
    const FAMILIES: Families = Families::of(Family::SelectedGradients);

    fn describe(&self) -> Kernel {
        let Lanes { channels, keys } = self.lanes;
        // A call with the last queries does not write sums.
        let access = if self.out.is_some() { Access::Read } else { Access::Write };
        let mut parts = vec![shader!("tensor/view"), shader!("selected/selected_sums")];
        if self.out.is_some() && self.sums.is_some() {
            parts.push("fn sums_store4(o: u32, x: vec4<f32>) {}\n");
        }
        self.declare().access("sums", access).u32("CHANNEL_LANES", channels).u32("KEY_LANES", keys).kernel(
            &parts,
            channels * keys,
            16 * KEYS * channels,
        )
    }

    fn all() -> impl IntoIterator<Item = Self> {
        [Lanes::CPU, Lanes::GPU].into_iter().flat_map(|lanes| {
            let of = move |values: bool, sums: bool, out| SelectedSums {
                bitmap: Untyped,
                terms: Untyped,
                values: values.then_some(Untyped),
                sums: sums.then_some(Untyped),
                out,
                lanes,
                with_values: values,
                with_sums: sums,
            };
            let typed = FLOATS.map(|dtype| of(false, false, Some(dtype)));
            let f32 = Some(DType::F32);
            typed.into_iter().chain([of(true, true, None), of(true, true, f32), of(false, true, f32)])
        })
    }
}
