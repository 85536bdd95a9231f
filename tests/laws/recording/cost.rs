//! The resources, allocations and time of a recording.

use wgpu_attention::rows::{CausalConv, CausalConvForward, MAX_TOP_K, TopK, TopKForward};

use super::*;

#[test]
fn the_second_recording_creates_nothing() {
    // Kernels of attention, which the layer has with another mask, and the dispatches of both.
    second_recording(Algorithm::Staged, 3, 8);
    second_recording(Algorithm::Fused, 1, 4);
}

fn second_recording(path: Algorithm, kernels: usize, dispatches: usize) {
    let own = Own::new();
    let gpu = &own.gpu;
    let problem = Problem::new(gpu, path, Shape::new(2, 4, 9, 8), 0.4);
    let attention = problem.attention(gpu.pipelines());
    let mut scratch = problem.scratch(gpu);
    let layer = Layer::new(gpu, path, 16);
    let mut layer_scratch = layer.scratch(gpu);
    assert_eq!(gpu.pipelines().compiled(), 0, "nothing is compiled before it is needed");

    let mut record = || {
        problem.poison(gpu);
        layer.poison(gpu);
        let mut encoder = encoder(gpu);
        attention.forward(&mut encoder, &problem.call(), &mut scratch).expect("a recording");
        layer.layer.forward(&mut encoder, &layer.call(), &mut layer_scratch).expect("a recording");
        gpu.queue().submit([encoder.finish()]);
        gpu.device().poll(wgpu::PollType::wait_indefinitely()).expect("an answer");
        let now = (gpu.pipelines().compiled(), own.alive());
        problem.judge(gpu, "the same recording");
        (now.0, now.1, layer.bits(gpu))
    };
    let first = record();
    assert!(first.0 > kernels, "{path:?}: {} pipelines hold no projection", first.0);
    for n in 0..3 {
        assert_eq!(record(), first, "recording {n} after the first");
    }
    let alive = first.1.expect("wgpu counts resources on this backend");
    assert!(alive.bind_groups >= dispatches && alive.pipelines == first.0, "{path:?}: {alive:?}");
}

/// A layer's gradients: all kernels of the forward pass except one projection, and the backward
/// kernels.
#[test]
fn the_second_backward_creates_nothing() {
    let own = Own::new();
    let gpu = &own.gpu;
    let layer = Layer::new(gpu, Algorithm::Auto, 16);
    let call = layer.backward();
    let size = layer.layer.backward_scratch_size(&call).expect("a size");
    let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
    layer.layer.prepare_backward(&call, &mut scratch).expect("a preparation");
    let prepared = (gpu.pipelines().compiled(), own.alive().expect("wgpu counts resources on this backend"));
    assert!(prepared.0 >= 6 && prepared.1.bind_groups >= 8, "{prepared:?}");
    let mut record = || {
        layer.poison(gpu);
        let mut encoder = encoder(gpu);
        layer.layer.backward(&mut encoder, &call, &mut scratch).expect("a recording");
        gpu.queue().submit([encoder.finish()]);
        gpu.device().poll(wgpu::PollType::wait_indefinitely()).expect("an answer");
        (layer.bits(gpu), gpu.pipelines().compiled(), own.alive())
    };
    let first = record();
    assert_eq!((first.1, first.2), (prepared.0, Some(prepared.1)));
    for n in 0..2 {
        assert!(record() == first, "recording {n} after the first");
    }
}

#[test]
fn preparing_compiles_and_records_nothing() {
    for (path, kernels) in [(Algorithm::Staged, 3), (Algorithm::Fused, 1)] {
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

/// A call that names no path has no temporary memory, one kernel and one dispatch.
#[test]
fn a_plain_call_is_one_dispatch_without_scratch() {
    let own = Own::new();
    let gpu = &own.gpu;
    let problem = Problem::new(gpu, Algorithm::Auto, Shape::new(2, 4, 65, 8), 0.4);
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

    // The fused path would have no memory for the weights.
    let weights = gpu.buffer(2 * 4 * 65 * 65 * 4).expect("a buffer");
    let mean = problem.call().weights(TensorView::new(&weights, DType::F32, [2, 1, 65, 65]));
    assert!(attention.scratch_size(&mean).expect("a size").total() >= 2 * 4 * 65 * 65 * 4);
}

/// Attention and a layer with a work limit: one kernel, and several dispatches.
#[test]
fn long_work_is_cut_into_dispatches() {
    let own = Own::new();
    let gpu = &own.gpu;
    let problem =
        Problem::new(gpu, Algorithm::Auto, Shape { value_dim: 70, ..Shape::new(2, 2, 130, 8) }, 0.4);
    let layer = Layer::new(gpu, Algorithm::Auto, 130);
    let alive = || own.alive().expect("wgpu counts resources on this backend");
    let size = layer.layer.scratch_size(&layer.call()).expect("a size");
    let mut bits = Vec::new();
    // Counts bind groups of a call: one per dispatch.
    let mut record = |limit: Option<u64>| {
        let kernel_options = limit.into_iter().fold(KernelOptions::new(), KernelOptions::work_limit);
        let config = problem.config().kernel_options(kernel_options.algorithm(Algorithm::Auto));
        let attention = Attention::with_pipelines(gpu.pipelines(), config).expect("an operator");
        let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
        problem.poison(gpu);
        layer.poison(gpu);
        let before = alive();
        let mut encoder = encoder(gpu);
        attention.forward(&mut encoder, &problem.call(), &mut scratch).expect("a recording");
        let attended = alive();
        let limited = layer.layer.clone().kernel_options(kernel_options.algorithm(Algorithm::Auto));
        limited.forward(&mut encoder, &layer.call(), &mut scratch).expect("a recording");
        let both = alive();
        gpu.queue().submit([encoder.finish()]);
        problem.judge(gpu, &format!("limit {limit:?}"));
        bits.push(layer.bits(gpu));
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

/// A call with more dispatches than the usual number of retained bindings.
#[test]
fn long_second_recording_creates_nothing() {
    let own = Own::new();
    let gpu = &own.gpu;
    let problem = Problem::new(gpu, Algorithm::Fused, Shape::new(1, 1500, 1, 4), 0.4);
    let config =
        problem.config().kernel_options(KernelOptions::new().algorithm(Algorithm::Fused).work_limit(1));
    let attention = Attention::with_pipelines(gpu.pipelines(), config).expect("an operator");
    let mut scratch = Scratch::new(gpu.device(), ScratchSize::default()).expect("scratch");
    let mut record = || {
        problem.poison(gpu);
        let mut encoder = encoder(gpu);
        let mut recording =
            || attention.forward(&mut encoder, &problem.call(), &mut scratch).expect("a recording");
        let allocated = allocations(&mut recording);
        gpu.queue().submit([encoder.finish()]);
        gpu.device().poll(wgpu::PollType::wait_indefinitely()).expect("an answer");
        let alive = own.alive().expect("wgpu counts resources on this backend");
        problem.judge(gpu, "1500 dispatches");
        (allocated, alive)
    };
    let (first, alive) = record();
    assert!(alive.bind_groups >= 1500, "{alive:?}");
    for _ in 0..2 {
        let (again, still_alive) = record();
        say(&format!("recording 1500 dispatches: {first} allocations, then {again}"));
        // Bindings that were dropped and remade would allocate as often as before.
        assert!(again < first / 2, "{first} allocations, then {again}");
        assert_eq!(still_alive, alive);
    }
}

#[test]
fn forgetting_releases_buffers() {
    forgetting(Algorithm::Staged, 3);
    forgetting(Algorithm::Fused, 1);
}

fn forgetting(path: Algorithm, dispatches: usize) {
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

    // The scratch still works.
    let problem = Problem::new(gpu, path, Shape::new(1, 2, 9, 8), 0.6);
    let mut encoder = self::encoder(gpu);
    attention.forward(&mut encoder, &problem.call(), &mut scratch).expect("a recording");
    gpu.queue().submit([encoder.finish()]);
    problem.judge(gpu, "after forgetting");
}

/// Each dispatch has a bind group. A longer convolution has a second dispatch for the states.
#[test]
fn short_convolutions_are_one_dispatch() {
    let own = Own::new();
    let gpu = &own.gpu;
    let buffers = [(); 4].map(|()| gpu.buffer(1 << 13).expect("a buffer"));
    let view = |n: usize, shape| TensorView::new(&buffers[n], DType::F32, shape);
    let conv = CausalConv::with_pipelines(gpu.pipelines());
    let alive = || own.alive().expect("wgpu counts resources on this backend").bind_groups;
    for (rows, dispatches) in [(1, 1), (16, 1), (17, 2)] {
        let (x, out) = (view(0, [2, 1, rows, 12]), view(1, [2, 1, rows, 12]));
        let call = CausalConvForward::new(x, view(2, [1, 1, 12, 4]), out).state(view(3, [2, 1, 3, 12]));
        let before = alive();
        let _prepared = conv.prepare(&call).expect("a call");
        assert_eq!(alive(), before + dispatches, "{rows} rows");
    }
}

/// A search, a selection with a sort, and with a merge. Each dispatch has a bind group.
#[test]
fn large_k_adds_dispatches() {
    let own = Own::new();
    let gpu = &own.gpu;
    let buffers = [(); 2].map(|()| gpu.buffer(1 << 16).expect("a buffer"));
    let top = TopK::with_pipelines(gpu.pipelines());
    let alive = || own.alive().expect("wgpu counts resources on this backend").bind_groups;
    for (k, dispatches) in [(64, 1), (65, 2), (MAX_TOP_K, 2), (MAX_TOP_K + 1, 3), (3 * MAX_TOP_K, 4)] {
        let x = TensorView::new(&buffers[0], DType::F32, [1, 1, 2, 8000]);
        let call = TopKForward::new(x, TensorView::new(&buffers[1], DType::U32, [1, 1, 2, k]));
        assert_eq!(top.prepare(&call).is_ok(), k <= MAX_TOP_K);
        top.forget();
        let size = top.scratch_size(&call).expect("a size");
        let bytes = if k > MAX_TOP_K { 2 * k * 16 } else { 0 };
        assert_eq!(size.total(), bytes as u64, "{k}");
        let mut scratch = Scratch::new(gpu.device(), size).expect("a scratch");
        let before = alive();
        let _prepared = top.prepare_with(&call, &mut scratch).expect("a call");
        assert_eq!(alive(), before + dispatches, "{k} of 8000");
    }
}

#[test]
fn operators_share_pipelines() {
    PATHS.into_iter().for_each(shares_pipelines);
}

fn shares_pipelines(path: Algorithm) {
    let own = Own::new();
    let gpu = &own.gpu;
    let shared = Pipelines::new(gpu.device());
    let prepare = |problem: &Problem, pipelines: &Pipelines| {
        let attention = problem.attention(pipelines);
        attention.prepare(&problem.call(), &mut problem.scratch(gpu)).expect("a preparation");
        pipelines.compiled()
    };
    // Other sizes and another scale use the same kernels.
    let [a, b] = [12, 16].map(|n| Problem::new(gpu, path, Shape::new(1, 2, n, 8), 0.4));
    let b = Problem { scale: 0.9, ..b };
    let first = prepare(&a, &shared);
    assert_eq!(prepare(&b, &shared), first);
    assert_eq!(prepare(&a, &shared.clone()), first);
    assert_eq!(prepare(&a, &Pipelines::new(gpu.device())), first, "separate pipelines");
    assert_eq!(shared.compiled(), first);

    let layers = [Layer::new(gpu, path, 16), Layer::new(gpu, path, 16)];
    let compiled = layers.each_ref().map(|layer| {
        layer.layer.prepare(&layer.call(), &mut layer.scratch(gpu)).expect("a preparation");
        layer.layer.pipelines().compiled()
    });
    assert_eq!(compiled[0], compiled[1]);
}

/// The host's time and allocations for the second recording of a call, with 8 heads of 64 and
/// length 512.
#[test]
fn recording_again_is_cheap() {
    PATHS.into_iter().for_each(records_cheaply);
}

fn records_cheaply(path: Algorithm) {
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
        let mut finish = Duration::MAX;
        let mut whole = || {
            let mut encoder = encoder(gpu);
            let start = Instant::now();
            record(&mut encoder);
            let recorded = start.elapsed();
            let start = Instant::now();
            drop(encoder.finish());
            finish = finish.min(start.elapsed());
            recorded
        };
        let time = fastest(400, &mut whole);
        let mut target = encoder(gpu);
        let count = allocations(|| record(&mut target));
        say(&format!(
            "recording {name}, {path:?}: {time:?}, {count} allocations; finishing the encoder {finish:?}"
        ));
        // 200 times the slowest of them. A compilation, a wait or a read-back would take longer.
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
    report("Attention::prepare", &mut |_| {
        drop(attention.prepare(&call, &mut scratch).expect("a preparation"))
    });
    report("MultiHeadAttention::prepare", &mut |_| {
        layer.layer.prepare(&layer_call, &mut layer_scratch).expect("a preparation");
    });
    report("Attention::scratch_size", &mut |_| {
        attention.scratch_size(&call).expect("a size");
    });
}
