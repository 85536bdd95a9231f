//! Agents that attend to each other, in plain wgpu. Nothing in this file depends on Bevy.

use std::f32::consts::{PI, TAU};

use wgpu_attention::{
    Attention, Config, DType, Error, Forward, Gpu, Pipelines, Prepared, Scratch, TensorView, wgpu,
};

/// Agents of different groups avoid each other. Agent `i` has group `i % GROUPS`.
pub const GROUPS: usize = 4;
/// The group of an agent, the nearest agents, the other groups.
pub const HEADS: usize = 3;
/// The position as two points on a circle, and the group as one of four.
pub const HEAD_DIM: usize = 8;
/// The position as two points on a circle, and the heading.
pub const VALUE_DIM: usize = 6;
/// The largest crowd. The time of a frame is quadratic in the number of agents.
pub const MOST_AGENTS: usize = 1 << 17;

/// Heads and channels of queries, keys, values and the result.
const ROWS: [[usize; 2]; 4] = [[HEADS, HEAD_DIM], [1, HEAD_DIM], [1, VALUE_DIM], [HEADS, VALUE_DIM]];
const WORKGROUP: usize = 64;

/// The state of an agent, as in `crowd.wgsl`.
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Agent {
    /// From -π to π along each axis. The world is a torus.
    pub position: [f32; 2],
    /// A vector of length 1.
    pub heading: [f32; 2],
}

/// Returns `agents` agents at random places, with random headings. They are the same every time.
pub fn seed(agents: usize) -> Vec<Agent> {
    let mut state = 1_u64;
    let mut random = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 24) as f32
    };
    (0..agents)
        .map(|_| {
            let position = [TAU * random() - PI, TAU * random() - PI];
            let (sin, cos) = (TAU * random()).sin_cos();
            Agent { position, heading: [cos, sin] }
        })
        .collect()
}

/// The configuration of the attention. All heads share the keys and values. The scale is in the
/// queries.
pub fn config() -> Config {
    Config::new(HEADS, HEAD_DIM).kv_heads(1).value_dim(VALUE_DIM).scale(1.0)
}

/// Buffers, pipelines and the prepared attention of a crowd, made once. [`record`](Self::record)
/// creates nothing.
pub struct Crowd {
    gpu: Gpu,
    agents: wgpu::Buffer,
    /// Queries, keys, values, and the result of the attention.
    tensors: [wgpu::Buffer; 4],
    len: usize,
    features: Kernel,
    /// `None` for a crowd that does not attend.
    attention: Option<Prepared>,
    steer: Kernel,
    times: Option<wgpu::QuerySet>,
}

/// A kernel of `crowd.wgsl` with its buffers.
struct Kernel {
    pipeline: wgpu::ComputePipeline,
    bindings: wgpu::BindGroup,
}

impl Crowd {
    /// Makes a crowd on a device of the application. If not `attends`, agents get zeros instead of
    /// the result of attention.
    ///
    /// # Errors
    /// The errors of the library: the device is lost, out of memory, or its limits are too small.
    pub fn new(gpu: Gpu, len: usize, attends: bool) -> Result<Self, Error> {
        let agents = gpu.upload(&seed(len))?;
        let buffer = |[heads, dim]: [usize; 2]| gpu.buffer(heads * len * dim * size_of::<f32>());
        let tensors = [buffer(ROWS[0])?, buffer(ROWS[1])?, buffer(ROWS[2])?, buffer(ROWS[3])?];
        let [q, k, v, out] = [0, 1, 2, 3].map(|t| {
            let [heads, dim] = ROWS[t];
            TensorView::new(&tensors[t], DType::F32, [1, heads, len, dim])
        });
        let call = Forward::new(q, k, v, out);
        let attention = Attention::with_pipelines(gpu.pipelines(), config())?;
        let mut scratch = Scratch::new(gpu.device(), attention.scratch_size(&call)?)?;
        // It keeps the buffers of the call and of the scratch alive.
        let prepared = attention.prepare(&call, &mut scratch)?;

        let device = gpu.device();
        let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
            label: Some("crowd"),
            source: wgpu::ShaderSource::Wgsl(text(len).into()),
        });
        let kernel = |entry, buffers: &[(u32, &wgpu::Buffer)]| Kernel::new(device, &module, entry, buffers);
        let [q, k, v, out] = &tensors;
        let features = kernel("features", &[(0, &agents), (1, q), (2, k), (3, v)]);
        let steer = kernel("steer", &[(0, &agents), (4, out)]);
        let times = device.features().contains(wgpu::Features::TIMESTAMP_QUERY).then(|| {
            device.create_query_set(&wgpu::QuerySetDescriptor {
                label: Some("crowd"),
                ty: wgpu::QueryType::Timestamp,
                count: 2,
            })
        });
        let attention = attends.then_some(prepared);
        Ok(Crowd { agents, tensors, len, features, attention, steer, times, gpu })
    }

    /// Records a frame: the attention's inputs, the attention, and a step of every agent.
    pub fn record(&self, encoder: &mut wgpu::CommandEncoder) {
        self.run(encoder, &self.features);
        if let Some(attention) = &self.attention {
            let timestamp_writes = self.times.as_ref().map(|query_set| wgpu::ComputePassTimestampWrites {
                query_set,
                beginning_of_pass_write_index: Some(0),
                end_of_pass_write_index: Some(1),
            });
            let label = Some("crowd attention");
            let mut pass =
                encoder.begin_compute_pass(&wgpu::ComputePassDescriptor { label, timestamp_writes });
            attention.record(&mut pass);
        }
        self.run(encoder, &self.steer);
    }

    fn run(&self, encoder: &mut wgpu::CommandEncoder, kernel: &Kernel) {
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        pass.set_pipeline(&kernel.pipeline);
        pass.set_bind_group(0, &kernel.bindings, &[]);
        pass.dispatch_workgroups(self.len.div_ceil(WORKGROUP) as u32, 1, 1);
    }

    /// The number of agents.
    pub fn count(&self) -> usize {
        self.len
    }

    /// The state of the agents, an array of [`Agent`].
    pub fn agents(&self) -> &wgpu::Buffer {
        &self.agents
    }

    /// Reads the agents back. It waits for the device.
    ///
    /// # Errors
    /// [`Error::DeviceLost`].
    pub fn read_agents(&self) -> Result<Vec<Agent>, Error> {
        self.gpu.download(&self.agents, self.len)
    }

    /// Reads the tensors of the last frame's attention back: queries, keys, values, result.
    ///
    /// # Errors
    /// [`Error::DeviceLost`].
    pub fn read_tensors(&self) -> Result<Vec<Vec<f32>>, Error> {
        let rows = self.tensors.iter().zip(ROWS);
        rows.map(|(buffer, [heads, dim])| self.gpu.download(buffer, heads * self.len * dim)).collect()
    }

    /// Reads the time of the last recorded attention back, in milliseconds. It is `None` if the
    /// device has no timestamps, or if the crowd does not attend.
    ///
    /// # Errors
    /// [`Error::DeviceLost`].
    pub fn read_time(&self) -> Result<Option<f64>, Error> {
        let (Some(times), Some(_)) = (&self.times, &self.attention) else { return Ok(None) };
        let device = self.gpu.device();
        let resolved = device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("crowd times"),
            size: 16,
            usage: wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        });
        self.gpu.submit(|encoder| {
            encoder.resolve_query_set(times, 0..2, &resolved, 0);
            Ok(())
        })?;
        let ticks: Vec<u64> = self.gpu.download(&resolved, 2)?;
        let period = f64::from(self.gpu.queue().get_timestamp_period());
        Ok(Some(ticks[1].saturating_sub(ticks[0]) as f64 * period / 1e6))
    }
}

impl Kernel {
    fn new(
        device: &wgpu::Device,
        module: &wgpu::ShaderModule,
        entry: &str,
        buffers: &[(u32, &wgpu::Buffer)],
    ) -> Self {
        let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(entry),
            layout: None,
            module,
            entry_point: Some(entry),
            compilation_options: wgpu::PipelineCompilationOptions::default(),
            cache: None,
        });
        let entries: Vec<_> = buffers
            .iter()
            .map(|(binding, buffer)| wgpu::BindGroupEntry {
                binding: *binding,
                resource: buffer.as_entire_binding(),
            })
            .collect();
        let bindings = device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some(entry),
            layout: &pipeline.get_bind_group_layout(0),
            entries: &entries,
        });
        Kernel { pipeline, bindings }
    }
}

/// The text of the kernels for `len` agents.
fn text(len: usize) -> String {
    format!(
        "const AGENTS = {len}u; const GROUPS = {GROUPS}u; const HEADS = {HEADS}u; const WORKGROUP = {WORKGROUP};\n{}",
        include_str!("crowd.wgsl")
    )
}

/// Returns the library's view of a device that the application owns.
pub fn gpu(device: &wgpu::Device, queue: &wgpu::Queue, adapter: &wgpu::Adapter) -> Gpu {
    Gpu::with_pipelines(queue.clone(), Pipelines::with_adapter(device, adapter))
}
