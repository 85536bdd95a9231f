//! The one-call helpers take the same inputs and return the same results as the reference.

use wgpu_attention::mask::{Pattern, PatternPart};
use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance, compare};
use wgpu_attention::reference::{
    self, Attended, HostLinear, HostWeights, MultiHeadShape, Options, Real, widen,
};
use wgpu_attention::{
    Attention, Config, DType, Forward, Gpu, HostTensor, Mask, Pipelines, Scratch, Shape, TensorView,
    UploadedMask, inspect,
};

use crate::harness::device::{device, devices_with};
use crate::harness::layer_options::LayerOptions;
use crate::harness::{Case, HostData, Rules, full, profiles};

fn noise(n: usize, seed: f32) -> Vec<f32> {
    (0..n).map(|i| (i as f32 * 12.9898 + seed).sin()).collect()
}

/// Checks a result of this magnitude with twice the naive error plus the floor.
fn check(what: &str, got: &[f32], want: &[f64], naive: &[f32], magnitude: f64) {
    let tolerance = Tolerance::from_naive(&widen(naive), want, magnitude, EPSILON_F32);
    if let Err(mismatch) = compare(got, want, tolerance) {
        panic!("{what}: {mismatch}");
    }
}

/// Checks the weights, if they were requested.
fn check_weights(got: &Attended<f32>, want: &Attended<f64>, naive: &Attended<f32>) {
    if let Some(weights) = &got.weights {
        let (want, naive) = (want.weights.as_ref().expect("asked"), naive.weights.as_ref().expect("asked"));
        check("weights", weights, want, naive, 1.0);
    }
}

#[test]
fn attend_equals_operator() {
    let shape = Shape::new(1, 2, 40, 8);
    let x = noise(shape.q().iter().product(), 0.5);
    for (asked, wanted) in [(false, "attention.fused"), (true, "attention.scores")] {
        let gpu = device(|_| ());
        let options = Options::new().scale(0.3).softcap(2.0).weights(asked);
        gpu.attention(&x, &x, &x, shape, &options).expect("a result");
        let compiled = inspect::compiled(gpu.pipelines());
        assert!(compiled.iter().any(|name| name.starts_with(wanted)), "{compiled:?}");
        assert_eq!(compiled.iter().any(|name| name.starts_with("attention.scores")), asked, "{compiled:?}");
    }
}

/// A mask that was uploaded separately gives the same result as the mask in the one call.
#[test]
fn uploaded_mask_equals_host_mask() {
    let case = Case::random("gpu, uploaded mask", Shape { kv_len: 9, ..Shape::new(2, 3, 7, 4) });
    let keep: Vec<bool> = (0..9).map(|j| j % 4 != 2).collect();
    let bias = noise(7 * 9, 0.5);
    let mask = Mask::causal()
        .lengths(HostTensor::new(&[9, 6], [2, 1, 1, 1]))
        .key_padding_mask(HostTensor::new(&keep, [1, 1, 1, 9]))
        .bias(HostTensor::new(&bias, [1, 1, 7, 9]));
    let gpu = &full().gpu;
    let want = gpu.attend(&case.q, &case.k, &case.v, case.shape, mask).expect("a result");
    let Shape { heads, head_dim, .. } = case.shape;
    let attention =
        Attention::with_pipelines(gpu.pipelines(), Config::new(heads, head_dim)).expect("a config");
    let upload = |x: &[f32]| gpu.upload(x).expect("an upload");
    let [q, k, v] = [&case.q, &case.k, &case.v].map(|x| upload(x));
    let out = gpu.buffer(want.len() * 4).expect("a buffer");
    let view = |buffer, shape| TensorView::new(buffer, DType::F32, shape);
    let uploaded = UploadedMask::new(gpu.device(), gpu.queue(), &mask).expect("an upload");
    gpu.queue().write_buffer(&out, 0, bytemuck::cast_slice(&vec![f32::NAN; want.len()]));
    let shape = case.shape;
    let call =
        Forward::new(view(&q, shape.q()), view(&k, shape.k()), view(&v, shape.v()), view(&out, shape.out()))
            .mask(uploaded.view());
    let mut scratch =
        Scratch::new(gpu.device(), attention.scratch_size(&call).expect("a size")).expect("scratch");
    gpu.submit(|encoder| attention.forward(encoder, &call, &mut scratch)).expect("a recording");
    assert_eq!(gpu.download::<f32>(&out, want.len()).expect("a read-back"), want);
    let short = Mask::none().bias(HostTensor::new(&bias[1..], [1, 1, 7, 9]));
    let error = UploadedMask::new(gpu.device(), gpu.queue(), &short).expect_err("too short").to_string();
    assert!(error.contains("`bias`") && error.contains("63") && error.contains("62"), "{error}");
}

#[test]
fn attention_with_every_option() {
    let shape = Shape { kv_heads: 2, kv_len: 9, value_dim: 5, ..Shape::new(2, 4, 7, 6) };
    let [q, k, v] = [shape.q(), shape.k(), shape.v()].map(|s| noise(s.iter().product(), s[3] as f32));
    let keep: Vec<bool> = (0..9).map(|j| j != 4).collect();
    let bias = noise(7 * 9, 0.5);
    let mask = Mask::causal()
        .lengths(HostTensor::new(&[9, 6], [2, 1, 1, 1]))
        .key_padding_mask(HostTensor::new(&keep, [1, 1, 1, 9]))
        .bias(HostTensor::new(&bias, [1, 1, 7, 9]));
    let options = Options::new().scale(0.3).softcap(2.0).mask(mask);
    fn run<R: Real>(x: [&[f32]; 3], shape: Shape, options: &Options) -> reference::Attended<R> {
        let [q, k, v] = x.map(widen::<R>);
        reference::attention(&q, &k, &v, shape, options).expect("a problem")
    }
    let inputs = [&q[..], &k, &v];
    let all = options.weights(true);
    let (want, naive) = (run::<f64>(inputs, shape, &all), run::<f32>(inputs, shape, &all));
    for profile in profiles() {
        for asked in [false, true] {
            let options = options.weights(asked);
            let got = profile.gpu.attention(&q, &k, &v, shape, &options).expect("a result");
            check("out", &got.out, &want.out, &naive.out, 1.0);
            check("lse", &got.lse, &want.lse, &naive.lse, 4.0);
            assert_eq!(got.weights.is_some(), asked, "{}", profile.name);
            check_weights(&got, &want, &naive);
        }
        let plain = Options::new().mask(mask);
        let attended = profile.gpu.attend(&q, &k, &v, shape, mask).expect("a result");
        let (want, naive) = (run::<f64>(inputs, shape, &plain), run::<f32>(inputs, shape, &plain));
        check("attend", &attended, &want.out, &naive.out, 1.0);
    }
}

/// Every part of a mask reaches the device from slices.
#[test]
fn attention_with_every_part_of_a_mask() {
    let case =
        Case::random("gpu, masks", Shape { kv_heads: 2, kv_len: 9, value_dim: 5, ..Shape::new(2, 4, 7, 6) });
    let causal = Rules { causal: true, ..Default::default() };
    let part = |shape| HostData::of(shape, |[b, h, i, j]: [usize; 4]| (b + 2 * h + i + 3 * j) as u32 % 3);
    let floats = |shape| Some(HostData::of(shape, |[b, h, _, j]| (b + h + j) as f32 * 0.25 - 1.0));
    let pattern = Some(Pattern::Strided { stride: 2, part: PatternPart::ByHead });
    let globals = Some(HostData::of([1, 1, 1, 9], |[.., j]| j % 4 == 1));
    let starts = |starts: [u32; 4]| HostData::new(starts.to_vec(), [1, 1, 1, 4]);
    let all = [
        Rules { pattern, ..causal.clone() },
        Rules { prefix: Some(part([2, 1, 7, 1])), ..causal.clone() },
        Rules { packed: Some([starts([0, 3, 3, 7]), starts([0, 4, 5, 9])]), ..causal.clone() },
        Rules { documents: Some([part([2, 1, 7, 1]), part([2, 1, 1, 9])]), ..causal.clone() },
        Rules { blocks: Some((part([1, 4, 3, 5]), [3, 2])), ..causal.clone() },
        Rules { globals, window: Some([1, 0]), ..Default::default() },
        Rules { slopes: floats([1, 4, 1, 1]), ..causal.clone() },
        Rules { slopes: floats([1, 4, 1, 1]), symmetric: true, ..Default::default() },
        Rules { relative: floats([2, 1, 1, 5]), ..causal.clone() },
        Rules { sinks: floats([1, 4, 1, 1]), ..causal },
    ];
    for rules in all {
        let case = case.clone().with(|c| c.rules = rules);
        let (want, naive) = (case.reference::<f64>(), case.reference::<f32>());
        for profile in profiles() {
            let got = profile.gpu.attend(&case.q, &case.k, &case.v, case.shape, case.rules.host());
            check(&format!("{:?}", case.rules), &got.expect("a result"), &want.out, &naive.out, 1.0);
            let got = profile.gpu.attention(&case.q, &case.k, &case.v, case.shape, &case.options());
            check_weights(&got.expect("a result"), &want, &naive);
        }
    }
}

#[test]
fn a_layer_with_appended_keys() {
    let config = LayerOptions {
        key_features: 10,
        value_features: 7,
        kv_heads: 2,
        add_zero_attn: true,
        ..LayerOptions::new(12, 4)
    }
    .config();
    let shape = MultiHeadShape { batch: 2, q_len: 5, kv_len: 6 };
    let x = [noise(2 * 5 * 12, 1.0), noise(2 * 6 * 10, 2.0), noise(2 * 6 * 7, 3.0)];
    let w = [noise(12 * 12, 4.0), noise(6 * 10, 5.0), noise(6 * 7, 6.0), noise(12 * 12, 7.0)];
    let b = [noise(12, 8.0), noise(6, 9.0), noise(6, 10.0), noise(12, 11.0)];
    let appended = [noise(6, 12.0), noise(6, 13.0)];
    let options = Options::new().mask(Mask::causal()).weights(true);

    fn weights<'a, R>(
        w: &'a [Vec<R>; 4],
        b: &'a [Vec<R>; 4],
        bias_kv: &'a [Vec<R>; 2],
    ) -> HostWeights<'a, R> {
        let linear = |n: usize| HostLinear { weight: &w[n], bias: Some(&b[n]) };
        HostWeights {
            query: linear(0),
            key: linear(1),
            value: linear(2),
            out: linear(3),
            bias_kv: Some(bias_kv.each_ref().map(|x| &x[..])),
            qk_norm: None,
            gate: None,
        }
    }
    fn wide<R: Real, const N: usize>(x: &[Vec<f32>; N]) -> [Vec<R>; N] {
        x.each_ref().map(|x| widen(x))
    }
    let inputs = [&x[0][..], &x[1], &x[2]];
    let naive = reference::multi_head(inputs, shape, &config, &weights(&w, &b, &appended), &options);
    let (x64, w64, b64, appended64) = (wide::<f64, 3>(&x), wide(&w), wide(&b), wide(&appended));
    let inputs64 = [&x64[0][..], &x64[1], &x64[2]];
    let want = reference::multi_head(inputs64, shape, &config, &weights(&w64, &b64, &appended64), &options);
    let (naive, want) = (naive.expect("a layer"), want.expect("a layer"));
    let magnitude = want.out.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
    for profile in profiles() {
        let got = profile.gpu.multi_head(inputs, shape, &config, &weights(&w, &b, &appended), &options);
        let got = got.expect("a result");
        check("out", &got.out, &want.out, &naive.out, magnitude);
        check_weights(&got, &want, &naive);
        check("lse", &got.lse, &want.lse, &naive.lse, magnitude);
    }
}

/// A pipeline cache changes no bit of the result. Its data makes another cache.
#[test]
fn pipeline_cache_keeps_bits() {
    let gpu = &full().gpu;
    let device = gpu.device();
    if !device.features().contains(wgpu::Features::PIPELINE_CACHE) {
        return println!("the device lacks PIPELINE_CACHE");
    }
    let shape = Shape::new(1, 2, 9, 8);
    let x = noise(shape.q().iter().product(), 0.3);
    let attend = |gpu: &Gpu| gpu.attend(&x, &x, &x, shape, Mask::causal()).expect("attention");
    let want = attend(gpu);
    let mut stored = None;
    for _ in 0..2 {
        let descriptor =
            wgpu::PipelineCacheDescriptor { label: None, data: stored.as_deref(), fallback: true };
        // SAFETY: the data comes from `get_data` on the same device.
        let cache = unsafe { device.create_pipeline_cache(&descriptor) };
        let empty = cache.get_data().expect("data").len();
        let pipelines = Pipelines::new(device).pipeline_cache(&cache);
        let cached = Gpu::with_pipelines(gpu.queue().clone(), pipelines);
        assert_eq!((attend(&cached), cached.pipelines().compiled()), (want.clone(), 1));
        stored = cache.get_data();
        println!("{empty} bytes, then {}", stored.as_ref().expect("data").len());
    }
}

#[test]
fn foreign_pipeline_cache_is_refused() {
    let feature = wgpu::Features::PIPELINE_CACHE;
    if !full().gpu.device().features().contains(feature) {
        return println!("the device lacks PIPELINE_CACHE");
    }
    let [own, other] = devices_with(feature, |_| ());
    let descriptor = wgpu::PipelineCacheDescriptor { label: None, data: None, fallback: true };
    // SAFETY: there is no data.
    let cache = unsafe { other.device().create_pipeline_cache(&descriptor) };
    let pipelines = Pipelines::new(own.device()).pipeline_cache(&cache);
    let gpu = Gpu::with_pipelines(own.queue().clone(), pipelines);
    let shape = Shape::new(1, 2, 9, 8);
    let x = noise(shape.q().iter().product(), 0.3);
    let error = gpu.attend(&x, &x, &x, shape, Mask::causal()).expect_err("another device").to_string();
    assert!(error.contains("wgpu refused"), "{error}");
}
