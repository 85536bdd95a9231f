//! Recording a call submits nothing, creates nothing the second time, and overwrites no parameters.

mod bench;
mod cached;
mod calls;
mod cost;
mod kept;
mod operators;
mod order;
mod passes;
mod stacks;

use std::time::{Duration, Instant};

use support::allocations::{Counting, allocations};
use wgpu_attention::layers::{MultiHeadBackward, MultiHeadConfig, MultiHeadForward, MultiHeadWeights};
use wgpu_attention::mask::{DeviceMask, HostMask};
use wgpu_attention::reference::compare::max_error;
use wgpu_attention::reference::{self, Options, widen};
use wgpu_attention::tuning::Algorithm;
use wgpu_attention::{
    Attention, Config, DType, Forward, Gpu, KernelOptions, Linear, Mask, MultiHeadAttention, Pipelines,
    Scratch, ScratchSize, Shape, TensorView,
};

use crate::harness::random::noise;
use crate::harness::say;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const POISON: f32 = -12345.0;

/// A device whose instance reports live resources, without resources of other tests.
struct Own {
    instance: wgpu::Instance,
    gpu: Gpu,
}

/// The number of live buffers, bind groups, pipelines and shader modules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Alive {
    buffers: usize,
    bind_groups: usize,
    pipelines: usize,
    layouts: usize,
}

impl Own {
    fn new() -> Self {
        let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
        let adapter = pollster::block_on(instance.request_adapter(&Default::default())).expect("an adapter");
        let (device, queue) =
            pollster::block_on(adapter.request_device(&Default::default())).expect("a device");
        Own { instance, gpu: Gpu::with_device(device, queue) }
    }

    /// Returns `None` where wgpu does not count, as on the web.
    fn alive(&self) -> Option<Alive> {
        let hub = self.instance.generate_report()?.hub;
        Some(Alive {
            buffers: hub.buffers.num_kept_from_user,
            bind_groups: hub.bind_groups.num_kept_from_user,
            pipelines: hub.compute_pipelines.num_kept_from_user,
            layouts: hub.bind_group_layouts.num_kept_from_user,
        })
    }
}

fn encoder(gpu: &Gpu) -> wgpu::CommandEncoder {
    gpu.device().create_command_encoder(&Default::default())
}

fn poison(gpu: &Gpu, buffer: &wgpu::Buffer) {
    let poison = vec![POISON; buffer.size() as usize / 4];
    gpu.queue().write_buffer(buffer, 0, bytemuck::cast_slice(&poison));
}

/// Returns the shortest time, which other threads disturbed least.
fn fastest(n: usize, mut f: impl FnMut() -> Duration) -> Duration {
    (0..n).map(|_| f()).min().unwrap_or_default()
}

/// The paths of a call. Plain calls use the last one.
const PATHS: [Algorithm; 2] = [Algorithm::Staged, Algorithm::Fused];

/// An attention problem with separate buffers.
struct Problem {
    shape: Shape,
    path: Algorithm,
    causal: bool,
    scale: f64,
    data: [Vec<f32>; 3],
    buffers: [wgpu::Buffer; 4],
}

impl Problem {
    fn new(gpu: &Gpu, path: Algorithm, shape: Shape, seed: f32) -> Self {
        let shapes = [shape.q(), shape.k(), shape.v(), shape.out()];
        let counts = shapes.map(|s| s.iter().product::<usize>());
        let data = [0, 1, 2].map(|n| noise(counts[n], seed + 0.3 * n as f32));
        let upload = |data: &[f32]| gpu.upload(data).expect("an upload");
        let out = upload(&vec![POISON; counts[3]]);
        let [q, k, v] = data.each_ref().map(|x| upload(x));
        Problem { shape, path, causal: false, scale: 0.5, data, buffers: [q, k, v, out] }
    }

    fn config(&self) -> Config {
        let Shape { heads, kv_heads, head_dim, value_dim, .. } = self.shape;
        Config::new(heads, head_dim)
            .kv_heads(kv_heads)
            .value_dim(value_dim)
            .scale(self.scale)
            .kernel_options(KernelOptions::new().algorithm(self.path))
    }

    fn attention(&self, pipelines: &Pipelines) -> Attention {
        Attention::with_pipelines(pipelines, self.config()).expect("an operator")
    }

    fn call(&self) -> Forward<'_> {
        let shapes = [self.shape.q(), self.shape.k(), self.shape.v(), self.shape.out()];
        let [q, k, v, out] = [0, 1, 2, 3].map(|n| TensorView::new(&self.buffers[n], DType::F32, shapes[n]));
        let mask: DeviceMask = if self.causal { Mask::causal() } else { Mask::none() };
        Forward::new(q, k, v, out).mask(mask)
    }

    fn scratch(&self, gpu: &Gpu) -> Scratch {
        let size = self.attention(gpu.pipelines()).scratch_size(&self.call()).expect("a size");
        Scratch::new(gpu.device(), size).expect("scratch")
    }

    /// Poisons the output, so that an earlier result cannot pass for a later one.
    fn poison(&self, gpu: &Gpu) {
        poison(gpu, &self.buffers[3]);
    }

    fn out(&self, gpu: &Gpu) -> Vec<f64> {
        let n = self.shape.out().iter().product();
        widen(&gpu.download::<f32>(&self.buffers[3], n).expect("a read-back"))
    }

    fn is_poison(&self, gpu: &Gpu) -> bool {
        self.out(gpu).iter().all(|x| *x == f64::from(POISON))
    }

    fn truth(&self, [q, k, v]: [&[f64]; 3]) -> Vec<f64> {
        let mask: HostMask = if self.causal { Mask::causal() } else { Mask::none() };
        let options = Options::new().mask(mask).scale(self.scale);
        reference::attention::<f64>(q, k, v, self.shape, &options).expect("a truth").out
    }

    fn judge(&self, gpu: &Gpu, context: &str) {
        let data = self.data.each_ref().map(|x| widen::<f64>(x));
        let error = max_error(&self.out(gpu), &self.truth(data.each_ref().map(|x| &x[..])));
        assert!(error < 1e-5, "{context}, {:?}, {:?}: off by {error}", self.path, self.shape);
    }
}

/// Returns sizes that differ in every dimension, so that no call works with another call's
/// parameters.
fn various(gpu: &Gpu, path: Algorithm) -> Vec<Problem> {
    let shape = |batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim| Shape {
        batch,
        heads,
        kv_heads,
        q_len,
        kv_len,
        head_dim,
        value_dim,
    };
    let shapes = [
        shape(1, 1, 1, 1, 1, 1, 1),
        shape(2, 4, 2, 3, 5, 8, 6),
        shape(1, 2, 1, 65, 33, 7, 4),
        shape(3, 1, 1, 2, 130, 16, 16),
        shape(1, 6, 3, 17, 17, 32, 5),
        shape(2, 2, 2, 3, 5, 8, 6),
        shape(1, 2, 1, 64, 64, 8, 8),
        shape(1, 2, 1, 63, 64, 8, 8),
    ];
    let problems = shapes.into_iter().enumerate().flat_map(|(n, shape)| {
        [false, true].map(|causal| {
            let scale = 0.2 + 0.1 * n as f64;
            Problem { causal, scale, ..Problem::new(gpu, path, shape, 0.17 + 0.05 * n as f32) }
        })
    });
    problems.collect()
}

/// A layer with separate buffers: 512 wide, 8 heads.
struct Layer {
    layer: MultiHeadAttention,
    x: wgpu::Buffer,
    out: wgpu::Buffer,
    shape: [usize; 3],
}

impl Layer {
    fn new(gpu: &Gpu, path: Algorithm, length: usize) -> Self {
        let (e, heads) = (512, 8);
        let upload = |x: Vec<f32>| gpu.upload(&x).expect("an upload");
        let weights = upload(noise(4 * e * e, 0.37).iter().map(|w| 0.1 * w).collect());
        let bias = upload(noise(e, 0.71));
        let linear = |n| Linear {
            weight: TensorView::matrix(&weights, DType::F32, [e, e]).with_offset(n * e * e),
            bias: Some(TensorView::vector(&bias, DType::F32, e)),
        };
        let weights = MultiHeadWeights {
            query: linear(0),
            key: linear(1),
            value: linear(2),
            out: linear(3),
            bias_kv: None,
            qk_norm: None,
            gate: None,
        };
        let layer =
            MultiHeadAttention::with_pipelines(gpu.pipelines(), MultiHeadConfig::new(e, heads), &weights)
                .expect("a layer")
                .kernel_options(KernelOptions::new().algorithm(path));
        let (x, out) = (upload(noise(length * e, 0.53)), upload(vec![POISON; length * e]));
        Layer { layer, x, out, shape: [1, length, e] }
    }

    fn call(&self) -> MultiHeadForward<'_> {
        let [x, out] = [&self.x, &self.out].map(|b| TensorView::sequence(b, DType::F32, self.shape));
        MultiHeadForward::self_attention(x, out).mask(Mask::causal())
    }

    /// Returns the call for the gradient of x, with x as the gradient of the output.
    fn backward(&self) -> MultiHeadBackward<'_> {
        let [x, d_x] = [&self.x, &self.out].map(|b| TensorView::sequence(b, DType::F32, self.shape));
        MultiHeadBackward::new(self.call(), x).d_query(d_x).d_key(d_x).d_value(d_x)
    }

    fn poison(&self, gpu: &Gpu) {
        poison(gpu, &self.out);
    }

    /// Returns the output's bits. All of them were written, and rows differ.
    fn bits(&self, gpu: &Gpu) -> Vec<u32> {
        let [_, length, e] = self.shape;
        let bits = gpu.download::<u32>(&self.out, length * e).expect("a read-back");
        assert!(!bits.contains(&POISON.to_bits()), "not all of the layer's output was written");
        assert!(bits[..e] != bits[e..2 * e], "all rows of the layer are the same");
        bits
    }

    fn scratch(&self, gpu: &Gpu) -> Scratch {
        let size = self.layer.scratch_size(&self.call()).expect("a size");
        Scratch::new(gpu.device(), size).expect("scratch")
    }
}
