//! Several recordings, in one encoder or several: each computes its own result.

use super::*;

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
    let problems = various(gpu, Algorithm::Staged);
    let size = problems.iter().map(|p| p.scratch(gpu).size()).reduce(|a, b| a.max(b)).expect("sizes");
    let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
    let mut encoder = encoder(gpu);
    // Each call runs twice. Before the last run of a call, another call has overwritten its results
    // in scratch.
    for problem in problems.iter().chain(problems.iter().rev()) {
        let attention = problem.attention(gpu.pipelines());
        attention.forward(&mut encoder, &problem.call(), &mut scratch).expect("a recording");
    }
    gpu.queue().submit([encoder.finish()]);
    problems.iter().for_each(|p| p.judge(gpu, "one scratch"));
}

/// The same tensors are bound again, with another scale and another mask.
#[test]
fn calls_of_the_same_tensors_keep_their_parameters() {
    let own = Own::new();
    let gpu = &own.gpu;
    PATHS.into_iter().for_each(|path| same_tensors(gpu, path));
}

fn same_tensors(gpu: &Gpu, path: Algorithm) {
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
fn caller_pass_interleaves_dispatches() {
    PATHS.into_iter().for_each(in_a_callers_pass);
}

fn in_a_callers_pass(path: Algorithm) {
    let own = Own::new();
    let gpu = &own.gpu;
    let problem = Problem::new(gpu, path, Shape::new(1, 2, 33, 8), 0.4);
    let attention = problem.attention(gpu.pipelines());
    let mut scratch = problem.scratch(gpu);
    // Doubles q, k and v before the call, adds one to out after it.
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
    attention.forward(&mut pass, &problem.call(), &mut scratch).expect("a recording");
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

fn runs_when_submitted(path: Algorithm) {
    let own = Own::new();
    let gpu = &own.gpu;
    let problem = Problem::new(gpu, path, Shape::new(1, 2, 9, 8), 0.4);
    let attention = problem.attention(gpu.pipelines());
    let mut scratch = problem.scratch(gpu);
    // Returns the number of a submission.
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
    // An encoder that is dropped has no effect.
    let mut dropped = encoder(gpu);
    attention.forward(&mut dropped, &problem.call(), &mut scratch).expect("a recording");
    drop(dropped);
    assert!(problem.is_poison(gpu));
    gpu.queue().submit([commands]);
    problem.judge(gpu, "submitted");
}
