//! The tensors of a mask, by their names in a case.

use std::collections::BTreeMap;

use safetensors::Dtype;
use wgpu_attention::mask::DeviceMask;
use wgpu_attention::{DType, Gpu, TensorView};

use crate::case::Case;
use crate::outcome::Failed;
use crate::tensor::{Placed, Tensor};

pub struct Tables(BTreeMap<String, Placed>);

impl Tables {
    pub fn new(gpu: &Gpu, case: &Case) -> Result<Self, Failed> {
        let mut tables = Tables(BTreeMap::new());
        for (name, tensor) in &case.inputs {
            tables.insert(gpu, name, tensor)?;
        }
        Ok(tables)
    }

    /// Places a tensor, if it is one of a mask. It replaces a tensor of the same name.
    pub fn insert(&mut self, gpu: &Gpu, name: &str, tensor: &Tensor) -> Result<(), Failed> {
        let Some(shape) = shape_of(name, tensor) else { return Ok(()) };
        // A number of a block map is 0 for a hidden block, and 1 if the other rules decide.
        let dtype = tensor.float().unwrap_or(match tensor.dtype {
            Dtype::BOOL if name != "block_mask" => DType::Bool,
            _ => DType::U32,
        });
        self.0.insert(name.into(), Placed::new(gpu, &tensor.data, dtype, shape)?);
        Ok(())
    }

    pub fn view(&self, name: &str) -> Option<TensorView<'_>> {
        self.0.get(name).map(Placed::view)
    }

    /// Returns the mask of the attributes `causal`, `left` and `right`. A bound of −1 is none.
    /// Slopes, sinks and booleans are tables.
    pub fn mask(&self, case: &Case) -> DeviceMask<'_> {
        let mut mask =
            if case.integer("causal") == Some(1) { DeviceMask::causal() } else { DeviceMask::none() };
        let bound = |name| case.integer(name).and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
        let (left, right) = (bound("left"), bound("right"));
        if left.min(right) < usize::MAX {
            mask = mask.window(left, right);
        }
        if let Some(slopes) = self.view("alibi_slopes") {
            mask = mask.alibi_symmetric(slopes);
        }
        if let Some(slopes) = self.view("linear_slopes") {
            mask = mask.alibi(slopes);
        }
        if let Some(sink) = self.view("sink") {
            mask = mask.sink_logits(sink);
        }
        if let Some(seen) = self.view("attn_mask") {
            mask = mask.attn_mask(seen);
        }
        mask
    }
}

/// Returns the shape on the device of a mask's tensor.
fn shape_of(name: &str, tensor: &Tensor) -> Option<[usize; 4]> {
    let axis = |n: usize| tensor.shape.get(n).copied().unwrap_or(1);
    Some(match name {
        "alibi_slopes" | "linear_slopes" => [axis(0), axis(1), 1, 1],
        "sink" | "head_bias" | "head_scale" => [1, axis(0), 1, 1],
        "batch_bias" => [axis(0), 1, 1, 1],
        "position_bias" | "query_bias" | "query_index" => [1, 1, axis(0), 1],
        "key_bias" | "key_scale" | "thresholds" | "cu_seqlens_q" | "cu_seqlens_k" => [1, 1, 1, axis(0)],
        "documents" => [axis(0), axis(1), axis(2), 1],
        "keep" | "attn_mask" | "block_mask" => tensor.four(),
        _ => return None,
    })
}
