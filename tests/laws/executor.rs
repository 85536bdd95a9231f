//! Futures on an executor with several threads. They are `Send`, and they do not block the executor
//! while the device computes.

use std::collections::VecDeque;
use std::pin::{Pin, pin};
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Instant;

use wgpu_attention::layers::MultiHeadConfig;
use wgpu_attention::mask::{At, HostMask, MaskMod};
use wgpu_attention::reference::{self, HostLinear, HostWeights, MultiHeadShape, Options, widen};
use wgpu_attention::tuning::TuningBudget;
use wgpu_attention::{Attention, Config, DType, Forward, Gpu, Mask, Scratch, Shape, TensorView};

use crate::harness::random::noise;
use crate::harness::{full, say};

type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The ready tasks, and the number of unfinished ones.
#[derive(Default)]
struct Executor {
    ready: Mutex<(VecDeque<Arc<Task>>, usize)>,
    changed: Condvar,
}

struct Task {
    work: Mutex<Option<Work>>,
    of: Arc<Executor>,
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        let of = self.of.clone();
        of.ready.lock().expect("no poison").0.push_back(self);
        of.changed.notify_one();
    }
}

impl Executor {
    fn spawn(self: &Arc<Self>, work: impl Future<Output = ()> + Send + 'static) {
        self.ready.lock().expect("no poison").1 += 1;
        let work = Mutex::new(Some(Box::pin(work) as Work));
        Arc::new(Task { work, of: self.clone() }).wake();
    }

    /// Runs tasks until all are done.
    fn work(&self) {
        loop {
            let mut ready = self.ready.lock().expect("no poison");
            let task = loop {
                match ready.0.pop_front() {
                    Some(task) => break task,
                    None if ready.1 == 0 => return,
                    None => ready = self.changed.wait(ready).expect("no poison"),
                }
            };
            drop(ready);
            let mut work = task.work.lock().expect("no poison");
            let waker = Waker::from(task.clone());
            let done = work
                .as_mut()
                .is_some_and(|future| future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready());
            if done {
                *work = None;
                self.ready.lock().expect("no poison").1 -= 1;
                self.changed.notify_all();
            }
        }
    }
}

fn is_send<T: Send>(future: T) -> T {
    future
}

const SHAPE: Shape = Shape::new(2, 2, 17, 8);

async fn attends(gpu: Gpu, seed: f32) {
    let x = noise(SHAPE.q().iter().product(), seed);
    let got = gpu.attend_async(&x, &x, &x, SHAPE, Mask::causal()).await.expect("a result");
    let wide = widen::<f64>(&x);
    let options = Options::new().mask(Mask::causal());
    let want = reference::attention::<f64>(&wide, &wide, &wide, SHAPE, &options).expect("a truth").out;
    assert!(got.iter().zip(&want).all(|(g, w)| (f64::from(*g) - w).abs() < 1e-5), "{seed}");
    let all = gpu.attention_async(&x, &x, &x, SHAPE, &options).await.expect("a result");
    assert_eq!(all.out, got);
    let buffer = gpu.upload(&x).expect("memory");
    assert_eq!(gpu.download_async::<f32>(&buffer, x.len()).await.expect("a read-back"), x);
}

async fn compares(gpu: Gpu) {
    let every = 3;
    let sees = move |at: &At| at.key.is_multiple_of(every);
    let own = MaskMod::new("fn mask_mod(at: At) -> bool { return at.key % 3u == 0u; }").expect("a mask");
    let device = Mask::none().mask_mod(own);
    let host = HostMask::none().mask_fn(&sees);
    gpu.compare_masks_async(&device, &host, SHAPE, 0.0).await.expect("the same");
}

async fn checks(gpu: Gpu) {
    gpu.check_async().await.expect("a report");
}

#[test]
fn futures_run_on_many_threads() {
    let gpu = &full().gpu;
    let executor = Arc::new(Executor::default());
    (0..12).for_each(|n| executor.spawn(attends(gpu.clone(), 0.3 + n as f32)));
    executor.spawn(compares(gpu.clone()));
    executor.spawn(checks(gpu.clone()));
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| executor.work());
        }
    });
    assert_eq!(executor.ready.lock().expect("no poison").1, 0);
    // The other futures have the same parts. The compiler checks that they are `Send`.
    let (x, w) = ([0.5; 12], [0.5; 16]);
    let linear = HostLinear { weight: &w[..], bias: None };
    let weights = HostWeights {
        query: linear,
        key: linear,
        value: linear,
        out: linear,
        bias_kv: None,
        qk_norm: None,
        gate: None,
    };
    let shape = MultiHeadShape { batch: 1, q_len: 3, kv_len: 3 };
    let (config, options) = (MultiHeadConfig::new(4, 2), Options::new());
    drop(is_send(gpu.multi_head_async([&x, &x, &x], shape, &config, &weights, &options)));
    drop(is_send(gpu.pipelines().tune_async(gpu.queue(), &[], TuningBudget::default())));
    drop(is_send(Gpu::new_async()));
}

/// The device is busy with earlier work. The first poll of a read-back and of attention returns
/// anyway.
#[test]
fn read_backs_do_not_block_their_executor() {
    let gpu = &full().gpu;
    let shape = Shape::new(1, 8, 512, 64);
    let x = gpu.upload(&noise(shape.q().iter().product(), 0.3)).expect("memory");
    let y = gpu.buffer(4 * shape.q().iter().product::<usize>()).expect("memory");
    let [q, out] = [&x, &y].map(|b| TensorView::new(b, DType::F32, shape.q()));
    let attention = Attention::with_pipelines(gpu.pipelines(), Config::new(8, 64)).expect("an operator");
    let call = Forward::new(q, q, q, out);
    let mut scratch =
        Scratch::new(gpu.device(), attention.scratch_size(&call).expect("a size")).expect("scratch");
    // Compiles the kernels in advance.
    let values = noise(SHAPE.q().iter().product(), 0.5);
    gpu.attend(&values, &values, &values, SHAPE, Mask::none()).expect("a result");
    gpu.submit(|encoder| attention.forward(encoder, &call, &mut scratch)).expect("a recording");
    gpu.download::<f32>(&y, 4).expect("a read-back");
    // Faster devices get more work.
    for calls in [4, 64, 1024] {
        gpu.submit(|encoder| (0..calls).try_for_each(|_| attention.forward(encoder, &call, &mut scratch)))
            .expect("a recording");
        let start = Instant::now();
        let read = async { gpu.download_async::<f32>(&y, 4).await };
        let attend = async { gpu.attend_async(&values, &values, &values, SHAPE, Mask::none()).await };
        let mut attend = pin!(attend);
        let attend_first = attend.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        let mut future = pin!(read);
        let first = future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        let polled = start.elapsed();
        let (Poll::Pending, Poll::Pending) = (first, attend_first) else { continue };
        let got = pollster::block_on(future).expect("a read-back");
        say(&format!("{calls} calls: polled for {polled:?}, done after {:?}", start.elapsed()));
        assert!(got.iter().all(|x| x.is_finite()));
        assert!(pollster::block_on(attend).expect("a result").iter().all(|x| x.is_finite()));
        assert!(polled < start.elapsed() / 2, "{polled:?} of {:?}", start.elapsed());
        return;
    }
    panic!("the first poll waits");
}
