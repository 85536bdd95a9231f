//! Tables of rotations on the device.

use super::kernels::rotation_table::{DIGITS, LEVELS, ORDER_HALF, RotationParams};
use super::{RopeConfig, check_base, check_channels, sinusoid_frequencies};
use crate::kernel::guard::guarded;
use crate::tensor::{DType, Error, TensorView, axes};

/// `[3, 256, pairs, 2]`: cos and sin of digit · 256^level · frequency, as
/// `position/rotation_table.wgsl` reads them.
#[derive(Clone, Debug)]
struct Table {
    buffer: wgpu::Buffer,
    pairs: usize,
}

impl Table {
    fn new(device: &wgpu::Device, tensor: &'static str, frequencies: &[f64]) -> Result<Self, Error> {
        let bytes = (LEVELS * DIGITS * frequencies.len() * 8) as u64;
        let limits = device.limits();
        let limit = limits.max_buffer_size.min(limits.max_storage_buffer_binding_size);
        if bytes > limit {
            return Err(Error::BindingLimit { tensor, bytes, limit });
        }
        let mut table = Vec::with_capacity(LEVELS * DIGITS * frequencies.len());
        for level in 0..LEVELS {
            for digit in 0..DIGITS {
                // The position is exact, so the angle is as exact as f64 permits.
                let position = (digit * DIGITS.pow(level as u32)) as f64;
                table.extend(frequencies.iter().map(|frequency| {
                    let (sin, cos) = (position * frequency).sin_cos();
                    [cos as f32, sin as f32]
                }));
            }
        }
        let buffer = guarded(device, "a table of rotations", || {
            let buffer = device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("attention.rotation_table"),
                size: bytes,
                usage: TensorView::USAGES,
                mapped_at_creation: true,
            });
            if let Ok(mut mapped) = buffer.slice(..).get_mapped_range_mut() {
                mapped.slice(..).copy_from_slice(bytemuck::cast_slice(&table));
            }
            buffer.unmap();
            buffer
        })?;
        Ok(Table { buffer, pairs: frequencies.len() })
    }

    fn view(&self) -> TensorView<'_> {
        TensorView::new(&self.buffer, DType::F32, [LEVELS, DIGITS, self.pairs, 2])
    }
}

/// A rotary position embedding on a device, as a table of `3072 · rotary_dim` bytes.
///
/// It holds rotations from which kernels compute the rotation at any position up to
/// [`MAX_POSITION`](super::MAX_POSITION). The error is within a few units in the last place of f32.
/// Clones are cheap.
#[derive(Clone, Debug)]
pub struct Rope {
    config: RopeConfig,
    table: Table,
}

impl Rope {
    /// True if both have the same configuration.
    pub(crate) fn is_same(&self, other: &Rope) -> bool {
        self.config == other.config
    }

    /// Computes the table, in f64, and uploads it.
    ///
    /// # Errors
    /// The errors of [`RopeConfig::check`], and [`Error::BindingLimit`] and [`Error::OutOfMemory`]
    /// for the table.
    pub fn new(device: &wgpu::Device, config: RopeConfig) -> Result<Self, Error> {
        config.check()?;
        Ok(Rope { config, table: Table::new(device, "rope", &config.frequencies())? })
    }

    /// Returns the configuration.
    pub(crate) fn config(&self) -> &RopeConfig {
        &self.config
    }

    /// Checks that the rows are as wide as the rotated channels.
    pub(crate) fn check_width(&self, tensor: &'static str, shape: [usize; 4]) -> Result<(), Error> {
        let rotary_dim = self.config.rotary_dim;
        if rotary_dim > shape[3] {
            let expected = format!("at least {rotary_dim} (`rotary_dim` of the rope)");
            return Err(Error::Shape {
                tensor,
                axis: axes(tensor)[3],
                expected,
                got: shape[3],
                shape,
                wanted: None,
            });
        }
        Ok(())
    }

    /// Returns the tensor that a kernel binds as `rotation_table`.
    pub(crate) fn view(&self) -> TensorView<'_> {
        self.table.view()
    }

    /// Returns the parameter of a kernel that rotates.
    pub(crate) fn rotation_params(&self) -> RotationParams {
        RotationParams {
            pairs: self.table.pairs as u32,
            amplitude: self.config.amplitude() as f32,
            rotary_dim: self.config.rotary_dim as u32,
            order: self.config.order as u32,
        }
    }
}

/// The sinusoidal encoding of positions on a device (Vaswani et al. 2017, "Attention is all you
/// need").
///
/// Channel `2n` is `sin(position · base^(−2n / dim))`, channel `2n + 1` the cosine. A table of
/// `3072 · dim` bytes holds it for every position up to [`MAX_POSITION`](super::MAX_POSITION).
/// Clones are cheap.
#[derive(Clone, Debug)]
pub struct Sinusoid {
    dim: usize,
    table: Table,
}

impl Sinusoid {
    /// Computes the table, in f64, and uploads it. `base` is 10000 in the paper.
    ///
    /// # Errors
    /// - `dim` 0 or above 65536
    /// - a base that is not finite and above 1
    /// - [`Error::BindingLimit`] and [`Error::OutOfMemory`] for the table
    pub fn new(device: &wgpu::Device, dim: usize, base: f64) -> Result<Self, Error> {
        check_channels("sinusoid dim", dim)?;
        check_base("sinusoid base", base)?;
        let frequencies: Vec<f64> = sinusoid_frequencies(dim, base).collect();
        Ok(Sinusoid { dim, table: Table::new(device, "sinusoid", &frequencies)? })
    }

    /// Returns the number of channels.
    pub(crate) fn dim(&self) -> usize {
        self.dim
    }

    pub(crate) fn view(&self) -> TensorView<'_> {
        self.table.view()
    }

    pub(crate) fn rotation_params(&self) -> RotationParams {
        RotationParams {
            pairs: self.table.pairs as u32,
            amplitude: 1.0,
            rotary_dim: self.dim as u32,
            order: ORDER_HALF,
        }
    }
}
