//! Time on the device.

use std::time::Duration;

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

/// Time between the first and the last dispatch of a pass, by timestamp queries.
pub struct Timer {
    gpu: Gpu,
    queries: wgpu::QuerySet,
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
        let resolved = device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: 16,
            usage: wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        });
        Some(Timer { gpu: gpu.clone(), queries, resolved })
    }

    /// Runs a pass that `record` fills and returns how long the device took.
    pub fn time(&self, record: impl FnOnce(&mut wgpu::ComputePass)) -> Duration {
        let mut encoder = self.gpu.device().create_command_encoder(&Default::default());
        let timestamp_writes = Some(wgpu::ComputePassTimestampWrites {
            query_set: &self.queries,
            beginning_of_pass_write_index: Some(0),
            end_of_pass_write_index: Some(1),
        });
        record(
            &mut encoder.begin_compute_pass(&wgpu::ComputePassDescriptor { label: None, timestamp_writes }),
        );
        encoder.resolve_query_set(&self.queries, 0..2, &self.resolved, 0);
        self.gpu.queue().submit([encoder.finish()]);
        let ticks: Vec<u64> = self.gpu.download(&self.resolved, 2).expect("timestamps");
        let ns = (ticks[1] - ticks[0]) as f64 * f64::from(self.gpu.queue().get_timestamp_period());
        Duration::from_nanos(ns as u64)
    }
}
