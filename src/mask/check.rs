//! Checks of masks.

use super::rule::{Axis, Given, Tensor, mismatch};
use super::rules::NO_POSITIONS_IN_CACHES;
use super::{Alignment, BY_SLOT, DeviceMask, HostMask, Id, Mask, TENSORS, slot};
use crate::device::DeviceFacts;
use crate::tensor::{Access, Error, HostTensor, Shape, TensorView, count};

impl Axis {
    /// Returns its length, or `None` if any length is valid.
    fn len(self, shape: &Shape, block_size: [usize; 2]) -> Option<usize> {
        let [rows, cols] = block_size.map(|n| n.max(1));
        Some(match self {
            Axis::Batch => shape.batch,
            Axis::Heads => shape.heads,
            Axis::QLen => shape.q_len,
            Axis::KvLen => shape.kv_len,
            Axis::BlockRows => shape.q_len.div_ceil(rows),
            Axis::BlockCols => shape.kv_len.div_ceil(cols),
            Axis::One(_) => 1,
            Axis::Free(_) => return None,
        })
    }
}

impl Tensor {
    /// Checks that `got` broadcasts to `shape`.
    fn check_shape(&self, got: [usize; 4], shape: &Shape, block_size: [usize; 2]) -> Result<(), Error> {
        for (axis, n) in got.into_iter().enumerate() {
            let Some(needed) = self.axes[axis].len(shape, block_size) else { continue };
            if n != needed && n != 1 {
                let expected = if needed == 1 { "1".to_string() } else { format!("{needed} or 1") };
                return Err(mismatch(self, axis, expected, got));
            }
        }
        Ok(())
    }

    fn check_zero(&self, shape: [usize; 4]) -> Result<(), Error> {
        match shape.iter().position(|n| *n == 0) {
            Some(axis) => Err(Error::ZeroSize { tensor: self.name, axis: self.axes[axis].name() }),
            None => Ok(()),
        }
    }
}

/// Checks that a block map broadcasts to `shape`.
pub(crate) fn check_map(map: [usize; 4], shape: &Shape, size: [usize; 2]) -> Result<(), Error> {
    BLOCKS.check_shape(map, shape, size)
}

/// Checks that a written map has every block.
pub(crate) fn check_whole_map(map: [usize; 4], shape: &Shape, size: [usize; 2]) -> Result<(), Error> {
    for axis in 2..4 {
        let needed = BLOCKS.axes[axis].len(shape, size).unwrap_or(1);
        if map[axis] != needed {
            return Err(mismatch(BLOCKS, axis, needed.to_string(), map));
        }
    }
    Ok(())
}

const BLOCKS: &Tensor = BY_SLOT[slot(Id::Blocks, 0)];

impl<L, K, B, M> Mask<L, K, B, M> {
    fn given(&self, shapes: [Option<[usize; 4]>; TENSORS]) -> Given<'_> {
        Given { rules: self.rules, settings: &self.settings, shapes }
    }

    /// Checks that caches can have the rules.
    pub(crate) fn check_for_cache(&self) -> Result<(), Error> {
        let of_alignment = match self.settings.alignment {
            Alignment::Offset(_) => Some(["`Alignment::Offset` with a cache", NO_POSITIONS_IN_CACHES]),
            _ => None,
        };
        match self.rules.iter().find_map(|id| id.rule().not_cached).or(of_alignment) {
            Some([what, why]) => Err(Error::Unsupported { what, why }),
            None => Ok(()),
        }
    }
}

impl HostMask<'_> {
    /// Checks that tensors broadcast to the shapes that their methods name. Also checks patterns
    /// and the size of blocks.
    pub(crate) fn check(&self, shape: Shape) -> Result<(), Error> {
        let shape = &shape;
        fn size<T>(part: &HostTensor<T>) -> ([usize; 4], usize) {
            (part.shape, part.data.len())
        }
        let sizes = self.tensors.each_ref().map(|part| {
            part.as_ref().map(|part| match part {
                super::Part::Number(t) => size(t),
                super::Part::Bool(t) => size(t),
                super::Part::Float(t) => size(t),
            })
        });
        self.given(sizes.map(|size| size.map(|size| size.0))).check()?;
        for (tensor, size) in BY_SLOT.iter().zip(sizes) {
            let Some((part_shape, got)) = size else { continue };
            tensor.check_shape(part_shape, shape, self.settings.block_size)?;
            let expected = count(part_shape);
            if got != expected {
                return Err(Error::Length { tensor: tensor.name, expected, got });
            }
        }
        Ok(())
    }
}

impl DeviceMask<'_> {
    /// True if a rule can hide a later row from an earlier one. A window on both sides counts too,
    /// because it shows later rows on purpose.
    pub(crate) fn orders_rows(&self) -> bool {
        let per_query = |id| self.tensor(slot(id, 0)).is_some_and(|t| t.shape()[2] > 1);
        let orders = |id| match id {
            Id::Causal | Id::Window | Id::Pattern | Id::Tree => true,
            Id::AttnMask | Id::Bias | Id::Lengths | Id::KeyPaddingMask => per_query(id),
            _ => false,
        };
        self.rules().iter().any(orders) || self.mods().all().next().is_some()
    }

    /// Checks shapes, dtypes and memory of every part.
    pub(crate) fn check(&self, shape: &Shape, device: &DeviceFacts) -> Result<(), Error> {
        let shape_of = |slot| self.tensor(slot).map(TensorView::shape);
        self.given(std::array::from_fn(shape_of)).check()?;
        for (slot, tensor) in BY_SLOT.iter().enumerate() {
            let Some(view) = self.tensor(slot) else { continue };
            view.check_element(tensor.name, tensor.element)?;
            tensor.check_zero(view.shape())?;
            view.check(tensor.name, Access::Read, device)?;
            tensor.check_shape(view.shape(), shape, self.settings.block_size)?;
        }
        self.mods().check(device)
    }
}
