//! `scripts/gpu cargo bench -p benches --bench selected [-- --quick]`
//!
//! Measures attention to selected keys, which are in random order over the whole sequence. It
//! prints the least time of interleaved rounds. The yardstick is attention of the same queries to
//! as many keys at the start of the sequence. A copy's time for the selected rows is added. It also
//! prints the ratio of the backward pass to the forward pass.

use std::time::Instant;

use common::bed::Bed;
use common::settings::quick;
use common::timer::noise;
use wgpu_attention::selected::{SelectedAttention, SelectedBackward, SelectedConfig, SelectedForward};
use wgpu_attention::{Attention, Backward, Config, DType, Forward, Scratch, TensorView, wgpu};

#[derive(Clone, Copy, Debug)]
struct Sizes {
    queries: usize,
    keys: usize,
    selected: usize,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    block: usize,
}

/// Returns distinct indices of each query, in random order.
fn lists(sizes: &Sizes) -> Vec<u32> {
    let Sizes { queries, keys, selected, block, .. } = *sizes;
    let (names, count) = (keys / block, selected / block);
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut all = Vec::with_capacity(queries * count);
    for _ in 0..queries {
        // An odd step visits every index of a power of two once.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (first, step) = ((state >> 33) as usize, (state >> 20) as usize | 1);
        all.extend((0..count).map(|n| (first.wrapping_add(n.wrapping_mul(step)) % names) as u32));
    }
    all
}

/// Returns the least times in ms: selected, dense, and the backward passes of both.
fn times(bed: &Bed, sizes: &Sizes) -> [f64; 4] {
    let Sizes { queries, keys, selected, heads, kv_heads, dim, block } = *sizes;
    let upload = |count, seed| bed.gpu.upload(&noise(count, seed)).expect("room");
    let buffer = |count: usize| bed.gpu.buffer(4 * count).expect("room");
    fn view(buffer: &wgpu::Buffer, shape: [usize; 4]) -> TensorView<'_> {
        TensorView::new(buffer, DType::F32, shape)
    }
    let (rows, all) = ([1, heads, queries, dim], [1, kv_heads, keys, dim]);
    let [q, d_out] = [1, 4].map(|n| upload(heads * queries * dim, n));
    let [k, v] = [2, 3].map(|n| upload(kv_heads * keys * dim, n));
    let [out, d_q] = [0; 2].map(|_| buffer(heads * queries * dim));
    let [d_k, d_v] = [0; 2].map(|_| buffer(kv_heads * keys * dim));
    let lse = buffer(heads * queries);
    let indices = bed.gpu.upload(&lists(sizes)).expect("room");
    let indices = TensorView::new(&indices, DType::U32, [1, 1, queries, selected / block]);

    let config = Config::new(heads, dim).kv_heads(kv_heads);
    let pipelines = bed.gpu.pipelines();
    let operator = SelectedAttention::with_pipelines(pipelines, SelectedConfig::new(config).block(block));
    let operator = operator.expect("an operator");
    let dense = Attention::with_pipelines(pipelines, config).expect("an operator");
    let near = |buffer| view(buffer, all).slice(2, 0, selected);
    let of =
        |k, v| Forward::new(view(&q, rows), k, v, view(&out, rows)).lse(view(&lse, [1, heads, queries, 1]));
    let of_all = of(view(&k, all), view(&v, all));
    let of_near = of(near(&k), near(&v));
    let call = SelectedForward::new(of_all, indices);
    let d_out = view(&d_out, rows);
    let back = Backward::new(of_all, d_out).d_q(view(&d_q, rows)).d_k(view(&d_k, all)).d_v(view(&d_v, all));
    let back = SelectedBackward::new(back, indices);
    let near_back = Backward::new(of_near, d_out).d_q(view(&d_q, rows)).d_k(near(&d_k)).d_v(near(&d_v));

    let size = operator.scratch_size(&call).expect("a size");
    let size = size.max(operator.backward_scratch_size(&back).expect("a size"));
    let size = size.max(dense.scratch_size(&of_near).expect("a size"));
    let size = size.max(dense.backward_scratch_size(&near_back).expect("a size"));
    let mut scratch = Scratch::new(bed.gpu.device(), size).expect("room");
    let mut least = [f64::INFINITY; 4];
    let start = Instant::now();
    for round in 0..if quick() { 2 } else { 4 } {
        if round > 1 && start.elapsed().as_secs() > 20 {
            break;
        }
        let mut at = 0;
        let mut time = |record: &mut dyn FnMut(&mut wgpu::ComputePass)| {
            least[at] = least[at]
                .min(bed.timer.time(|pass: &mut wgpu::ComputePass| record(pass)).as_secs_f64() * 1e3);
            at += 1;
        };
        time(&mut |pass| operator.forward(pass, &call, &mut scratch).expect("a call"));
        time(&mut |pass| dense.forward(pass, &of_near, &mut scratch).expect("a call"));
        time(&mut |pass| operator.backward(pass, &back, &mut scratch).expect("a call"));
        time(&mut |pass| dense.backward(pass, &near_back, &mut scratch).expect("a call"));
    }
    least
}

fn main() {
    let Some(bed) = Bed::open() else { return };
    let [queries, keys, selected] = if quick() { [64, 1024, 64] } else { [4096, 65536, 512] };
    let of = |heads, kv_heads, dim, block| Sizes { queries, keys, selected, heads, kv_heads, dim, block };
    let rate = bed.ceilings().copy_gbs.giga * 1e9;
    for sizes in [of(8, 1, 64, 1), of(8, 8, 64, 1), of(8, 2, 64, 64), of(16, 1, 128, 1)] {
        let [forward, dense, backward, dense_backward] = times(&bed, &sizes);
        let Sizes { heads, kv_heads, dim, block, .. } = sizes;
        let bytes = 8.0 * (queries * selected * kv_heads * dim) as f64;
        // A copy reads and writes each byte.
        let gather = bytes / rate * 1e3;
        println!(
            "{queries} queries, {selected} of {keys} keys in blocks of {block}, {heads} heads, {kv_heads} of keys, \
             {dim} channels: {forward:.1} ms; dense {dense:.1} ms and gather {gather:.1} ms: {:.2} ×; backward \
             {backward:.1} ms, {:.2} × forward (dense {:.2} ×)",
            forward / (dense + gather),
            backward / forward,
            dense_backward / dense,
        );
    }
}
