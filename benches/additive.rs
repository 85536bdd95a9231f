//! `scripts/gpu cargo bench -p benches --bench additive [-- --quick]`
//!
//! Compares additive attention with its floors. One floor is a kernel that computes as many tanh
//! with the same text, and nothing else. The other is a copy of as many bytes as the tensors have.
//! It prints the least time of interleaved rounds, and the ratio to the larger floor.

use common::bed::Bed;
use common::copy::{Copy, CopyForm};
use common::settings::quick;
use common::timer::noise;
use wgpu_attention::additive::{AdditiveAttention, AdditiveConfig, AdditiveForward};
use wgpu_attention::{DType, Scratch, Shape, TensorView, wgpu};

/// Each invocation computes ROUNDS × 16 tanh, in four independent chains.
const FLOOR: &str = "
@group(0) @binding(0) var<storage, read_write> out: array<f32>;
override ROUNDS: u32;
@compute @workgroup_size(WIDTH)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let start = vec4<f32>(0.0, 0.1, 0.2, 0.3) + f32(id.x % 64u) * 0.01;
    var x = start;
    var sums = array<vec4<f32>, 4>();
    for (var n = 0u; n < ROUNDS; n++) {
        sums[0] += tanh4(x);
        sums[1] += tanh4(x + 1.0);
        sums[2] += tanh4(x - 1.0);
        sums[3] += tanh4(x + 0.5);
        x += 0.001;
    }
    let sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    out[id.x] = (sum.x + sum.y) + (sum.z + sum.w);
}
";

/// The floor of arithmetic: as many tanh as pairs times hidden units, in 16384 invocations.
struct Floor {
    pipeline: wgpu::ComputePipeline,
    group: wgpu::BindGroup,
    workgroups: u32,
}

impl Floor {
    fn new(bed: &Bed, count: usize) -> Self {
        let device = bed.gpu.device();
        let (width, invocations) = (if bed.software() { 16 } else { 64 }, 1 << 14);
        let rounds = count.div_ceil(16 * invocations);
        let text = [
            include_str!("../shaders/tensor/view.wgsl"),
            include_str!("../shaders/additive/tanh.wgsl"),
            &FLOOR.replace("WIDTH", &width.to_string()),
        ]
        .join("\n");
        let source = wgpu::ShaderModuleDescriptor {
            label: Some("tanh"),
            source: wgpu::ShaderSource::Wgsl(text.into()),
        };
        let module = device.create_shader_module(source);
        let compilation_options = wgpu::PipelineCompilationOptions {
            constants: &[("ROUNDS", rounds as f64)],
            ..Default::default()
        };
        let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some("tanh"),
            layout: None,
            module: &module,
            entry_point: Some("main"),
            compilation_options,
            cache: None,
        });
        let out = bed.gpu.buffer(4 * invocations).expect("room");
        let group = device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &pipeline.get_bind_group_layout(0),
            entries: &[wgpu::BindGroupEntry { binding: 0, resource: out.as_entire_binding() }],
        });
        Floor { pipeline, group, workgroups: (invocations / width) as u32 }
    }

    fn record(&self, pass: &mut wgpu::ComputePass) {
        pass.set_pipeline(&self.pipeline);
        pass.set_bind_group(0, &self.group, &[]);
        pass.dispatch_workgroups(self.workgroups, 1, 1);
    }
}

fn compare(bed: &Bed, copy: &Copy, shape: Shape) {
    let pairs: usize = shape.weights().iter().product();
    let count = |shape: [usize; 4]| shape.iter().product::<usize>();
    let upload = |n: u32, shape| bed.gpu.upload(&noise(count(shape), n)).expect("room");
    let buffers = [upload(1, shape.q()), upload(2, shape.k()), upload(3, shape.v())];
    let vector = bed.gpu.upload(&noise(shape.head_dim, 4)).expect("room");
    let out = bed.gpu.buffer(4 * count(shape.out())).expect("room");
    let view = |buffer, shape| TensorView::new(buffer, DType::F32, shape);
    let config = AdditiveConfig::new(shape.heads, shape.head_dim).value_dim(shape.value_dim);
    let attention = AdditiveAttention::with_pipelines(bed.gpu.pipelines(), config).expect("an operator");
    let call = AdditiveForward::new(
        view(&buffers[0], shape.q()),
        view(&buffers[1], shape.k()),
        view(&buffers[2], shape.v()),
        TensorView::vector(&vector, DType::F32, shape.head_dim),
        view(&out, shape.out()),
    );
    let size = attention.scratch_size(&call).expect("a size");
    let mut scratch = Scratch::new(bed.gpu.device(), size).expect("room");
    let floor = Floor::new(bed, pairs * shape.head_dim);
    let tensors = [shape.q(), shape.k(), shape.v(), shape.out()];
    let bytes: usize = tensors.into_iter().map(|shape| 4 * count(shape)).sum();
    let mut least = [f64::INFINITY; 3];
    for _ in 0..if quick() { 2 } else { 40 } {
        let time = bed.timer.time(|pass: &mut wgpu::ComputePass| {
            attention.forward(pass, &call, &mut scratch).expect("a call");
        });
        least[0] = least[0].min(time.as_secs_f64() * 1e3);
        let time = bed.timer.time(|pass: &mut wgpu::ComputePass| floor.record(pass));
        least[1] = least[1].min(time.as_secs_f64() * 1e3);
        let time = bed.timer.time(|pass: &mut wgpu::ComputePass| copy.record(pass));
        least[2] = least[2].min(time.as_secs_f64() * 1e3 * bytes as f64 / copy.bytes());
    }
    let Shape { batch, heads, q_len, kv_len, head_dim, value_dim, .. } = shape;
    let name = format!("{batch}×{heads}×{q_len}×{kv_len}, {head_dim} hidden, {value_dim} channels");
    let [own, tanh, bytes] = least;
    let ratio = own / tanh.max(bytes);
    println!("{name:<44} {own:>8.2} ms, as many tanh {tanh:>8.2}, bytes {bytes:>8.2}: {ratio:.2} ×");
}

fn main() {
    let Some(bed) = Bed::open() else { return };
    let of = |q_len, kv_len, head_dim, value_dim| Shape {
        q_len,
        kv_len,
        head_dim,
        value_dim,
        ..Shape::new(1, 4, 1, 1)
    };
    let shapes = if quick() {
        vec![of(64, 64, 32, 32)]
    } else {
        vec![
            of(256, 256, 64, 64),
            of(512, 512, 64, 64),
            of(256, 256, 128, 256),
            of(16, 2048, 128, 64),
            of(1, 4096, 128, 128),
        ]
    };
    let copy =
        Copy::new(&bed.gpu, if bed.software() { CopyForm::Run(4096) } else { CopyForm::ALL[0] }, 1 << 24);
    shapes.into_iter().for_each(|shape| compare(&bed, &copy, shape));
}
