//! Lists of dispatches, and tensors in scratch.

use super::Dispatch;
use crate::device::DeviceFacts;
use crate::tensor::{DType, Error, Layout, TensorView, dense_strides};

/// Dispatches, in order.
pub(crate) type Dispatches<'a> = Vec<Dispatch<'a>>;

/// A dense tensor in a scratch buffer, from element `offset` on.
pub(crate) fn in_scratch(
    buffer: &wgpu::Buffer,
    dtype: DType,
    shape: [usize; 4],
    offset: usize,
) -> TensorView<'_> {
    TensorView::with_layout(buffer, dtype, Layout { shape, strides: dense_strides(shape), offset })
}

/// Bytes of so many elements in scratch.
///
/// # Errors
/// More than kernels count, or the device binds.
pub(crate) fn fits(elements: u64, size: u64, device: &DeviceFacts) -> Result<u64, Error> {
    let bytes = elements.saturating_mul(size).checked_next_multiple_of(4).unwrap_or(u64::MAX);
    if elements > u64::from(u32::MAX / 2) || bytes > device.max_binding_bytes {
        return Err(Error::BindingLimit { tensor: "scratch", bytes, limit: device.max_binding_bytes });
    }
    Ok(bytes)
}

/// So many workgroups in dispatches that the device takes: the first of each, and its grid.
pub(crate) fn runs(workgroups: usize, device: &DeviceFacts) -> impl Iterator<Item = (u32, [u32; 3])> + use<> {
    let most = device.max_workgroups as usize;
    (0..workgroups)
        .step_by(most)
        .map(move |first| (first as u32, [(workgroups - first).min(most) as u32, 1, 1]))
}
