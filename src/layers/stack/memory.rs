//! A decoder's memory: keys and values that are projected once.

use super::Stack;
use super::workspace::Rows;
use crate::device::DeviceFacts;
use crate::kernel::{Dispatches, Prepared, Scratch};
use crate::layers::multi_head::{MultiHeadAttention, MultiHeadForward};
use crate::mask::DeviceMask;
use crate::tensor::{Access, Error, TensorView, check_aliasing, check_apart, expect_shape};

/// Projected keys and values of a decoder's memory, for all its layers, in the stack's dtype. Layer
/// n begins at batch entry `n · batch`. `length` is `memory_len` and the appended keys (`bias_kv`,
/// `add_zero_attn`), which come last.
#[derive(Clone, Copy, Debug)]
pub struct DecoderMemory<'a> {
    /// `[layers · batch, kv_heads, length, head_dim]`.
    pub keys: TensorView<'a>,
    /// `[layers · batch, kv_heads, length, value_dim]`.
    pub values: TensorView<'a>,
}

impl<'a> DecoderMemory<'a> {
    fn of_layer(&self, n: usize, batch: usize) -> [TensorView<'a>; 2] {
        [self.keys, self.values].map(|t| t.slice(0, n * batch, batch))
    }

    pub(super) fn tensors(&self) -> [(&'static str, TensorView<'a>); 2] {
        [("memory.keys", self.keys), ("memory.values", self.values)]
    }
}

/// The memory in a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryCall<'a> {
    pub projected: DecoderMemory<'a>,
    pub mask: DeviceMask<'a>,
    /// The memory's rows before projection, in a backward call. A forward call does not read them.
    pub rows: Option<TensorView<'a>>,
}

impl<'a> MemoryCall<'a> {
    /// The attention of `x` to the memory in layer `n`, into `out`.
    pub fn attention(&self, n: usize, [x, out]: [TensorView<'a>; 2]) -> MultiHeadForward<'a> {
        let rows = self.rows.unwrap_or(x);
        let keys = self.projected.of_layer(n, x.shape()[0]);
        MultiHeadForward::new(x, rows, rows, out).mask(self.mask).projected_keys(keys)
    }
}

impl Stack {
    /// Checks the projections of a memory, compiles their pipelines and binds their tensors.
    pub fn prepare_memory(
        &self,
        memory: TensorView,
        projected: &DecoderMemory,
        scratch: &mut Scratch,
    ) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        let Rows { batch, length } = self.check_rows("memory", &memory, device)?;
        self.check_memory(projected, batch, length, Access::Write, device)?;
        let attentions = || self.layers.iter().filter_map(|layer| layer.cross.as_ref());
        let mut read = vec![("memory", memory)];
        read.extend(attentions().flat_map(MultiHeadAttention::weights));
        check_aliasing(&projected.tensors(), &read, device)?;
        check_apart(&projected.tensors(), device)?;
        let mut dispatches = Dispatches::new();
        for (n, attention) in attentions().enumerate() {
            dispatches.extend(attention.key_products(memory, projected.of_layer(n, batch), device)?);
        }
        self.pipelines.bind("decoder memory", &dispatches, scratch.bindings())
    }

    /// The number of rows of a memory, without the keys that layers append.
    pub(super) fn memory_len(&self, projected: &DecoderMemory) -> Result<usize, Error> {
        let (shape, [_, appended]) = (projected.keys.shape(), self.layers[0].appended());
        match shape[2].checked_sub(appended) {
            Some(length) if length > 0 => Ok(length),
            _ => Err(Error::Shape {
                tensor: "memory.keys",
                axis: "length",
                expected: format!("more than {appended}, the number of appended keys"),
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
        let (dims, [_, appended]) = ([config.head_dim, config.value_dim], self.layers[0].appended());
        for ((name, view), dim) in memory.tensors().into_iter().zip(dims) {
            view.check_as(name, config.dtype, access, device)?;
            let entries = self.layers.len().saturating_mul(batch);
            let length = length.saturating_add(appended);
            expect_shape(name, view.shape(), [entries, config.kv_heads, length, dim])?;
        }
        Ok(())
    }
}
