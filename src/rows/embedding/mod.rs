//! The embedding operator: rows of a table by their ids, and the gradient of the table.

mod backward;
pub(crate) mod dispatch;
pub(crate) mod kernels;
pub(crate) mod reference;

pub use backward::EmbeddingBackward;
use dispatch::EmbeddingOp;

use std::sync::Arc;

use crate::device::DeviceFacts;
use crate::kernel::{BindingCache, Pipelines, Prepared, Recorder};
use crate::matmul::projection::check_summed_rows;
use crate::tensor::{Access, CallTensors, DType, Element, Error, TensorView};

/// One call: `out = scale · table[ids]`.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct EmbeddingForward<'a> {
    pub(crate) ids: TensorView<'a>,
    pub(crate) table: TensorView<'a>,
    pub(crate) out: TensorView<'a>,
    pub(crate) scale: f64,
    pub(crate) accumulate: bool,
}

/// Refuses a scale that is not finite in f32.
fn check_scale(scale: f64) -> Result<f32, Error> {
    let in_f32 = scale as f32;
    if in_f32.is_finite() {
        return Ok(in_f32);
    }
    Err(Error::Option { option: "scale", value: scale, expected: "finite in f32" })
}

/// Checks the ids, the table `[1, 1, rows, width]` and the rows `[batch, 1, length, width]`.
fn check(
    ids: TensorView,
    (table_name, table, table_access): (&'static str, TensorView, Access),
    (rows_name, rows, rows_access): (&'static str, TensorView, Access),
    device: &DeviceFacts,
) -> Result<(), Error> {
    let mut tensors = CallTensors::new(device);
    let [batch, _, length, _] = ids.shape();
    tensors.read("ids", ids, DType::U32, [batch, 1, length, 1])?;
    let [_, _, table_rows, width] = table.shape();
    tensors.add(table_access, table_name, table, Element::Float, [1, 1, table_rows, width])?;
    tensors.add(rows_access, rows_name, rows, Element::Float, [batch, 1, length, width])?;
    check_summed_rows(rows_name, &rows, 1)?;
    tensors.finish()
}

impl<'a> EmbeddingForward<'a> {
    /// Looks up the rows `ids` of `table` and writes them to `out`. `ids` is `[batch, 1, length,
    /// 1]`, U32 (see [`TensorView::sequence`]). `table` is `[1, 1, rows, width]` (see
    /// [`TensorView::matrix`]). `out` is `[batch, 1, length, width]`. `table` and `out` are F32,
    /// F16 or BF16.
    pub fn new(ids: TensorView<'a>, table: TensorView<'a>, out: TensorView<'a>) -> Self {
        EmbeddingForward { ids, table, out, scale: 1.0, accumulate: false }
    }

    /// Sets the factor of the rows, 1 by default. Vaswani et al. 2017 use √width.
    pub fn scale(mut self, scale: f64) -> Self {
        self.scale = scale;
        self
    }

    /// Adds the rows to `out` instead of overwriting it. Use it to add embeddings of tokens,
    /// positions and types in three calls. The sum is rounded to the type of `out` after each call.
    pub fn accumulate(mut self, accumulate: bool) -> Self {
        self.accumulate = accumulate;
        self
    }

    fn op(&self, device: &DeviceFacts) -> Result<EmbeddingOp<'a>, Error> {
        let EmbeddingForward { ids, table, out, scale, accumulate } = *self;
        check(ids, ("table", table, Access::Read), ("out", out, Access::Write), device)?;
        Ok(EmbeddingOp { ids, table, out, scale: check_scale(scale)?, accumulates: accumulate })
    }
}

/// Looks up rows of a table by their ids, as `nn.Embedding` does, and computes the gradient of the
/// table.
///
/// ```no_run
/// # use wgpu_attention::{Error, TensorView, wgpu};
/// # use wgpu_attention::rows::{Embedding, EmbeddingForward};
/// # fn f(device: &wgpu::Device, encoder: &mut wgpu::CommandEncoder, ids: [TensorView; 3], tables: [TensorView; 3],
/// #      x: TensorView) -> Result<(), Error> {
/// let embedding = Embedding::new(device);
/// // The sum of the embeddings of words, positions and types, as BERT has it.
/// for (n, (ids, table)) in ids.into_iter().zip(tables).enumerate() {
///     embedding.forward(encoder, &EmbeddingForward::new(ids, table, x).accumulate(n > 0))?;
/// }
/// # Ok(()) }
/// ```
///
/// An id without a row in the table gives zeros and has no gradient. It is not an error, because
/// the host does not read the ids.
///
/// The operator stores the bindings of recent forward calls, so that a repeated call creates
/// nothing. The bindings keep some buffers alive: see [`forget`](Self::forget). The scratch stores
/// the bindings of backward calls.
#[derive(Clone, Debug)]
pub struct Embedding {
    pipelines: Pipelines,
    bindings: Arc<BindingCache>,
}

impl Embedding {
    /// Creates the operator with separate pipelines.
    pub fn new(device: &wgpu::Device) -> Self {
        Self::with_pipelines(&Pipelines::new(device))
    }

    /// Creates the operator with pipelines that other operators of the device share.
    pub fn with_pipelines(pipelines: &Pipelines) -> Self {
        Embedding { pipelines: pipelines.clone(), bindings: Arc::default() }
    }

    /// The pipelines of the operator, to share with other operators.
    pub fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// Drops the bindings of past forward calls, and with them the references to their buffers.
    /// Clones share the bindings.
    ///
    /// Without this call, unused bindings are dropped after a few calls, at most 64. Until then,
    /// the buffers that only these bindings keep alive are limited. They have at most twice the
    /// bytes of the last call's buffers, or 8 MiB if that is more.
    pub fn forget(&self) {
        self.bindings.clear();
    }

    /// Records `call` into an encoder or a pass.
    ///
    /// # Errors
    /// Shapes that do not match, or an `out` that overlaps an input. A scale that is
    /// not finite, and every other [`Error`] of tensors. After an error nothing has been recorded.
    pub fn forward(&self, into: &mut impl Recorder, call: &EmbeddingForward) -> Result<(), Error> {
        self.prepare(call)?.record(into);
        Ok(())
    }

    /// Checks `call`, then compiles and binds its kernels. [`Prepared::record`] can then record it
    /// any number of times.
    ///
    /// # Errors
    /// See [`forward`](Self::forward).
    pub fn prepare(&self, call: &EmbeddingForward) -> Result<Prepared, Error> {
        let device = &self.pipelines.facts();
        let dispatch = call.op(device)?.forward(device);
        self.pipelines.bind("embedding", &[dispatch], &self.bindings)
    }
}
