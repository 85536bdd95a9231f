//! Measures device time.

use web_time::Instant;

use crate::gpu::Gpu;
use crate::kernel::guard::guarded;
use crate::tensor::Error;

/// A clock that uses the device's timestamps if it has them, else the host's clock.
pub(super) struct Clock<'a> {
    gpu: &'a Gpu,
    queries: Option<wgpu::QuerySet>,
    resolved: wgpu::Buffer,
}

impl<'a> Clock<'a> {
    /// # Errors
    /// [`Error::OutOfMemory`], a device that is lost.
    pub fn new(gpu: &'a Gpu) -> Result<Self, Error> {
        let device = gpu.device();
        let has = device.features().contains(wgpu::Features::TIMESTAMP_QUERY);
        guarded(device, "a clock", || {
            let queries = has.then(|| {
                device.create_query_set(&wgpu::QuerySetDescriptor {
                    label: Some("attention.tune"),
                    ty: wgpu::QueryType::Timestamp,
                    count: 2,
                })
            });
            let resolved = device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("attention.tune"),
                size: 16,
                usage: wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
                mapped_at_creation: false,
            });
            Clock { gpu, queries, resolved }
        })
    }

    /// Returns the seconds of the pass that `record` fills.
    pub async fn time(
        &self,
        record: impl FnOnce(&mut wgpu::ComputePass) -> Result<(), Error>,
    ) -> Result<f64, Error> {
        let start = Instant::now();
        self.gpu.submit(|encoder| {
            let timestamp_writes = self.queries.as_ref().map(|query_set| wgpu::ComputePassTimestampWrites {
                query_set,
                beginning_of_pass_write_index: Some(0),
                end_of_pass_write_index: Some(1),
            });
            let descriptor = wgpu::ComputePassDescriptor { label: Some("attention.tune"), timestamp_writes };
            record(&mut encoder.begin_compute_pass(&descriptor))?;
            if let Some(queries) = &self.queries {
                encoder.resolve_query_set(queries, 0..2, &self.resolved, 0);
            }
            Ok(())
        })?;
        let ticks: Vec<u64> = self.gpu.download_async(&self.resolved, 2).await?;
        let host = start.elapsed().as_secs_f64();
        let counted = ticks[1].saturating_sub(ticks[0]) as f64;
        let device = counted * f64::from(self.gpu.queue().get_timestamp_period()) * 1e-9;
        // Some drivers write no timestamps.
        Ok(if device > 0.0 { device } else { host })
    }
}
