//! The largest elements of rows.

use std::sync::Arc;

use super::dispatch::{MOST_IN_PLACE, TopKProblem};
use crate::device::DeviceFacts;
use crate::kernel::{BindingCache, KernelOptions, Pipelines, Prepared, Recorder, Scratch, ScratchSize, Slot};
use crate::matmul::projection::check_summed_rows;
use crate::tensor::{CallTensors, DType, Element, Error, TensorView};

/// The largest `k` of a call without a scratch. [`TopK::forward_with`] has no limit.
pub const MAX_TOP_K: usize = MOST_IN_PLACE;

/// One call. It processes every row of `[batch, heads, length, columns]` separately.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct TopKForward<'a> {
    x: TensorView<'a>,
    indices: TensorView<'a>,
    values: Option<TensorView<'a>>,
}

impl<'a> TopKForward<'a> {
    /// Writes the columns of the k largest elements of each row of `x` to `indices`, the largest
    /// first. `x` is F32, F16 or BF16, and `indices` is `[batch, heads, length, k]`, U32. With k =
    /// 1 it is the argmax.
    #[doc(alias = "argmax")]
    pub fn new(x: TensorView<'a>, indices: TensorView<'a>) -> Self {
        TopKForward { x, indices, values: None }
    }

    /// Sets the output for the largest elements, with the shape of `indices`; F32, F16 or BF16.
    pub fn values(mut self, values: impl Into<Option<TensorView<'a>>>) -> Self {
        self.values = values.into();
        self
    }

    fn check(&self, device: &DeviceFacts) -> Result<TopKProblem<'a>, Error> {
        let TopKForward { x, indices, values } = *self;
        let mut tensors = CallTensors::new(device);
        tensors.read("x", x, Element::Float, x.shape())?;
        let [batch, heads, length, columns] = x.shape();
        check_summed_rows("x", &x, heads)?;
        let k = indices.shape()[3];
        if k > columns {
            let expected = "at most the number of columns";
            return Err(Error::Option { option: "k", value: k as f64, expected });
        }
        tensors.write("indices", indices, DType::U32, [batch, heads, length, k])?;
        tensors.write("values", values, Element::Float, indices.shape())?;
        tensors.finish()?;
        Ok(TopKProblem { x, values, indices, skips_neg_inf: false })
    }
}

/// The k largest elements of rows of any length, sorted, and their columns. With k = 1 it is the
/// argmax.
///
/// ```no_run
/// # use wgpu_attention::{DType, Error, TensorView, wgpu};
/// # use wgpu_attention::rows::{TopK, TopKForward};
/// # fn f(device: &wgpu::Device, encoder: &mut wgpu::CommandEncoder, logits: TensorView, next: &wgpu::Buffer)
/// # -> Result<(), Error> {
/// // The likeliest token of each sequence.
/// let next = TensorView::sequence(next, DType::U32, [logits.shape()[0], 1, 1]);
/// TopK::new(device).forward(encoder, &TopKForward::new(logits, next))
/// # }
/// ```
///
/// Among equal elements, the lower index comes first; −0 and 0 are equal. NaN is larger than every
/// number, as in PyTorch, so NaN in a row is visible in the result.
///
/// Up to k = 64, each result is searched after the previous one. Above, a row is read three times,
/// whatever k is: a radix selection counts the high bits of its elements. Rows with more than 512
/// elements that agree with the k-th in 22 bits are read three more times. The results are then
/// sorted, up to k = 2048 in workgroup memory. Above, sorted runs are merged in a scratch: call
/// [`forward_with`](Self::forward_with).
///
/// The operator stores the bindings of recent calls, so that a repeated call creates nothing. The
/// bindings keep some buffers alive: see [`forget`](Self::forget).
#[doc(alias = "topk")]
#[doc(alias = "argmax")]
#[derive(Clone, Debug)]
pub struct TopK {
    pipelines: Pipelines,
    bindings: Arc<BindingCache>,
    kernel_options: KernelOptions,
}

impl TopK {
    /// Creates the operator with separate pipelines.
    pub fn new(device: &wgpu::Device) -> Self {
        Self::with_pipelines(&Pipelines::new(device))
    }

    /// Creates the operator with pipelines that other operators of the device share.
    pub fn with_pipelines(pipelines: &Pipelines) -> Self {
        TopK { pipelines: pipelines.clone(), bindings: Arc::default(), kernel_options: KernelOptions::new() }
    }

    /// The pipelines of the operator, to share with other operators.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// Drops the bindings of past calls, and with them the references to their buffers. Clones
    /// share the bindings.
    ///
    /// Without this call, unused bindings are dropped after a few calls, at most 64. Until then,
    /// the buffers that only these bindings keep alive are limited. They have at most twice the
    /// bytes of the last call's buffers, or 8 MiB if that is more.
    pub fn forget(&self) {
        self.bindings.clear();
    }

    /// Sets the class of kernels. The other [`KernelOptions`] do not apply to this operator.
    pub fn kernel_options(mut self, kernel_options: KernelOptions) -> Self {
        self.kernel_options = kernel_options;
        self
    }

    /// Returns the temporary memory that `call` needs. If k is larger than [`MAX_TOP_K`], it is 16
    /// bytes for each result. Otherwise it is none.
    ///
    /// # Errors
    /// See [`forward`](Self::forward).
    pub fn scratch_size(&self, call: &TopKForward) -> Result<ScratchSize, Error> {
        let device = &self.pipelines.facts();
        call.check(device)?.scratch_size(device)
    }

    /// Records `call` into an encoder or a pass. It needs no scratch.
    ///
    /// # Errors
    /// [`Error::Option`] if `k` is larger than the number of columns. [`Error::Unsupported`] if `k`
    /// is larger than [`MAX_TOP_K`]. Shapes that do not match, and written tensors that overlap
    /// other tensors. Every other [`Error`] of tensors. After an error nothing has been recorded.
    pub fn forward(&self, into: &mut impl Recorder, call: &TopKForward) -> Result<(), Error> {
        self.prepare(call)?.record(into);
        Ok(())
    }

    /// Checks `call`, then compiles and binds its kernels. [`Prepared::record`] can then record it
    /// any number of times.
    ///
    /// # Errors
    /// See [`forward`](Self::forward).
    pub fn prepare(&self, call: &TopKForward) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        let problem = call.check(device)?;
        if call.indices.shape()[3] > MAX_TOP_K {
            let why = "use `forward_with`, with a scratch of `scratch_size`";
            return Err(Error::Unsupported { what: "a k above 2048 without a scratch", why });
        }
        let dispatches = problem.dispatches(None, &self.kernel_options, device);
        self.pipelines.bind("top-k", &dispatches, &self.bindings)
    }

    /// Records `call` with any `k` into an encoder or a pass. The scratch stores its bindings.
    ///
    /// # Errors
    /// See [`forward`](Self::forward), and every [`Error`] of a scratch.
    pub fn forward_with(
        &self,
        into: &mut impl Recorder,
        call: &TopKForward,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        self.prepare_with(call, scratch)?.record(into);
        Ok(())
    }

    /// Checks `call` with any `k`, then compiles and binds its kernels. [`Prepared::record`] can
    /// then record it any number of times.
    ///
    /// # Errors
    /// See [`forward_with`](Self::forward_with).
    pub fn prepare_with(&self, call: &TopKForward, scratch: &mut Scratch) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        let problem = call.check(device)?;
        let scratch: &Scratch = scratch;
        scratch.check(problem.scratch_size(device)?)?;
        let pairs = match call.indices.shape()[3] > MAX_TOP_K {
            true => Some(scratch.buffer(Slot::TopKPairs)?),
            false => None,
        };
        let dispatches = problem.dispatches(pairs, &self.kernel_options, device);
        self.pipelines.bind("top-k", &dispatches, scratch.bindings())
    }
}
