//! Calls → dispatches in the caller's pass. Everything that can fail happens before the first one.

use crate::device::DeviceFacts;
use std::sync::Arc;

use crate::error::Error;
use crate::kernel::{Dispatch, Variant};
use crate::kernels::KernelVariant;
use crate::pipelines::{Cache, guarded};
use crate::scratch::{BindKey, BoundDispatch, Scratch};

/// The compiled pipelines of a device, shared by every operator made from it. Clones are cheap.
///
/// A pipeline is compiled at the first call that needs it and kept.
#[derive(Clone, Debug)]
pub struct Pipelines(Arc<Cache<KernelVariant>>);

impl Pipelines {
    /// No pipelines yet, for `device`.
    pub fn new(device: &wgpu::Device) -> Self {
        Self::with_facts(device, DeviceFacts::of(device))
    }

    /// As [`new`](Self::new), for a `device` of `adapter`: kernels may then use its matrix units, if the device has the
    /// features `EXPERIMENTAL_COOPERATIVE_MATRIX`, `SHADER_F16` and `SUBGROUP` and the adapter lists fragments of 16 × 16
    /// or 8 × 8 that multiply f16 and sum in f32 (see [`MatrixUnits`](crate::MatrixUnits)).
    ///
    /// ```no_run
    /// # async fn f(adapter: &wgpu::Adapter) -> Result<(), Box<dyn std::error::Error>> {
    /// use wgpu_attention::{Attention, Config, DType, Pipelines, wgpu};
    ///
    /// let config = Config::new(32, 128).dtype(DType::F16);
    /// let (features, limits) = config.required(adapter);
    /// let matrix = wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX & adapter.features();
    /// let (device, queue) = adapter
    ///     .request_device(&wgpu::DeviceDescriptor {
    ///         required_features: features | matrix,
    ///         required_limits: limits,
    ///         // SAFETY: wgpu's experimental features may have bugs; this application accepts that.
    ///         experimental_features: unsafe { wgpu::ExperimentalFeatures::enabled() },
    ///         ..Default::default()
    ///     })
    ///     .await?;
    /// let attention = Attention::with_pipelines(&Pipelines::with_adapter(&device, adapter), config)?;
    /// # Ok(()) }
    /// ```
    pub fn with_adapter(device: &wgpu::Device, adapter: &wgpu::Adapter) -> Self {
        Self::with_facts(device, DeviceFacts::of(device).with_adapter(device, adapter))
    }

    pub(crate) fn with_facts(device: &wgpu::Device, facts: DeviceFacts) -> Self {
        Pipelines(Arc::new(Cache::new(device, facts)))
    }

    /// The device these belong to.
    pub fn device(&self) -> &wgpu::Device {
        &self.0.device
    }

    /// Pipelines compiled so far.
    pub fn compiled(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn variants(&self) -> Vec<KernelVariant> {
        self.0.variants()
    }

    /// Drops what was compiled: for applications that are done with one kind of problem. What has been recorded
    /// or is bound in a [`Scratch`] keeps its pipeline.
    pub fn clear(&self) {
        self.0.clear();
    }

    pub(crate) fn facts(&self) -> &DeviceFacts {
        &self.0.facts
    }

    /// Compiles and binds every call, in order.
    pub(crate) fn bind(
        &self,
        dispatches: &[Dispatch<KernelVariant>],
        scratch: &mut Scratch,
    ) -> Result<Vec<(BoundDispatch, [u32; 3])>, Error> {
        scratch.make_room(dispatches.len());
        dispatches.iter().map(|call| Ok((self.bind_one(call, scratch)?, call.grid))).collect()
    }

    fn bind_one(
        &self,
        call: &Dispatch<KernelVariant>,
        scratch: &mut Scratch,
    ) -> Result<BoundDispatch, Error> {
        let tensors = call.tensors.iter().map(|w| (w.buffer.clone(), w.start, w.size)).collect();
        let key = BindKey { stage: call.variant, params: call.params.clone(), tensors };
        if let Some(bound) = scratch.bound(&key) {
            return Ok(bound);
        }
        let limit = self.0.facts.max_workgroups;
        if let Some(needed) = call.grid.into_iter().find(|n| *n > limit) {
            return Err(Error::Limit {
                what: "workgroups of a dispatch",
                needed: needed.into(),
                limit: limit.into(),
                name: "max_compute_workgroups_per_dimension",
            });
        }
        let compiled = self.0.get(call.variant)?;
        let device = &self.0.device;
        let bind_group = guarded(device, "a tensor's buffer", || {
            // Never rewritten: a recorded call keeps its parameters, whatever is recorded after it.
            let params = device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("attention.params"),
                size: key.params.len() as u64,
                usage: wgpu::BufferUsages::UNIFORM,
                mapped_at_creation: true,
            });
            if let Ok(mut mapped) = params.slice(..).get_mapped_range_mut() {
                mapped.slice(..).copy_from_slice(&key.params);
            }
            params.unmap();
            let mut entries = vec![wgpu::BindGroupEntry { binding: 0, resource: params.as_entire_binding() }];
            for (n, window) in call.tensors.iter().enumerate() {
                let resource = wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                    buffer: window.buffer,
                    offset: window.start,
                    size: wgpu::BufferSize::new(window.size),
                });
                entries.push(wgpu::BindGroupEntry { binding: n as u32 + 1, resource });
            }
            device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: Some(call.variant.label()),
                layout: &compiled.layout,
                entries: &entries,
            })
        })?;
        let bound = BoundDispatch { pipeline: compiled.pipeline, bind_group };
        scratch.keep(key, bound.clone());
        Ok(bound)
    }
}

/// Records dispatches that [`Pipelines::bind`] has prepared.
pub(crate) fn dispatch(pass: &mut wgpu::ComputePass, bound: &[(BoundDispatch, [u32; 3])]) {
    for (step, [x, y, z]) in bound {
        pass.set_pipeline(&step.pipeline);
        pass.set_bind_group(0, &step.bind_group, &[]);
        pass.dispatch_workgroups(*x, *y, *z);
    }
}

/// A compute pass of the caller's encoder.
pub(crate) fn pass<'e>(encoder: &'e mut wgpu::CommandEncoder, label: &str) -> wgpu::ComputePass<'e> {
    encoder.begin_compute_pass(&wgpu::ComputePassDescriptor { label: Some(label), timestamp_writes: None })
}
