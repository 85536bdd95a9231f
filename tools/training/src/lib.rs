//! Parts of training that the examples share: random numbers, the loss and AdamW. The kernels are
//! short, and add in a fixed order.

mod random;

pub use random::Random;

/// The cross-entropy of each row: buffers step, targets, logits, `d_logits`, `[rows, 2]` losses.
/// One workgroup for each `width` rows.
pub const LOSS: &str = include_str!("loss.wgsl");
/// The sums of losses and hits: buffers step, losses, totals. One workgroup.
pub const TOTAL: &str = include_str!("total.wgsl");
/// AdamW: buffers step, gradients, parameters, means, squares. One workgroup for each `width`
/// parameters.
pub const ADAMW: &str = include_str!("adamw.wgsl");

/// The decay rates of AdamW's running means of gradients and of their squares.
pub const KEEP_MEAN: f32 = 0.9;
pub const KEEP_SQUARE: f32 = 0.98;
pub const EPSILON: f32 = 1e-8;
pub const DECAY: f32 = 0.01;

/// The target of a row without a target.
pub const NONE: u32 = u32::MAX;

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

impl Step {
    /// The values of step `n`, from 1 on.
    pub fn of(n: usize, targets: usize, rate: f64, slot: usize) -> Self {
        let unbias = |keep: f32| (1.0 / (1.0 - f64::from(keep).powi(n as i32))) as f32;
        Step {
            per_target: 1.0 / targets as f32,
            rate: rate as f32,
            unbias_mean: unbias(KEEP_MEAN),
            unbias_square: unbias(KEEP_SQUARE),
            slot: slot as u32,
        }
    }

    /// The values for a batch that a model is not trained on.
    pub fn still(targets: usize) -> Self {
        let per_target = 1.0 / targets as f32;
        Step { per_target, rate: 0.0, unbias_mean: 1.0, unbias_square: 1.0, slot: 0 }
    }
}

/// The learning rate of a step: it rises over `warmup` steps, and falls over the last third.
pub fn scheduled(rate: f64, warmup: usize, step: usize, steps: usize) -> f64 {
    let rising = (step + 1) as f64 / warmup as f64;
    let falling = 3.0 * (steps - step) as f64 / steps as f64;
    rate * rising.min(falling).min(1.0)
}

/// The numbers that kernels are compiled with.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Rows of logits.
    pub rows: usize,
    /// Invocations of a workgroup.
    pub width: usize,
    /// Logits of a row.
    pub vocabulary: usize,
    /// The first parameter with another learning rate, and the factor of that rate.
    pub faster: (usize, f32),
}

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
    /// Compiles a kernel, with more constants in WGSL.
    pub fn new(device: &wgpu::Device, label: &str, wgsl: &str, sizes: &Sizes, more: &str) -> Self {
        let Sizes { rows, width, vocabulary, faster: (biases, bias_rate) } = *sizes;
        let constants = format!(
            "const ROWS = {rows}u;\nconst WIDTH = {width}u;\nconst VOCABULARY = {vocabulary}u;\n\
             const BIASES = {biases}u;\nconst BIAS_RATE = {bias_rate:?};\n\
             const KEEP_MEAN = {KEEP_MEAN:?};\nconst KEEP_SQUARE = {KEEP_SQUARE:?};\n\
             const EPSILON = {EPSILON:?};\nconst DECAY = {DECAY:?};\n"
        );
        let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
            label: Some(label),
            source: wgpu::ShaderSource::Wgsl([&constants, more, STEP, wgsl].concat().into()),
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
