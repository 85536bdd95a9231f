//! Tensors in host memory.

use super::{Error, count, expect_broadcast};

/// A dense row-major slice with its shape. An axis of one element is repeated.
#[derive(Clone, Copy, Debug)]
pub struct HostTensor<'a, T> {
    /// The elements.
    pub(crate) data: &'a [T],
    /// The shape of the tensor. The method of [`Mask`](crate::Mask) that takes the tensor describes
    /// it.
    pub(crate) shape: [usize; 4],
}

impl<'a, T: Copy> HostTensor<'a, T> {
    /// A slice, viewed as a tensor.
    pub fn new(data: &'a [T], shape: [usize; 4]) -> Self {
        HostTensor { data, shape }
    }

    /// Returns the element at `[b, h, i, j]`, with axes of 1 repeated; `None` outside the tensor.
    pub fn at(&self, index: [usize; 4]) -> Option<T> {
        if (0..4).any(|a| self.shape[a] != 1 && index[a] >= self.shape[a]) {
            return None;
        }
        let strides = super::dense_strides(self.shape);
        // A shape may have more elements than the slice.
        let flat = (0..4)
            .filter(|a| self.shape[*a] != 1)
            .try_fold(0usize, |flat, a| flat.checked_add(index[a].checked_mul(strides[a])?))?;
        self.data.get(flat).copied()
    }

    pub(crate) fn check(&self, tensor: &'static str, to: [usize; 4]) -> Result<(), Error> {
        expect_broadcast(tensor, self.shape, to)?;
        let expected = count(self.shape);
        if self.data.len() != expected {
            return Err(Error::Length { tensor, expected, got: self.data.len() });
        }
        Ok(())
    }
}
