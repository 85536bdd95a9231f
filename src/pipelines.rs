//! Kernel variants → compiled pipelines, each once.

use crate::device::DeviceFacts;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::Error;
use crate::kernel::{Kernel, Variant};
use crate::tensor::Access;

/// A pipeline and the layout its bind groups follow.
#[derive(Clone, Debug)]
pub(crate) struct Compiled {
    pub pipeline: wgpu::ComputePipeline,
    pub layout: wgpu::BindGroupLayout,
}

/// The pipelines of one device.
#[derive(Debug)]
pub(crate) struct Cache<V> {
    pub device: wgpu::Device,
    pub facts: DeviceFacts,
    compiled: Mutex<HashMap<V, Compiled>>,
}

impl<V: Variant> Cache<V> {
    pub fn new(device: &wgpu::Device, facts: DeviceFacts) -> Self {
        Cache { device: device.clone(), facts, compiled: Mutex::default() }
    }

    /// The pipelines stay usable if another thread panicked while it held the lock.
    fn lock(&self) -> MutexGuard<'_, HashMap<V, Compiled>> {
        self.compiled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn len(&self) -> usize {
        self.lock().len()
    }

    pub fn variants(&self) -> Vec<V> {
        self.lock().keys().copied().collect()
    }

    pub fn clear(&self) {
        self.lock().clear();
    }

    /// The pipeline of `variant`, compiled now if this is its first use.
    pub fn get(&self, variant: V) -> Result<Compiled, Error> {
        let mut compiled = self.lock();
        if let Some(found) = compiled.get(&variant) {
            return Ok(found.clone());
        }
        let new = self.compile(variant.label(), &variant.describe())?;
        compiled.insert(variant, new.clone());
        Ok(new)
    }

    fn compile(&self, label: &'static str, kernel: &Kernel) -> Result<Compiled, Error> {
        // wgpu checks neither of these against the limits.
        let limits = [
            (
                "invocations per workgroup",
                kernel.invocations,
                self.facts.max_invocations,
                "max_compute_invocations_per_workgroup",
            ),
            (
                "workgroup memory",
                kernel.workgroup_memory,
                self.facts.workgroup_memory,
                "max_compute_workgroup_storage_size",
            ),
            (
                "storage buffers of a kernel",
                kernel.bindings.len() as u32,
                self.facts.max_storage_buffers,
                "max_storage_buffers_per_shader_stage",
            ),
        ];
        for (what, needed, limit, name) in limits {
            if needed > limit {
                return Err(Error::Limit { what, needed: needed.into(), limit: limit.into(), name });
            }
        }
        guarded(&self.device, label, || {
            let layout = self.layout(label, kernel);
            // SAFETY: the text is the crate's own. Its loops count to bounds that the host passes, or that are
            // clamped to those where they come from a buffer; its indices stay inside the views the host has
            // checked, its divisors are positive.
            let module = unsafe {
                self.device.create_shader_module_trusted(
                    wgpu::ShaderModuleDescriptor {
                        label: Some(label),
                        source: wgpu::ShaderSource::Wgsl(kernel.wgsl.as_str().into()),
                    },
                    wgpu::ShaderRuntimeChecks::unchecked(),
                )
            };
            let pipeline_layout = self.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
                label: Some(label),
                bind_group_layouts: &[Some(&layout)],
                immediate_size: 0,
            });
            let pipeline = self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some(label),
                layout: Some(&pipeline_layout),
                module: &module,
                entry_point: Some("main"),
                compilation_options: wgpu::PipelineCompilationOptions {
                    constants: &[],
                    // Every kernel writes its workgroup memory before it reads it.
                    zero_initialize_workgroup_memory: false,
                },
                cache: None,
            });
            Compiled { pipeline, layout }
        })
    }

    fn layout(&self, label: &'static str, kernel: &Kernel) -> wgpu::BindGroupLayout {
        let entry = |binding: usize, ty| wgpu::BindGroupLayoutEntry {
            binding: binding as u32,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer { ty, has_dynamic_offset: false, min_binding_size: None },
            count: None,
        };
        let mut entries = vec![entry(0, wgpu::BufferBindingType::Uniform)];
        for (n, binding) in kernel.bindings.iter().enumerate() {
            let read_only = binding.access == Access::Read;
            entries.push(entry(n + 1, wgpu::BufferBindingType::Storage { read_only }));
        }
        self.device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
            label: Some(label),
            entries: &entries,
        })
    }
}

/// Runs `make` and turns what wgpu reports, or panics with, into an error.
#[cfg(not(target_arch = "wasm32"))]
pub(crate) fn guarded<T>(
    device: &wgpu::Device,
    what: &'static str,
    make: impl FnOnce() -> T,
) -> Result<T, Error> {
    let memory = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
    let internal = device.push_error_scope(wgpu::ErrorFilter::Internal);
    let validation = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let made = std::panic::catch_unwind(std::panic::AssertUnwindSafe(make));
    let validation = now(validation.pop());
    let internal = now(internal.pop());
    let memory = now(memory.pop());
    if let Some(error) = memory {
        return Err(Error::OutOfMemory { what, description: error.to_string() });
    }
    if is_lost(device) {
        return Err(Error::DeviceLost(format!("wgpu made nothing of {what}")));
    }
    if let Some(error) = validation.or(internal) {
        return Err(Error::Refused { what, description: error.to_string() });
    }
    made.map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("wgpu panicked");
        Error::Refused { what, description: text.to_string() }
    })
}

/// Whether the device is lost. wgpu then makes things that are none, without a word, but for a callback that is the
/// application's; it does not even refuse what it always refuses, a buffer without any usage.
#[cfg(not(target_arch = "wasm32"))]
fn is_lost(device: &wgpu::Device) -> bool {
    let scope = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let _ = device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 4,
        usage: wgpu::BufferUsages::empty(),
        mapped_at_creation: false,
    });
    now(scope.pop()).is_none()
}

/// Browsers answer error scopes later than this returns: there a [`Watch`] is told, else the application's
/// own handler.
#[cfg(target_arch = "wasm32")]
pub(crate) fn guarded<T>(_: &wgpu::Device, _: &'static str, make: impl FnOnce() -> T) -> Result<T, Error> {
    Ok(make())
}

/// Error scopes in a browser, around calls that do not wait; elsewhere nothing, as [`guarded`] tells.
pub(crate) struct Watch {
    // Dropped in this order, the last pushed first.
    #[cfg(target_arch = "wasm32")]
    scopes: [wgpu::ErrorScopeGuard; 3],
}

#[cfg(target_arch = "wasm32")]
impl Watch {
    pub fn begin(device: &wgpu::Device) -> Self {
        let memory = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let internal = device.push_error_scope(wgpu::ErrorFilter::Internal);
        let validation = device.push_error_scope(wgpu::ErrorFilter::Validation);
        Watch { scopes: [validation, internal, memory] }
    }

    /// Ends the scopes now; the future says what they caught.
    pub fn end(self, what: &'static str) -> impl Future<Output = Result<(), Error>> {
        let [validation, internal, memory] = self.scopes.map(wgpu::ErrorScopeGuard::pop);
        async move {
            if let Some(error) = memory.await {
                return Err(Error::OutOfMemory { what, description: error.to_string() });
            }
            match (validation.await, internal.await) {
                (Some(error), _) | (None, Some(error)) => {
                    Err(Error::Refused { what, description: error.to_string() })
                }
                (None, None) => Ok(()),
            }
        }
    }
}

#[cfg(not(target_arch = "wasm32"))]
impl Watch {
    pub fn begin(_: &wgpu::Device) -> Self {
        Watch {}
    }

    pub async fn end(self, _: &'static str) -> Result<(), Error> {
        Ok(())
    }
}

/// The result of a future that is ready at once, as error scopes are on native backends.
#[cfg(not(target_arch = "wasm32"))]
fn now(scope: impl Future<Output = Option<wgpu::Error>>) -> Option<wgpu::Error> {
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match std::pin::pin!(scope).poll(&mut context) {
        std::task::Poll::Ready(error) => error,
        std::task::Poll::Pending => None,
    }
}
