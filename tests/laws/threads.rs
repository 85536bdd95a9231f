//! Several threads with one device.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use wgpu_attention::reference::{self, Options, widen};
use wgpu_attention::{Gpu, Mask, Shape, wgpu};

use crate::harness::device::defaults;
use crate::harness::random::noise;
use crate::harness::say;

/// Runs attention of a length and head dimension that no other thread has. So each thread compiles
/// separate kernels.
fn attends(gpu: &Gpu, head_dim: usize) {
    let shape = Shape::new(1, 2, 30 + head_dim, head_dim);
    let x = noise(shape.q().iter().product(), 0.1 * head_dim as f32);
    let wide = widen::<f64>(&x);
    for mask in [Mask::none(), Mask::causal()] {
        let options = Options::new().mask(mask).weights(head_dim.is_multiple_of(8));
        let want = reference::attention::<f64>(&wide, &wide, &wide, shape, &options).expect("a truth").out;
        let got = gpu.attention(&x, &x, &x, shape, &options).expect("a result").out;
        let worst = got.iter().zip(&want).map(|(g, w)| (f64::from(*g) - w).abs()).fold(0.0, f64::max);
        assert!(worst < 1e-5, "head_dim {head_dim}: {worst}");
    }
}

/// Threads compile, upload, submit and read back at the same time. On OpenGL wgpu panics in a
/// thread that waits for another one for more than six seconds. The long call takes about 15
/// seconds there on a software driver.
#[test]
fn threads_share_a_device() {
    let gpu = &defaults().gpu;
    let heads = if gpu.device().adapter_info().backend == wgpu::Backend::Gl { 96 } else { 1 };
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let shape = Shape::new(1, heads, 4096, 64);
            let ones = vec![1.0; shape.q().iter().product()];
            let start = Instant::now();
            let got = gpu.attend(&ones, &ones, &ones, shape, Mask::none());
            is_done.store(true, Ordering::Relaxed);
            say(&format!("the long call: {:.1?}", start.elapsed()));
            assert!(got.expect("a result").iter().all(|x| (x - 1.0).abs() < 1e-5));
        });
        for head_dim in [16, 20, 64, 128] {
            let is_done = &is_done;
            scope.spawn(move || {
                attends(gpu, head_dim);
                while !is_done.load(Ordering::Relaxed) {
                    attends(gpu, head_dim);
                }
            });
        }
    });
}
