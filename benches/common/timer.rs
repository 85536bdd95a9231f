//! Time on the device.

use std::cell::Cell;
use std::time::Duration;

use web_time::Instant;
use wgpu_attention::Gpu;

use super::device;
use super::kernel::{Kernel, uniform};

/// Numbers in (−1, 1) that look random and are the same every time.
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

/// `None` of nothing.
pub fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let (low, high) = (values.get(values.len().checked_sub(1)? / 2)?, values.get(values.len() / 2)?);
    Some((low + high) / 2.0)
}

/// Time between the first and the last dispatch of a pass, by timestamp queries; or of the host's clock.
pub struct Timer {
    gpu: Gpu,
    queries: Option<wgpu::QuerySet>,
    resolved: wgpu::Buffer,
    heater: Option<Heater>,
}

/// Work that precedes what is timed, and shows the rate at which the device runs: some GPUs take a third or less of their
/// rate for seconds when there is little to do. (Seen on an H200 under Vulkan, 580.159.)
struct Heater {
    kernel: Kernel,
    /// Of one dispatch, the least seen; 0 until it is measured.
    ms: Cell<f64>,
    /// When the device was last seen to end its work.
    ended: Cell<Option<Instant>>,
    /// Times that were taken although the device was slow, and when it was last waited for in vain.
    slow: Cell<usize>,
    gave_up: Cell<Option<Instant>>,
}

impl Heater {
    /// Milliseconds of work after a pause, and after none.
    const COLD: f64 = 50.0;
    const WARM: f64 = 1.0;
    const PAUSE: Duration = Duration::from_millis(10);
    /// Dispatches that the rate is measured of, how much slower they may be, and how often it is tried again.
    const PROBE: usize = 4;
    const SLOWER: f64 = 1.15;
    const TRIES: usize = 8;
    /// How long slow times are taken as they are, once it was tried in vain.
    const RESIGNED: Duration = Duration::from_secs(3);
    const WORKGROUPS: u32 = 2048;
    /// Multiply-adds: 4 GFLOP in all.
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
        let kernel = Kernel::new(gpu, Self::TEXT, &[&out, &uniform(gpu)]);
        Heater {
            kernel,
            ms: Cell::new(0.0),
            ended: Cell::new(None),
            slow: Cell::new(0),
            gave_up: Cell::new(None),
        }
    }

    fn record(&self, encoder: &mut wgpu::CommandEncoder) {
        let cold = self.ended.get().is_none_or(|ended| ended.elapsed() > Self::PAUSE);
        let ms = if cold { Self::COLD } else { Self::WARM };
        let mut pass = encoder.begin_compute_pass(&Default::default());
        // So few that no system takes the device for hanging.
        for _ in 0..((ms / self.ms.get()).ceil() as usize).clamp(1, 4096) {
            self.kernel.dispatch(&mut pass, [Self::WORKGROUPS, 1]);
        }
    }
}

impl Timer {
    /// `None` if the device has no timestamp queries.
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
        let heater = (!device::software(gpu)).then(|| Heater::new(gpu));
        Some(Timer { queries: Some(queries), heater, ..Self::of_host(gpu) })
    }

    /// The host's clock, for devices without a better one: submission and waiting are included.
    pub fn of_host(gpu: &Gpu) -> Self {
        let resolved = gpu.device().create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: 16,
            usage: wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        });
        Timer { gpu: gpu.clone(), queries: None, resolved, heater: None }
    }

    /// Runs a pass that `record` fills and returns how long the device took.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn time(&self, record: impl FnOnce(&mut wgpu::ComputePass)) -> Duration {
        pollster::block_on(self.time_async(record))
    }

    /// `time`, not blocking.
    pub async fn time_async(&self, record: impl FnOnce(&mut wgpu::ComputePass)) -> Duration {
        let Some(heater) = &self.heater else { return self.timed(|_| {}, record).await };
        let probe = |pass: &mut wgpu::ComputePass| {
            (0..Heater::PROBE).for_each(|_| heater.kernel.dispatch(pass, [Heater::WORKGROUPS, 1]));
        };
        let of_probe = |time: Duration| (time.as_secs_f64() * 1e3 / Heater::PROBE as f64).max(1e-3);
        if heater.ms.get() == 0.0 {
            // The first is slower.
            for _ in 0..2 {
                heater.ms.set(of_probe(self.timed(|_| {}, probe).await));
            }
        }
        for tries in 1.. {
            let ms = of_probe(self.timed(|encoder| heater.record(encoder), probe).await);
            heater.ended.set(Some(Instant::now()));
            let least = heater.ms.get();
            heater.ms.set(least.min(ms));
            if ms <= Heater::SLOWER * least {
                break;
            }
            let resigned = heater.gave_up.get().is_some_and(|time| time.elapsed() < Heater::RESIGNED);
            if resigned || tries == Heater::TRIES {
                if !resigned {
                    heater.gave_up.set(Some(Instant::now()));
                }
                let slow = heater.slow.get() + 1;
                heater.slow.set(slow);
                if slow.is_power_of_two() {
                    println!(
                        "warning: the device runs at {:.2} of its rate, {slow} times so far",
                        least / ms
                    );
                }
                break;
            }
            heater.ended.set(None);
        }
        let time = self.timed(|encoder| heater.record(encoder), record).await;
        heater.ended.set(Some(Instant::now()));
        time
    }

    /// Of the pass that `record` fills, in the submission that `before` began.
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
