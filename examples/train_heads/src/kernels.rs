//! Kernels that this example adds to the crate: embedding, loss and AdamW. They are short, and add
//! in a fixed order.

use wgpu_attention::wgpu;

use crate::parameters::{Places, WIDTH};
use crate::task::{BATCH, LENGTH, VOCABULARY};

pub const ROWS: usize = BATCH * LENGTH;
/// The decay rates of AdamW's running means of gradients and of their squares.
pub const KEEP_MEAN: f32 = 0.9;
pub const KEEP_SQUARE: f32 = 0.98;
pub const EPSILON: f32 = 1e-8;
pub const DECAY: f32 = 0.01;
/// The factor of the learning rate for the biases by distance. They need a higher rate, because a
/// score depends on one bias, but on two whole rows of matrices.
pub const BIAS_RATE: f32 = 16.0;

/// The uniform values that change from step to step.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
pub struct Step {
    /// 1 / (number of targets in the batch).
    pub per_target: f32,
    /// The learning rate.
    pub rate: f32,
    /// 1 / (1 − KEEP_MEANⁿ) in step n, and the same for squares.
    pub unbias_mean: f32,
    pub unbias_square: f32,
    /// The slot for the step's totals.
    pub slot: u32,
}

const STEP: &str =
    "struct Step { per_target: f32, rate: f32, unbias_mean: f32, unbias_square: f32, slot: u32 }\n";

/// A compiled kernel.
pub struct Kernel {
    pipeline: wgpu::ComputePipeline,
}

/// A kernel with its buffers and its workgroups.
pub struct Bound {
    pipeline: wgpu::ComputePipeline,
    group: wgpu::BindGroup,
    workgroups: u32,
}

impl Kernel {
    pub fn new(device: &wgpu::Device, label: &str, wgsl: &str, places: &Places) -> Self {
        let constants = format!(
            "const ROWS = {ROWS}u;\nconst WIDTH = {WIDTH}u;\nconst VOCABULARY = {VOCABULARY}u;\n\
             const EMBED = {embed}u;\nconst BIASES = {biases}u;\nconst BIAS_RATE = {BIAS_RATE:?};\n\
             const KEEP_MEAN = {KEEP_MEAN:?};\nconst KEEP_SQUARE = {KEEP_SQUARE:?};\n\
             const EPSILON = {EPSILON:?};\nconst DECAY = {DECAY:?};\n",
            embed = places.embed.first,
            biases = places.biases(),
        );
        let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
            label: Some(label),
            source: wgpu::ShaderSource::Wgsl([&constants, STEP, wgsl].concat().into()),
        });
        let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(label),
            layout: None,
            module: &module,
            entry_point: None,
            compilation_options: wgpu::PipelineCompilationOptions::default(),
            cache: None,
        });
        Kernel { pipeline }
    }

    /// Binds `buffers` as bindings 0, 1, ...
    pub fn bind(&self, device: &wgpu::Device, buffers: &[&wgpu::Buffer], workgroups: usize) -> Bound {
        let entries: Vec<_> = buffers
            .iter()
            .zip(0..)
            .map(|(buffer, binding)| wgpu::BindGroupEntry { binding, resource: buffer.as_entire_binding() })
            .collect();
        let group = device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &self.pipeline.get_bind_group_layout(0),
            entries: &entries,
        });
        Bound { pipeline: self.pipeline.clone(), group, workgroups: workgroups as u32 }
    }
}

impl Bound {
    pub fn dispatch(&self, pass: &mut wgpu::ComputePass) {
        pass.set_pipeline(&self.pipeline);
        pass.set_bind_group(0, &self.group, &[]);
        pass.dispatch_workgroups(self.workgroups, 1, 1);
    }
}
