//! Host tensors that are uploaded for one call.

use std::convert::Infallible;

use super::Gpu;
use crate::kernel::guard::guarded;
use crate::mask::{DeviceMask, Dropout, HostMask, Mask};
use crate::matmul::Linear;
use crate::position::reference::check_positions;
use crate::position::{Rope, Rotary, Rotation, RowPositions};
use crate::reference::{Attended, HostLinear, Options};
use crate::tensor::{DType, Error, HostTensor, Shape, TensorView, count};

/// A dense tensor in a separate buffer.
#[derive(Clone, Debug)]
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

/// A layer's rotary positions.
pub(super) struct UploadedRotary {
    rope: Rope,
    at: RowPositions<Uploaded>,
}

impl UploadedRotary {
    /// Uploads the rotary positions of `options` for rows `[batch, length]`, if it has any.
    pub fn new(gpu: &Gpu, options: &Options, [batch, length]: [usize; 2]) -> Result<Option<Self>, Error> {
        let Some((rope, at)) = options.rotary else { return Ok(None) };
        let at = match at {
            RowPositions::Start(start) => RowPositions::Start(start),
            RowPositions::Tensor(t) => {
                check_positions(&t, [batch, length], rope.axes())?;
                let (buffer, dtype, shape) = (gpu.upload(t.data)?, DType::U32, t.shape);
                RowPositions::Tensor(Uploaded { buffer, dtype, shape })
            }
        };
        Ok(Some(UploadedRotary { rope: Rope::new(gpu.device(), rope)?, at }))
    }

    pub fn view(&self) -> Rotary<'_> {
        let at = match &self.at {
            RowPositions::Start(start) => RowPositions::Start(*start),
            RowPositions::Tensor(t) => RowPositions::Tensor(t.view()),
        };
        Rotary { rotation: Rotation::Rope(&self.rope), at }
    }
}

/// The outputs of a call.
pub(super) struct Outputs {
    pub out: Uploaded,
    pub lse: Option<Uploaded>,
    pub weights: Option<Uploaded>,
}

impl Outputs {
    pub fn new(
        gpu: &Gpu,
        out: [usize; 4],
        lse: Option<Shape>,
        weights: Option<Shape>,
    ) -> Result<Self, Error> {
        let wanted = |shape: Option<[usize; 4]>| shape.map(|shape| Uploaded::zeros(gpu, shape)).transpose();
        Ok(Outputs {
            out: Uploaded::zeros(gpu, out)?,
            lse: wanted(lse.map(|shape| shape.lse()))?,
            weights: wanted(weights.map(|shape| shape.weights()))?,
        })
    }

    pub async fn read(&self, gpu: &Gpu) -> Result<Attended<f32>, Error> {
        Ok(Attended {
            out: self.out.read(gpu).await?,
            lse: match &self.lse {
                Some(lse) => lse.read(gpu).await?,
                None => Vec::new(),
            },
            weights: match &self.weights {
                Some(weights) => Some(weights.read(gpu).await?),
                None => None,
            },
        })
    }
}

/// A mask in device memory, uploaded from slices. It owns its buffers.
///
/// ```no_run
/// # fn f(device: &wgpu::Device, queue: &wgpu::Queue, call: wgpu_attention::Forward)
/// # -> Result<(), wgpu_attention::Error> {
/// use wgpu_attention::{HostTensor, Mask, UploadedMask};
/// use wgpu_attention::mask::HostMask;
///
/// let lengths = [512, 300]; // of two sequences
/// let mask: HostMask = Mask::causal().lengths(HostTensor::new(&lengths, [2, 1, 1, 1]));
/// let mask = UploadedMask::new(device, queue, &mask)?;
/// let call = call.mask(mask.view());
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct UploadedMask {
    mask: Mask<Uploaded, Uploaded, Uploaded>,
}

impl UploadedMask {
    /// Uploads the tensors of `mask`, each to a separate buffer.
    ///
    /// # Errors
    /// [`Error::Length`] for a slice whose length does not match its shape, [`Error::OutOfMemory`].
    /// The call that uses the mask checks that the shapes fit.
    pub fn new(device: &wgpu::Device, queue: &wgpu::Queue, mask: &HostMask) -> Result<Self, Error> {
        fn dense<T: Copy>(tensor: &'static str, t: &HostTensor<T>) -> Result<(), Error> {
            let (expected, got) = (count(t.shape), t.data.len());
            if got == expected { Ok(()) } else { Err(Error::Length { tensor, expected, got }) }
        }
        if mask.mods().is_any() {
            let what = "a host function on a device";
            return Err(Error::Unsupported {
                what,
                why: "set a `ScoreMod` or `MaskMod` in the `DeviceMask`",
            });
        }
        let upload = |bytes: &[u8], dtype, shape| {
            Ok(Uploaded { buffer: upload_bytes(device, queue, bytes.to_vec())?, dtype, shape })
        };
        let mask = mask.try_map(
            |name, t: HostTensor<u32>| {
                dense(name, &t)?;
                upload(bytemuck::cast_slice(t.data), DType::U32, t.shape)
            },
            |name, t: HostTensor<bool>| {
                dense(name, &t)?;
                upload(bytemuck::cast_slice(t.data), DType::Bool, t.shape)
            },
            |name, t: HostTensor<f32>| {
                dense(name, &t)?;
                upload(bytemuck::cast_slice(t.data), DType::F32, t.shape)
            },
        )?;
        Ok(UploadedMask { mask })
    }

    /// Returns the mask for a call.
    pub fn view(&self) -> DeviceMask<'_> {
        fn view<'a>(_: &'static str, t: &'a Uploaded) -> Result<TensorView<'a>, Infallible> {
            Ok(t.view())
        }
        let Ok(mask) = self.mask.as_ref().try_map(view, view, view);
        mask
    }
}

/// The weights that dropout keeps, if the caller chose them.
pub(super) struct UploadedDropout(Option<Uploaded>);

impl UploadedDropout {
    pub fn new(gpu: &Gpu, options: &Options) -> Result<Self, Error> {
        let keep = options.dropout.as_ref().and_then(Dropout::given);
        let upload = |t: &HostTensor<bool>| {
            Ok(Uploaded { buffer: gpu.upload_bools(t.data)?, dtype: DType::Bool, shape: t.shape })
        };
        Ok(UploadedDropout(keep.map(upload).transpose()?))
    }

    pub fn view(&self, options: &Options) -> Option<Dropout<TensorView<'_>>> {
        match options.dropout? {
            Dropout::Seeded { p, seed } => Some(Dropout::Seeded { p, seed }),
            Dropout::Given { p, .. } => self.0.as_ref().map(|keep| Dropout::Given { p, keep: keep.view() }),
        }
    }
}

/// Creates a storage buffer with `bytes`, padded to whole words.
pub(super) fn upload_bytes(
    device: &wgpu::Device,
    queue: &wgpu::Queue,
    mut bytes: Vec<u8>,
) -> Result<wgpu::Buffer, Error> {
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    let buffer = storage_buffer(device, bytes.len())?;
    guarded(device, "an upload", || queue.write_buffer(&buffer, 0, &bytes))?;
    Ok(buffer)
}

/// Creates a storage buffer of at least `bytes`, with copy usages in both directions.
pub(super) fn storage_buffer(device: &wgpu::Device, bytes: usize) -> Result<wgpu::Buffer, Error> {
    guarded(device, "a buffer", || {
        device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: (bytes as u64).max(4).checked_next_multiple_of(4).unwrap_or(u64::MAX - 3),
            usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        })
    })
}
