//! Tensors and calls of attention that several suites have.

use std::collections::BTreeMap;

use wgpu_attention::cache::CacheStorage;
use wgpu_attention::mask::DeviceMask;
use wgpu_attention::selected::{SelectedAttention, SelectedBackward, SelectedForward};
use wgpu_attention::{
    Attention, Backward, Config, DType, Error, Forward, Gpu, KernelOptions, Scratch, Shape, TensorView,
};

use crate::case::Case;
use crate::outcome::{Failed, float};
use crate::tensor::{Placed, Tensor};

/// A tensor of heads. `shape` is `[batch, heads, length, dim]`.
pub struct Heads {
    pub placed: Placed,
    pub shape: [usize; 4],
    /// True if heads come after the length in memory.
    pub is_blhd: bool,
}

impl Heads {
    /// Takes `[batch, heads, length, dim]`, or `[batch, length, heads · dim]`.
    pub fn new(gpu: &Gpu, tensor: &Tensor, heads: Option<i64>) -> Result<Self, Failed> {
        let placed = Placed::new(gpu, &tensor.data, float(tensor)?, tensor.four())?;
        let (shape, is_blhd) = match tensor.shape[..] {
            [batch, length, width] => {
                let heads = heads.ok_or_else(|| Failed("no number of heads".into()))? as usize;
                ([batch, heads, length, width / heads], true)
            }
            _ => (tensor.four(), false),
        };
        Ok(Heads { placed, shape, is_blhd })
    }

    /// Takes `[batch, length, heads, dim]` or `[batch, length, heads]`, or tensors side by side,
    /// `[batch, length, tensors, heads, dim]`.
    pub fn blhd(gpu: &Gpu, tensor: &Tensor) -> Result<Self, Failed> {
        let shape = Self::axes(tensor)?;
        let placed = Placed::new(gpu, &tensor.data, float(tensor)?, shape)?;
        Ok(Heads { placed, shape, is_blhd: true })
    }

    /// Makes an output with the type and the axes of `tensor`, as [`blhd`](Self::blhd) takes them.
    pub fn like(gpu: &Gpu, tensor: &Tensor) -> Result<Self, Failed> {
        Ok(Self::output(gpu, float(tensor)?, Self::axes(tensor)?)?)
    }

    fn axes(tensor: &Tensor) -> Result<[usize; 4], Failed> {
        match tensor.shape[..] {
            [batch, length, heads] => Ok([batch, heads, length, 1]),
            [batch, length, heads, dim] => Ok([batch, heads, length, dim]),
            [batch, length, tensors, heads, dim] => Ok([batch, tensors * heads, length, dim]),
            _ => Err(Failed("other axes".into())),
        }
    }

    /// Makes an output, `[batch, length, heads, dim]` in memory.
    pub fn output(gpu: &Gpu, dtype: DType, shape: [usize; 4]) -> Result<Self, Error> {
        Ok(Heads { placed: Placed::output(gpu, dtype, shape)?, shape, is_blhd: true })
    }

    /// Makes an output of the same type, axes and order.
    fn output_like(&self, gpu: &Gpu) -> Result<Self, Error> {
        Ok(Heads { placed: Placed::output(gpu, self.view().dtype(), self.shape)?, ..*self })
    }

    pub fn view(&self) -> TensorView<'_> {
        if self.is_blhd { self.placed.blhd(self.shape) } else { self.placed.viewed(self.shape) }
    }

    /// Returns tensor `n` of `count` tensors side by side.
    pub fn part(&self, n: usize, count: usize) -> TensorView<'_> {
        let heads = self.shape[1] / count;
        self.view().slice(1, n * heads, heads)
    }
}

/// The tensors of a forward and a backward call.
pub struct CallTensors {
    pub q: Heads,
    k: Heads,
    v: Heads,
    pub out: Heads,
    lse: Placed,
    d_out: Heads,
    pub d_q: Heads,
    pub d_k: Heads,
    pub d_v: Heads,
}

impl CallTensors {
    /// Makes the outputs for these inputs.
    pub fn new(gpu: &Gpu, [q, k, v, d_out]: [Heads; 4]) -> Result<Self, Error> {
        let [batch, heads, length, _] = q.shape;
        Ok(CallTensors {
            out: d_out.output_like(gpu)?,
            lse: Placed::output(gpu, DType::F32, [batch, heads, length, 1])?,
            d_q: q.output_like(gpu)?,
            d_k: k.output_like(gpu)?,
            d_v: v.output_like(gpu)?,
            q,
            k,
            v,
            d_out,
        })
    }

    pub fn config(&self) -> Config {
        let [_, heads, _, dim] = self.q.shape;
        Config::new(heads, dim).kv_heads(self.k.shape[1]).dtype(self.q.view().dtype())
    }

    pub fn forward<'a>(&'a self, mask: DeviceMask<'a>) -> Forward<'a> {
        let forward = Forward::new(self.q.view(), self.k.view(), self.v.view(), self.out.view());
        forward.mask(mask).lse(self.lse.view())
    }

    pub fn backward<'a>(&'a self, forward: Forward<'a>) -> Backward<'a> {
        let backward = Backward::new(forward, self.d_out.view());
        backward.d_q(self.d_q.view()).d_k(self.d_k.view()).d_v(self.d_v.view())
    }

    /// Downloads the results.
    pub fn results(&self, gpu: &Gpu) -> Result<BTreeMap<&'static str, Vec<f64>>, Error> {
        let named = [("o", &self.out), ("d_q", &self.d_q), ("d_k", &self.d_k), ("d_v", &self.d_v)];
        named.into_iter().map(|(name, heads)| Ok((name, heads.placed.download(gpu)?))).collect()
    }
}

/// Runs a forward call.
pub fn forward(gpu: &Gpu, attention: &Attention, call: &Forward) -> Result<(), Error> {
    let mut scratch = Scratch::new(gpu.device(), attention.scratch_size(call)?)?;
    gpu.submit(|e| attention.forward(e, call, &mut scratch))
}

/// Runs a backward call.
pub fn backward(gpu: &Gpu, attention: &Attention, call: &Backward) -> Result<(), Error> {
    let mut scratch = Scratch::new(gpu.device(), attention.backward_scratch_size(call)?)?;
    gpu.submit(|e| attention.backward(e, call, &mut scratch))
}

/// Runs a forward and a backward call of attention to listed keys.
pub fn selected(
    gpu: &Gpu,
    attention: &SelectedAttention,
    (forward, backward): (Forward, Backward),
    indices: TensorView,
) -> Result<(), Error> {
    let call = SelectedForward::new(forward, indices);
    let mut scratch = Scratch::new(gpu.device(), attention.scratch_size(&call)?)?;
    gpu.submit(|e| attention.forward(e, &call, &mut scratch))?;
    let call = SelectedBackward::new(backward, indices);
    let mut scratch = Scratch::new(gpu.device(), attention.backward_scratch_size(&call)?)?;
    gpu.submit(|e| attention.backward(e, &call, &mut scratch))
}

/// Uploads a tensor of floats, with ones in front up to four axes.
pub fn place(gpu: &Gpu, tensor: &Tensor) -> Result<Placed, Failed> {
    Ok(Placed::new(gpu, &tensor.data, float(tensor)?, tensor.four())?)
}

/// Returns the storage of a cache that holds `dtype`.
pub fn storage(dtype: DType) -> CacheStorage {
    match dtype {
        DType::F16 => CacheStorage::F16,
        DType::BF16 => CacheStorage::BF16,
        _ => CacheStorage::F32,
    }
}

/// Returns the configuration of a case: `scale`, `softcap` and `splits` are attributes. A softcap
/// of 0 is none, and 0 splits are chosen by the plan.
pub fn config(case: &Case, shape: &Shape, dtype: DType) -> Config {
    let splits = case.integer("splits").filter(|n| *n > 0);
    Config::of(shape)
        .dtype(dtype)
        .scale(case.number("scale"))
        .softcap(case.number("softcap").filter(|c| *c > 0.0))
        .kernel_options(splits.map_or(KernelOptions::new(), |n| KernelOptions::new().splits(n as usize)))
}
