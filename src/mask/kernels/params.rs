//! The parameters of a mask in kernels: the views of tensors, and numbers.

use crate::device::DeviceFacts;
use crate::kernel::{Field, Shared as _, Table, View, params, shared};
use crate::mask::pattern::PatternParams;
use crate::mask::{Alignment, BY_SLOT, DeviceMask, Id, PatternPart, TENSORS};
use crate::tensor::{LONGEST_AXIS, Shape, TensorView};

/// The WGSL `MaskParams`: a view of every rule's tensors, by their names, then [`Numbers`].
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct MaskParams {
    views: [View; TENSORS],
    numbers: Numbers,
}
shared! { MaskParams = "MaskParams" }

params! {
    struct Numbers {
        // Stride, reach or SAME_BLOCK, summary or 0, part.
        pattern: [u32; 4],
        // Queries and keys of a block of the map.
        block: [u32; 2],
        // The key position of query 0.
        diagonal: i32,
        left: i32,
        right: i32,
        // The largest distance in the table of relative biases.
        reach: i32,
        // The first appended key. Every query sees the keys from here on.
        masked_len: u32,
        q_len: u32,
        kv_len: u32,
        // The number of packed sequences, and their alignment.
        sequences: u32,
        bottom_right: u32,
        // 1 if ALiBi's distance is absolute.
        symmetric: u32,
        softcap: f32,
        // −∞; WGSL has no literal for it.
        neg_inf: f32,
        // The number of query heads per head of keys and values.
        group: u32,
        pad: u32,
    }
}

const FIELDS: [Field; TENSORS + Numbers::FIELDS.len()] = {
    let mut fields = [Field { name: "", offset: 0, wgsl: View::WGSL }; TENSORS + Numbers::FIELDS.len()];
    let mut n = 0;
    while n < fields.len() {
        if n < TENSORS {
            fields[n] = Field { name: BY_SLOT[n].name, offset: n * size_of::<View>(), wgsl: View::WGSL };
        } else {
            let Field { name, offset, wgsl } = Numbers::FIELDS[n - TENSORS];
            fields[n] = Field { name, offset: std::mem::offset_of!(MaskParams, numbers) + offset, wgsl };
        }
        n += 1;
    }
    fields
};

impl Table for MaskParams {
    const NAME: &'static str = "MaskParams";
    const FIELDS: &'static [Field] = &FIELDS;
}

impl MaskParams {
    /// Makes the parameters. `appended` of the `kv_len` keys lie outside of the mask.
    pub fn new(
        mask: &DeviceMask,
        shape: &Shape,
        appended: usize,
        softcap: Option<f32>,
        device: &DeviceFacts,
    ) -> Self {
        let view = |t: &TensorView| View::repeating(*t, device);
        let masked_len = shape.kv_len - appended;
        // No key is further from a query. Positions of both are at most a quarter of i32's range,
        // and so is an offset.
        let reach = |bound: Option<usize>| bound.unwrap_or(usize::MAX).min(2 * LONGEST_AXIS + 1) as i32;
        let last = |t: Option<&TensorView>| t.map_or(1, |t| t.shape()[3]);
        let settings = mask.settings();
        let numbers = Numbers {
            pattern: settings.pattern.map_or([1, 0, 0, 0], |p| pattern(p.params())),
            // A block larger than the problem is one block.
            block: if mask.has(Id::Blocks) {
                settings.block_size.map(|n| u32::try_from(n).unwrap_or(u32::MAX))
            } else {
                [1; 2]
            },
            diagonal: settings.alignment.diagonal(shape.q_len, masked_len) as i32,
            left: reach(settings.left),
            right: reach(settings.right),
            reach: (last(mask.floats(Id::Relative)) / 2) as i32,
            masked_len: masked_len as u32,
            q_len: shape.q_len as u32,
            kv_len: shape.kv_len as u32,
            sequences: last(mask.numbers(Id::Packed, 0)).saturating_sub(1) as u32,
            bottom_right: u32::from(settings.alignment == Alignment::BottomRight),
            symmetric: u32::from(settings.symmetric),
            softcap: softcap.unwrap_or(0.0),
            neg_inf: f32::NEG_INFINITY,
            group: shape.group() as u32,
            pad: 0,
        };
        let views = std::array::from_fn(|slot| mask.tensor(slot).map_or(View::default(), view));
        MaskParams { views, numbers }
    }
}

/// Returns `Numbers::pattern`.
pub(crate) fn pattern(p: PatternParams) -> [u32; 4] {
    let part = match p.part {
        PatternPart::Near => 0,
        PatternPart::Far => 1,
        PatternPart::Both => 2,
        PatternPart::ByHead => 3,
    };
    let reach = p.reach.map_or(u32::MAX, |n| n as u32);
    [p.stride as u32, reach, p.summary.map_or(0, |n| n as u32), part]
}
