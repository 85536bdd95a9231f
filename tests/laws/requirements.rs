//! `Prepared::requirements`: a device and buffers with exactly these run the call.

use wgpu_attention::layers::{MultiHeadBackward, MultiHeadConfig, MultiHeadForward, MultiHeadWeights};
use wgpu_attention::matmul::{ProjectionBackward, ProjectionForward};
use wgpu_attention::rows::{Norm, NormConfig, NormForward, TopK, TopKForward};
use wgpu_attention::tuning::Algorithm;
use wgpu_attention::{
    Attention, Backward, Cache, CacheConfig, Config, DType, Error, Forward, Gpu, KernelOptions, Linear, Mask,
    MultiHeadAttention, Prepared, Projection, Requirements, Scratch, TensorView,
};

use crate::harness::device::exact_device;
use crate::harness::full;

const WIDE: [usize; 4] = [1, 4, 64, 32];
const ROWS: [usize; 4] = [1, 1, 64, 128];
/// The largest tensor: a weight.
const BYTES: u64 = 4 * 128 * 128;

/// Buffers for tensors that a call reads and writes.
struct Buffers(Vec<wgpu::Buffer>);

impl Buffers {
    fn new(gpu: &Gpu, usage: wgpu::BufferUsages) -> Self {
        let size = BYTES;
        let descriptor = wgpu::BufferDescriptor { label: None, size, usage, mapped_at_creation: false };
        Buffers((0..6).map(|_| gpu.device().create_buffer(&descriptor)).collect())
    }

    fn of(&self, n: usize, shape: [usize; 4]) -> TensorView<'_> {
        TensorView::new(&self.0[n], DType::F32, shape)
    }
}

/// Prepares a call on the tensors. The first two buffers are read.
type Call = fn(&Gpu, &Buffers) -> Result<Prepared, Error>;

fn scratch(gpu: &Gpu, size: wgpu_attention::ScratchSize) -> Result<Scratch, Error> {
    Scratch::new(gpu.device(), size)
}

fn attends(gpu: &Gpu, b: &Buffers, path: Algorithm) -> Result<Prepared, Error> {
    let config = Config::new(4, 32).kernel_options(KernelOptions::new().algorithm(path));
    let attention = Attention::with_pipelines(gpu.pipelines(), config)?;
    let call = Forward::new(b.of(0, WIDE), b.of(0, WIDE), b.of(1, WIDE), b.of(2, WIDE));
    let call = call.mask(Mask::causal().bias(b.of(1, [1, 1, 64, 64])));
    attention.prepare(&call, &mut scratch(gpu, attention.scratch_size(&call)?)?)
}

fn layer(gpu: &Gpu, b: &Buffers) -> Result<MultiHeadAttention, Error> {
    let linear = Linear { weight: b.of(0, [1, 1, 128, 128]), bias: Some(b.of(1, [1, 1, 1, 128])) };
    let [query, key, value, out] = [linear; 4];
    let weights = MultiHeadWeights { query, key, value, out, bias_kv: None, qk_norm: None, gate: None };
    MultiHeadAttention::with_pipelines(gpu.pipelines(), MultiHeadConfig::new(128, 4), &weights)
}

const CALLS: [(&str, Call); 9] = [
    ("attention", |gpu, b| attends(gpu, b, Algorithm::Fused)),
    ("attention by stages", |gpu, b| attends(gpu, b, Algorithm::Staged)),
    ("attention, backward", |gpu, b| {
        let attention = Attention::with_pipelines(gpu.pipelines(), Config::new(4, 32))?;
        let call = Forward::new(b.of(0, WIDE), b.of(0, WIDE), b.of(1, WIDE), b.of(1, WIDE));
        let call = Backward::new(call.lse(b.of(1, [1, 4, 64, 1])), b.of(0, WIDE));
        let call = call.d_q(b.of(2, WIDE)).d_k(b.of(3, WIDE)).d_v(b.of(4, WIDE));
        attention.prepare_backward(&call, &mut scratch(gpu, attention.backward_scratch_size(&call)?)?)
    }),
    ("attention to a cache", |gpu, b| {
        let cache = Cache::with_pipelines(gpu.pipelines(), CacheConfig::new(4, 32, 64))?;
        let attention = Attention::with_pipelines(gpu.pipelines(), Config::new(4, 32))?;
        let call = Forward::with_cache(b.of(0, WIDE), &cache, b.of(2, WIDE)).at_end();
        attention.prepare(&call, &mut scratch(gpu, attention.scratch_size(&call)?)?)
    }),
    ("projection, backward", |gpu, b| {
        let linear = Linear { weight: b.of(0, [1, 1, 128, 128]), bias: None };
        let call = ProjectionForward::new(b.of(0, ROWS), linear, b.of(1, ROWS));
        let call = ProjectionBackward::new(call, b.of(1, ROWS)).d_x(b.of(2, ROWS));
        let call = call.d_weight(b.of(3, [1, 1, 128, 128]));
        Projection::with_pipelines(gpu.pipelines()).prepare_backward(&[call])
    }),
    ("layer", |gpu, b| {
        let call = MultiHeadForward::self_attention(b.of(0, ROWS), b.of(2, ROWS));
        let layer = layer(gpu, b)?;
        layer.prepare(&call, &mut scratch(gpu, layer.scratch_size(&call)?)?)
    }),
    ("layer, backward", |gpu, b| {
        let call = MultiHeadForward::self_attention(b.of(0, ROWS), b.of(2, ROWS));
        let call = MultiHeadBackward::new(call, b.of(1, ROWS)).d_query(b.of(3, ROWS)).d_key(b.of(3, ROWS));
        let (call, layer) = (call.d_value(b.of(3, ROWS)), layer(gpu, b)?);
        layer.prepare_backward(&call, &mut scratch(gpu, layer.backward_scratch_size(&call)?)?)
    }),
    ("norm", |gpu, b| {
        let norm = Norm::with_pipelines(gpu.pipelines(), NormConfig::layer())?;
        norm.prepare(&NormForward::new(b.of(0, ROWS), b.of(2, ROWS)))
    }),
    ("top-k", |gpu, b| {
        let indices = TensorView::new(&b.0[2], DType::U32, [1, 1, 64, 4]);
        TopK::with_pipelines(gpu.pipelines()).prepare(&TopKForward::new(b.of(0, ROWS), indices))
    }),
];

/// Returns the requirements on a device with all features and limits of the adapter.
fn needs(call: Call) -> Requirements {
    let gpu = &full().gpu;
    call(gpu, &Buffers::new(gpu, TensorView::USAGES)).expect("a preparation").requirements()
}

#[test]
fn exact_devices_run_calls() {
    for (name, call) in CALLS {
        let Requirements { usages, features, limits, .. } = needs(call);
        let gpu = exact_device(features, limits);
        let prepared = call(&gpu, &Buffers::new(&gpu, usages)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let scope = gpu.device().push_error_scope(wgpu::ErrorFilter::Validation);
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        prepared.record(&mut encoder);
        gpu.queue().submit([encoder.finish()]);
        let error = pollster::block_on(scope.pop());
        assert!(error.is_none(), "{name}: {error:?}");
    }
}

/// With less of one limit, the call chooses other kernels, or an error names the limit.
#[test]
fn smaller_limits_are_named() {
    type Shrink = fn(&mut wgpu::Limits);
    let shrink: [(&str, Shrink); 4] = [
        ("max_storage_buffers_per_shader_stage", |l| l.max_storage_buffers_per_shader_stage -= 1),
        ("max_compute_workgroup_storage_size", |l| {
            l.max_compute_workgroup_storage_size = l.max_compute_workgroup_storage_size.saturating_sub(16);
        }),
        ("max_compute_invocations_per_workgroup", |l| l.max_compute_invocations_per_workgroup -= 1),
        ("max_storage_buffer_binding_size", |l| l.max_storage_buffer_binding_size -= 4),
    ];
    let mut named = 0;
    for (name, call) in CALLS {
        let Requirements { usages, features, limits, .. } = needs(call);
        for (limit, shrink) in shrink {
            let mut less = limits.clone();
            shrink(&mut less);
            let gpu = exact_device(features, less.clone());
            match call(&gpu, &Buffers::new(&gpu, usages)) {
                Ok(prepared) => {
                    assert!(prepared.requirements().limits.check_limits(&less), "{name}, {limit}")
                }
                Err(error) => {
                    assert!(error.to_string().contains(limit), "{name}, {limit}: {error}");
                    named += 1;
                }
            }
        }
    }
    // At least the buffers and the bindings of every call.
    assert!(named >= CALLS.len(), "{named} errors");
}

#[test]
fn missing_usage_is_named() {
    for (name, call) in CALLS {
        let gpu = &full().gpu;
        let usage = wgpu::BufferUsages::COPY_SRC | (needs(call).usages - wgpu::BufferUsages::STORAGE);
        let error = call(gpu, &Buffers::new(gpu, usage)).expect_err("a buffer without the usage");
        assert!(
            matches!(error, Error::Usage { missing: wgpu::BufferUsages::STORAGE, .. }),
            "{name}: {error}"
        );
    }
}
