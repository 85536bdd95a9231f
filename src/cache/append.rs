//! Appending and overwriting keys and values of a layer.

use super::dispatch::{self, KeyRotation};
use super::sequences::Change;
use super::{Cache, CacheConfig, CacheLayout};
use crate::kernel::{Prepared, Recorder};
use crate::position::{MAX_POSITION, Rope, RowPositions};
use crate::tensor::{CallTensors, Element, Error, LONGEST_AXIS, TensorView};

/// Keys and values for one layer.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Append<'a> {
    /// `[batch, kv_heads, rows, head_dim]`, F32, F16 or BF16, whatever the cache stores.
    pub(crate) k: TensorView<'a>,
    /// `[batch, kv_heads, rows, value_dim]`, of the same type. `None` for latent values.
    pub(crate) v: Option<TensorView<'a>>,
    /// Rotates keys by their positions in the cache while they are written. Only rings and
    /// compacted sequences reach positions from 2²⁴ on. They rotate as the last position below 2²⁴.
    pub(crate) rope: Option<&'a Rope>,
}

impl<'a> Append<'a> {
    /// Appends keys and values without rotation.
    pub fn new(k: TensorView<'a>, v: TensorView<'a>) -> Self {
        Append { k, v: Some(v), rope: None }
    }

    /// Appends the keys of a cache with [latent](CacheConfig::latent) values, which are their first
    /// channels. With a [`rope`](Self::rope), the rotated channels are the first ones too: rotate
    /// others before the append.
    pub fn latent(k: TensorView<'a>) -> Self {
        Append { k, v: None, rope: None }
    }

    /// Rotates the keys. The rope has no [sections](crate::position::RopeConfig::sections), because
    /// a cache has one position for each key.
    pub fn rope(mut self, rope: impl Into<Option<&'a Rope>>) -> Self {
        self.rope = rope.into();
        self
    }

    /// The keys and the values, which may be a part of the keys.
    fn tensors(&self, value_dim: usize) -> [TensorView<'a>; 2] {
        [self.k, self.v.unwrap_or_else(|| self.k.slice(3, 0, value_dim))]
    }

    fn rotation(&self) -> Option<KeyRotation<'a>> {
        self.rope.map(|rope| KeyRotation::new(rope, None))
    }
}

impl Cache {
    /// Records the write of the last advance's keys and values into a layer. Each sequence has as
    /// many rows as the longest advance of a sequence. Rows past a sequence's count are not read.
    ///
    /// # Errors
    /// - [`Error::Unsupported`] before the first advance, after a rewind and after a reorder.
    /// - [`Error::Unsupported`] if changes are not recorded ([`flush`](Self::flush)).
    /// - [`Error::Option`] if there is no such layer, or if a rotated key may have a position past
    ///   the last rotation.
    /// - [`Error::Unsupported`] for a rope with sections.
    /// - Everything that [`Error`] lists for tensors.
    ///
    /// On an error nothing is recorded.
    pub fn append(&self, into: &mut impl Recorder, layer: usize, append: &Append) -> Result<(), Error> {
        self.prepare_append(layer, append)?.record(into);
        Ok(())
    }

    /// Checks an append, compiles its pipeline and binds its tensors. [`Prepared::record`] can then
    /// record it many times. Each time it writes the rows of the last advance on the device.
    ///
    /// # Errors
    /// As [`append`](Self::append).
    pub fn prepare_append(&self, layer: usize, append: &Append) -> Result<Prepared, Error> {
        self.check_recorded()?;
        let source = self.source(layer, false)?;
        self.check_append(layer, append, self.advanced)?;
        let tensors = append.tensors(self.config.value_dim);
        let device = &self.pipelines.facts();
        let dispatches = dispatch::append(&source, tensors, append.rotation(), None, device);
        self.pipelines.bind("cache append", &dispatches, &self.bindings)
    }

    /// Records the overwriting of existing positions with keys and values, and all changes since
    /// the last recording. `append` may have any number of rows. Rows are dropped if a sequence
    /// does not have their position, or if a ring has overwritten it. Each sequence with dropped
    /// rows counts one refusal ([`refusals`](Self::refusals)). If sequences share a page, all but
    /// the last get a copy before the write.
    ///
    /// Positions in a tensor must differ within a sequence. If two rows have the same position, the
    /// stored row is undefined.
    ///
    /// # Errors
    /// * [`Error::Option`] for a start from which rows exceed the end of a sequence, if the host
    ///   knows its length.
    /// * [`Error::Option`] if there is no such layer.
    /// * [`Error::Unsupported`] for a rope with sections.
    /// * [`Error::OutOfPages`] if a shared page must be copied and too few pages are free.
    /// * [`Error::Unsupported`] for positions in a tensor if sequences share pages. Only the device
    ///   knows then which pages to copy.
    /// * Everything that [`Error`] lists for tensors.
    ///
    /// On an error nothing is recorded and the cache does not change.
    pub fn overwrite(
        &mut self,
        into: &mut impl Recorder,
        layer: usize,
        append: &Append,
        at: RowPositions<TensorView>,
    ) -> Result<(), Error> {
        let source = self.source(layer, false)?;
        let rows = append.k.shape()[2];
        self.check_append(layer, append, rows)?;
        let device = &self.pipelines.facts();
        let mut tensors = CallTensors::new(device);
        at.check(append.k.shape(), &mut tensors)?;
        tensors.write_checked(self.tensors(layer).chain([("cache", self.lengths())]));
        tensors.check_aliasing()?;
        let Change { after, edits, copies } = match at {
            RowPositions::Start(start) => self.sequences.overwrite(start as usize, rows)?,
            RowPositions::Tensor(_) => self.sequences.overwrite_anywhere()?,
        };
        // No sequence is as long as this limit, and rows past it are dropped.
        let positions = (at.params(rows, LONGEST_AXIS as u32, device), at.tensor());
        let mut dispatches = self.copies(&copies);
        let tensors = append.tensors(self.config.value_dim);
        dispatches.extend(dispatch::append(&source, tensors, append.rotation(), Some(positions), device));
        let call = self.pipelines.bind("cache", &dispatches, &self.bindings)?;
        let call = self.bind_edits(&edits)?.then(call);
        // Nothing can fail after this line.
        self.sequences.commit(after);
        call.record(into);
        Ok(())
    }

    fn check_append(&self, layer: usize, append: &Append, rows: usize) -> Result<(), Error> {
        let CacheConfig { batch, kv_heads, head_dim, value_dim, capacity, layout, latent, compacts, .. } =
            self.config;
        let Append { k, v, rope } = *append;
        if self.advanced == 0 {
            let why = "no tokens were advanced since the cache was made, rewound or reordered; record `Cache::advance` first";
            return Err(Error::Unsupported { what: "an append without an advance", why });
        }
        let device = &self.pipelines.facts();
        let mut tensors = CallTensors::new(device);
        tensors.read("k", k, Element::Float, [batch, kv_heads, rows, head_dim])?;
        match (v, latent) {
            (Some(v), false) => {
                if v.dtype() != k.dtype() {
                    let expected = format!("{:?}, as in `k`", k.dtype());
                    return Err(Error::Type { tensor: "v", expected, got: v.dtype() });
                }
                tensors.read("v", v, k.dtype(), [batch, kv_heads, rows, value_dim])?;
            }
            (None, true) => {}
            (Some(_), true) => {
                let why = "the cache has latent values; use `Append::latent`";
                return Err(Error::Unsupported { what: "values apart from the keys", why });
            }
            (None, false) => {
                let why = "the cache stores values; use `Append::new`";
                return Err(Error::Unsupported { what: "an append without values", why });
            }
        }
        tensors.write_checked(self.tensors(layer).chain([("cache", self.lengths())]));
        tensors.check_aliasing()?;
        let Some(rope) = rope else { return Ok(()) };
        rope.check_width("k", k.shape())?;
        if rope.config().sections.is_some() {
            let what = "a rope with sections in a cache's append";
            let why = "a cache has one position for each key, and sections need three; rotate the keys with `Positions::rotate`, then append them without a rope";
            return Err(Error::Unsupported { what, why });
        }
        let last = self.config.longest() - 1;
        if !compacts && !matches!(layout, CacheLayout::Ring { .. }) && last > MAX_POSITION as usize {
            let expected = "at most 2^24 if keys are rotated, because later positions have no rotation";
            return Err(Error::Option { option: "capacity", value: capacity as f64, expected });
        }
        Ok(())
    }
}
