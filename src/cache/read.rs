//! Keys and values, back out of a layer.

use super::{Cache, CacheConfig, dispatch};
use crate::kernel::{Prepared, Recorder};
use crate::position::RowPositions;
use crate::tensor::{CallTensors, Element, Error, LONGEST_AXIS, TensorView};

/// Keys and values of a layer, read back: from position 0 on, unless [`at`](Self::at) says
/// otherwise.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct CacheRead<'a> {
    k: TensorView<'a>,
    v: TensorView<'a>,
    at: RowPositions<TensorView<'a>>,
}

impl<'a> CacheRead<'a> {
    /// Into `k`, `[batch, kv_heads, rows, head_dim]`, and `v`, `[batch, kv_heads, rows,
    /// value_dim]`: F32, F16 or BF16, whatever the cache stores, both of one type.
    pub fn new(k: TensorView<'a>, v: TensorView<'a>) -> Self {
        CacheRead { k, v, at: RowPositions::Start(0) }
    }

    /// From other positions: a number for all sequences, or a tensor of theirs.
    pub fn at(mut self, at: RowPositions<TensorView<'a>>) -> Self {
        self.at = at;
        self
    }
}

impl Cache {
    /// Records what writes keys and values of a layer into tensors, as attention sees them: rotated
    /// where they were appended so, and with the rounding of the storage
    /// ([`reference::cache::stored`](super::reference::stored)). Rows of positions that a sequence
    /// does not have, or that a ring has overwritten, are zeros.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with changes that are not recorded ([`flush`](Self::flush)), [`Error::Option`] for a
    /// layer that is none, and everything that [`Error`] lists for tensors; then nothing has been recorded.
    pub fn read(&self, into: &mut impl Recorder, layer: usize, read: &CacheRead) -> Result<(), Error> {
        self.prepare_read(layer, read)?.record(into);
        Ok(())
    }

    /// Checks a read, compiles and binds what it needs. [`Prepared::record`] then records it as
    /// often as you like.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn prepare_read(&self, layer: usize, read: &CacheRead) -> Result<Prepared, Error> {
        self.check_recorded()?;
        let source = self.source(layer, false)?;
        let device = &self.pipelines.facts();
        let CacheConfig { batch, kv_heads, head_dim, value_dim, .. } = self.config;
        let CacheRead { k, v, at } = *read;
        let mut tensors = CallTensors::new(device);
        let rows = k.shape()[2];
        tensors.write("k", k, Element::Float, [batch, kv_heads, rows, head_dim])?;
        tensors.write("v", v, k.dtype(), [batch, kv_heads, rows, value_dim])?;
        tensors.read_checked(self.tensors(layer).chain([("cache", self.lengths())]));
        at.check(k.shape(), &mut tensors)?;
        tensors.finish()?;
        // No sequence is as long: what lies beyond is zeros.
        let last = LONGEST_AXIS as u32;
        let at = match at {
            RowPositions::Start(start) => RowPositions::Start(start.min(last)),
            tensor => tensor,
        };
        let dispatch = dispatch::read(&source, [k, v], (at.params(rows, last, device), at.tensor()), device);
        self.pipelines.bind("cache read", &[dispatch], &self.bindings)
    }
}
