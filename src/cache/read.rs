//! Reading keys and values back from a layer of a cache.

use super::{Cache, CacheConfig, dispatch};
use crate::kernel::{Prepared, Recorder};
use crate::position::RowPositions;
use crate::tensor::{CallTensors, Element, Error, LONGEST_AXIS, TensorView};

/// Keys and values of a layer, read back. They begin at position 0 unless [`at`](Self::at) is set.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct CacheRead<'a> {
    k: TensorView<'a>,
    v: TensorView<'a>,
    at: RowPositions<TensorView<'a>>,
}

impl<'a> CacheRead<'a> {
    /// Reads into `k`, `[batch, kv_heads, rows, head_dim]`, and `v`, `[batch, kv_heads, rows,
    /// value_dim]`. Both have one type: F32, F16 or BF16, whatever the cache stores.
    pub fn new(k: TensorView<'a>, v: TensorView<'a>) -> Self {
        CacheRead { k, v, at: RowPositions::Start(0) }
    }

    /// Reads other positions: one start for all sequences, or a tensor of positions.
    pub fn at(mut self, at: RowPositions<TensorView<'a>>) -> Self {
        self.at = at;
        self
    }
}

impl Cache {
    /// Records a read of a layer's keys and values into tensors. The values are the same as in
    /// attention: keys are rotated if [`append`](Self::append) rotated them. They have the rounding
    /// of the storage ([`reference::cache::stored`](super::reference::stored)), times the matrix
    /// before and after it with [`CacheConfig::hadamard`]. Rows are zeros if the sequence does not
    /// have their position, or if a ring has overwritten it.
    ///
    /// # Errors
    /// - [`Error::Unsupported`] if changes are not recorded ([`flush`](Self::flush)).
    /// - [`Error::Option`] if there is no such layer.
    /// - Everything that [`Error`] lists for tensors.
    ///
    /// On an error nothing is recorded.
    pub fn read(&self, into: &mut impl Recorder, layer: usize, read: &CacheRead) -> Result<(), Error> {
        self.prepare_read(layer, read)?.record(into);
        Ok(())
    }

    /// Checks a read, compiles its pipeline and binds its tensors. [`Prepared::record`] can then
    /// record it many times.
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
        // No sequence is as long as this limit, so rows past it are zeros.
        let last = LONGEST_AXIS as u32;
        let at = match at {
            RowPositions::Start(start) => RowPositions::Start(start.min(last)),
            tensor => tensor,
        };
        let dispatch = dispatch::read(&source, [k, v], (at.params(rows, last, device), at.tensor()), device);
        self.pipelines.bind("cache read", &[dispatch], &self.bindings)
    }
}
