//! A decoder's memory: keys and values that are projected once.

use super::TransformerDecoder;
use crate::device::DeviceFacts;
use crate::kernel::{Dispatches, Prepared, Recorder, Scratch};
use crate::layers::block::Rows;
use crate::tensor::{Access, Error, TensorView, check_aliasing, check_apart, expect_shape};

/// Keys and values that the layers of a decoder have projected of a memory, of the stack's dtype: layer n's from batch entry
/// `n · batch` on. `length` is `memory_len` and the keys that the layers append (`bias_kv`, `add_zero_attn`), which come last.
#[derive(Clone, Copy, Debug)]
pub struct DecoderMemory<'a> {
    /// `[layers · batch, kv_heads, length, head_dim]`.
    pub keys: TensorView<'a>,
    /// `[layers · batch, kv_heads, length, value_dim]`.
    pub values: TensorView<'a>,
}

impl<'a> DecoderMemory<'a> {
    pub(super) fn of_layer(&self, n: usize, batch: usize) -> [TensorView<'a>; 2] {
        [self.keys, self.values].map(|t| t.slice(0, n * batch, batch))
    }

    pub(super) fn tensors(&self) -> [(&'static str, TensorView<'a>); 2] {
        [("memory.keys", self.keys), ("memory.values", self.values)]
    }
}

impl TransformerDecoder {
    /// Records the keys and values that all layers have of `memory`, `[batch, 1, memory_len, features]`, into `projected`. `scratch` keeps
    /// what it binds; it may be of any size.
    ///
    /// # Errors
    /// Shapes that differ, tensors that are written and share a buffer with others, and everything else that [`Error`] lists for
    /// tensors; then nothing has been recorded.
    pub fn project_memory(
        &self,
        into: &mut impl Recorder,
        memory: TensorView,
        projected: &DecoderMemory,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.prepare_memory(memory, projected, scratch)?.record(into);
        Ok(())
    }

    /// Checks the projections of a memory, compiles and binds what they need. [`Prepared::record`] then records them as often as you
    /// like.
    ///
    /// # Errors
    /// As [`project_memory`](Self::project_memory).
    pub fn prepare_memory(
        &self,
        memory: TensorView,
        projected: &DecoderMemory,
        scratch: &mut Scratch,
    ) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        let Rows { batch, length } = self.check_rows("memory", &memory, device)?;
        self.check_memory(projected, batch, length, Access::Write, device)?;
        let mut read = vec![("memory", memory)];
        read.extend(self.layers.iter().flat_map(|layer| layer.cross_attention.weights()));
        check_aliasing(&projected.tensors(), &read)?;
        check_apart(&projected.tensors(), device)?;
        let mut dispatches = Dispatches::new();
        for (n, layer) in self.layers.iter().enumerate() {
            let to = projected.of_layer(n, batch);
            dispatches.extend(layer.cross_attention.key_products(memory, to, device)?);
        }
        self.pipelines.bind("decoder memory", &dispatches, scratch.bindings())
    }

    /// Rows of a memory, of which those are that layers have projected and appended to.
    pub(super) fn memory_len(&self, projected: &DecoderMemory) -> Result<usize, Error> {
        let (shape, appended) = (projected.keys.shape(), self.layers[0].cross_attention.appended_keys());
        match shape[2].checked_sub(appended) {
            Some(length) if length > 0 => Ok(length),
            _ => Err(Error::Shape {
                tensor: "memory.keys",
                axis: "length",
                expected: format!("more than {appended}, which layers append"),
                got: shape[2],
                shape,
                wanted: None,
            }),
        }
    }

    pub(super) fn check_memory(
        &self,
        memory: &DecoderMemory,
        batch: usize,
        length: usize,
        access: Access,
        device: &DeviceFacts,
    ) -> Result<(), Error> {
        let config = &self.config.attention;
        let dims = [config.head_dim, config.value_dim];
        for ((name, view), dim) in memory.tensors().into_iter().zip(dims) {
            view.check_as(name, config.dtype, access, device)?;
            let entries = self.layers.len().saturating_mul(batch);
            let length = length.saturating_add(self.layers[0].cross_attention.appended_keys());
            expect_shape(name, view.shape(), [entries, config.kv_heads, length, dim])?;
        }
        Ok(())
    }
}
