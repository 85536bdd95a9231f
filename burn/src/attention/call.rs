//! One call on the handles of its tensors, forward and backward.

use std::sync::Arc;

use burn_cubecl::tensor::CubeTensor;
use wgpu_attention::cache::Append;
use wgpu_attention::mask::{BoundMaskMod, BoundScoreMod, DeviceMask, MaskMod, ScoreMod};
use wgpu_attention::{Attention, Backward, Config, Dropout, Forward, TensorView};

use crate::cache::Cache;
use crate::device::Shared;
use crate::error::Result;
use crate::graph::{Gradient, GradientTensors};
use crate::mask::{self, BoundMask, HandleMask};
use crate::tensor::{Bound, empty_like, flush, on_device, same_device};

/// A tensor of a score or mask function.
#[derive(Clone, Debug)]
pub(super) enum CapturedHandle {
    /// The index of a float tensor of the call.
    Float(usize),
    Other(Box<CubeTensor>),
}

/// A call. Its float tensors are numbered in the order of the graph's parents.
#[derive(Debug)]
pub(super) struct Call {
    /// Query, key, value, the mask's, the functions'.
    pub floats: Vec<CubeTensor>,
    pub names: Vec<&'static str>,
    pub mask: HandleMask,
    pub score_mod: Option<(ScoreMod, Vec<CapturedHandle>, Vec<u8>)>,
    pub mask_mod: Option<(MaskMod, Vec<CapturedHandle>, Vec<u8>)>,
    pub scale: Option<f64>,
    pub softcap: Option<f64>,
    /// The probability and the seed.
    pub dropout: Option<(f64, u64)>,
}

/// The buffers of a call's inputs.
struct Inputs {
    floats: Vec<Bound>,
    mask: BoundMask,
    captured: [Vec<CapturedBound>; 2],
}

enum CapturedBound {
    Float(usize),
    Other(Bound),
}

impl Call {
    pub fn query(&self) -> &CubeTensor {
        &self.floats[0]
    }

    pub fn value(&self) -> &CubeTensor {
        &self.floats[2]
    }

    /// Returns every tensor with its name.
    fn tensors(&self) -> Vec<(&'static str, &CubeTensor)> {
        let mut all: Vec<_> = self.names.iter().copied().zip(&self.floats).collect();
        all.extend(mask::tensors(&self.mask));
        let captured = self.captured().into_iter().flatten().filter_map(|handle| match handle {
            CapturedHandle::Float(_) => None,
            CapturedHandle::Other(t) => Some(("captured", t.as_ref())),
        });
        all.extend(captured);
        all
    }

    fn captured(&self) -> [&[CapturedHandle]; 2] {
        let scores = self.score_mod.as_ref().map_or(&[][..], |(_, captured, _)| captured);
        let pairs = self.mask_mod.as_ref().map_or(&[][..], |(_, captured, _)| captured);
        [scores, pairs]
    }

    /// Checks the devices of all tensors.
    pub fn check(&self) -> Result<()> {
        same_device(&self.tensors())
    }

    fn config(&self, q: TensorView, k: TensorView, v: TensorView) -> Config {
        let ([_, heads, _, head_dim], [_, kv_heads, ..], [.., value_dim]) = (q.shape(), k.shape(), v.shape());
        Config::new(heads, head_dim)
            .kv_heads(kv_heads)
            .value_dim(value_dim)
            .dtype(q.dtype())
            .scale(self.scale)
            .softcap(self.softcap)
    }

    fn bind(&self) -> Result<Inputs> {
        let floats = self
            .names
            .iter()
            .zip(&self.floats)
            .map(|(name, t)| Bound::new(name, t))
            .collect::<Result<_>>()?;
        let mask = mask::bind(&self.mask)?;
        let captured = |handles: &[CapturedHandle]| {
            let bound = |handle: &CapturedHandle| match handle {
                CapturedHandle::Float(n) => Ok(CapturedBound::Float(*n)),
                CapturedHandle::Other(t) => Bound::new("captured", t).map(CapturedBound::Other),
            };
            handles.iter().map(bound).collect::<Result<Vec<_>>>()
        };
        let [scores, pairs] = self.captured();
        Ok(Inputs { floats, mask, captured: [captured(scores)?, captured(pairs)?] })
    }

    /// Returns the library's call on bound tensors.
    fn views<'a>(&'a self, inputs: &'a Inputs, out: &'a Bound, lse: Option<&'a Bound>) -> Forward<'a> {
        let [q, k, v] = [0, 1, 2].map(|n| inputs.floats[n].view());
        Forward::new(q, k, v, out.view())
            .mask(self.device_mask(inputs))
            .lse(lse.map(Bound::view))
            .dropout(self.dropout.map(|(p, seed)| Dropout::Seeded { p, seed }))
    }

    fn device_mask<'a>(&'a self, inputs: &'a Inputs) -> DeviceMask<'a> {
        let mut mask = mask::view(&inputs.mask, &inputs.floats);
        let views = |captured: &'a [CapturedBound]| -> Vec<TensorView<'a>> {
            let view = |t: &'a CapturedBound| match t {
                CapturedBound::Float(n) => inputs.floats[*n].view(),
                CapturedBound::Other(t) => t.view(),
            };
            captured.iter().map(view).collect()
        };
        let [scores, pairs] = &inputs.captured;
        if let Some((function, _, uniforms)) = &self.score_mod {
            let bound: BoundScoreMod = function.with(&views(scores));
            mask = mask.score_mod(if uniforms.is_empty() { bound } else { bound.uniforms(uniforms) });
        }
        if let Some((function, _, uniforms)) = &self.mask_mod {
            let bound: BoundMaskMod = function.with(&views(pairs));
            mask = mask.mask_mod(if uniforms.is_empty() { bound } else { bound.uniforms(uniforms) });
        }
        mask
    }

    /// Computes `out` and `lse`.
    pub fn forward(&self, shared: &Shared, out: &CubeTensor, lse: Option<&CubeTensor>) -> Result<()> {
        let inputs = self.bind()?;
        let out_bound = Bound::new("out", out)?;
        let lse_bound = lse.map(|t| Bound::new("lse", t)).transpose()?;
        let call = self.views(&inputs, &out_bound, lse_bound.as_ref());
        let [q, k, v] = [0, 1, 2].map(|n| inputs.floats[n].view());
        let attention = Attention::with_pipelines(&shared.pipelines, self.config(q, k, v))?;
        let size = attention.scratch_size(&call)?;
        flush(self.tensors().into_iter().map(|(_, t)| t).chain([out]))?;
        shared.submit(size, |encoder, scratch| attention.forward(encoder, &call, scratch))
    }

    /// Appends keys and values to a layer of a cache, and computes `out` from the layer.
    pub fn step(&self, cache: &Cache, layer: usize, out: &CubeTensor) -> Result<()> {
        let inputs = self.bind()?;
        let out_bound = Bound::new("out", out)?;
        let [q, k, v] = [0, 1, 2].map(|n| inputs.floats[n].view());
        let attention = Attention::with_pipelines(&cache.shared.pipelines, self.config(q, k, v))?;
        let mask = self.device_mask(&inputs);
        let call = Forward::with_cache(q, &cache.inner, out_bound.view()).layer(layer).mask(mask);
        let size = attention.scratch_size(&call)?;
        let append = cache.inner.prepare_append(layer, &Append::new(k, v))?;
        flush(self.tensors().into_iter().map(|(_, t)| t).chain([out]))?;
        cache.shared.submit(size, |encoder, scratch| {
            let attend = attention.prepare(&call, scratch)?;
            append.record(encoder);
            attend.record(encoder);
            Ok(())
        })
    }
}

/// A forward call with its results, for the backward pass.
#[derive(Debug)]
pub(super) struct Saved {
    pub call: Call,
    pub out: CubeTensor,
    pub lse: CubeTensor,
    pub shared: Arc<Shared>,
}

impl Saved {
    /// Checks the backward pass in advance, with a gradient of the result that has no content.
    pub fn check(&self, wanted: &[bool]) -> Result<()> {
        on_device(&self.out, || {
            let gradients = GradientTensors::new(&self.call.floats, wanted)?;
            self.with_call(&empty_like(&self.out), &gradients, |attention, call| {
                Ok(attention.backward_scratch_size(call).map(drop)?)
            })
        })
    }

    /// Calls `then` with the library's call.
    fn with_call(
        &self,
        d_out: &CubeTensor,
        gradients: &GradientTensors,
        then: impl FnOnce(&Attention, &Backward) -> Result<()>,
    ) -> Result<()> {
        let call = &self.call;
        let inputs = call.bind()?;
        let [out, lse] = [Bound::new("out", &self.out)?, Bound::new("lse", &self.lse)?];
        let d_out = Bound::new("d_out", d_out)?;
        let [q, k, v] = [0, 1, 2].map(|n| inputs.floats[n].view());
        let attention = Attention::with_pipelines(&self.shared.pipelines, call.config(q, k, v))?;
        let forward = call.views(&inputs, &out, Some(&lse));
        let [d_q, d_k, d_v] = [0, 1, 2].map(|n| gradients.view(n));
        let mut backward = Backward::new(forward, d_out.view()).d_q(d_q).d_k(d_k).d_v(d_v);
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
        let of_captured = |handle: &CapturedHandle| match handle {
            CapturedHandle::Float(n) => gradients.view(*n),
            CapturedHandle::Other(_) => None,
        };
        let captured: Vec<_> = call.captured()[0].iter().map(of_captured).collect();
        if captured.iter().any(Option::is_some) {
            backward = backward.d_captured(&captured);
        }
        then(&attention, &backward)
    }
}

impl Gradient for Saved {
    fn backward(&self, d_out: CubeTensor, wanted: &[bool]) -> Result<Vec<Option<CubeTensor>>> {
        on_device(&self.out, || {
            let gradients = GradientTensors::new(&self.call.floats, wanted)?;
            self.with_call(&d_out, &gradients, |attention, call| {
                let size = attention.backward_scratch_size(call)?;
                let read = self.call.tensors().into_iter().map(|(_, t)| t).chain([&self.out, &d_out]);
                flush(read.chain(gradients.iter()))?;
                self.shared.submit(size, |encoder, scratch| attention.backward(encoder, call, scratch))
            })?;
            Ok(gradients.into_tensors())
        })
    }
}
