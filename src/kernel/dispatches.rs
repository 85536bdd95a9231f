//! Lists of dispatches, and tensors in scratch memory.

use super::Dispatch;
use crate::device::DeviceFacts;
use crate::tensor::{DType, Error, Layout, TensorView, dense_strides};

/// A list of dispatches, in order.
pub(crate) type Dispatches<'a> = Vec<Dispatch<'a>>;

/// A dense tensor in a scratch buffer. It starts at element `offset`.
pub(crate) fn in_scratch(
    buffer: &wgpu::Buffer,
    dtype: DType,
    shape: [usize; 4],
    offset: usize,
) -> TensorView<'_> {
    TensorView::with_layout(buffer, dtype, Layout { shape, strides: dense_strides(shape), offset })
}

/// Returns the bytes of `elements` elements of `size` bytes in scratch, rounded up to 4.
///
/// # Errors
/// [`Error::BindingLimit`] if kernels cannot count the elements, or the device cannot bind the
/// bytes.
pub(crate) fn fits(elements: u64, size: u64, device: &DeviceFacts) -> Result<u64, Error> {
    let bytes = elements.saturating_mul(size).checked_next_multiple_of(4).unwrap_or(u64::MAX);
    if elements > u64::from(u32::MAX / 2) || bytes > device.max_binding_bytes {
        return Err(Error::BindingLimit { tensor: "scratch", bytes, limit: device.max_binding_bytes });
    }
    Ok(bytes)
}

/// Splits `workgroups` into dispatches within the device's limit. Returns the first workgroup and
/// the grid of each.
pub(crate) fn runs(workgroups: usize, device: &DeviceFacts) -> impl Iterator<Item = (u32, [u32; 3])> + use<> {
    let most = device.max_workgroups as usize;
    (0..workgroups)
        .step_by(most)
        .map(move |first| (first as u32, [(workgroups - first).min(most) as u32, 1, 1]))
}
