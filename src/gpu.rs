//! A device of one's own, for newcomers and tests: slices in, `Vec` out.

use crate::attention::{Attention, Config, Forward};
use crate::dropout::Dropout;
use crate::error::Error;
use crate::mask::{DeviceMask, HostMask, HostTensor, Mask};
use crate::pipelines::guarded;
use crate::problem::Shape;
use crate::record::Pipelines;
use crate::reference::{Attended, Options};
use crate::scratch::Scratch;
use crate::tensor::{DType, TensorView};

/// A device, its queue and its pipelines.
///
/// Uploads, submits and reads back by itself, which an application that has a device of its own will not
/// want: see [`Attention`]. The functions that end in `_async` work in browsers too; the others block.
///
/// ```no_run
/// use wgpu_attention::{Gpu, Mask, Shape};
/// let gpu = Gpu::new()?;
/// let shape = Shape::new(1, 8, 512, 64); // batch, heads, length, head_dim
/// let x = vec![0.1; 8 * 512 * 64];
/// let y = gpu.attend(&x, &x, &x, shape, Mask::causal())?;
/// assert_eq!(y.len(), x.len());
/// # Ok::<(), wgpu_attention::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Gpu {
    device: wgpu::Device,
    queue: wgpu::Queue,
    pipelines: Pipelines,
}

impl Gpu {
    /// The fastest adapter there is, blocking. `WGPU_BACKEND` and wgpu's other variables are honoured.
    ///
    /// # Errors
    /// [`Error::NoAdapter`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn new() -> Result<Self, Error> {
        pollster::block_on(Self::new_async())
    }

    /// The fastest adapter there is.
    ///
    /// # Errors
    /// [`Error::NoAdapter`].
    pub async fn new_async() -> Result<Self, Error> {
        let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
        let options = wgpu::RequestAdapterOptions {
            power_preference: wgpu::PowerPreference::HighPerformance,
            ..Default::default()
        };
        let adapter =
            instance.request_adapter(&options).await.map_err(|e| Error::NoAdapter(e.to_string()))?;
        let (_, limits) = Config::new(1, 1).required(&adapter);
        let useful = wgpu::Features::SHADER_F16 | wgpu::Features::TIMESTAMP_QUERY;
        let (device, queue) = adapter
            .request_device(&wgpu::DeviceDescriptor {
                label: Some("attention"),
                required_features: useful & adapter.features(),
                required_limits: limits,
                ..Default::default()
            })
            .await
            .map_err(|e| Error::NoAdapter(e.to_string()))?;
        Ok(Self::with_device(device, queue))
    }

    /// On a device that exists already.
    pub fn with_device(device: wgpu::Device, queue: wgpu::Queue) -> Self {
        let pipelines = Pipelines::new(&device);
        Gpu { device, queue, pipelines }
    }

    /// The device.
    pub fn device(&self) -> &wgpu::Device {
        &self.device
    }

    /// The queue.
    pub fn queue(&self) -> &wgpu::Queue {
        &self.queue
    }

    /// The pipelines, to make operators with.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// `softmax(q kᵀ / √head_dim, masked) · v` over dense f32 slices shaped as [`Shape`] says.
    ///
    /// # Errors
    /// Slices or masks that do not fit `shape`, a device without enough memory, a lost device.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn attend(
        &self,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        shape: Shape,
        mask: HostMask,
    ) -> Result<Vec<f32>, Error> {
        pollster::block_on(self.attend_async(q, k, v, shape, mask))
    }

    /// [`attend`](Self::attend), not blocking.
    ///
    /// # Errors
    /// As [`attend`](Self::attend).
    pub async fn attend_async(
        &self,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        shape: Shape,
        mask: HostMask<'_>,
    ) -> Result<Vec<f32>, Error> {
        let options = Options { mask, ..Default::default() };
        self.run([q, k, v], &shape, &options, false).await.map(|attended| attended.out)
    }

    /// Attention with all its options and outputs, taking and giving what
    /// [`reference::attention`](crate::reference::attention) does: the two compare one to one.
    ///
    /// # Errors
    /// As [`attend`](Self::attend), and `options.appended`, which only layers have.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn attention(
        &self,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        shape: &Shape,
        options: &Options,
    ) -> Result<Attended<f32>, Error> {
        pollster::block_on(self.attention_async(q, k, v, shape, options))
    }

    /// [`attention`](Self::attention), not blocking.
    ///
    /// # Errors
    /// As [`attention`](Self::attention).
    pub async fn attention_async(
        &self,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        shape: &Shape,
        options: &Options<'_>,
    ) -> Result<Attended<f32>, Error> {
        self.run([q, k, v], shape, options, true).await
    }

    async fn run(
        &self,
        [q, k, v]: [&[f32]; 3],
        shape: &Shape,
        options: &Options<'_>,
        everything: bool,
    ) -> Result<Attended<f32>, Error> {
        shape.check()?;
        options.mask.check(shape)?;
        if options.appended > 0 {
            let why = "only MultiHeadAttention appends keys; give the keys as part of `k` instead";
            return Err(Error::Unsupported { what: "options.appended", why });
        }
        let upload = |tensor, data: &[f32], wanted: [usize; 4]| {
            let expected = wanted.iter().product();
            if data.len() != expected {
                return Err(Error::Length { tensor, expected, got: data.len() });
            }
            self.upload(data)
        };
        let [q, k, v] = [("q", q, shape.q()), ("k", k, shape.k()), ("v", v, shape.v())]
            .map(|(tensor, data, wanted)| upload(tensor, data, wanted));
        let (q, k, v) = (q?, k?, v?);
        let mask = MaskBuffers::new(self, &options.mask)?;
        let keep = match &options.dropout {
            Some(Dropout::Given { keep, .. }) => Some((self.upload_bools(keep.data)?, keep.shape)),
            _ => None,
        };
        let floats = |wanted: [usize; 4]| self.buffer(wanted.iter().product::<usize>() * 4);
        let (out, lse, weights) = (floats(shape.out())?, floats(shape.lse())?, floats(shape.weights())?);

        let mut config =
            Config::new(shape.heads, shape.head_dim).kv_heads(shape.kv_heads).value_dim(shape.value_dim);
        config.scale = options.scale.map(|s| s as f32);
        config.softcap = options.softcap.map(|c| c as f32);
        let view = |buffer, wanted| TensorView::new(buffer, DType::F32, wanted);
        let mut call = Forward::new(
            view(&q, shape.q()),
            view(&k, shape.k()),
            view(&v, shape.v()),
            view(&out, shape.out()),
        )
        .mask(mask.mask(&options.mask));
        if everything {
            call.lse = Some(view(&lse, shape.lse()));
        }
        // The weights' buffer serves as the score matrix too.
        call.weights = Some(view(&weights, shape.weights()));
        call.dropout = options.dropout.as_ref().map(|dropout| match dropout {
            Dropout::Given { p, .. } => {
                let keep = keep.as_ref().map(|(b, shape)| TensorView::new(b, DType::Bool, *shape));
                keep.map_or(Dropout::Seeded { p: *p, seed: 0 }, |keep| Dropout::Given { p: *p, keep })
            }
            Dropout::Seeded { p, seed } => Dropout::Seeded { p: *p, seed: *seed },
        });

        let attention = Attention::with_pipelines(&self.pipelines, config)?;
        let mut scratch = Scratch::new(&self.device, attention.scratch_size(&call)?)?;
        let mut encoder = self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        attention.forward(&mut encoder, &call, &mut scratch)?;
        guarded(&self.device, "the submission", || self.queue.submit([encoder.finish()]))?;
        let read = |buffer, wanted: [usize; 4]| self.download_async(buffer, wanted.iter().product());
        Ok(Attended {
            out: read(&out, shape.out()).await?,
            weights: if everything { read(&weights, shape.weights()).await? } else { Vec::new() },
            lse: if everything { read(&lse, shape.lse()).await? } else { Vec::new() },
        })
    }

    /// A storage buffer of at least `bytes`, which can be copied from and to.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Refused`] if it is larger than the device allows.
    pub fn buffer(&self, bytes: usize) -> Result<wgpu::Buffer, Error> {
        guarded(&self.device, "a buffer", || {
            self.device.create_buffer(&wgpu::BufferDescriptor {
                label: None,
                size: (bytes as u64).next_multiple_of(4).max(4),
                usage: wgpu::BufferUsages::STORAGE
                    | wgpu::BufferUsages::COPY_SRC
                    | wgpu::BufferUsages::COPY_DST,
                mapped_at_creation: false,
            })
        })
    }

    /// A storage buffer that holds `data`.
    ///
    /// # Errors
    /// As [`buffer`](Self::buffer).
    pub fn upload<T: bytemuck::NoUninit>(&self, data: &[T]) -> Result<wgpu::Buffer, Error> {
        self.upload_bytes(bytemuck::cast_slice(data).to_vec())
    }

    /// A storage buffer that holds `data`, one byte each, for [`DType::Bool`].
    ///
    /// # Errors
    /// As [`buffer`](Self::buffer).
    pub fn upload_bools(&self, data: &[bool]) -> Result<wgpu::Buffer, Error> {
        self.upload_bytes(data.iter().map(|b| u8::from(*b)).collect())
    }

    fn upload_bytes(&self, mut bytes: Vec<u8>) -> Result<wgpu::Buffer, Error> {
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        let buffer = self.buffer(bytes.len())?;
        guarded(&self.device, "an upload", || self.queue.write_buffer(&buffer, 0, &bytes))?;
        Ok(buffer)
    }

    /// The first `n` elements of a buffer with usage `COPY_SRC`, after everything submitted before.
    ///
    /// # Errors
    /// [`Error::DeviceLost`], [`Error::Refused`] if the buffer is shorter or lacks the usage.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn download<T: bytemuck::AnyBitPattern>(
        &self,
        buffer: &wgpu::Buffer,
        n: usize,
    ) -> Result<Vec<T>, Error> {
        pollster::block_on(self.download_async(buffer, n))
    }

    /// [`download`](Self::download), not blocking.
    ///
    /// # Errors
    /// As [`download`](Self::download).
    pub async fn download_async<T: bytemuck::AnyBitPattern>(
        &self,
        buffer: &wgpu::Buffer,
        n: usize,
    ) -> Result<Vec<T>, Error> {
        let bytes = n * size_of::<T>();
        let size = (bytes as u64).next_multiple_of(4);
        let (sender, receiver) = futures_channel::oneshot::channel();
        let staging = guarded(&self.device, "a read-back", || {
            let staging = self.device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("attention.download"),
                size,
                usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
                mapped_at_creation: false,
            });
            let mut encoder = self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
            encoder.copy_buffer_to_buffer(buffer, 0, &staging, 0, size);
            self.queue.submit([encoder.finish()]);
            staging.map_async(wgpu::MapMode::Read, .., |result| {
                // The receiver is gone only if the caller dropped the future.
                let _ = sender.send(result);
            });
            staging
        })?;
        let lost = |e: &dyn std::fmt::Display| Error::DeviceLost(e.to_string());
        // Browsers poll by themselves.
        #[cfg(not(target_arch = "wasm32"))]
        self.device.poll(wgpu::PollType::wait_indefinitely()).map_err(|e| lost(&e))?;
        receiver.await.map_err(|e| lost(&e))?.map_err(|e| lost(&e))?;
        let mapped = staging.slice(..).get_mapped_range().map_err(|e| lost(&e))?;
        Ok(mapped[..bytes].chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect())
    }
}

/// The tensors of a mask, uploaded.
struct MaskBuffers {
    lengths: Option<(wgpu::Buffer, [usize; 4])>,
    keep: Option<(wgpu::Buffer, [usize; 4])>,
    keys: Option<(wgpu::Buffer, [usize; 4])>,
    bias: Option<(wgpu::Buffer, [usize; 4])>,
}

impl MaskBuffers {
    fn new(gpu: &Gpu, mask: &HostMask) -> Result<Self, Error> {
        let bools = |t: HostTensor<bool>| Ok((gpu.upload_bools(t.data)?, t.shape));
        Ok(MaskBuffers {
            lengths: mask.lengths.map(|t| Ok((gpu.upload(t.data)?, t.shape))).transpose()?,
            keep: mask.keep.map(bools).transpose()?,
            keys: mask.keys.map(bools).transpose()?,
            bias: mask.bias.map(|t| Ok((gpu.upload(t.data)?, t.shape))).transpose()?,
        })
    }

    fn mask<'a>(&'a self, host: &HostMask) -> DeviceMask<'a> {
        fn view<'a>(part: &'a Option<(wgpu::Buffer, [usize; 4])>, dtype: DType) -> Option<TensorView<'a>> {
            part.as_ref().map(|(buffer, shape)| TensorView::new(buffer, dtype, *shape))
        }
        Mask {
            band: host.band,
            lengths: view(&self.lengths, DType::U32),
            keep: view(&self.keep, DType::Bool),
            keys: view(&self.keys, DType::Bool),
            bias: view(&self.bias, DType::F32),
        }
    }
}
