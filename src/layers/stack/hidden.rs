//! The outputs of the layers of a stack, in calls that store them.

use super::Stack;
use super::config::TransformerLayerConfig;
use super::workspace::{Rows, Workspace, check_rows_of};
use crate::device::DeviceFacts;
use crate::kernel::{Slot, in_scratch};
use crate::tensor::{Access, Error, TensorView, count, expect_shape};

/// The tensor of the layers' outputs before the final norm. The output of layer n begins at batch
/// entry `n · batch`.
#[derive(Clone, Copy)]
pub(crate) struct Hidden {
    /// The number of its layers. Without a final norm the last layer's output is the stack's output
    /// instead.
    pub layers: usize,
    shape: [usize; 4],
}

impl Hidden {
    pub fn of(stack: &Stack, rows: &Rows) -> Self {
        let layers = stack.layers.len() - usize::from(stack.final_norm.is_none());
        let [batch, one, length, features] = rows.shape(stack.config.features());
        Hidden { layers, shape: [batch.saturating_mul(layers), one, length, features] }
    }

    pub fn check(
        &self,
        hidden: &TensorView,
        config: &TransformerLayerConfig,
        access: Access,
        device: &DeviceFacts,
    ) -> Result<(), Error> {
        if self.layers == 0 {
            let why = "the only layer writes `out`, so there are no other hidden states; omit `hidden`";
            return Err(Error::Unsupported { what: "hidden", why });
        }
        check_rows_of("hidden", hidden, &config.attention, access, device)?;
        expect_shape("hidden", hidden.shape(), self.shape)
    }

    /// The tensor in the scratch of a backward pass whose forward pass has not stored it.
    pub fn in_scratch<'a>(&self, work: &Workspace<'a>) -> Result<TensorView<'a>, Error> {
        let buffer = work.scratch.buffer(Slot::BlockOutputs)?;
        Ok(in_scratch(buffer, work.config.attention.dtype, self.shape, 0))
    }

    /// The bytes of that tensor.
    pub fn bytes(&self, config: &TransformerLayerConfig) -> u64 {
        let bytes = (count(self.shape) as u64).saturating_mul(config.attention.dtype.bytes() as u64);
        bytes.next_multiple_of(4)
    }
}

impl<'a> Workspace<'a> {
    /// The output of layer `n` in the tensor of all layers.
    pub fn given(&self, hidden: TensorView<'a>, n: usize) -> TensorView<'a> {
        hidden.slice(0, n.saturating_mul(self.rows.batch), self.rows.batch)
    }
}
