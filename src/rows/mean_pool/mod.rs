//! The mean-pooling operator: means of rows, such as sentence embeddings, and their gradients.

pub(crate) mod dispatch;
pub(crate) mod kernels;
pub(crate) mod reference;

use dispatch::MeanPoolOp;
use kernels::mean_pool::Pooled;

use std::sync::Arc;

use crate::kernel::{BindingCache, Dispatch, KernelOptions, Pipelines, Prepared, Recorder};
use crate::matmul::projection::check_summed_rows;
use crate::tensor::{Access, CallTensors, DType, Element, Error, TensorView, expect};

/// Selects the rows of `[batch, 1, length, features]` that belong to a mean.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum PoolMask<'a> {
    /// All rows of each batch entry.
    All,
    /// The first rows of each batch entry. The tensor of lengths is `[batch, 1, 1, 1]`, U32. A
    /// length above the number of rows means all rows.
    Lengths(TensorView<'a>),
    /// The rows that are true in a tensor `[batch, 1, 1, length]`, Bool, such as a key mask.
    Keep(TensorView<'a>),
    /// The rows of each sequence of one packed batch entry. Sequence n has the rows from
    /// `cu_seqlens[n]` to `cu_seqlens[n + 1]`. `cu_seqlens` is `[1, 1, 1, sequences + 1]`, U32, and
    /// must not decrease.
    Packed(TensorView<'a>),
}

/// The lower bound of the divisor of a mean, as in `torch.nn.functional.normalize`.
const EPS: f32 = 1e-12;

/// One call, which writes the mean of each sequence to `out`.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct MeanPoolForward<'a> {
    x: TensorView<'a>,
    rows: PoolMask<'a>,
    out: TensorView<'a>,
    normalize: bool,
}

impl<'a> MeanPoolForward<'a> {
    /// Writes the means of the selected `rows` of `x` to `out`. `x` is `[batch, 1, length,
    /// features]`, and `out` is `[sequences, 1, 1, features]`. Both are F32, F16 or BF16. Each
    /// batch entry is a sequence, unless the rows are packed.
    pub fn new(x: TensorView<'a>, rows: PoolMask<'a>, out: TensorView<'a>) -> Self {
        MeanPoolForward { x, rows, out, normalize: false }
    }

    /// Divides each mean by its length, or by 10⁻¹² if the length is smaller. Scalar products are
    /// then cosines.
    pub fn normalize(mut self, wanted: bool) -> Self {
        self.normalize = wanted;
        self
    }

    /// Checks the input tensors, and `means`, a tensor with the shape of `out`.
    fn op(
        &self,
        tensors: &mut CallTensors<'a, '_>,
        (name, means, access): (&'static str, TensorView<'a>, Access),
    ) -> Result<MeanPoolOp<'a>, Error> {
        let x = self.x;
        let [batch, _, length, features] = x.shape();
        tensors.read("x", x, Element::Float, [batch, 1, length, features])?;
        check_summed_rows("x", &x, 1)?;
        let (pooled, which, sequences) = match self.rows {
            PoolMask::All => (Pooled::All, None, batch),
            PoolMask::Lengths(t) => {
                tensors.read("lengths", t, DType::U32, [batch, 1, 1, 1])?;
                (Pooled::Lengths, Some(t), batch)
            }
            PoolMask::Keep(t) => {
                tensors.read("keep", t, DType::Bool, [batch, 1, 1, length])?;
                (Pooled::Keep, Some(t), batch)
            }
            PoolMask::Packed(t) => {
                let ends = t.shape()[3];
                tensors.read("cu_seqlens", t, DType::U32, [1, 1, 1, ends.max(2)])?;
                expect("x", x.shape(), 0, 1)?;
                (Pooled::Packed, Some(t), ends - 1)
            }
        };
        tensors.add(access, name, means, Element::Float, [sequences, 1, 1, features])?;
        Ok(MeanPoolOp { x, pooled, which, sequences, l2: self.normalize.then_some(EPS) })
    }
}

/// The gradient of the rows of one forward call.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct MeanPoolBackward<'a> {
    forward: MeanPoolForward<'a>,
    d_out: TensorView<'a>,
    d_x: TensorView<'a>,
    accumulate: bool,
}

impl<'a> MeanPoolBackward<'a> {
    /// The backward pass of `forward`. `d_out` is the gradient of its `out`, with the same shape.
    /// `d_x` is the output for the gradient of its `x`, with the same shape. Rows without a mean
    /// get zeros. All are F32, F16 or BF16.
    pub fn new(forward: MeanPoolForward<'a>, d_out: TensorView<'a>, d_x: TensorView<'a>) -> Self {
        MeanPoolBackward { forward, d_out, d_x, accumulate: false }
    }

    /// Adds the gradient to `d_x` instead of overwriting it. The sum is rounded to the type of
    /// `d_x`.
    pub fn accumulate(mut self, accumulate: bool) -> Self {
        self.accumulate = accumulate;
        self
    }
}

/// The mean of each sequence's rows, optionally divided by its length, and the gradient. Use it to
/// compute sentence embeddings (Reimers and Gurevych 2019, "Sentence-BERT").
///
/// ```no_run
/// # use wgpu_attention::{Error, TensorView, wgpu};
/// # use wgpu_attention::rows::{MeanPool, MeanPoolForward, PoolMask};
/// # fn f(device: &wgpu::Device, encoder: &mut wgpu::CommandEncoder, tensors: [TensorView; 3]) -> Result<(), Error> {
/// # let [hidden, key_mask, embeddings] = tensors;
/// let call = MeanPoolForward::new(hidden, PoolMask::Keep(key_mask), embeddings).normalize(true);
/// MeanPool::new(device).forward(encoder, &call)
/// # }
/// ```
///
/// A sequence without rows has a mean of zero. Lengths and `cu_seqlens` are clamped to the last
/// row. If `cu_seqlens` decreases, the result is undefined: a row may belong to any mean. Nothing
/// outside the tensors is read or written.
///
/// The operator stores the bindings of recent calls, so that a repeated call creates nothing. The
/// bindings keep some buffers alive: see [`forget`](Self::forget).
#[doc(alias = "mean_pooling")]
#[derive(Clone, Debug)]
pub struct MeanPool {
    pipelines: Pipelines,
    bindings: Arc<BindingCache>,
    kernel_options: KernelOptions,
}

impl MeanPool {
    /// Creates the operator with separate pipelines.
    pub fn new(device: &wgpu::Device) -> Self {
        Self::with_pipelines(&Pipelines::new(device))
    }

    /// Creates the operator with pipelines that other operators of the device share.
    pub fn with_pipelines(pipelines: &Pipelines) -> Self {
        MeanPool {
            pipelines: pipelines.clone(),
            bindings: Arc::default(),
            kernel_options: KernelOptions::new(),
        }
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

    /// Records `call` into an encoder or a pass.
    ///
    /// # Errors
    /// Shapes that do not match, an `out` that overlaps an input, and every other
    /// [`Error`] of tensors. After an error nothing has been recorded.
    pub fn forward(&self, into: &mut impl Recorder, call: &MeanPoolForward) -> Result<(), Error> {
        self.prepare(call)?.record(into);
        Ok(())
    }

    /// Checks `call`, then compiles and binds its kernels. [`Prepared::record`] can then record it
    /// any number of times.
    ///
    /// # Errors
    /// See [`forward`](Self::forward).
    pub fn prepare(&self, call: &MeanPoolForward) -> Result<Prepared, Error> {
        let call = self.forward_dispatch(call)?;
        self.pipelines.bind("mean pool", &[call], &self.bindings)
    }

    /// Records the gradient of a call into an encoder or a pass.
    ///
    /// # Errors
    /// See [`forward`](Self::forward). The same errors apply to `d_out` and `d_x`.
    pub fn backward(&self, into: &mut impl Recorder, call: &MeanPoolBackward) -> Result<(), Error> {
        self.prepare_backward(call)?.record(into);
        Ok(())
    }

    /// Checks `call`, then compiles and binds its kernels. [`Prepared::record`] can then record it
    /// any number of times.
    ///
    /// # Errors
    /// See [`backward`](Self::backward).
    pub fn prepare_backward(&self, call: &MeanPoolBackward) -> Result<Prepared, Error> {
        let call = self.backward_dispatch(call)?;
        self.pipelines.bind("mean pool backward", &[call], &self.bindings)
    }

    fn forward_dispatch<'a>(&self, call: &MeanPoolForward<'a>) -> Result<Dispatch<'a>, Error> {
        let device = &self.pipelines.facts();
        let mut tensors = CallTensors::new(device);
        let op = call.op(&mut tensors, ("out", call.out, Access::Write))?;
        tensors.finish()?;
        Ok(op.forward(call.out, &self.kernel_options, device))
    }

    fn backward_dispatch<'a>(&self, call: &MeanPoolBackward<'a>) -> Result<Dispatch<'a>, Error> {
        let device = &self.pipelines.facts();
        let MeanPoolBackward { forward, d_out, d_x, accumulate } = *call;
        let mut tensors = CallTensors::new(device);
        let op = forward.op(&mut tensors, ("d_out", d_out, Access::Read))?;
        tensors.write("d_x", d_x, Element::Float, forward.x.shape())?;
        tensors.finish()?;
        Ok(op.backward(d_out, d_x, accumulate, &self.kernel_options, device))
    }
}
