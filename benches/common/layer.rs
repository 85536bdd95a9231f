//! A self-attention layer, and the comparison of its result with the reference.

use wgpu_attention::layers::{MultiHeadConfig, MultiHeadForward, MultiHeadWeights};
use wgpu_attention::reference::compare::{Difference, Mismatch, compare};
use wgpu_attention::reference::{self, HostLinear, HostWeights, Options, Real, widen};
use wgpu_attention::{DType, Gpu, Linear, MultiHeadAttention, TensorView, wgpu};

use super::problem::{blank, read, rounded, tolerance, upload};
use super::timer::noise;

/// The buffers of a self-attention layer, with weights `[in, out]` (`transposed`) or `[out, in]`.
pub struct Layer {
    config: MultiHeadConfig,
    embed: usize,
    length: usize,
    dtype: DType,
    transposed: bool,
    /// x and both weights, rounded to `dtype`.
    data: [Vec<f32>; 3],
    x: wgpu::Buffer,
    in_proj: wgpu::Buffer,
    out_proj: wgpu::Buffer,
    pub y: wgpu::Buffer,
}

impl Layer {
    /// Makes a layer of width `embed` on `x` `[1, length, embed]`, with weights `[3 · embed,
    /// embed]` and `[embed, embed]`.
    pub fn new(
        gpu: &Gpu,
        heads: usize,
        data: [Vec<f32>; 3],
        length: usize,
        dtype: DType,
        transposed: bool,
    ) -> Self {
        let data = data.map(|x| rounded(x, dtype));
        let [x, in_proj, out_proj] = &data;
        let embed = x.len() / length;
        Layer {
            config: MultiHeadConfig::new(embed, heads).dtype(dtype),
            embed,
            length,
            dtype,
            transposed,
            x: upload(gpu, x, dtype).expect("x"),
            in_proj: upload(gpu, in_proj, dtype).expect("in_proj"),
            out_proj: upload(gpu, out_proj, dtype).expect("out_proj"),
            y: blank(gpu, x.len(), dtype).expect("y"),
            data,
        }
    }

    /// Makes a layer of pseudo-random numbers, with weights `[out, in]`.
    pub fn random(gpu: &Gpu, length: usize, embed: usize, heads: usize) -> Self {
        let weights = |n, seed| {
            noise(n * embed * embed, seed)
                .into_iter()
                .map(|x| x / (embed as f32).sqrt())
                .collect::<Vec<f32>>()
        };
        Layer::new(
            gpu,
            heads,
            [noise(length * embed, 1), weights(3, 2), weights(1, 3)],
            length,
            DType::F32,
            false,
        )
    }

    fn matrix<'a>(&self, buffer: &'a wgpu::Buffer, rows: usize) -> TensorView<'a> {
        let embed = self.embed;
        if self.transposed {
            return TensorView::matrix(buffer, self.dtype, [embed, rows]).transposed(2, 3);
        }
        TensorView::matrix(buffer, self.dtype, [rows, embed])
    }

    pub fn operator(&self, gpu: &Gpu) -> MultiHeadAttention {
        let embed = self.embed;
        let in_proj = self.matrix(&self.in_proj, 3 * embed);
        let part = |n| Linear { weight: in_proj.slice(2, n * embed, embed), bias: None };
        let out = Linear { weight: self.matrix(&self.out_proj, embed), bias: None };
        let weights = MultiHeadWeights {
            query: part(0),
            key: part(1),
            value: part(2),
            out,
            bias_kv: None,
            qk_norm: None,
            gate: None,
        };
        MultiHeadAttention::with_pipelines(gpu.pipelines(), self.config, &weights).expect("layer")
    }

    pub fn call(&self) -> MultiHeadForward<'_> {
        let sequence = |buffer| TensorView::sequence(buffer, self.dtype, [1, self.length, self.embed]);
        MultiHeadForward::self_attention(sequence(&self.x), sequence(&self.y))
    }

    /// Compares the whole result. The weights must be `[out, in]`.
    pub fn judge(&self, gpu: &Gpu) -> Result<Difference, Mismatch> {
        let (want, naive) = (self.truth::<f64>(), self.truth::<f32>());
        let got = read(gpu, &self.y, want.len(), self.dtype);
        compare(&got, &want, tolerance(&naive, &want, self.dtype))
    }

    fn truth<R: Real>(&self) -> Vec<R> {
        assert!(!self.transposed, "the reference has weights [out, in]");
        let [x, in_proj, out_proj] = self.data.each_ref().map(|x| widen::<R>(x));
        let embed = self.embed;
        let part =
            |n: usize| HostLinear { weight: &in_proj[n * embed * embed..][..embed * embed], bias: None };
        let out = HostLinear { weight: &out_proj, bias: None };
        let weights = HostWeights {
            query: part(0),
            key: part(1),
            value: part(2),
            out,
            bias_kv: None,
            qk_norm: None,
            gate: None,
        };
        let shape = reference::MultiHeadShape { batch: 1, q_len: self.length, kv_len: self.length };
        reference::multi_head([&x[..]; 3], shape, &self.config, &weights, &Options::default())
            .expect("the reference knows the layer")
            .out
    }
}
