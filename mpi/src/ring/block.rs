//! The layout of one rank's keys and values as one message, and the dimensions of a call.

use std::ops::Range;

use wgpu_attention::mask::DeviceMask;
use wgpu_attention::{DType, TensorView, wgpu};

use crate::schedule::{Part, SequenceMask};
use wgpu_attention::Alignment;

/// The dimensions of a call that all ranks share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub batch: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub value_dim: usize,
    /// The type of the input tensors, and of keys and values in messages.
    pub dtype: DType,
}

pub(crate) fn count(shape: [usize; 4]) -> usize {
    shape.into_iter().product()
}

/// The layout of consecutive tensors in a buffer. Each start is aligned so that any device can
/// bind the tensor.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    pub dtype: DType,
    pub shapes: Vec<[usize; 4]>,
    starts: Vec<usize>,
    pub bytes: usize,
}

impl Layout {
    pub fn new(dtype: DType, shapes: &[[usize; 4]]) -> Self {
        let mut bytes = 0;
        let mut starts = Vec::new();
        for shape in shapes {
            starts.push(bytes);
            bytes += (count(*shape) * width(dtype)).next_multiple_of(256);
        }
        Layout { dtype, shapes: shapes.to_vec(), starts, bytes }
    }

    pub fn view<'a>(&self, n: usize, buffer: &'a wgpu::Buffer) -> TensorView<'a> {
        let at = self.starts[n] / width(self.dtype);
        TensorView::new(buffer, self.dtype, self.shapes[n]).with_offset(at)
    }
}

/// Bytes of an element of a float type.
pub(crate) fn width(dtype: DType) -> usize {
    if dtype == DType::F32 { 4 } else { 2 }
}

impl Sizes {
    pub fn q(&self, tokens: usize) -> [usize; 4] {
        [self.batch, self.heads, tokens, self.head_dim]
    }

    pub fn k(&self, tokens: usize) -> [usize; 4] {
        [self.batch, self.kv_heads, tokens, self.head_dim]
    }

    pub fn v(&self, tokens: usize) -> [usize; 4] {
        [self.batch, self.kv_heads, tokens, self.value_dim]
    }

    pub fn out(&self, tokens: usize) -> [usize; 4] {
        [self.batch, self.heads, tokens, self.value_dim]
    }

    pub fn lse(&self, tokens: usize) -> [usize; 4] {
        [self.batch, self.heads, tokens, 1]
    }

    /// The layout of keys and values of `tokens` tokens.
    pub fn block(&self, tokens: usize, dtype: DType) -> Layout {
        Layout::new(dtype, &[self.k(tokens), self.v(tokens)])
    }
}

/// The mask of a part, with the positions of its queries and keys in the whole sequence.
pub(crate) fn mask_of<'a>(
    mask: &SequenceMask,
    part: &Part,
    numbers: Option<&'a wgpu::Buffer>,
) -> DeviceMask<'a> {
    if part.all {
        return DeviceMask::none();
    }
    let mut of_part = DeviceMask::none().aligned(Alignment::Offset(part.q_at as i64 - part.k_at as i64));
    if mask.causal {
        of_part = of_part.and_causal();
    }
    if let Some([left, right]) = mask.window {
        of_part = of_part.window(left, right);
    }
    match numbers {
        Some(numbers) => {
            let view = |shape, at| TensorView::new(numbers, DType::U32, shape).with_offset(at);
            let queries = view([1, 1, part.q.len(), 1], part.q_at);
            of_part.documents(queries, view([1, 1, 1, part.k.len()], part.k_at))
        }
        None => of_part,
    }
}

/// A view of the given rows.
pub(crate) fn rows<'a>(view: TensorView<'a>, rows: &Range<usize>) -> TensorView<'a> {
    view.slice(2, rows.start, rows.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_start_where_any_device_binds() {
        let layout = Layout::new(DType::F16, &[[1, 1, 3, 5], [1, 1, 3, 7]]);
        assert_eq!(layout.starts, [0, 256]);
        assert_eq!(layout.bytes, 512);
    }
}
