//! What the crate does not do: embedding, loss, AdamW. Short kernels, whose sums have a fixed
//! order.

use wgpu_attention::wgpu;

use crate::parameters::{Places, WIDTH};
use crate::task::{BATCH, LENGTH, VOCABULARY};

pub const ROWS: usize = BATCH * LENGTH;
/// Of AdamW: what the running means of gradients and of their squares keep in a step.
pub const KEEP_MEAN: f32 = 0.9;
pub const KEEP_SQUARE: f32 = 0.98;
pub const EPSILON: f32 = 1e-8;
pub const DECAY: f32 = 0.01;
/// Biases by distance move so many times as fast: a score changes by one of them, but by all of two
/// rows of matrices.
pub const BIAS_RATE: f32 = 16.0;

/// What changes from step to step.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
pub struct Step {
    /// 1 / the targets of the batch.
    pub per_target: f32,
    /// How far parameters move.
    pub rate: f32,
    /// 1 / (1 − KEEP_MEANⁿ) in step n, and of squares.
    pub unbias_mean: f32,
    pub unbias_square: f32,
    /// Where the totals go.
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

    /// With `buffers` as bindings 0, 1, ...
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
