//! Times on the device.

use std::cell::Cell;
use std::time::Duration;

use web_time::Instant;
use wgpu_attention::Gpu;

use super::device;
use super::kernel::{Kernel, uniform};

/// Returns pseudo-random numbers in (−1, 1), the same every time.
pub fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// Returns the median; `None` for no values.
pub fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let (low, high) = (values.get(values.len().checked_sub(1)? / 2)?, values.get(values.len() / 2)?);
    Some((low + high) / 2.0)
}

/// A clock for the time between the first and the last dispatch of a pass. It uses timestamp
/// queries or the host's clock.
pub struct Timer {
    gpu: Gpu,
    queries: Option<wgpu::QuerySet>,
    resolved: wgpu::Buffer,
    warm_up: Option<WarmUp>,
}

/// Work that runs before a timed pass, and measures the current rate of the device. Some GPUs fall
/// to a third of their rate or less for seconds when they have little work. (Seen on an H200 under
/// Vulkan, driver 580.159.)
struct WarmUp {
    kernel: Kernel,
    /// The shortest time of a dispatch, in ms; 0 until it is measured.
    best_ms: Cell<f64>,
    /// When the device last ended its work.
    last_end: Cell<Option<Instant>>,
    /// The number of passes that were timed on a slow device.
    slow_passes: Cell<usize>,
    /// When the timer last waited in vain for the full rate.
    gave_up: Cell<Option<Instant>>,
}

impl WarmUp {
    /// Milliseconds of work after a pause of more than `PAUSE`, and after a shorter one.
    const COLD_MS: f64 = 50.0;
    const WARM_MS: f64 = 1.0;
    const PAUSE: Duration = Duration::from_millis(10);
    /// Dispatches that are timed to measure the rate.
    const PROBES: usize = 4;
    /// A device is slow if a dispatch takes this many times the shortest time.
    const SLOW: f64 = 1.15;
    /// Tries to reach the full rate; when all fail, the timer tries only once until `RETRY_AFTER`
    /// has passed.
    const TRIES: usize = 8;
    const RETRY_AFTER: Duration = Duration::from_secs(3);
    const WORKGROUPS: u32 = 2048;
    /// Multiply-adds, 4 GFLOP in all. The uniform is zero, but the compiler cannot know that.
    const TEXT: &str = "
@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@group(0) @binding(1) var<uniform> zeros: vec4<f32>;
@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    var x = vec4<f32>(0.0, 0.25, 0.5, 0.75) + f32(id.x % 7u);
    for (var i = 0u; i < 1024u; i++) {
        x = fma(x, vec4<f32>(-0.999) + zeros, vec4<f32>(1.0));
    }
    out[id.x] = x.x + x.y + x.z + x.w;
}";

    fn new(gpu: &Gpu) -> Self {
        let out = gpu.buffer(Self::WORKGROUPS as usize * 256 * 4).expect("room for results");
        WarmUp {
            kernel: Kernel::new(gpu, Self::TEXT, &[&out, &uniform(gpu)]),
            best_ms: Cell::new(0.0),
            last_end: Cell::new(None),
            slow_passes: Cell::new(0),
            gave_up: Cell::new(None),
        }
    }

    fn dispatch(&self, pass: &mut wgpu::ComputePass, times: usize) {
        (0..times).for_each(|_| self.kernel.dispatch(pass, [Self::WORKGROUPS, 1]));
    }

    fn record(&self, encoder: &mut wgpu::CommandEncoder) {
        let is_cold = self.last_end.get().is_none_or(|end| end.elapsed() > Self::PAUSE);
        let ms = if is_cold { Self::COLD_MS } else { Self::WARM_MS };
        let times = (ms / self.best_ms.get()).ceil() as usize;
        self.dispatch(&mut encoder.begin_compute_pass(&Default::default()), times.clamp(1, 4096));
    }
}

impl Timer {
    /// Returns `None` if the device has no timestamp queries.
    pub fn new(gpu: &Gpu) -> Option<Self> {
        let device = gpu.device();
        if !device.features().contains(wgpu::Features::TIMESTAMP_QUERY) {
            return None;
        }
        let queries = device.create_query_set(&wgpu::QuerySetDescriptor {
            label: None,
            ty: wgpu::QueryType::Timestamp,
            count: 2,
        });
        let warm_up = (!device::software(gpu)).then(|| WarmUp::new(gpu));
        Some(Timer { queries: Some(queries), warm_up, ..Self::of_host(gpu) })
    }

    /// Returns the host's clock, for devices without a better one. It includes submission and
    /// waiting.
    pub fn of_host(gpu: &Gpu) -> Self {
        let resolved = gpu.device().create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: 16,
            usage: wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        });
        Timer { gpu: gpu.clone(), queries: None, resolved, warm_up: None }
    }

    /// Runs a pass that `record` fills, and returns its time on the device.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn time(&self, record: impl FnOnce(&mut wgpu::ComputePass)) -> Duration {
        pollster::block_on(self.time_async(record))
    }

    /// The async variant of `time`.
    pub async fn time_async(&self, record: impl FnOnce(&mut wgpu::ComputePass)) -> Duration {
        let Some(warm_up) = &self.warm_up else { return self.timed(|_| {}, record).await };
        self.reach_full_rate(warm_up).await;
        let time = self.timed(|encoder| warm_up.record(encoder), record).await;
        warm_up.last_end.set(Some(Instant::now()));
        time
    }

    /// Runs work until the device reaches its full rate. Prints a warning if it does not.
    async fn reach_full_rate(&self, warm_up: &WarmUp) {
        let probe_ms = async |before: &dyn Fn(&mut wgpu::CommandEncoder)| {
            let time = self.timed(before, |pass| warm_up.dispatch(pass, WarmUp::PROBES)).await;
            (time.as_secs_f64() * 1e3 / WarmUp::PROBES as f64).max(1e-3)
        };
        if warm_up.best_ms.get() == 0.0 {
            // The first run is slower.
            probe_ms(&|_| {}).await;
            warm_up.best_ms.set(probe_ms(&|_| {}).await);
        }
        let waits = warm_up.gave_up.get().is_none_or(|time| time.elapsed() > WarmUp::RETRY_AFTER);
        let mut slowness = 1.0;
        for _ in 0..if waits { WarmUp::TRIES } else { 1 } {
            let ms = probe_ms(&|encoder| warm_up.record(encoder)).await;
            slowness = ms / warm_up.best_ms.get();
            warm_up.best_ms.set(warm_up.best_ms.get().min(ms));
            warm_up.last_end.set(Some(Instant::now()));
            if slowness <= WarmUp::SLOW {
                return;
            }
            if waits {
                // The next try runs more work.
                warm_up.last_end.set(None);
            }
        }
        if waits {
            warm_up.gave_up.set(Some(Instant::now()));
        }
        let slow_passes = warm_up.slow_passes.get() + 1;
        warm_up.slow_passes.set(slow_passes);
        if slow_passes.is_power_of_two() {
            println!(
                "warning: the device runs at {:.2} of its rate, {slow_passes} times so far",
                1.0 / slowness
            );
        }
    }

    /// Times the pass that `record` fills; `before` records into the same submission.
    async fn timed(
        &self,
        before: impl FnOnce(&mut wgpu::CommandEncoder),
        record: impl FnOnce(&mut wgpu::ComputePass),
    ) -> Duration {
        let mut encoder = self.gpu.device().create_command_encoder(&Default::default());
        before(&mut encoder);
        let timestamp_writes = self.queries.as_ref().map(|query_set| wgpu::ComputePassTimestampWrites {
            query_set,
            beginning_of_pass_write_index: Some(0),
            end_of_pass_write_index: Some(1),
        });
        record(
            &mut encoder.begin_compute_pass(&wgpu::ComputePassDescriptor { label: None, timestamp_writes }),
        );
        if let Some(queries) = &self.queries {
            encoder.resolve_query_set(queries, 0..2, &self.resolved, 0);
        }
        let commands = encoder.finish();
        let start = Instant::now();
        self.gpu.queue().submit([commands]);
        let ticks: Vec<u64> = self.gpu.download_async(&self.resolved, 2).await.expect("timestamps");
        if self.queries.is_none() {
            return start.elapsed();
        }
        let ns =
            ticks[1].saturating_sub(ticks[0]) as f64 * f64::from(self.gpu.queue().get_timestamp_period());
        Duration::from_nanos(ns as u64)
    }
}
