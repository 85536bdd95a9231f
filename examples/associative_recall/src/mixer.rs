//! The layers that mix tokens: gated DeltaNet, linear attention and softmax attention. All of them
//! see each token with the three tokens before it, through a causal convolution. Gated DeltaNet has
//! one, and the other two read the output of one.

use std::fmt;

use wgpu_attention::layers::{
    GatedDeltaNet, GatedDeltaNetBackward, GatedDeltaNetConfig, GatedDeltaNetForward, GatedDeltaNetWeights,
};
use wgpu_attention::linear_attention::{LinearAttention, LinearBackward, LinearConfig, LinearForward};
use wgpu_attention::matmul::{ProjectionBackward, ProjectionForward};
use wgpu_attention::rows::{CausalConv, CausalConvBackward, CausalConvForward};
use wgpu_attention::{
    Attention, Backward, Config, DType, Error, Forward, Gpu, Linear, Mask, Projection, Scratch, Shape,
    TensorView, wgpu,
};

use crate::model::WIDTH;

pub const HEADS: usize = 2;
const HEAD_DIM: usize = WIDTH / HEADS;
/// Rows of the convolution.
const ROWS: usize = 4;

/// The kind of the layers of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    GatedDeltaNet,
    Linear,
    Softmax,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(match self {
            Kind::GatedDeltaNet => "gated DeltaNet",
            Kind::Linear => "linear attention",
            Kind::Softmax => "softmax attention",
        })
    }
}

pub const KINDS: [Kind; 3] = [Kind::GatedDeltaNet, Kind::Linear, Kind::Softmax];

fn delta_config() -> GatedDeltaNetConfig {
    GatedDeltaNetConfig::new(WIDTH, HEADS, HEAD_DIM).conv_width(ROWS)
}

/// The shapes of a layer's weights.
pub fn shapes(kind: Kind) -> [[usize; 4]; 7] {
    let square = [1, 1, WIDTH, WIDTH];
    match kind {
        Kind::GatedDeltaNet => delta_config().weight_shapes().named().map(|(_, shape)| shape),
        // The last two have no use.
        _ => [[1, 1, WIDTH, ROWS], square, square, square, square, [1, 1, 1, 1], [1, 1, 1, 1]],
    }
}

/// The deviation and the mean of a layer's weights at the beginning.
pub fn beginnings(kind: Kind) -> [[f32; 2]; 7] {
    let of_width = [1.0 / (WIDTH as f32).sqrt(), 0.0];
    let of_rows = [1.0 / (ROWS as f32).sqrt(), 0.0];
    match kind {
        // A norm of 1, and decays that forget little: exp(−1.5) · softplus(−2) = 0.03 per token.
        Kind::GatedDeltaNet => [of_width, of_width, of_rows, [0.1, -1.5], [0.1, -2.0], [0.0, 1.0], of_width],
        _ => [of_rows, of_width, of_width, of_width, of_width, [0.0; 2], [0.0; 2]],
    }
}

/// The tensors of a layer, and of its gradients.
#[derive(Clone, Copy)]
pub struct Tensors<'a> {
    pub weights: [TensorView<'a>; 7],
    pub x: TensorView<'a>,
    pub out: TensorView<'a>,
}

/// A layer for calls of one shape.
pub enum Mixer {
    Delta { layer: Box<GatedDeltaNet>, scratch: Scratch },
    Heads { heads: Box<Heads>, scratch: Scratch },
}

/// Convolution, projections to heads, attention, and the output projection.
pub struct Heads {
    conv: CausalConv,
    projection: Projection,
    attention: Attending,
    shape: Shape,
    /// The convolved rows, q, k, v and the outputs of heads, then their gradients.
    between: [wgpu::Buffer; 5],
    d_between: [wgpu::Buffer; 5],
    lse: wgpu::Buffer,
}

enum Attending {
    Linear(LinearAttention),
    Softmax(Attention),
}

fn weights_of<T>(values: [T; 7]) -> GatedDeltaNetWeights<T> {
    let [in_proj_qkvz, in_proj_ba, conv1d, a_log, dt_bias, norm, out_proj] = values;
    GatedDeltaNetWeights { in_proj_qkvz, in_proj_ba, conv1d, a_log, dt_bias, norm, out_proj }
}

fn delta_backward<'a>(tensors: &Tensors<'a>, gradients: &Tensors<'a>) -> GatedDeltaNetBackward<'a> {
    GatedDeltaNetBackward::new(GatedDeltaNetForward::new(tensors.x, tensors.out), gradients.out)
        .d_x(gradients.x)
        .d_weights(weights_of(gradients.weights.map(Some)))
}

impl Mixer {
    pub fn new(gpu: &Gpu, kind: Kind, tensors: &Tensors, gradients: &Tensors) -> Result<Self, Error> {
        let pipelines = gpu.pipelines();
        if kind == Kind::GatedDeltaNet {
            let layer =
                GatedDeltaNet::with_pipelines(pipelines, delta_config(), &weights_of(tensors.weights))?;
            let size = layer.backward_scratch_size(&delta_backward(tensors, gradients))?;
            let scratch = Scratch::new(gpu.device(), size)?;
            return Ok(Mixer::Delta { layer: Box::new(layer), scratch });
        }
        let [batch, _, length, _] = tensors.x.shape();
        let shape = Shape::new(batch, HEADS, length, HEAD_DIM);
        let attention = if kind == Kind::Linear {
            let config = LinearConfig::new(HEADS, HEAD_DIM).causal(true);
            Attending::Linear(LinearAttention::with_pipelines(pipelines, config)?)
        } else {
            let config = Config::new(HEADS, HEAD_DIM);
            Attending::Softmax(Attention::with_pipelines(pipelines, config)?)
        };
        let buffers = || -> Result<[wgpu::Buffer; 5], Error> {
            let buffer = || gpu.buffer(4 * batch * length * WIDTH);
            Ok([buffer()?, buffer()?, buffer()?, buffer()?, buffer()?])
        };
        let heads = Heads {
            conv: CausalConv::with_pipelines(pipelines),
            projection: Projection::with_pipelines(pipelines),
            attention,
            shape,
            between: buffers()?,
            d_between: buffers()?,
            lse: gpu.buffer(4 * batch * HEADS * length)?,
        };
        let scratch = Scratch::new(gpu.device(), heads.size(tensors, gradients)?)?;
        Ok(Mixer::Heads { heads: Box::new(heads), scratch })
    }

    pub fn forward(&mut self, pass: &mut wgpu::ComputePass, tensors: &Tensors) -> Result<(), Error> {
        match self {
            Mixer::Delta { layer, scratch } => {
                layer.forward(pass, &GatedDeltaNetForward::new(tensors.x, tensors.out), scratch)
            }
            Mixer::Heads { heads, scratch } => heads.forward(pass, tensors, scratch),
        }
    }

    /// Writes the gradients of `x` and of the weights.
    pub fn backward(
        &mut self,
        pass: &mut wgpu::ComputePass,
        tensors: &Tensors,
        gradients: &Tensors,
    ) -> Result<(), Error> {
        match self {
            Mixer::Delta { layer, scratch } => {
                layer.backward(pass, &delta_backward(tensors, gradients), scratch)
            }
            Mixer::Heads { heads, scratch } => heads.backward(pass, tensors, gradients, scratch),
        }
    }
}

impl Heads {
    fn rows<'a>(&self, buffer: &'a wgpu::Buffer) -> TensorView<'a> {
        TensorView::sequence(buffer, DType::F32, [self.shape.batch, self.shape.q_len, WIDTH])
    }

    fn heads<'a>(&self, buffer: &'a wgpu::Buffer) -> TensorView<'a> {
        TensorView::blhd(buffer, DType::F32, self.shape.q())
    }

    fn convolution<'a>(&'a self, tensors: &Tensors<'a>) -> CausalConvForward<'a> {
        CausalConvForward::new(tensors.x, tensors.weights[0], self.rows(&self.between[0]))
    }

    fn convolution_backward<'a>(
        &'a self,
        tensors: &Tensors<'a>,
        gradients: &Tensors<'a>,
    ) -> CausalConvBackward<'a> {
        CausalConvBackward::new(self.convolution(tensors), self.rows(&self.d_between[0]))
            .d_x(gradients.x)
            .d_weight(gradients.weights[0])
    }

    fn sides<'a>(&'a self, tensors: &Tensors<'a>) -> [ProjectionForward<'a>; 3] {
        let x = self.rows(&self.between[0]);
        [1, 2, 3].map(|n| {
            let linear = Linear { weight: tensors.weights[n], bias: None };
            ProjectionForward::new(x, linear, self.heads(&self.between[n]))
        })
    }

    fn output<'a>(&'a self, tensors: &Tensors<'a>) -> ProjectionForward<'a> {
        let linear = Linear { weight: tensors.weights[4], bias: None };
        ProjectionForward::new(self.rows(&self.between[4]), linear, tensors.out)
    }

    fn linear(&self) -> LinearForward<'_> {
        let [_, q, k, v, out] = self.between.each_ref().map(|buffer| self.heads(buffer));
        LinearForward::new(q, k, v, out)
    }

    fn linear_backward(&self) -> LinearBackward<'_> {
        let [_, d_q, d_k, d_v, d_out] = self.d_between.each_ref().map(|buffer| self.heads(buffer));
        LinearBackward::new(self.linear(), d_out).d_q(d_q).d_k(d_k).d_v(d_v)
    }

    fn softmax(&self) -> Forward<'_> {
        let [_, q, k, v, out] = self.between.each_ref().map(|buffer| self.heads(buffer));
        let lse = TensorView::new(&self.lse, DType::F32, self.shape.lse());
        Forward::new(q, k, v, out).mask(Mask::causal()).lse(lse)
    }

    fn softmax_backward(&self) -> Backward<'_> {
        let [_, d_q, d_k, d_v, d_out] = self.d_between.each_ref().map(|buffer| self.heads(buffer));
        Backward::new(self.softmax(), d_out).d_q(d_q).d_k(d_k).d_v(d_v)
    }

    fn size(&self, tensors: &Tensors, gradients: &Tensors) -> Result<wgpu_attention::ScratchSize, Error> {
        let of_attention = match &self.attention {
            Attending::Linear(attention) => attention
                .scratch_size(&self.linear())?
                .max(attention.backward_scratch_size(&self.linear_backward())?),
            Attending::Softmax(attention) => attention
                .scratch_size(&self.softmax())?
                .max(attention.backward_scratch_size(&self.softmax_backward())?),
        };
        let of_conv = self.conv.backward_scratch_size(&self.convolution_backward(tensors, gradients))?;
        Ok(of_attention.max(of_conv))
    }

    fn forward(
        &self,
        pass: &mut wgpu::ComputePass,
        tensors: &Tensors,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.conv.forward(pass, &self.convolution(tensors))?;
        self.projection.forward(pass, &self.sides(tensors))?;
        match &self.attention {
            Attending::Linear(attention) => attention.forward(pass, &self.linear(), scratch)?,
            Attending::Softmax(attention) => attention.forward(pass, &self.softmax(), scratch)?,
        }
        self.projection.forward(pass, &[self.output(tensors)])
    }

    fn backward(
        &self,
        pass: &mut wgpu::ComputePass,
        tensors: &Tensors,
        gradients: &Tensors,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        let output = ProjectionBackward::new(self.output(tensors), gradients.out)
            .d_x(self.rows(&self.d_between[4]))
            .d_weight(gradients.weights[4]);
        self.projection.backward(pass, &[output])?;
        match &self.attention {
            Attending::Linear(attention) => attention.backward(pass, &self.linear_backward(), scratch)?,
            Attending::Softmax(attention) => attention.backward(pass, &self.softmax_backward(), scratch)?,
        }
        let sides = self.sides(tensors);
        let sides = [0, 1, 2].map(|n| {
            ProjectionBackward::new(sides[n], self.heads(&self.d_between[n + 1]))
                // One view for all three gradients: the operator writes their sum.
                .d_x(self.rows(&self.d_between[0]))
                .d_weight(gradients.weights[n + 1])
        });
        self.projection.backward(pass, &sides)?;
        self.conv.backward(pass, &self.convolution_backward(tensors, gradients), scratch)
    }
}
