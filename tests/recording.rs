//! What recording a call does, and what it does not: no submission, nothing created the second time, no
//! parameters overwritten.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::{Duration, Instant};

use wgpu_attention::reference::compare::max_error;
use wgpu_attention::reference::{self, Options, widen};
use wgpu_attention::{
    Attention, Config, DType, DeviceMask, Forward, Gpu, HostMask, LayerConfig, LayerForward, LayerWeights,
    Linear, Mask, MultiHeadAttention, Path, Pipelines, Scratch, ScratchSize, Shape, TensorView,
};

use crate::harness::say;

const POISON: f32 = -12345.0;

/// Counts the allocations of each thread of the test binary.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: everything is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that is ending has no counter any more.
        let _ = ALLOCATIONS.try_with(|n| n.set(n.get() + 1));
        // SAFETY: the caller's promises are System's conditions.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

fn allocations(f: impl FnOnce()) -> usize {
    let before = ALLOCATIONS.get();
    f();
    ALLOCATIONS.get() - before
}

/// A device whose instance reports what lives on it: nobody else's resources are counted.
struct Own {
    instance: wgpu::Instance,
    gpu: Gpu,
}

/// What lives: buffers, bind groups, pipelines, shader modules.
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

    /// `None` where wgpu does not count, as on the web.
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

fn noise(n: usize, seed: f32) -> Vec<f32> {
    (0..n).map(|i| ((i as f32 + 1.0) * seed).sin()).collect()
}

/// What a call may be computed by; plain ones take the last.
const PATHS: [Path; 2] = [Path::Staged, Path::Fused];

/// An attention problem with buffers of its own.
struct Problem {
    shape: Shape,
    path: Path,
    causal: bool,
    scale: f32,
    data: [Vec<f32>; 3],
    buffers: [wgpu::Buffer; 4],
}

impl Problem {
    fn new(gpu: &Gpu, path: Path, shape: Shape, seed: f32) -> Self {
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
        Config::new(heads, head_dim).kv_heads(kv_heads).value_dim(value_dim).scale(self.scale).path(self.path)
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

    fn out(&self, gpu: &Gpu) -> Vec<f64> {
        let n = self.shape.out().iter().product();
        widen(&gpu.download::<f32>(&self.buffers[3], n).expect("a read-back"))
    }

    fn is_poison(&self, gpu: &Gpu) -> bool {
        self.out(gpu).iter().all(|x| *x == f64::from(POISON))
    }

    fn truth(&self, [q, k, v]: [&[f64]; 3]) -> Vec<f64> {
        let mask: HostMask = if self.causal { Mask::causal() } else { Mask::none() };
        let options = Options { mask, scale: Some(f64::from(self.scale)), ..Default::default() };
        reference::attention::<f64>(q, k, v, &self.shape, &options).expect("a truth").out
    }

    fn judge(&self, gpu: &Gpu, context: &str) {
        let data = self.data.each_ref().map(|x| widen::<f64>(x));
        let error = max_error(&self.out(gpu), &self.truth(data.each_ref().map(|x| &x[..])));
        assert!(error < 1e-5, "{context}, {:?}, {:?}: off by {error}", self.path, self.shape);
    }
}

/// Sizes that differ in every dimension, so that no call's parameters do for another.
fn various(gpu: &Gpu, path: Path) -> Vec<Problem> {
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
            let scale = 0.2 + 0.1 * n as f32;
            Problem { causal, scale, ..Problem::new(gpu, path, shape, 0.17 + 0.05 * n as f32) }
        })
    });
    problems.collect()
}

/// A layer with buffers of its own: 512 wide, 8 heads.
struct Layer {
    layer: MultiHeadAttention,
    x: wgpu::Buffer,
    out: wgpu::Buffer,
    shape: [usize; 3],
}

impl Layer {
    fn new(gpu: &Gpu, path: Path, length: usize) -> Self {
        let (e, heads) = (512, 8);
        let weights = gpu.upload(&vec![0.01f32; 4 * e * e]).expect("an upload");
        let bias = gpu.upload(&vec![0.1f32; e]).expect("an upload");
        let linear = |n| Linear {
            weight: TensorView::matrix(&weights, DType::F32, [e, e]).with_offset(n * e * e),
            bias: Some(TensorView::vector(&bias, DType::F32, e)),
        };
        let weights = LayerWeights {
            query: linear(0),
            key: linear(1),
            value: linear(2),
            out: linear(3),
            appended: None,
        };
        let layer = MultiHeadAttention::with_pipelines(gpu.pipelines(), LayerConfig::new(e, heads), &weights)
            .expect("a layer")
            .path(path);
        let buffer = || gpu.buffer(length * e * 4).expect("a buffer");
        Layer { layer, x: buffer(), out: buffer(), shape: [1, length, e] }
    }

    fn call(&self) -> LayerForward<'_> {
        let [x, out] = [&self.x, &self.out].map(|b| TensorView::sequence(b, DType::F32, self.shape));
        LayerForward::self_attention(x, out).mask(Mask::causal())
    }

    fn scratch(&self, gpu: &Gpu) -> Scratch {
        let size = self.layer.scratch_size(&self.call()).expect("a size");
        Scratch::new(gpu.device(), size).expect("scratch")
    }
}

#[test]
fn the_second_recording_creates_nothing() {
    // Kernels of attention, which the layer has with another mask, and dispatches of both.
    second_recording(Path::Staged, 3, 8);
    second_recording(Path::Fused, 1, 4);
}

fn second_recording(path: Path, kernels: usize, dispatches: usize) {
    let own = Own::new();
    let gpu = &own.gpu;
    let problem = Problem::new(gpu, path, Shape::new(2, 4, 9, 8), 0.4);
    let attention = problem.attention(gpu.pipelines());
    let mut scratch = problem.scratch(gpu);
    let layer = Layer::new(gpu, path, 16);
    let mut layer_scratch = layer.scratch(gpu);
    assert_eq!(gpu.pipelines().compiled(), 0, "nothing is compiled before it is needed");

    let mut record = || {
        let mut encoder = encoder(gpu);
        attention.forward(&mut encoder, &problem.call(), &mut scratch).expect("a recording");
        layer.layer.forward(&mut encoder, &layer.call(), &mut layer_scratch).expect("a recording");
        gpu.queue().submit([encoder.finish()]);
        gpu.device().poll(wgpu::PollType::wait_indefinitely()).expect("an answer");
        (gpu.pipelines().compiled(), own.alive())
    };
    let first = record();
    assert!(first.0 > kernels, "{path:?}: {} pipelines hold no projection", first.0);
    for n in 0..3 {
        assert_eq!(record(), first, "recording {n} after the first");
    }
    let alive = first.1.expect("wgpu counts resources on this backend");
    assert!(alive.bind_groups >= dispatches && alive.pipelines == first.0, "{path:?}: {alive:?}");
    problem.judge(gpu, "after four recordings");
}

#[test]
fn preparing_compiles_and_records_nothing() {
    for (path, kernels) in [(Path::Staged, 3), (Path::Fused, 1)] {
        let own = Own::new();
        let gpu = &own.gpu;
        let problem = Problem::new(gpu, path, Shape::new(1, 2, 9, 8), 0.4);
        let attention = problem.attention(gpu.pipelines());
        let mut scratch = problem.scratch(gpu);
        attention.prepare(&problem.call(), &mut scratch).expect("a preparation");
        let (compiled, alive) = (gpu.pipelines().compiled(), own.alive());
        assert_eq!(compiled, kernels, "{path:?}");
        let mut encoder = encoder(gpu);
        attention.forward(&mut encoder, &problem.call(), &mut scratch).expect("a recording");
        assert_eq!((gpu.pipelines().compiled(), own.alive()), (compiled, alive));
        gpu.queue().submit([encoder.finish()]);
        problem.judge(gpu, "prepared");
    }
}

/// A call that names no path: no temporary memory, one kernel, one dispatch.
#[test]
fn a_plain_call_is_one_dispatch_without_scratch() {
    let own = Own::new();
    let gpu = &own.gpu;
    let problem = Problem::new(gpu, Path::Auto, Shape::new(2, 4, 65, 8), 0.4);
    let attention = problem.attention(gpu.pipelines());
    assert_eq!(attention.scratch_size(&problem.call()).expect("a size"), ScratchSize::default());
    let mut scratch = Scratch::new(gpu.device(), ScratchSize::default()).expect("scratch");
    let before = own.alive().expect("wgpu counts resources on this backend");
    let mut encoder = encoder(gpu);
    attention.forward(&mut encoder, &problem.call(), &mut scratch).expect("a recording");
    let after = own.alive().expect("wgpu counts resources on this backend");
    assert_eq!((after.pipelines, after.bind_groups), (before.pipelines + 1, before.bind_groups + 1));
    gpu.queue().submit([encoder.finish()]);
    problem.judge(gpu, "without scratch");

    // The weights are what it would have no memory for.
    let weights = gpu.buffer(2 * 4 * 65 * 65 * 4).expect("a buffer");
    let mean = problem.call().weights(TensorView::new(&weights, DType::F32, [2, 1, 65, 65]));
    assert!(attention.scratch_size(&mean).expect("a size").total() >= 2 * 4 * 65 * 65 * 4);
}

/// Attention and a layer, cut by their limit of work: one kernel, as many dispatches as it takes.
#[test]
fn long_work_is_cut_into_dispatches() {
    let own = Own::new();
    let gpu = &own.gpu;
    let problem = Problem::new(gpu, Path::Auto, Shape { value_dim: 70, ..Shape::new(2, 2, 130, 8) }, 0.4);
    let layer = Layer::new(gpu, Path::Auto, 130);
    let alive = || own.alive().expect("wgpu counts resources on this backend");
    let size = layer.layer.scratch_size(&layer.call()).expect("a size");
    let mut bits = Vec::new();
    // Bind groups of a call: one per dispatch.
    let mut record = |limit: Option<u64>| {
        let limited = |config: Config| limit.map_or(config, |limit| config.work_limit(limit));
        let attention =
            Attention::with_pipelines(gpu.pipelines(), limited(problem.config())).expect("an operator");
        let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
        let before = alive();
        let mut encoder = encoder(gpu);
        attention.forward(&mut encoder, &problem.call(), &mut scratch).expect("a recording");
        let attended = alive();
        let limited = layer.layer.clone();
        let limited = limit.map_or(limited.clone(), |limit| limited.work_limit(limit));
        limited.forward(&mut encoder, &layer.call(), &mut scratch).expect("a recording");
        let both = alive();
        gpu.queue().submit([encoder.finish()]);
        problem.judge(gpu, &format!("limit {limit:?}"));
        bits.push(gpu.download::<u32>(&layer.out, 130 * 512).expect("a read-back"));
        [attended.bind_groups - before.bind_groups, both.bind_groups - attended.bind_groups]
    };
    let whole = record(None);
    let compiled = gpu.pipelines().compiled();
    let [few, many, most] = [20_000_000, 2_000_000, 1].map(|limit| record(Some(limit)));
    assert_eq!(whole[0], 1, "the default is far beyond this");
    for n in 0..2 {
        let counts = [whole, few, many, most].map(|counts| counts[n]);
        assert!(counts.is_sorted() && counts[0] < counts[2], "{counts:?}");
    }
    assert_eq!(gpu.pipelines().compiled(), compiled, "pieces are of one kernel");
    assert!(bits.iter().all(|b| *b == bits[0]), "a layer in pieces gives other bits");
}

/// A call of more dispatches than bindings are kept for otherwise.
#[test]
fn the_second_recording_of_a_very_long_call_creates_nothing() {
    let own = Own::new();
    let gpu = &own.gpu;
    let problem = Problem::new(gpu, Path::Fused, Shape::new(1, 1500, 1, 4), 0.4);
    let attention =
        Attention::with_pipelines(gpu.pipelines(), problem.config().work_limit(1)).expect("an operator");
    let mut scratch = Scratch::new(gpu.device(), ScratchSize::default()).expect("scratch");
    let mut record = || {
        let mut encoder = encoder(gpu);
        let mut recording =
            || attention.forward(&mut encoder, &problem.call(), &mut scratch).expect("a recording");
        let allocated = allocations(&mut recording);
        gpu.queue().submit([encoder.finish()]);
        gpu.device().poll(wgpu::PollType::wait_indefinitely()).expect("an answer");
        (allocated, own.alive().expect("wgpu counts resources on this backend"))
    };
    let (first, alive) = record();
    assert!(alive.bind_groups >= 1500, "{alive:?}");
    for _ in 0..2 {
        let (again, still_alive) = record();
        say(&format!("recording 1500 dispatches: {first} allocations, then {again}"));
        // Bindings that were dropped and made again would be as many as before.
        assert!(again < first / 2, "{first} allocations, then {again}");
        assert_eq!(still_alive, alive);
    }
    problem.judge(gpu, "1500 dispatches");
}

#[test]
fn many_calls_in_one_encoder_keep_their_parameters() {
    let own = Own::new();
    let gpu = &own.gpu;
    let problems: Vec<_> = PATHS.into_iter().flat_map(|path| various(gpu, path)).collect();
    let mut scratches: Vec<_> = problems.iter().map(|p| p.scratch(gpu)).collect();
    let mut encoder = encoder(gpu);
    for (problem, scratch) in problems.iter().zip(&mut scratches) {
        let attention = problem.attention(gpu.pipelines());
        attention.forward(&mut encoder, &problem.call(), scratch).expect("a recording");
    }
    gpu.queue().submit([encoder.finish()]);
    problems.iter().for_each(|p| p.judge(gpu, "many calls"));
}

#[test]
fn calls_of_different_sizes_share_one_scratch() {
    let own = Own::new();
    let gpu = &own.gpu;
    let problems = various(gpu, Path::Staged);
    let size = problems.iter().map(|p| p.scratch(gpu).size()).reduce(|a, b| a.max(b)).expect("sizes");
    let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
    let mut encoder = encoder(gpu);
    // Each call twice, so that every result was overwritten in scratch by another's before the last.
    for problem in problems.iter().chain(problems.iter().rev()) {
        let attention = problem.attention(gpu.pipelines());
        attention.forward(&mut encoder, &problem.call(), &mut scratch).expect("a recording");
    }
    gpu.queue().submit([encoder.finish()]);
    problems.iter().for_each(|p| p.judge(gpu, "one scratch"));
}

/// The same tensors bound again, with another scale and another mask.
#[test]
fn calls_of_the_same_tensors_keep_their_parameters() {
    let own = Own::new();
    let gpu = &own.gpu;
    PATHS.into_iter().for_each(|path| same_tensors(gpu, path));
}

fn same_tensors(gpu: &Gpu, path: Path) {
    let first = Problem::new(gpu, path, Shape::new(1, 2, 9, 8), 0.4);
    let again = |scale, causal| {
        let [q, k, v, out] = first.buffers.clone();
        let out = gpu.upload(&vec![POISON; out.size() as usize / 4]).expect("an upload");
        Problem { scale, causal, path, shape: first.shape, data: first.data.clone(), buffers: [q, k, v, out] }
    };
    let problems = [again(0.5, false), again(0.9, false), again(0.9, true), again(-0.3, true)];
    let mut scratch = first.scratch(gpu);
    let mut encoder = encoder(gpu);
    for problem in problems.iter().chain(&problems) {
        let attention = problem.attention(gpu.pipelines());
        attention.forward(&mut encoder, &problem.call(), &mut scratch).expect("a recording");
    }
    gpu.queue().submit([encoder.finish()]);
    problems.iter().for_each(|p| p.judge(gpu, "the same tensors"));
}

#[test]
fn a_callers_pass_holds_our_dispatches_among_its_own() {
    PATHS.into_iter().for_each(in_a_callers_pass);
}

fn in_a_callers_pass(path: Path) {
    let own = Own::new();
    let gpu = &own.gpu;
    let problem = Problem::new(gpu, path, Shape::new(1, 2, 33, 8), 0.4);
    let attention = problem.attention(gpu.pipelines());
    let mut scratch = problem.scratch(gpu);
    // Doubles q, k and v before, adds one to out after.
    let module = gpu.device().create_shader_module(wgpu::ShaderModuleDescriptor {
        label: None,
        source: wgpu::ShaderSource::Wgsl(
            "@group(0) @binding(0) var<storage, read_write> x: array<f32>;
            @compute @workgroup_size(64) fn double(@builtin(global_invocation_id) id: vec3<u32>) {
                if id.x < arrayLength(&x) { x[id.x] *= 2.0; }
            }
            @compute @workgroup_size(64) fn increment(@builtin(global_invocation_id) id: vec3<u32>) {
                if id.x < arrayLength(&x) { x[id.x] += 1.0; }
            }"
            .into(),
        ),
    });
    let [double, increment] = ["double", "increment"].map(|name| {
        gpu.device().create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: None,
            layout: None,
            module: &module,
            entry_point: Some(name),
            compilation_options: Default::default(),
            cache: None,
        })
    });
    let mut encoder = encoder(gpu);
    let mut pass = encoder.begin_compute_pass(&Default::default());
    let dispatch = |pass: &mut wgpu::ComputePass, pipeline: &wgpu::ComputePipeline, n: usize| {
        let buffer = &problem.buffers[n];
        let group = gpu.device().create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &pipeline.get_bind_group_layout(0),
            entries: &[wgpu::BindGroupEntry { binding: 0, resource: buffer.as_entire_binding() }],
        });
        pass.set_pipeline(pipeline);
        pass.set_bind_group(0, &group, &[]);
        pass.dispatch_workgroups((buffer.size() / 4).div_ceil(64) as u32, 1, 1);
    };
    (0..3).for_each(|n| dispatch(&mut pass, &double, n));
    attention.forward_in_pass(&mut pass, &problem.call(), &mut scratch).expect("a recording");
    dispatch(&mut pass, &increment, 3);
    drop(pass);
    gpu.queue().submit([encoder.finish()]);

    let doubled = problem.data.each_ref().map(|x| x.iter().map(|x| f64::from(*x) * 2.0).collect::<Vec<_>>());
    let want = problem.truth(doubled.each_ref().map(|x| &x[..]));
    let got: Vec<f64> = problem.out(gpu).iter().map(|x| x - 1.0).collect();
    let error = max_error(&got, &want);
    assert!(error < 1e-5, "off by {error}");
}

#[test]
fn nothing_runs_before_the_caller_submits() {
    PATHS.into_iter().for_each(runs_when_submitted);
}

fn runs_when_submitted(path: Path) {
    let own = Own::new();
    let gpu = &own.gpu;
    let problem = Problem::new(gpu, path, Shape::new(1, 2, 9, 8), 0.4);
    let attention = problem.attention(gpu.pipelines());
    let mut scratch = problem.scratch(gpu);
    // Submissions are numbered.
    let number = || -> u64 {
        let debug = format!("{:?}", gpu.queue().submit([]));
        let digits: String = debug.chars().filter(char::is_ascii_digit).collect();
        digits.parse().unwrap_or_else(|_| panic!("no number in {debug}"))
    };
    let step = {
        let before = number();
        number() - before
    };
    let before = number();
    let mut kept = encoder(gpu);
    attention.forward(&mut kept, &problem.call(), &mut scratch).expect("a recording");
    let commands = kept.finish();
    assert_eq!(number() - before, step, "something was submitted");
    gpu.device().poll(wgpu::PollType::wait_indefinitely()).expect("an answer");
    assert!(problem.is_poison(gpu));
    // An encoder that is dropped instead has no effect.
    let mut dropped = encoder(gpu);
    attention.forward(&mut dropped, &problem.call(), &mut scratch).expect("a recording");
    drop(dropped);
    assert!(problem.is_poison(gpu));
    gpu.queue().submit([commands]);
    problem.judge(gpu, "submitted");
}

#[test]
fn forgetting_releases_buffers() {
    forgetting(Path::Staged, 3);
    forgetting(Path::Fused, 1);
}

fn forgetting(path: Path, dispatches: usize) {
    let own = Own::new();
    let gpu = &own.gpu;
    let problem = Problem::new(gpu, path, Shape::new(1, 2, 9, 8), 0.4);
    let attention = problem.attention(gpu.pipelines());
    let mut scratch = problem.scratch(gpu);
    let alive = || {
        gpu.device().poll(wgpu::PollType::wait_indefinitely()).expect("an answer");
        own.alive().expect("wgpu counts resources on this backend")
    };
    let before = alive();
    let mut encoder = encoder(gpu);
    attention.forward(&mut encoder, &problem.call(), &mut scratch).expect("a recording");
    gpu.queue().submit([encoder.finish()]);
    problem.judge(gpu, "forgetting");
    let bound = alive();
    assert_eq!(bound.bind_groups, before.bind_groups + dispatches, "{path:?}");
    drop(problem);
    let held = alive();
    assert_eq!(held.buffers, bound.buffers, "the bindings keep the caller's buffers");
    scratch.forget();
    let after = alive();
    assert_eq!(after.bind_groups, before.bind_groups);
    assert_eq!(after.buffers, before.buffers - 4, "q, k, v and out");

    // The scratch works on.
    let problem = Problem::new(gpu, path, Shape::new(1, 2, 9, 8), 0.6);
    let mut encoder = self::encoder(gpu);
    attention.forward(&mut encoder, &problem.call(), &mut scratch).expect("a recording");
    gpu.queue().submit([encoder.finish()]);
    problem.judge(gpu, "after forgetting");
}

#[test]
fn operators_share_pipelines() {
    PATHS.into_iter().for_each(shares_pipelines);
}

fn shares_pipelines(path: Path) {
    let own = Own::new();
    let gpu = &own.gpu;
    let shared = Pipelines::new(gpu.device());
    let prepare = |problem: &Problem, pipelines: &Pipelines| {
        let attention = problem.attention(pipelines);
        attention.prepare(&problem.call(), &mut problem.scratch(gpu)).expect("a preparation");
        pipelines.compiled()
    };
    // Other sizes and another scale, the same kernels.
    let [a, b] = [12, 16].map(|n| Problem::new(gpu, path, Shape::new(1, 2, n, 8), 0.4));
    let b = Problem { scale: 0.9, ..b };
    let first = prepare(&a, &shared);
    assert_eq!(prepare(&b, &shared), first);
    assert_eq!(prepare(&a, &shared.clone()), first);
    assert_eq!(prepare(&a, &Pipelines::new(gpu.device())), first, "pipelines of its own");
    assert_eq!(shared.compiled(), first);

    let layers = [Layer::new(gpu, path, 16), Layer::new(gpu, path, 16)];
    let compiled = layers.each_ref().map(|layer| {
        layer.layer.prepare(&layer.call(), &mut layer.scratch(gpu)).expect("a preparation");
        layer.layer.pipelines().compiled()
    });
    assert_eq!(compiled[0], compiled[1]);
}

/// Median time of `f`.
fn median(n: usize, mut f: impl FnMut() -> Duration) -> Duration {
    let mut times: Vec<_> = (0..n).map(|_| f()).collect();
    times.sort_unstable();
    times[n / 2]
}

/// Host time and allocations of recording a call that was recorded before: 8 heads of 64, length 512.
#[test]
fn recording_again_is_cheap() {
    PATHS.into_iter().for_each(records_cheaply);
}

fn records_cheaply(path: Path) {
    let own = Own::new();
    let gpu = &own.gpu;
    let shape = Shape::new(1, 8, 512, 64);
    let problem = Problem { causal: true, ..Problem::new(gpu, path, shape, 0.4) };
    let attention = problem.attention(gpu.pipelines());
    let mut scratch = problem.scratch(gpu);
    let layer = Layer::new(gpu, path, 512);
    let mut layer_scratch = layer.scratch(gpu);
    let call = problem.call();
    let layer_call = layer.call();
    attention.prepare(&call, &mut scratch).expect("a preparation");
    layer.layer.prepare(&layer_call, &mut layer_scratch).expect("a preparation");

    let report = |name: &str, record: &mut dyn FnMut(&mut wgpu::CommandEncoder)| {
        let mut finished = Vec::new();
        let mut whole = || {
            let mut encoder = encoder(gpu);
            let start = Instant::now();
            record(&mut encoder);
            let recorded = start.elapsed();
            let start = Instant::now();
            drop(encoder.finish());
            finished.push(start.elapsed());
            recorded
        };
        let time = median(400, &mut whole);
        finished.sort_unstable();
        let finish = finished[finished.len() / 2];
        let mut target = encoder(gpu);
        let count = allocations(|| record(&mut target));
        say(&format!(
            "recording {name}, {path:?}: {time:?}, {count} allocations; finishing the encoder {finish:?}"
        ));
        assert!(time < Duration::from_millis(1), "{name} takes {time:?}");
        assert!(count < 500, "{name} allocates {count} times");
    };
    report("an empty pass", &mut |encoder| drop(encoder.begin_compute_pass(&Default::default())));
    report("Attention::forward", &mut |encoder| {
        attention.forward(encoder, &call, &mut scratch).expect("a recording")
    });
    report("MultiHeadAttention::forward", &mut |encoder| {
        layer.layer.forward(encoder, &layer_call, &mut layer_scratch).expect("a recording")
    });
    report("Attention::prepare", &mut |_| attention.prepare(&call, &mut scratch).expect("a preparation"));
    report("MultiHeadAttention::prepare", &mut |_| {
        layer.layer.prepare(&layer_call, &mut layer_scratch).expect("a preparation")
    });
    report("Attention::scratch_size", &mut |_| {
        attention.scratch_size(&call).expect("a size");
    });
}
