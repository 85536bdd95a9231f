//! One call of a layer on the handles of its tensors, forward and backward.

use std::sync::Arc;

use burn_cubecl::tensor::CubeTensor;
use wgpu_attention::layers::{
    LinearGradients, MultiHeadBackward, MultiHeadConfig, MultiHeadForward, MultiHeadGradients,
    MultiHeadWeights,
};
use wgpu_attention::{Dropout, Linear, MultiHeadAttention};

use crate::device::Shared;
use crate::error::Result;
use crate::graph::{Gradient, GradientTensors};
use crate::mask::{self, BoundMask, HandleMask};
use crate::tensor::{Bound, empty_like, flush, on_device, same_device};

/// A call of a layer. Its float tensors are numbered in the order of the graph's parents.
#[derive(Debug)]
pub(super) struct LayerCall {
    /// One or three inputs, four weights, the biases, the mask's tensors.
    pub floats: Vec<CubeTensor>,
    pub names: Vec<&'static str>,
    /// The number of inputs.
    pub inputs: usize,
    /// The indices of the biases in `floats`.
    pub biases: [Option<usize>; 4],
    pub mask: HandleMask,
    pub heads: usize,
    pub dropout: Option<(f64, u64)>,
}

/// The buffers of a call's inputs.
struct Inputs {
    floats: Vec<Bound>,
    mask: BoundMask,
}

impl LayerCall {
    pub fn query(&self) -> &CubeTensor {
        &self.floats[0]
    }

    pub fn key(&self) -> &CubeTensor {
        &self.floats[self.input(1)]
    }

    /// The index of the input of queries, keys or values.
    fn input(&self, n: usize) -> usize {
        n.min(self.inputs - 1)
    }

    fn tensors(&self) -> Vec<(&'static str, &CubeTensor)> {
        let floats = self.names.iter().copied().zip(&self.floats);
        floats.chain(mask::tensors(&self.mask)).collect()
    }

    /// Checks the devices of all tensors.
    pub fn check(&self) -> Result<()> {
        same_device(&self.tensors())
    }

    fn bind(&self) -> Result<Inputs> {
        let floats = self.names.iter().zip(&self.floats).map(|(name, t)| Bound::new(name, t));
        Ok(Inputs { floats: floats.collect::<Result<_>>()?, mask: mask::bind(&self.mask)? })
    }

    /// The layer. Burn's weights are `[in, out]`, which are transposed views here.
    fn layer(&self, shared: &Shared, inputs: &Inputs) -> Result<MultiHeadAttention> {
        let linear = |n: usize| Linear {
            weight: inputs.floats[self.inputs + n].view().transposed(2, 3),
            bias: self.biases[n].map(|n| inputs.floats[n].view()),
        };
        let x = inputs.floats[0].view();
        let config = MultiHeadConfig::new(x.shape()[3], self.heads).dtype(x.dtype());
        let weights = MultiHeadWeights {
            query: linear(0),
            key: linear(1),
            value: linear(2),
            out: linear(3),
            bias_kv: None,
            qk_norm: None,
            gate: None,
        };
        Ok(MultiHeadAttention::with_pipelines(&shared.pipelines, config, &weights)?)
    }

    fn views<'a>(
        &self,
        inputs: &'a Inputs,
        out: &'a Bound,
        stored: Option<&'a [Bound; 2]>,
    ) -> MultiHeadForward<'a> {
        let [q, k, v] = [0, 1, 2].map(|n| inputs.floats[self.input(n)].sequence());
        MultiHeadForward::new(q, k, v, out.sequence())
            .mask(mask::view(&inputs.mask, &inputs.floats))
            .context(stored.map(|[context, _]| context.sequence()))
            .lse(stored.map(|[_, lse]| lse.view()))
            .dropout(self.dropout.map(|(p, seed)| Dropout::Seeded { p, seed }))
    }

    /// Computes `out`, what the backward pass needs, and the weights.
    pub fn forward(
        &self,
        shared: &Shared,
        out: &CubeTensor,
        stored: Option<&[CubeTensor; 2]>,
        weights: Option<&CubeTensor>,
    ) -> Result<()> {
        let inputs = self.bind()?;
        let out_bound = Bound::new("out", out)?;
        let stored = stored.map(bind_stored).transpose()?;
        let weights = weights.map(|t| Bound::new("weights", t)).transpose()?;
        let layer = self.layer(shared, &inputs)?;
        let call =
            self.views(&inputs, &out_bound, stored.as_ref()).weights(weights.as_ref().map(Bound::view));
        let size = layer.scratch_size(&call)?;
        flush(self.tensors().into_iter().map(|(_, t)| t).chain([out]))?;
        shared.submit(size, |encoder, scratch| layer.forward(encoder, &call, scratch))
    }
}

fn bind_stored([context, lse]: &[CubeTensor; 2]) -> Result<[Bound; 2]> {
    Ok([Bound::new("context", context)?, Bound::new("lse", lse)?])
}

/// A forward call with its results, for the backward pass.
#[derive(Debug)]
pub(super) struct Saved {
    pub call: LayerCall,
    pub out: CubeTensor,
    /// The heads' outputs and their log-sum-exp.
    pub stored: [CubeTensor; 2],
    pub shared: Arc<Shared>,
}

impl Saved {
    /// Checks the backward pass in advance, with a gradient of the result that has no content.
    pub fn check(&self, wanted: &[bool]) -> Result<()> {
        on_device(&self.out, || {
            let gradients = GradientTensors::new(&self.call.floats, wanted)?;
            self.with_call(&empty_like(&self.out), &gradients, |layer, call| {
                Ok(layer.backward_scratch_size(call).map(drop)?)
            })
        })
    }

    /// Calls `then` with the library's call.
    fn with_call(
        &self,
        d_out: &CubeTensor,
        gradients: &GradientTensors,
        then: impl FnOnce(&MultiHeadAttention, &MultiHeadBackward) -> Result<()>,
    ) -> Result<()> {
        let call = &self.call;
        let inputs = call.bind()?;
        let [out, d_out] = [Bound::new("out", &self.out)?, Bound::new("d_out", d_out)?];
        let stored = bind_stored(&self.stored)?;
        let of_input = |n: usize| gradients.bound(call.input(n)).map(Bound::sequence);
        let linear = |n: usize| LinearGradients {
            weight: gradients.view(call.inputs + n).map(|t| t.transposed(2, 3)),
            bias: call.biases[n].and_then(|n| gradients.view(n)),
        };
        let weights = MultiHeadGradients {
            query: linear(0),
            key: linear(1),
            value: linear(2),
            out: linear(3),
            ..MultiHeadGradients::default()
        };
        let layer = call.layer(&self.shared, &inputs)?;
        let forward = call.views(&inputs, &out, Some(&stored));
        let mut backward = MultiHeadBackward::new(forward, d_out.sequence())
            .d_query(of_input(0))
            .d_key(of_input(1))
            .d_value(of_input(2))
            .d_weights(weights);
        for (n, name) in call.names.iter().enumerate() {
            let gradient = gradients.view(n);
            backward = match *name {
                "bias" => backward.d_bias(gradient),
                "slopes" => backward.d_slopes(gradient),
                "relative" => backward.d_relative(gradient),
                "sink_logits" => backward.d_sinks(gradient),
                _ => backward,
            };
        }
        then(&layer, &backward)
    }
}

impl Gradient for Saved {
    fn backward(&self, d_out: CubeTensor, wanted: &[bool]) -> Result<Vec<Option<CubeTensor>>> {
        on_device(&self.out, || {
            let gradients = GradientTensors::new(&self.call.floats, wanted)?;
            self.with_call(&d_out, &gradients, |layer, call| {
                let size = layer.backward_scratch_size(call)?;
                let read = self.call.tensors().into_iter().map(|(_, t)| t).chain([&self.out, &d_out]);
                flush(read.chain(&self.stored).chain(gradients.iter()))?;
                self.shared.submit(size, |encoder, scratch| layer.backward(encoder, call, scratch))
            })?;
            Ok(gradients.into_tensors())
        })
    }
}
