//! An attention layer and its gradients: causal, with a learned bias for each distance.

use wgpu_attention::layers::{
    LinearGradients, MultiHeadBackward, MultiHeadConfig, MultiHeadForward, MultiHeadGradients,
    MultiHeadWeights,
};
use wgpu_attention::{DType, Error, Gpu, Linear, Mask, MultiHeadAttention, Scratch, TensorView, wgpu};

use crate::parameters::{HEADS, LayerOf, WIDTH};
use crate::task::{BATCH, LENGTH};

pub struct Layer {
    attention: MultiHeadAttention,
    /// What the forward pass leaves to the backward pass.
    context: wgpu::Buffer,
    lse: wgpu::Buffer,
    scratch: Scratch,
}

/// What both passes are given.
#[derive(Clone, Copy)]
pub struct Tensors<'a> {
    pub weights: LayerOf<TensorView<'a>>,
    /// What the layer reads, and what it makes of it.
    pub x: TensorView<'a>,
    pub out: TensorView<'a>,
}

/// What only the backward pass is given.
#[derive(Clone, Copy)]
pub struct Gradients<'a> {
    pub weights: LayerOf<TensorView<'a>>,
    pub d_out: TensorView<'a>,
    pub d_x: TensorView<'a>,
}

fn forward<'a>(tensors: &Tensors<'a>, [context, lse]: [&'a wgpu::Buffer; 2]) -> MultiHeadForward<'a> {
    MultiHeadForward::self_attention(tensors.x, tensors.out)
        .mask(Mask::causal().relative(tensors.weights.relative))
        .context(TensorView::sequence(context, DType::F32, [BATCH, LENGTH, WIDTH]))
        .lse(TensorView::new(lse, DType::F32, [BATCH, HEADS, LENGTH, 1]))
}

fn backward<'a>(forward: MultiHeadForward<'a>, gradients: &Gradients<'a>) -> MultiHeadBackward<'a> {
    let LayerOf { query, key, value, out, relative } = gradients.weights;
    let [query, key, value, out] =
        [query, key, value, out].map(|weight| LinearGradients { weight: Some(weight), bias: None });
    MultiHeadBackward::new(forward, gradients.d_out)
        // The same view for all three: their sum.
        .d_query(gradients.d_x)
        .d_key(gradients.d_x)
        .d_value(gradients.d_x)
        .d_weights(MultiHeadGradients {
            query,
            key,
            value,
            out,
            bias_kv: None,
            qk_norm: Default::default(),
            gate: Default::default(),
        })
        .d_relative(relative)
}

impl Layer {
    /// A layer for calls with such tensors.
    pub fn new(gpu: &Gpu, tensors: &Tensors, maps: TensorView, gradients: &Gradients) -> Result<Self, Error> {
        let linear = |weight| Linear { weight, bias: None };
        let LayerOf { query, key, value, out, .. } = tensors.weights;
        let [query, key, value, out] = [query, key, value, out].map(linear);
        let weights = MultiHeadWeights { query, key, value, out, bias_kv: None, qk_norm: None, gate: None };
        let config = MultiHeadConfig::new(WIDTH, HEADS);
        let attention = MultiHeadAttention::with_pipelines(gpu.pipelines(), config, &weights)?;
        let context = gpu.buffer(size_of::<f32>() * BATCH * LENGTH * WIDTH)?;
        let lse = gpu.buffer(size_of::<f32>() * BATCH * HEADS * LENGTH)?;
        let call = forward(tensors, [&context, &lse]);
        let size = attention
            .scratch_size(&call)?
            .max(attention.scratch_size(&call.weights(maps))?)
            .max(attention.backward_scratch_size(&backward(call, gradients))?);
        let scratch = Scratch::new(gpu.device(), size)?;
        Ok(Layer { attention, context, lse, scratch })
    }

    /// Writes `out`, and to `maps` what every head attends to.
    pub fn forward(
        &mut self,
        pass: &mut wgpu::ComputePass,
        tensors: &Tensors,
        maps: Option<TensorView>,
    ) -> Result<(), Error> {
        let call = forward(tensors, [&self.context, &self.lse]).weights(maps);
        self.attention.forward(pass, &call, &mut self.scratch)
    }

    /// The gradients of the last [`forward`](Self::forward): of `x` and of the weights.
    pub fn backward(
        &mut self,
        pass: &mut wgpu::ComputePass,
        tensors: &Tensors,
        gradients: &Gradients,
    ) -> Result<(), Error> {
        let call = backward(forward(tensors, [&self.context, &self.lse]), gradients);
        self.attention.backward(pass, &call, &mut self.scratch)
    }
}
