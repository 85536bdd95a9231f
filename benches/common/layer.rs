//! A self-attention layer, as both benchmarks run it.

use wgpu_attention::{
    DType, Gpu, LayerConfig, LayerForward, LayerWeights, Linear, MultiHeadAttention, TensorView,
};

/// The buffers of a self-attention layer, `[in, out]` weights (`transposed`) or `[out, in]`.
pub struct Layer {
    pub config: LayerConfig,
    length: usize,
    transposed: bool,
    pub x: wgpu::Buffer,
    in_proj: wgpu::Buffer,
    out_proj: wgpu::Buffer,
    pub y: wgpu::Buffer,
}

impl Layer {
    /// A layer `embed` wide over `x` `[1, length, embed]`, weights `[3 · embed, embed]` and `[embed, embed]`.
    pub fn new(
        gpu: &Gpu,
        heads: usize,
        [x, in_proj, out_proj]: [&[f32]; 3],
        length: usize,
        transposed: bool,
    ) -> Self {
        let embed = x.len() / length;
        Layer {
            config: LayerConfig::new(embed, heads),
            length,
            transposed,
            x: gpu.upload(x).expect("x"),
            in_proj: gpu.upload(in_proj).expect("in_proj"),
            out_proj: gpu.upload(out_proj).expect("out_proj"),
            y: gpu.buffer(x.len() * 4).expect("y"),
        }
    }

    fn matrix<'a>(&self, buffer: &'a wgpu::Buffer, rows: usize) -> TensorView<'a> {
        let embed = self.config.query_features;
        if self.transposed {
            return TensorView::matrix(buffer, DType::F32, [embed, rows]).transposed(2, 3);
        }
        TensorView::matrix(buffer, DType::F32, [rows, embed])
    }

    pub fn operator(&self, gpu: &Gpu) -> MultiHeadAttention {
        let embed = self.config.query_features;
        let in_proj = self.matrix(&self.in_proj, 3 * embed);
        let part = |n| Linear { weight: in_proj.slice(2, n * embed, embed), bias: None };
        let out = Linear { weight: self.matrix(&self.out_proj, embed), bias: None };
        let weights = LayerWeights { query: part(0), key: part(1), value: part(2), out, appended: None };
        MultiHeadAttention::with_pipelines(gpu.pipelines(), self.config, &weights).expect("layer")
    }

    pub fn call(&self) -> LayerForward<'_> {
        let sequence =
            |buffer| TensorView::sequence(buffer, DType::F32, [1, self.length, self.config.query_features]);
        LayerForward::self_attention(sequence(&self.x), sequence(&self.y))
    }
}
