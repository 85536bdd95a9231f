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
    /// The forward pass writes these two for the backward pass.
    context: wgpu::Buffer,
    lse: wgpu::Buffer,
    scratch: Scratch,
}

/// The tensors of both passes.
#[derive(Clone, Copy)]
pub struct Tensors<'a> {
    pub weights: LayerOf<TensorView<'a>>,
    /// The layer's input and output.
    pub x: TensorView<'a>,
    pub out: TensorView<'a>,
}

/// The additional tensors of the backward pass.
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
        // One view for all three gradients: the layer writes their sum.
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
    /// Creates a layer for calls with tensors of these shapes.
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

    /// Records the forward pass: writes `out`, and every head's attention weights to `maps`.
    pub fn forward(
        &mut self,
        pass: &mut wgpu::ComputePass,
        tensors: &Tensors,
        maps: Option<TensorView>,
    ) -> Result<(), Error> {
        let call = forward(tensors, [&self.context, &self.lse]).weights(maps);
        self.attention.forward(pass, &call, &mut self.scratch)
    }

    /// Records the backward pass of the last [`forward`](Self::forward): writes the gradients of
    /// `x` and of the weights.
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
