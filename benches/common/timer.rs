//! Time on the device.

use std::time::Duration;

use web_time::Instant;
use wgpu_attention::Gpu;

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
        Some(Timer { queries: Some(queries), ..Self::of_host(gpu) })
    }

    /// The host's clock, for devices without a better one: submission and waiting are included.
    pub fn of_host(gpu: &Gpu) -> Self {
        let resolved = gpu.device().create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: 16,
            usage: wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        });
        Timer { gpu: gpu.clone(), queries: None, resolved }
    }

    /// Runs a pass that `record` fills and returns how long the device took.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn time(&self, record: impl FnOnce(&mut wgpu::ComputePass)) -> Duration {
        pollster::block_on(self.time_async(record))
    }

    /// `time`, not blocking.
    pub async fn time_async(&self, record: impl FnOnce(&mut wgpu::ComputePass)) -> Duration {
        let mut encoder = self.gpu.device().create_command_encoder(&Default::default());
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
