//! Programs from public bug reports, through the public API alone. Tests of similar cases:
//!
//! - rings that go back: `caches::rings`
//! - values near the largest of their type: `numbers::values_near_range_ends_match`, `range_ends`
//! - buffers of past calls: the unit tests of `bindings`
//! - many short sequences of linear attention:
//!   `linear::many_short_sequences_run_in_bounded_scratch`
//! - time of documents: `hidden_tiles::skipped_tiles_take_no_time`
//! - layers that differ: `stacks::by_layer`

use wgpu_attention::cache::{Append, CacheLayout, Tokens};
use wgpu_attention::reference::compare::max_error;
use wgpu_attention::reference::{self, Options, widen};
use wgpu_attention::{
    Attention, Cache, CacheConfig, Config, DType, Error, Forward, Gpu, Mask, Scratch, ScratchSize, Shape,
    TensorView,
};

use crate::harness::device::device;
use crate::harness::{full, say};

/// Like pytorch/pytorch #121558, with larger values. A mean of finite values is finite, and at most
/// the largest of them.
#[test]
fn means_of_values_near_the_largest_are_finite() {
    let gpu = &full().gpu;
    for (keys, value) in [(2, 2e38f32), (3, -1.5e38), (100, 4e36), (300, 2e36), (2, f32::MAX)] {
        let shape = Shape { kv_len: keys, ..Shape::new(1, 1, 1, 1) };
        let (k, v) = (vec![0.0; keys], vec![value; keys]);
        for options in [Options::new(), Options::new().weights(true)] {
            let out = gpu.attention(&[0.0], &k, &v, shape, &options).expect("an output").out[0];
            // Half an ulp for each addition and for later operations on the sum.
            let allowed = (keys + 8) as f32 * f32::EPSILON / 2.0;
            assert!(((out - value) / value).abs() <= allowed, "{keys} values of {value:e} give {out:e}");
        }
    }
}

const DIM: usize = 8;
const TOKENS: usize = 31;

fn step(gpu: &Gpu, cache: &mut Cache, tokens: &wgpu::Buffer, n: usize) -> Result<(), Error> {
    let row = TensorView::new(tokens, DType::F32, [1, 1, TOKENS, DIM]).slice(2, n, 1);
    gpu.submit(|encoder| {
        cache.advance(encoder, Tokens::All(1))?;
        cache.append(encoder, 0, &Append::new(row, row))
    })
}

/// Like ml-explore/mlx-swift-lm #424 and ggml-org/llama.cpp #13833. A ring of 16 with two sinks
/// holds tokens 0, 1 and 16 to 29 of 30. After a truncation to 24 it would need 10 to 23, but it
/// has lost six of them. It returns an error and stays unchanged.
#[test]
fn ring_reports_lost_tokens() {
    let gpu = &full().gpu;
    let tokens: Vec<f32> = (0..TOKENS * DIM).map(|i| (i as f32 * 0.7).sin()).collect();
    let x = gpu.upload(&tokens).expect("tokens");
    let layout = CacheLayout::Ring { sink_tokens: 2 };
    let mut cache =
        Cache::with_pipelines(gpu.pipelines(), CacheConfig::new(1, DIM, 16).layout(layout)).expect("a cache");
    (0..30).try_for_each(|n| step(gpu, &mut cache, &x, n)).expect("30 tokens");
    let refused = cache.truncate(0, 24).expect_err("six tokens are lost");
    assert!(matches!(refused, Error::Option { .. }), "{refused}");
    step(gpu, &mut cache, &x, 30).expect("a token");

    let (q, out) = (gpu.upload(&[1.0f32; DIM]).expect("a query"), gpu.buffer(4 * DIM).expect("an output"));
    let attention = Attention::with_pipelines(gpu.pipelines(), Config::new(1, DIM)).expect("an operator");
    let [query, y] = [&q, &out].map(|buffer| TensorView::new(buffer, DType::F32, [1, 1, 1, DIM]));
    let call = Forward::with_cache(query, &cache, y).at_end().mask(Mask::causal());
    let size = attention.scratch_size(&call).expect("a size");
    let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
    gpu.submit(|encoder| attention.forward(encoder, &call, &mut scratch)).expect("a call");
    let got: Vec<f64> = widen(&gpu.download::<f32>(&out, DIM).expect("an output"));
    let seen = [0, 1].into_iter().chain(17..TOKENS);
    let kv: Vec<f64> = seen.flat_map(|n| widen::<f64>(&tokens[n * DIM..][..DIM])).collect();
    let shape = Shape { kv_len: kv.len() / DIM, ..Shape::new(1, 1, 1, DIM) };
    let want = reference::attention(&[1.0; DIM], &kv, &kv, shape, &Options::new()).expect("a mean").out;
    assert!(max_error(&got, &want) < 1e-6, "{got:?}, wanted {want:?}");
}

/// Like tracel-ai/burn #2042: calls with new tensors, which are dropped after them. The live
/// tensors have 2 MiB.
#[test]
fn bindings_of_dropped_tensors_are_released() {
    let gpu = device(|_| {});
    let attention = Attention::with_pipelines(gpu.pipelines(), Config::new(8, 64)).expect("an operator");
    let mut scratch = Scratch::new(gpu.device(), ScratchSize::default()).expect("scratch");
    for call in 0..200 {
        let [x, y] = [(); 2].map(|()| gpu.buffer(1 << 20).expect("a tensor"));
        let [q, out] = [&x, &y].map(|buffer| TensorView::new(buffer, DType::F32, [1, 8, 64, 64]));
        gpu.submit(|encoder| attention.forward(encoder, &Forward::new(q, q, q, out), &mut scratch))
            .expect("a call");
        gpu.device().poll(wgpu::PollType::wait_indefinitely()).expect("an idle device");
        let Some(report) = gpu.device().generate_allocator_report() else {
            return say("tensors of past calls: no report of what is allocated");
        };
        let held: u64 = report.allocations.iter().map(|allocation| allocation.size).sum();
        assert!(held < 80 << 20, "{} MiB after {call} calls", held >> 20);
    }
}
