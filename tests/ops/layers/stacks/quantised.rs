//! Norms of queries and keys with a quantised cache. The cache stores keys after their norm and
//! rotation.

use wgpu_attention::cache::{CacheRead, CacheStorage, ScaleGroup, Tokens};
use wgpu_attention::layers::{EncoderForward, NormOrder, OutputGate};
use wgpu_attention::matmul::Activation;
use wgpu_attention::position::RowPositions;
use wgpu_attention::reference::cache::scales;
use wgpu_attention::reference::compare::max_error;
use wgpu_attention::reference::{activate, attention, feed_forward, join_heads, norm, project, split_heads};
use wgpu_attention::rows::NormConfig;
use wgpu_attention::tuning::Target;
use wgpu_attention::{Cache, CacheConfig, DType, KernelOptions, Scratch, Shape, TensorView};

use super::data::Stack;
use super::encoder::drawn;
use super::steps::steps_of;
use crate::harness::layer::LinearData;
use crate::harness::rotary::RotaryData;
use crate::harness::run::{Layout, PlacedRules};
use crate::harness::{FORMS, Rng, Rules, full};

const HEAD_DIM: usize = 64;

/// Returns one layer with norms of queries and keys, a gate and grouped heads.
fn stack() -> Stack {
    let (stack, _) = drawn(2);
    let stack = Stack {
        batch: 2,
        length: 11,
        heads: 4,
        kv_heads: 2,
        features: 4 * HEAD_DIM,
        hidden: 24,
        order: NormOrder::Pre,
        qk_norm: Some(NormConfig::rms()),
        output_gate: Some(OutputGate::Elementwise),
        rules: Rules { causal: true, ..Default::default() },
        rotary: Some(RotaryData::in_order(HEAD_DIM)),
        ..stack
    };
    assert!(stack.gated, "the parts of a layer are counted so");
    Stack::random(&mut Rng::new(0x9a4), 1, false, stack)
}

/// Returns the output of the stack's rows in steps, and the keys and values that a cache of
/// `storage` returns.
fn run(stack: &Stack, storage: CacheStorage, form: Target) -> [Vec<f32>; 3] {
    let gpu = &full().gpu;
    let placed = stack.place(full(), DType::F32);
    let encoder = placed.encoder(full(), stack.config(DType::F32)).expect("a stack");
    let encoder = encoder.kernel_options(KernelOptions::new().target(form));
    let [batch, _, length, features] = stack.shape();
    let config = CacheConfig::new(stack.kv_heads, HEAD_DIM, length + 3).batch(batch).storage(storage);
    let mut cache = Cache::with_pipelines(gpu.pipelines(), config).expect("a cache");
    let upload = |x: &[f32]| gpu.upload(x).expect("an upload");
    let (x, out) = (upload(&stack.x), upload(&vec![f32::NAN; stack.x.len()]));
    let rows = |buffer| TensorView::sequence(buffer, DType::F32, [batch, length, features]);
    let rules = PlacedRules::new(full(), &stack.rules, DType::F32, Layout::Dense);
    let rotary = stack.rotary.as_ref().expect("a rotation").place(full());
    let mut first = 0;
    for step in steps_of(length, &mut Rng::new(7)) {
        gpu.submit(|e| cache.advance(e, Tokens::All(step))).expect("an advance");
        let call = EncoderForward::new(rows(&x).slice(2, first, step), rows(&out).slice(2, first, step))
            .cache(&cache)
            .mask(rules.mask())
            .rotary(rotary.rotation(), RowPositions::Tensor(cache.starts()));
        let size = encoder.scratch_size(&call).expect("a size");
        let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
        gpu.submit(|e| encoder.forward(e, &call, &mut scratch)).expect("recorded");
        first += step;
    }
    let shape = [batch, stack.kv_heads, length, HEAD_DIM];
    let count: usize = shape.iter().product();
    let buffers = [(); 2].map(|()| upload(&vec![f32::NAN; count]));
    let [k, v] = buffers.each_ref().map(|buffer| TensorView::new(buffer, DType::F32, shape));
    gpu.submit(|e| cache.read(e, 0, &CacheRead::new(k, v))).expect("recorded");
    let read = |buffer, count| gpu.download::<f32>(buffer, count).expect("a read-back");
    [read(&out, stack.x.len()), read(&buffers[0], count), read(&buffers[1], count)]
}

#[test]
fn quantised_caches_store_normalised_keys() {
    crate::harness::in_turn!();
    let stack = stack();
    let parts = &stack.layers[0];
    let (e, heads, kv_heads) = (stack.features, stack.heads, stack.kv_heads);
    let widened = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
    let product = |x: &[f64], l: &LinearData, from: usize| {
        let (weight, bias) = (widened(&l.weight), l.bias.as_ref().map(|b| widened(b)));
        project(x, &weight, bias.as_deref(), from, weight.len() / from).expect("it fits")
    };
    let normed = |x: &[f64], l: &LinearData, dim: usize, config: &NormConfig| {
        let (weight, bias) = (widened(&l.weight), l.bias.as_ref().map(|b| widened(b)));
        norm(x, dim, Some(&weight), bias.as_deref(), config).expect("it fits")
    };
    let x = widened(&stack.x);
    let input = normed(&x, &parts[6], e, &stack.norm);
    let norms = Stack::qk_norms(parts).expect("the stack has norms");
    let rotary = stack.rotary.as_ref().expect("a rotation");
    let side = |n: usize, heads: usize| {
        let mut y = product(&input, &parts[n], e);
        if n < 2 {
            y = normed(&y, norms[n], HEAD_DIM, stack.qk_norm.as_ref().expect("a norm"));
            y = rotary.turned(&y, [heads, stack.length, HEAD_DIM], false);
        }
        split_heads(&y, stack.length, heads, HEAD_DIM).expect("it fits")
    };
    let [q, keys, values] = [side(0, heads), side(1, kv_heads), side(2, kv_heads)];

    for (storage, form) in
        [CacheStorage::Q8(ScaleGroup::Row), CacheStorage::Q4(ScaleGroup::Of(32))].into_iter().zip(FORMS)
    {
        let [out, k, v] = run(&stack, storage, form);
        for (name, want, got) in [("keys", &keys, &k), ("values", &values, &v)] {
            for (want, got) in want.chunks_exact(HEAD_DIM).zip(got.chunks_exact(HEAD_DIM)) {
                let row: Vec<f32> = want.iter().map(|x| *x as f32).collect();
                let scales = scales(storage, &row);
                let group = HEAD_DIM / scales.len();
                for (n, (want, got)) in want.iter().zip(got).enumerate() {
                    let level = f64::from(scales[n / group]);
                    let off = (want - f64::from(*got)).abs();
                    assert!(off <= 0.501 * level + 1e-5, "{name}, {storage:?}: {off} with levels of {level}");
                }
            }
        }
        // After the cache, only the order of sums differs.
        let shape = Shape { kv_heads, ..Shape::new(stack.batch, heads, stack.length, HEAD_DIM) };
        let (k, v) = (widened(&k), widened(&v));
        let got = attention(&q, &k, &v, shape, &stack.options().rotary(None, RowPositions::Start(0)));
        let mut context =
            join_heads(&got.expect("it fits").out, stack.length, heads, HEAD_DIM).expect("it fits");
        let logits = product(&input, Stack::output_gate(parts).expect("a gate"), e);
        context.iter_mut().zip(logits).for_each(|(x, logit)| *x *= activate(logit, Activation::Sigmoid));
        let attended = product(&context, &parts[3], e);
        let middle: Vec<f64> = x.iter().zip(attended).map(|(x, y)| x + y).collect();
        let fed = normed(&middle, &parts[7], e, &stack.norm);
        let fed = stack.on_host::<f64, _>(|_, layers, _| {
            feed_forward(&fed, &stack.config(DType::F32), &layers[0].feed_forward).expect("it fits")
        });
        let want: Vec<f64> = middle.iter().zip(fed).map(|(x, y)| x + y).collect();
        let off = max_error(&widened(&out), &want);
        let largest = want.iter().fold(0.0f64, |most, x| most.max(x.abs()));
        assert!(off < 2e-5 * largest, "{storage:?}: {off} of {largest}");
    }
}
