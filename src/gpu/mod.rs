//! A device with its queue and pipelines, for newcomers and tests: slices in, `Vec` out.

mod compare;
mod mapped;
#[cfg(feature = "layers")]
mod multi_head;
#[cfg(feature = "presets")]
mod tables;
mod upload;

use mapped::{done, mapped};
pub use upload::UploadedMask;
use upload::{Outputs, Uploaded, UploadedDropout, storage_buffer, upload_bytes};

use std::sync::Arc;

use crate::attention::{Attention, Config, Forward};
use crate::device::Report;
use crate::device::opengl::{is_opengl, lock_opengl};
use crate::kernel::guard::{Watch, guarded};
use crate::kernel::{Pipelines, Scratch};
use crate::mask::HostMask;
use crate::reference::{Attended, Options};
use crate::tensor::{DType, Error, Shape, count};

/// A device, its queue and its pipelines.
///
/// It uploads, submits and reads back. An application that already has a device uses [`Attention`]
/// instead. The functions that end in `_async` also work in browsers; the others block. Outside of
/// browsers, the futures are `Send`. They do not block their executor while the device computes: a
/// thread waits for each read-back.
///
/// Threads may share a `Gpu`. On OpenGL only one of them at a time calls wgpu: see [`Pipelines`].
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
    /// Opens the fastest adapter of a new `wgpu::Instance`; it blocks. Do not mix its buffers with
    /// buffers of another instance's devices: wgpu cannot tell them apart. If you have a device,
    /// use [`with_device`](Self::with_device). `WGPU_BACKEND` and wgpu's other variables are
    /// honoured.
    ///
    /// The device gets timestamp queries, and the features and limits of [`Config::required`] for
    /// F16. It lacks those that the adapter does not have. It has no experimental features, and
    /// therefore no matrix units. These need your consent: see [`Pipelines::with_adapter`] and
    /// [`with_pipelines`](Self::with_pipelines).
    ///
    /// # Errors
    /// [`Error::NoAdapter`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn new() -> Result<Self, Error> {
        pollster::block_on(Self::new_async())
    }

    /// Opens the fastest adapter; see `new`.
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
        let (features, limits) = Config::new(1, 1).dtype(DType::F16).required(&adapter);
        let features = features | wgpu::Features::TIMESTAMP_QUERY & adapter.features();
        let (device, queue) = adapter
            .request_device(&wgpu::DeviceDescriptor {
                label: Some("attention"),
                required_features: features,
                // Old adapters may have lower limits than the defaults. Calls that need the
                // defaults are then refused.
                required_limits: limits.or_worse_values_from(&adapter.limits()),
                ..Default::default()
            })
            .await
            .map_err(|e| Error::NoAdapter(e.to_string()))?;
        Ok(Self::with_pipelines(queue, Pipelines::with_adapter(&device, &adapter)))
    }

    /// Uses a device that already exists.
    pub fn with_device(device: wgpu::Device, queue: wgpu::Queue) -> Self {
        let pipelines = Pipelines::new(&device);
        Gpu { device, queue, pipelines }
    }

    /// Uses the device of `pipelines`. Pipelines of [`Pipelines::with_adapter`] use its matrix
    /// units.
    pub fn with_pipelines(queue: wgpu::Queue, pipelines: Pipelines) -> Self {
        Gpu { device: pipelines.device().clone(), queue, pipelines }
    }

    /// The device.
    pub fn device(&self) -> &wgpu::Device {
        &self.device
    }

    /// The queue.
    pub fn queue(&self) -> &wgpu::Queue {
        &self.queue
    }

    /// The pipelines, from which operators are made.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// Checks each family of kernels on this device and disables wrong ones: see
    /// [`Pipelines::check`].
    ///
    /// # Errors
    /// As [`Pipelines::check`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn check(&self) -> Result<Report, Error> {
        self.pipelines.check(&self.queue)
    }

    /// The async variant of `check`.
    ///
    /// # Errors
    /// As [`Pipelines::check_async`].
    pub async fn check_async(&self) -> Result<Report, Error> {
        self.pipelines.check_async(&self.queue).await
    }

    /// Computes `softmax(q kᵀ / √head_dim, masked) · v` over dense f32 slices. [`Shape`] describes
    /// their layout.
    ///
    /// # Errors
    /// Slices or masks that do not fit `shape`, a device without enough memory, a lost device.
    #[doc(alias = "scaled_dot_product_attention")]
    #[doc(alias = "sdpa")]
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

    /// The async variant of [`attend`](Self::attend).
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
        let options = Options::new().mask(mask);
        self.run([q, k, v], shape, &options, false).await.map(|attended| attended.out)
    }

    /// Computes attention with all its options and outputs. It takes and returns the same types as
    /// [`reference::attention`](crate::reference::attention), so that results compare one to one.
    /// It runs the kernels of [`Attention`]: the fused ones, unless [`Options::weights`] requests
    /// the weights.
    ///
    /// # Errors
    /// The errors of [`attend`](Self::attend), and an error if `options.appended` is set: only
    /// layers support it.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn attention(
        &self,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        shape: Shape,
        options: &Options,
    ) -> Result<Attended<f32>, Error> {
        pollster::block_on(self.attention_async(q, k, v, shape, options))
    }

    /// The async variant of [`attention`](Self::attention).
    ///
    /// # Errors
    /// As [`attention`](Self::attention).
    pub async fn attention_async(
        &self,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        shape: Shape,
        options: &Options<'_>,
    ) -> Result<Attended<f32>, Error> {
        self.run([q, k, v], shape, options, true).await
    }

    async fn run(
        &self,
        [q, k, v]: [&[f32]; 3],
        shape: Shape,
        options: &Options<'_>,
        with_lse: bool,
    ) -> Result<Attended<f32>, Error> {
        shape.check()?;
        if options.appended > 0 {
            let why = "only `MultiHeadAttention` appends keys; pass the keys as part of `k`";
            return Err(Error::Unsupported { what: "options.appended", why });
        }
        options.check(shape)?;
        let watch = Watch::begin(&self.device);
        let q = self.upload_shaped("q", q, shape.q())?;
        let k = self.upload_shaped("k", k, shape.k())?;
        let v = self.upload_shaped("v", v, shape.v())?;
        let mask = self.upload_mask(&options.mask)?;
        let dropout = UploadedDropout::new(self, options)?;
        let weights = options.weights.then_some(shape);
        let out = Outputs::new(self, shape.out(), with_lse.then_some(shape), weights)?;

        let config = Config::of(&shape).scale(options.scale).softcap(options.softcap);
        let call = Forward::new(q.view(), k.view(), v.view(), out.out.view())
            .mask(mask.view())
            .lse(out.lse.as_ref().map(Uploaded::view))
            .weights(out.weights.as_ref().map(Uploaded::view))
            .dropout(dropout.view(options));
        let attention = Attention::with_pipelines(&self.pipelines, config)?;
        self.settle().await?;
        self.pipelines.with_fallbacks(|| {
            let mut scratch = Scratch::new(&self.device, attention.scratch_size(&call)?)?;
            self.submit(|encoder| attention.forward(encoder, &call, &mut scratch))
        })?;
        watch.end("attention").await?;
        let attended = out.read(self).await;
        self.release((q, k, v, mask, dropout, out, attention));
        attended
    }

    /// Records with `record` and submits. If `record` fails, nothing is submitted.
    ///
    /// # Errors
    /// The errors of `record`, and the errors that wgpu reports at submission.
    pub fn submit(
        &self,
        record: impl FnOnce(&mut wgpu::CommandEncoder) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut encoder = self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        record(&mut encoder)?;
        guarded(&self.device, "the submission", || self.queue.submit([encoder.finish()]))?;
        Ok(())
    }

    /// Creates a storage buffer of at least `bytes`, with copy usages in both directions.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Refused`] if it is larger than the device allows.
    pub fn buffer(&self, bytes: usize) -> Result<wgpu::Buffer, Error> {
        storage_buffer(&self.device, bytes)
    }

    /// Waits before a submission. A software driver computes earlier submissions within the next
    /// one, and would block the executor. On OpenGL threads wait for each other in any case.
    async fn settle(&self) -> Result<(), Error> {
        if !self.pipelines.facts().software || is_opengl(&self.device) {
            return Ok(());
        }
        done(&self.device, None, Arc::default()).await
    }

    /// Drops `buffers` while no other thread calls OpenGL.
    fn release<T>(&self, buffers: T) {
        let _guard = lock_opengl(&self.device);
        drop(buffers);
    }

    fn upload_mask(&self, mask: &HostMask) -> Result<UploadedMask, Error> {
        UploadedMask::new(&self.device, &self.queue, mask)
    }

    /// Creates a storage buffer that holds `data`.
    ///
    /// # Errors
    /// As [`buffer`](Self::buffer).
    pub fn upload<T: bytemuck::NoUninit>(&self, data: &[T]) -> Result<wgpu::Buffer, Error> {
        upload_bytes(&self.device, &self.queue, bytemuck::cast_slice(data).to_vec())
    }

    /// Creates a storage buffer that holds `data`, one byte each, for [`DType::Bool`].
    ///
    /// # Errors
    /// As [`buffer`](Self::buffer).
    pub fn upload_bools(&self, data: &[bool]) -> Result<wgpu::Buffer, Error> {
        upload_bytes(&self.device, &self.queue, data.iter().map(|b| u8::from(*b)).collect())
    }

    fn upload_shaped(
        &self,
        tensor: &'static str,
        data: &[f32],
        shape: [usize; 4],
    ) -> Result<Uploaded, Error> {
        let expected = count(shape);
        if data.len() != expected {
            return Err(Error::Length { tensor, expected, got: data.len() });
        }
        Ok(Uploaded { buffer: self.upload(data)?, dtype: DType::F32, shape })
    }

    /// Returns the first `n` elements of a buffer with usage `COPY_SRC`, after all earlier
    /// submissions.
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

    /// The async variant of [`download`](Self::download): outside of browsers a thread waits for
    /// the device. Submit nothing that writes to the buffer before the future is done.
    ///
    /// # Errors
    /// As [`download`](Self::download).
    pub async fn download_async<T: bytemuck::AnyBitPattern>(
        &self,
        buffer: &wgpu::Buffer,
        n: usize,
    ) -> Result<Vec<T>, Error> {
        if n == 0 || size_of::<T>() == 0 {
            // wgpu maps no empty ranges.
            return Ok(vec![T::zeroed(); n]);
        }
        // A size that no buffer has, if `n` is too large.
        let bytes = n.saturating_mul(size_of::<T>()).min(isize::MAX as usize);
        let size = (bytes as u64).next_multiple_of(4);
        let watch = Watch::begin(&self.device);
        self.settle().await?;
        let (staging, submission) = guarded(&self.device, "a read-back", || {
            let staging = self.device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("attention.download"),
                size,
                usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
                mapped_at_creation: false,
            });
            let mut encoder = self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
            encoder.copy_buffer_to_buffer(buffer, 0, &staging, 0, size);
            (staging, self.queue.submit([encoder.finish()]))
        })?;
        watch.end("a read-back").await?;
        let lost = |e: &dyn std::fmt::Display| Error::DeviceLost(e.to_string());
        mapped(&self.device, &staging, submission).await?;
        let mapped = staging.slice(..).get_mapped_range().map_err(|e| lost(&e))?;
        let data = mapped[..bytes].chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect();
        drop(mapped);
        self.release(staging);
        Ok(data)
    }
}
