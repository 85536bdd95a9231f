//! Kernel variants → compiled pipelines, each once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::device::DeviceFacts;
use crate::error::Error;
use crate::guard::guarded;
use crate::kernel::{Kernel, Variant as _};
use crate::kernels::KernelVariant;
use crate::tensor::Access;

/// A pipeline and the layout its bind groups follow.
#[derive(Clone, Debug)]
pub(crate) struct Compiled {
    pub pipeline: wgpu::ComputePipeline,
    pub layout: wgpu::BindGroupLayout,
}

/// The place of one variant's pipeline.
#[derive(Debug, Default)]
struct Place {
    compiled: OnceLock<Compiled>,
    /// Held by the thread that compiles it.
    compiling: Mutex<()>,
}

#[derive(Debug)]
struct Inner {
    device: wgpu::Device,
    facts: DeviceFacts,
    /// Locked to find a place, never while something compiles.
    places: Mutex<HashMap<KernelVariant, Arc<Place>>>,
}

/// What a lock holds, whether or not another thread panicked with it: nothing is left half done under ours.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The compiled pipelines of a device, shared by every operator made from it. Clones are cheap.
///
/// A pipeline is compiled at the first call that needs it and kept. Threads that record at once wait for each other
/// only where they need the same new pipeline.
#[derive(Clone, Debug)]
pub struct Pipelines(Arc<Inner>);

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
        Pipelines(Arc::new(Inner { device: device.clone(), facts, places: Mutex::default() }))
    }

    /// The device these belong to.
    pub fn device(&self) -> &wgpu::Device {
        &self.0.device
    }

    /// Pipelines compiled so far.
    pub fn compiled(&self) -> usize {
        self.variants().len()
    }

    pub(crate) fn variants(&self) -> Vec<KernelVariant> {
        let places = lock(&self.0.places);
        let compiled = places.iter().filter(|(_, place)| place.compiled.get().is_some());
        compiled.map(|(variant, _)| *variant).collect()
    }

    /// Drops what was compiled: for applications that are done with one kind of problem. What has been recorded
    /// or is bound, in a [`Scratch`](crate::Scratch) or an operator, keeps its pipeline.
    pub fn clear(&self) {
        lock(&self.0.places).clear();
    }

    pub(crate) fn facts(&self) -> &DeviceFacts {
        &self.0.facts
    }

    /// The pipeline of `variant`, compiled now if this is its first use. After an error the next use tries again.
    pub(crate) fn get(&self, variant: KernelVariant) -> Result<Compiled, Error> {
        let place = lock(&self.0.places).entry(variant).or_default().clone();
        if let Some(compiled) = place.compiled.get() {
            return Ok(compiled.clone());
        }
        let _compiling = lock(&place.compiling);
        if let Some(compiled) = place.compiled.get() {
            return Ok(compiled.clone());
        }
        let compiled = self.0.compile(variant.label(), &variant.describe())?;
        Ok(place.compiled.get_or_init(|| compiled).clone())
    }
}

impl Inner {
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
