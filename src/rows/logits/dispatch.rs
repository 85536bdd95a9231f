//! Dispatches for log-softmax and top-k, from checked tensors.

use super::kernels::{log_softmax, log_softmax_backward, top_k, top_k_merge, top_k_select, top_k_sort};
use crate::device::DeviceFacts;
use crate::kernel::{Dispatch, Dispatches, KernelOptions, ScratchSize, Slot, Width, fits, in_scratch};
use crate::rows::plan::{self, Rows};
use crate::tensor::{DType, Error, TensorView, count};

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
        width: Width::of_rows(&[x, out]),
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
        width: Width::of_rows(&[out, d_out, d_x]),
    };
    call.dispatch([groups, 1, 1], device)
}

/// The largest `k` that `top_k.wgsl` serves. It searches a part of the row again for each result.
const MOST_SEARCHED: usize = 64;

/// The largest `k` that needs no memory for pairs: a workgroup sorts a row in place.
pub(crate) const MOST_IN_PLACE: usize = top_k_sort::BLOCKS[1] as usize;

/// Checked tensors of a top-k. `indices` and `values` are `[batch, heads, length, k]`.
#[derive(Clone, Copy)]
pub(crate) struct TopKProblem<'a> {
    pub x: TensorView<'a>,
    pub values: Option<TensorView<'a>>,
    pub indices: TensorView<'a>,
    /// True if elements of −∞ do not count. Rows may then have fewer than `k` elements. The rest of
    /// `indices` is u32::MAX, and the rest of `values` is −∞.
    pub skips_neg_inf: bool,
}

impl<'a> TopKProblem<'a> {
    fn k(&self) -> usize {
        self.indices.shape()[3]
    }

    /// The bytes of the pairs of `rows` rows with `k` results.
    pub fn pairs_bytes(rows: usize, k: usize, device: &DeviceFacts) -> Result<u64, Error> {
        if k <= MOST_IN_PLACE {
            return Ok(0);
        }
        fits((rows as u64).saturating_mul(k as u64).saturating_mul(4), 4, device)
    }

    /// The temporary memory of the call.
    pub fn scratch_size(&self, device: &DeviceFacts) -> Result<ScratchSize, Error> {
        let pairs = Self::pairs_bytes(row_count(&self.x), self.k(), device)?;
        Ok(ScratchSize::default().with(Slot::TopKPairs, pairs))
    }

    /// The dispatches. `pairs` is the part of the scratch, present if `k` needs it.
    pub fn dispatches(
        &self,
        pairs: Option<&'a wgpu::Buffer>,
        kernel_options: &KernelOptions,
        device: &DeviceFacts,
    ) -> Dispatches<'a> {
        let cpu = kernel_options.target.is_cpu(device);
        if self.k() <= MOST_SEARCHED && !self.skips_neg_inf {
            return vec![self.search(cpu, device)];
        }
        let TopKProblem { x, values, indices, .. } = *self;
        let [_, heads, length, columns] = x.shape();
        let (k, rows) = (self.k(), row_count(&x));
        let pairs = pairs.map(|buffer| in_scratch(buffer, DType::U32, [1, 1, 1, rows * k * 4], 0));
        let select = top_k_select::TopKSelectCall {
            x,
            indices: pairs.map_or(Some(indices), |_| None),
            pairs,
            columns: columns as u32,
            k: k as u32,
            heads: heads as u32,
            length: length as u32,
            least: if self.skips_neg_inf { top_k_select::NEG_INF_KEY } else { 0 },
            lanes: top_k_select::lanes(cpu),
            width: Width::of(x.layout.in_fours(3)),
        };
        let block = k.next_power_of_two().min(MOST_IN_PLACE);
        let most = top_k_sort::BLOCKS.into_iter().find(|most| block <= *most as usize);
        let sort = top_k_sort::TopKSortCall {
            x: if pairs.is_some() { None } else { Some(x) },
            values: values.filter(|_| pairs.is_none()),
            indices: select.indices,
            pairs,
            k: k as u32,
            heads: heads as u32,
            length: length as u32,
            block: block as u32,
            neg_inf: f32::NEG_INFINITY,
            lanes: top_k_select::lanes(cpu),
            most: most.unwrap_or(MOST_IN_PLACE as u32),
        };
        let blocks = k.div_ceil(MOST_IN_PLACE);
        let mut all = vec![select.dispatch([rows, 1, 1], device), sort.dispatch([blocks, rows, 1], device)];
        let Some(pairs) = pairs else { return all };
        let groups = k.div_ceil(top_k_merge::LANES as usize);
        let mut run = MOST_IN_PLACE;
        for half in [0, 1].into_iter().cycle() {
            let is_last = 2 * run >= k;
            let call = top_k_merge::TopKMergeCall {
                x: is_last.then_some(x),
                values: values.filter(|_| is_last),
                indices: is_last.then_some(indices),
                pairs,
                k: k as u32,
                heads: heads as u32,
                length: length as u32,
                run: run as u32,
                half,
                neg_inf: f32::NEG_INFINITY,
            };
            all.push(call.dispatch([groups, rows, 1], device));
            if is_last {
                break;
            }
            run *= 2;
        }
        all
    }

    /// Searches each result among the elements after the previous one.
    fn search(&self, cpu: bool, device: &DeviceFacts) -> Dispatch<'a> {
        let TopKProblem { x, values, indices, .. } = *self;
        let [_, heads, length, columns] = x.shape();
        let rows = row_count(&x);
        let groups = rows.min(MOST_GROUPS).min(device.max_workgroups as usize);
        let call = top_k::TopKCall {
            x,
            values,
            indices,
            columns: columns as u32,
            k: self.k() as u32,
            heads: heads as u32,
            length: length as u32,
            rows: rows as u32,
            step: groups as u32,
            lanes: top_k::lanes(columns, cpu),
            width: Width::of(x.layout.in_fours(3)),
        };
        call.dispatch([groups, 1, 1], device)
    }
}
