//! Kernels that belong to the benches.

use wgpu_attention::{Gpu, wgpu};

/// A kernel with its bindings.
pub struct Kernel {
    pipeline: wgpu::ComputePipeline,
    bind_group: wgpu::BindGroup,
}

impl Kernel {
    /// Compiles `text`. It must bind all of `buffers` in this order, stay inside them and end: no
    /// runtime check enforces this.
    pub fn new(gpu: &Gpu, text: &str, buffers: &[&wgpu::Buffer]) -> Self {
        let device = gpu.device();
        let source = wgpu::ShaderSource::Wgsl(text.into());
        // SAFETY: the callers, which are the benches, guarantee it.
        let module = unsafe {
            device.create_shader_module_trusted(
                wgpu::ShaderModuleDescriptor { label: None, source },
                wgpu::ShaderRuntimeChecks::unchecked(),
            )
        };
        let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: None,
            layout: None,
            module: &module,
            entry_point: None,
            // Kernels with workgroup memory fill it first.
            compilation_options: wgpu::PipelineCompilationOptions {
                zero_initialize_workgroup_memory: false,
                ..Default::default()
            },
            cache: None,
        });
        let entries: Vec<_> = buffers
            .iter()
            .zip(0..)
            .map(|(buffer, binding)| wgpu::BindGroupEntry { binding, resource: buffer.as_entire_binding() })
            .collect();
        let bind_group = device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &pipeline.get_bind_group_layout(0),
            entries: &entries,
        });
        Kernel { pipeline, bind_group }
    }

    pub fn dispatch(&self, pass: &mut wgpu::ComputePass, [x, y]: [u32; 2]) {
        pass.set_pipeline(&self.pipeline);
        pass.set_bind_group(0, &self.bind_group, &[]);
        pass.dispatch_workgroups(x, y, 1);
    }
}

/// A uniform buffer of 16 bytes, zeros until written.
pub fn uniform(gpu: &Gpu) -> wgpu::Buffer {
    gpu.device().create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 16,
        usage: wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST,
        mapped_at_creation: false,
    })
}
