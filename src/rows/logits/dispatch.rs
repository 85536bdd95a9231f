//! Dispatches for log-softmax and top-k, from checked tensors.

use super::kernels::{log_softmax, log_softmax_backward, top_k};
use crate::device::DeviceFacts;
use crate::kernel::{Dispatch, KernelOptions, Width};
use crate::rows::plan::{self, Rows};
use crate::tensor::{TensorView, count};

/// The largest number of workgroups of a dispatch. If there are more rows, each workgroup processes
/// several.
const MOST_GROUPS: usize = 65535;

fn row_count(x: &TensorView) -> usize {
    let [batch, heads, length, _] = x.shape();
    count([batch, heads, length, 1])
}

/// Distributes the rows. Returns the kernel's variant, the number of workgroups, and the distance
/// between an invocation's rows.
fn share(x: &TensorView, kernel_options: &KernelOptions, device: &DeviceFacts) -> (Rows, usize, u32) {
    let rows = plan::rows(x.shape()[3], kernel_options.target.is_cpu(device));
    let each = (rows.workgroup / rows.lanes) as usize;
    let groups = row_count(x).div_ceil(each).min(MOST_GROUPS).min(device.max_workgroups as usize);
    (rows, groups, (groups * each) as u32)
}

/// Computes `out = log_softmax(x)`. Both have the same shape.
pub(crate) fn log_softmax<'a>(
    x: TensorView<'a>,
    out: TensorView<'a>,
    kernel_options: &KernelOptions,
    device: &DeviceFacts,
) -> Dispatch<'a> {
    let [_, heads, length, columns] = x.shape();
    let (shares, groups, step) = share(&x, kernel_options, device);
    let call = log_softmax::LogSoftmaxCall {
        x,
        out,
        columns: columns as u32,
        heads: heads as u32,
        length: length as u32,
        rows: row_count(&x) as u32,
        step,
        inf: f32::INFINITY,
        nan: f32::NAN,
        shares,
        width: Width::of([x, out].iter().all(|t| t.layout.in_fours(3))),
    };
    call.dispatch([groups, 1, 1], device)
}

/// Computes the gradient of the input from the output and the gradient of the output.
pub(crate) fn log_softmax_backward<'a>(
    [out, d_out, d_x]: [TensorView<'a>; 3],
    accumulates: bool,
    kernel_options: &KernelOptions,
    device: &DeviceFacts,
) -> Dispatch<'a> {
    let [_, heads, length, columns] = out.shape();
    let (shares, groups, step) = share(&out, kernel_options, device);
    let call = log_softmax_backward::LogSoftmaxBackwardCall {
        out,
        d_out,
        d_x,
        columns: columns as u32,
        heads: heads as u32,
        length: length as u32,
        rows: row_count(&out) as u32,
        step,
        inf: f32::INFINITY,
        shares,
        accumulates,
        width: Width::of([out, d_out, d_x].iter().all(|t| t.layout.in_fours(3))),
    };
    call.dispatch([groups, 1, 1], device)
}

/// Writes the largest elements of every row to `values`, if requested, and their columns to
/// `indices`. Both are `[batch, heads, length, k]`.
pub(crate) fn top_k<'a>(
    x: TensorView<'a>,
    values: Option<TensorView<'a>>,
    indices: TensorView<'a>,
    kernel_options: &KernelOptions,
    device: &DeviceFacts,
) -> Dispatch<'a> {
    let [_, heads, length, columns] = x.shape();
    let rows = row_count(&x);
    let groups = rows.min(MOST_GROUPS).min(device.max_workgroups as usize);
    let call = top_k::TopKCall {
        x,
        values,
        indices,
        columns: columns as u32,
        k: indices.shape()[3] as u32,
        heads: heads as u32,
        length: length as u32,
        rows: rows as u32,
        step: groups as u32,
        lanes: top_k::lanes(columns, kernel_options.target.is_cpu(device)),
        width: Width::of(x.layout.in_fours(3)),
    };
    call.dispatch([groups, 1, 1], device)
}
