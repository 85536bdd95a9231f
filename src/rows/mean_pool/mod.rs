//! The operator: means of rows, as sentence embeddings are, and their gradients.

pub(crate) mod dispatch;
pub(crate) mod kernels;
pub(crate) mod reference;

use dispatch::MeanPoolOp;
use kernels::mean_pool::Pooled;

use std::sync::Arc;

use crate::kernel::{BindingCache, Dispatch, KernelOptions, Pipelines, Prepared, Recorder};
use crate::matmul::projection::check_summed_rows;
use crate::tensor::{Access, CallTensors, DType, Element, Error, TensorView, expect};

/// Which rows of `[batch, 1, length, features]` a mean is of.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum PoolMask<'a> {
    /// All of each batch entry.
    All,
    /// The first of each batch entry: `[batch, 1, 1, 1]`, U32. More than there are mean all.
    Lengths(TensorView<'a>),
    /// Those that are true: `[batch, 1, 1, length]`, Bool, as a key mask is.
    Keep(TensorView<'a>),
    /// Those of each sequence of one packed batch entry, sequence n from `cu_seqlens[n]` to
    /// `cu_seqlens[n + 1]`: `[1, 1, 1, sequences + 1]`, U32, not falling.
    Packed(TensorView<'a>),
}

/// The least length of a mean that is divided by: that of `torch.nn.functional.normalize`.
const EPS: f32 = 1e-12;

/// One call: `out` takes the mean of each sequence.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct MeanPoolForward<'a> {
    x: TensorView<'a>,
    rows: PoolMask<'a>,
    out: TensorView<'a>,
    normalize: bool,
}

impl<'a> MeanPoolForward<'a> {
    /// The means of `rows` of `x`, `[batch, 1, length, features]`, into `out`, `[sequences, 1, 1,
    /// features]`, each F32, F16 or BF16; as many sequences as batch entries unless they are
    /// packed.
    pub fn new(x: TensorView<'a>, rows: PoolMask<'a>, out: TensorView<'a>) -> Self {
        MeanPoolForward { x, rows, out, normalize: false }
    }

    /// Divides each mean by its length, or by 10⁻¹² where it is shorter: scalar products are then
    /// cosines.
    pub fn normalize(mut self, wanted: bool) -> Self {
        self.normalize = wanted;
        self
    }

    /// Checks the tensors that are read, and `means`, a tensor shaped as `out`.
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
    /// `forward` as it was made, the gradient of its `out`, shaped as that, and where the gradient
    /// of its `x` goes, shaped as that: all of it, with zeros for rows that are in no mean. F32,
    /// F16 or BF16 each.
    pub fn new(forward: MeanPoolForward<'a>, d_out: TensorView<'a>, d_x: TensorView<'a>) -> Self {
        MeanPoolBackward { forward, d_out, d_x, accumulate: false }
    }

    /// Adds the gradient to what is there instead of writing over it, rounded to its type.
    pub fn accumulate(mut self, accumulate: bool) -> Self {
        self.accumulate = accumulate;
        self
    }
}

/// The mean of each sequence's rows, divided by its length if asked for: what sentence embeddings
/// are (Reimers and Gurevych 2019, "Sentence-BERT"), and its gradient.
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
/// A sequence without rows has a mean of zero. Lengths and `cu_seqlens` past the last row end
/// there; where `cu_seqlens` fall, which mean a row has a part in is not defined, but nothing else
/// is read or written.
///
/// It keeps the bindings of recent calls, so that the same call again creates nothing. They keep
/// some buffers alive: see
/// [`forget`](Self::forget).
#[derive(Clone, Debug)]
pub struct MeanPool {
    pipelines: Pipelines,
    bindings: Arc<BindingCache>,
    kernel_options: KernelOptions,
}

impl MeanPool {
    /// The operator with pipelines of its own.
    pub fn new(device: &wgpu::Device) -> Self {
        Self::with_pipelines(&Pipelines::new(device))
    }

    /// The operator with pipelines that it shares with others on the device.
    pub fn with_pipelines(pipelines: &Pipelines) -> Self {
        MeanPool {
            pipelines: pipelines.clone(),
            bindings: Arc::default(),
            kernel_options: KernelOptions::new(),
        }
    }

    /// The pipelines, to share.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// Drops the bindings of its calls, and with them the references to their buffers. Clones share
    /// them.
    ///
    /// Without this, bindings that are not used any more go after a few calls, at most 64. Until
    /// then, the buffers that only they keep alive have at most twice the bytes of the last call's,
    /// or 8 MiB if that is more.
    pub fn forget(&self) {
        self.bindings.clear();
    }

    /// The form of kernels; the rest of [`KernelOptions`] does not concern means.
    pub fn kernel_options(mut self, kernel_options: KernelOptions) -> Self {
        self.kernel_options = kernel_options;
        self
    }

    /// Records `call` into an encoder or a pass.
    ///
    /// # Errors
    /// Shapes that differ, an `out` that shares a buffer with an input, and everything else that [`Error`] lists for tensors; then
    /// nothing has been recorded.
    pub fn forward(&self, into: &mut impl Recorder, call: &MeanPoolForward) -> Result<(), Error> {
        self.prepare(call)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles and binds what it needs. [`Prepared::record`] then records it as
    /// often as you like.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn prepare(&self, call: &MeanPoolForward) -> Result<Prepared, Error> {
        let call = self.forward_dispatch(call)?;
        self.pipelines.bind("mean pool", &[call], &self.bindings)
    }

    /// Records the gradient of a call into an encoder or a pass.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), of `d_out` and `d_x`.
    pub fn backward(&self, into: &mut impl Recorder, call: &MeanPoolBackward) -> Result<(), Error> {
        self.prepare_backward(call)?.record(into);
        Ok(())
    }

    /// Checks `call`, compiles and binds what it needs. [`Prepared::record`] then records it as
    /// often as you like.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
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
