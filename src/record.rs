//! Dispatches, in the caller's pass. Everything that can fail happens before the first one.

use crate::bindings::{BindingCache, BindingKey, BoundDispatch};
use crate::error::Error;
use crate::guard::guarded;
use crate::kernel::{Dispatch, Variant as _};
use crate::kernels::KernelVariant;
use crate::pipelines::Pipelines;

impl Pipelines {
    /// Compiles and binds every dispatch, in order; what `bindings` keeps is not bound again.
    pub(crate) fn bind(
        &self,
        dispatches: &[Dispatch<KernelVariant>],
        bindings: &BindingCache,
    ) -> Result<Vec<(BoundDispatch, [u32; 3])>, Error> {
        bindings.check_device(self.device())?;
        let call = bindings.begin();
        let one = |dispatch: &Dispatch<_>| Ok((self.bind_one(dispatch, bindings, call)?, dispatch.grid));
        let bound = dispatches.iter().map(one).collect();
        bindings.end(call);
        bound
    }

    fn bind_one(
        &self,
        call: &Dispatch<KernelVariant>,
        bindings: &BindingCache,
        number: u64,
    ) -> Result<BoundDispatch, Error> {
        let tensors = call.tensors.iter().map(|w| (w.buffer.clone(), w.start, w.size)).collect();
        let key = BindingKey { variant: call.variant, params: call.params.clone(), tensors };
        if let Some(bound) = bindings.get(&key, number) {
            return Ok(bound);
        }
        let limit = self.facts().max_workgroups;
        if let Some(needed) = call.grid.into_iter().find(|n| *n > limit) {
            return Err(Error::Limit {
                what: "workgroups of a dispatch",
                needed: needed.into(),
                limit: limit.into(),
                name: "max_compute_workgroups_per_dimension",
            });
        }
        let compiled = self.get(call.variant)?;
        let device = self.device();
        let bind_group = guarded(device, "a tensor's buffer", || {
            let (params, rest) = key.params.split_at(compiled.params_bytes.min(key.params.len()));
            let params = uniform(device, params);
            let rest = (!rest.is_empty()).then(|| uniform(device, rest));
            let mut entries = vec![wgpu::BindGroupEntry { binding: 0, resource: params.as_entire_binding() }];
            for (n, window) in call.tensors.iter().enumerate() {
                let resource = wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                    buffer: window.buffer,
                    offset: window.start,
                    size: wgpu::BufferSize::new(window.size),
                });
                entries.push(wgpu::BindGroupEntry { binding: n as u32 + 1, resource });
            }
            if let Some(rest) = &rest {
                let binding = entries.len() as u32;
                entries.push(wgpu::BindGroupEntry { binding, resource: rest.as_entire_binding() });
            }
            device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: Some(call.variant.label()),
                layout: &compiled.layout,
                entries: &entries,
            })
        })?;
        let bound = BoundDispatch { pipeline: compiled.pipeline, bind_group };
        bindings.keep(key, bound.clone(), number);
        Ok(bound)
    }
}

/// A uniform, never rewritten: a recorded call keeps its parameters, whatever is recorded after it.
fn uniform(device: &wgpu::Device, bytes: &[u8]) -> wgpu::Buffer {
    let buffer = device.create_buffer(&wgpu::BufferDescriptor {
        label: Some("attention.params"),
        size: bytes.len() as u64,
        usage: wgpu::BufferUsages::UNIFORM,
        mapped_at_creation: true,
    });
    if let Ok(mut mapped) = buffer.slice(..).get_mapped_range_mut() {
        mapped.slice(..).copy_from_slice(bytes);
    }
    buffer.unmap();
    buffer
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
