//! Staging buffers that host and device use alternately: MPI cannot read wgpu's buffers directly.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use wgpu_attention::wgpu;

use crate::error::Error;

const UNMAPPED: u8 = 0;
const UNDER_WAY: u8 = 1;
const MAPPED: u8 = 2;
const FAILED: u8 = 3;

/// A buffer that the host uses while it is mapped, and the device while it is unmapped.
pub(crate) struct Staging {
    pub buffer: wgpu::Buffer,
    mode: wgpu::MapMode,
    state: Arc<AtomicU8>,
}

pub(crate) fn lost(error: &dyn std::fmt::Display) -> Error {
    Error::Device(format!("the device does not answer: {error}"))
}

impl Staging {
    /// A buffer for copies from the host to the device, mapped at creation.
    pub fn upload(device: &wgpu::Device, bytes: usize) -> Self {
        Self::new(device, bytes, wgpu::MapMode::Write)
    }

    /// A buffer for copies from the device to the host.
    pub fn download(device: &wgpu::Device, bytes: usize) -> Self {
        Self::new(device, bytes, wgpu::MapMode::Read)
    }

    fn new(device: &wgpu::Device, bytes: usize, mode: wgpu::MapMode) -> Self {
        let writes = mode == wgpu::MapMode::Write;
        let usage = if writes {
            wgpu::BufferUsages::MAP_WRITE | wgpu::BufferUsages::COPY_SRC
        } else {
            wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST
        };
        let buffer = device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("ring.staging"),
            size: bytes as u64,
            usage,
            mapped_at_creation: writes,
        });
        let state = Arc::new(AtomicU8::new(if writes { MAPPED } else { UNMAPPED }));
        Staging { buffer, mode, state }
    }

    /// Requests that the buffer is mapped when all submitted work has ended.
    pub fn ask(&self) {
        let state = self.state.clone();
        state.store(UNDER_WAY, Ordering::Release);
        self.buffer.map_async(self.mode, .., move |result| {
            state.store(if result.is_ok() { MAPPED } else { FAILED }, Ordering::Release);
        });
    }

    fn wait(&self, device: &wgpu::Device) -> Result<(), Error> {
        let mut pause = Duration::from_micros(20);
        loop {
            device.poll(wgpu::PollType::Poll).map_err(|e| lost(&e))?;
            match self.state.load(Ordering::Acquire) {
                MAPPED => return Ok(()),
                UNDER_WAY => std::thread::sleep(pause),
                _ => return Err(Error::Device("a staging buffer could not be mapped".into())),
            }
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }

    /// Waits for the mapping, fills the buffer and unmaps it for the device.
    pub fn write(&self, device: &wgpu::Device, bytes: &[u8]) -> Result<(), Error> {
        self.wait(device)?;
        let len = bytes.len() as u64;
        let mut mapped = self.buffer.slice(..len).get_mapped_range_mut().map_err(|e| lost(&e))?;
        mapped.copy_from_slice(bytes);
        drop(mapped);
        self.unmap();
        Ok(())
    }

    /// Waits for the mapping, passes the data to `show` and unmaps the buffer for the device.
    pub fn read(&self, device: &wgpu::Device, len: usize, show: impl FnOnce(&[u8])) -> Result<(), Error> {
        self.wait(device)?;
        let mapped = self.buffer.slice(..len as u64).get_mapped_range().map_err(|e| lost(&e))?;
        show(&mapped);
        drop(mapped);
        self.unmap();
        Ok(())
    }

    fn unmap(&self) {
        self.state.store(UNMAPPED, Ordering::Release);
        self.buffer.unmap();
    }
}
