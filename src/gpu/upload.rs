//! Host tensors in device memory, for the length of one call.

use std::convert::Infallible;

use super::Gpu;
use crate::dropout::Dropout;
use crate::error::Error;
use crate::mask::{DeviceMask, HostTensor, Mask};
use crate::problem::Shape;
use crate::projection::Linear;
use crate::reference::{Attended, HostLinear, Options};
use crate::tensor::{DType, TensorView, count};

/// A dense tensor in a buffer of its own.
pub(super) struct Uploaded {
    pub buffer: wgpu::Buffer,
    pub dtype: DType,
    pub shape: [usize; 4],
}

impl Uploaded {
    pub fn zeros(gpu: &Gpu, shape: [usize; 4]) -> Result<Self, Error> {
        Ok(Uploaded { buffer: gpu.buffer(count(shape).saturating_mul(4))?, dtype: DType::F32, shape })
    }

    pub fn view(&self) -> TensorView<'_> {
        TensorView::new(&self.buffer, self.dtype, self.shape)
    }

    pub async fn read(&self, gpu: &Gpu) -> Result<Vec<f32>, Error> {
        gpu.download_async(&self.buffer, count(self.shape)).await
    }
}

/// A projection's weights.
pub(super) struct LinearBuffers {
    weight: Uploaded,
    bias: Option<Uploaded>,
}

impl LinearBuffers {
    pub fn new(gpu: &Gpu, linear: &HostLinear<f32>, shape: [usize; 4]) -> Result<Self, Error> {
        let bias = linear.bias.map(|b| gpu.upload_shaped("bias", b, [1, 1, 1, shape[1] * shape[2]]));
        Ok(LinearBuffers {
            weight: gpu.upload_shaped("weight", linear.weight, shape)?,
            bias: bias.transpose()?,
        })
    }

    pub fn view(&self) -> Linear<'_> {
        Linear { weight: self.weight.view(), bias: self.bias.as_ref().map(Uploaded::view) }
    }
}

/// What a call writes.
pub(super) struct Outputs {
    pub out: Uploaded,
    pub lse: Option<Uploaded>,
    pub weights: Option<Uploaded>,
}

impl Outputs {
    pub fn new(gpu: &Gpu, out: [usize; 4], shape: &Shape, everything: bool) -> Result<Self, Error> {
        let wanted = |shape| everything.then(|| Uploaded::zeros(gpu, shape)).transpose();
        Ok(Outputs {
            out: Uploaded::zeros(gpu, out)?,
            lse: wanted(shape.lse())?,
            weights: wanted(shape.weights())?,
        })
    }

    pub async fn read(&self, gpu: &Gpu) -> Result<Attended<f32>, Error> {
        let read = async |t: &Option<Uploaded>| match t {
            Some(t) => t.read(gpu).await,
            None => Ok(Vec::new()),
        };
        Ok(Attended {
            out: self.out.read(gpu).await?,
            weights: read(&self.weights).await?,
            lse: read(&self.lse).await?,
        })
    }
}

/// The tensors of a mask and of dropout.
pub(super) struct Extras {
    mask: Mask<Uploaded, Uploaded, Uploaded>,
    dropout: Option<Uploaded>,
}

impl Extras {
    pub fn new(gpu: &Gpu, options: &Options) -> Result<Self, Error> {
        let bools = |t: HostTensor<bool>| {
            Ok(Uploaded { buffer: gpu.upload_bools(t.data)?, dtype: DType::Bool, shape: t.shape })
        };
        let numbers = |_, t: HostTensor<u32>| {
            Ok(Uploaded { buffer: gpu.upload(t.data)?, dtype: DType::U32, shape: t.shape })
        };
        let dropout = options.dropout.as_ref().and_then(Dropout::given).copied();
        Ok(Extras {
            mask: options.mask.try_map(
                numbers,
                |_, t| bools(t),
                |name, t| gpu.upload_shaped(name, t.data, t.shape),
            )?,
            dropout: dropout.map(bools).transpose()?,
        })
    }

    pub fn mask(&self) -> DeviceMask<'_> {
        fn view<'a>(_: &'static str, t: &'a Uploaded) -> Result<TensorView<'a>, Infallible> {
            Ok(t.view())
        }
        let Ok(mask) = self.mask.as_ref().try_map(view, view, view);
        mask
    }

    pub fn dropout(&self, options: &Options) -> Option<Dropout<TensorView<'_>>> {
        match options.dropout? {
            Dropout::Seeded { p, seed } => Some(Dropout::Seeded { p, seed }),
            Dropout::Given { p, .. } => {
                self.dropout.as_ref().map(|keep| Dropout::Given { p, keep: keep.view() })
            }
        }
    }
}
