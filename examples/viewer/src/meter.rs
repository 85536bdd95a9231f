//! Times attention and reads the largest weight back, without waiting for the device.

use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use wgpu_attention::Gpu;

/// Two timestamps of 8 bytes, then the largest weight.
const LARGEST: u64 = 16;
const BYTES: u64 = 24;

/// One measurement at a time.
pub struct Meter {
    gpu: Gpu,
    queries: Option<wgpu::QuerySet>,
    resolved: wgpu::Buffer,
    staging: wgpu::Buffer,
    /// Receives the host's time of the attention, if it ran, and true if the copy succeeded.
    pending: Option<Receiver<(Option<Duration>, bool)>>,
    /// The time of the last attention.
    pub attention: Option<Duration>,
    pub largest: Option<f32>,
}

impl Meter {
    pub fn new(gpu: &Gpu) -> Self {
        let device = gpu.device();
        let queries = device.features().contains(wgpu::Features::TIMESTAMP_QUERY).then(|| {
            device.create_query_set(&wgpu::QuerySetDescriptor {
                label: Some("meter"),
                ty: wgpu::QueryType::Timestamp,
                count: 2,
            })
        });
        let buffer = |usage| {
            let label = Some("meter");
            device.create_buffer(&wgpu::BufferDescriptor {
                label,
                size: BYTES,
                usage,
                mapped_at_creation: false,
            })
        };
        Meter {
            queries,
            resolved: buffer(wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC),
            staging: buffer(wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST),
            pending: None,
            attention: None,
            largest: None,
            gpu: gpu.clone(),
        }
    }

    /// The queries for the compute pass to time.
    pub fn timestamps(&self) -> Option<wgpu::ComputePassTimestampWrites<'_>> {
        self.queries.as_ref().map(|query_set| wgpu::ComputePassTimestampWrites {
            query_set,
            beginning_of_pass_write_index: Some(0),
            end_of_pass_write_index: Some(1),
        })
    }

    /// True if the GPU's timestamps measure the attention, false for the host's clock.
    pub fn has_timestamps(&self) -> bool {
        self.queries.is_some()
    }

    pub fn is_pending(&self) -> bool {
        self.pending.is_some()
    }

    /// Submits `encoder` and the copies of the results. The measurement before must have ended.
    /// `started` is the instant before the attention was submitted, if it ran.
    pub fn submit(
        &mut self,
        mut encoder: wgpu::CommandEncoder,
        largest: &wgpu::Buffer,
        started: Option<Instant>,
    ) {
        if let (Some(queries), Some(_)) = (&self.queries, started) {
            encoder.resolve_query_set(queries, 0..2, &self.resolved, 0);
            encoder.copy_buffer_to_buffer(&self.resolved, 0, &self.staging, 0, LARGEST);
        }
        encoder.copy_buffer_to_buffer(largest, 0, &self.staging, LARGEST, size_of::<f32>() as u64);
        self.gpu.queue().submit([encoder.finish()]);
        let (send, receive) = channel();
        self.staging.slice(..).map_async(wgpu::MapMode::Read, move |result| {
            // The receiver is gone if the window closed.
            let _ = send.send((started.map(|started| started.elapsed()), result.is_ok()));
        });
        self.pending = Some(receive);
    }

    /// Reads the results if the device has finished. Call it once a frame.
    pub fn poll(&mut self) {
        let Some(receive) = &self.pending else { return };
        // A lost device reports the end of the copy, with an error.
        let _ = self.gpu.device().poll(wgpu::PollType::Poll);
        let Ok((host, is_mapped)) = receive.try_recv() else { return };
        self.pending = None;
        if !is_mapped {
            return;
        }
        if let Ok(bytes) = self.staging.slice(..).get_mapped_range() {
            let period = self.queries.as_ref().map(|_| self.gpu.queue().get_timestamp_period());
            self.largest = Some(bytemuck::pod_read_unaligned(&bytes[LARGEST as usize..][..4]));
            self.attention = host.map(|host| attention_time(&bytes, period, host)).or(self.attention);
        }
        self.staging.unmap();
    }
}

/// Decodes two timestamps. `period` is the nanoseconds of a tick, if there are timestamps.
fn attention_time(bytes: &[u8], period: Option<f32>, host: Duration) -> Duration {
    let tick = |n: usize| bytemuck::pod_read_unaligned::<u64>(&bytes[8 * n..][..8]);
    period.map_or(host, |period| {
        // Some drivers reset their counters.
        let nanoseconds = tick(1).saturating_sub(tick(0)) as f64 * f64::from(period);
        Duration::from_nanos(nanoseconds as u64)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_become_durations() {
        let host = Duration::from_secs(1);
        let time = |ticks: [u64; 2], period| attention_time(bytemuck::bytes_of(&ticks), period, host);
        assert_eq!(time([100, 350], Some(2.0)), Duration::from_nanos(500));
        assert_eq!(time([9, 3], Some(1.0)), Duration::ZERO);
        assert_eq!(time([0, 0], None), host);
    }
}
