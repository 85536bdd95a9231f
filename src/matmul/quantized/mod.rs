//! The quantised projection operator: `y = x Wᵀ` with quantised weights, and rows of quantised
//! tables.

pub(crate) mod dispatch;
pub(crate) mod format;
pub(crate) mod kernels;
pub(crate) mod plan;
pub(crate) mod reference;

use dispatch::QuantizedOp;
use format::QuantizedFormat;

use std::sync::Arc;

use crate::device::DeviceFacts;
use crate::kernel::{BindingCache, Dispatch, KernelOptions, Pipelines, Prepared, Recorder};
use crate::tensor::{Access, CallTensors, DType, Element, Error, Layout, TensorView, expect_shape};

/// A quantised matrix `[rows, columns]`, stored row after row as in a GGUF file. It holds weights
/// `[out, in]` or a table of embeddings.
#[derive(Clone, Copy, Debug)]
pub struct QuantizedMatrix<'a> {
    buffer: &'a wgpu::Buffer,
    format: QuantizedFormat,
    rows: usize,
    columns: usize,
    offset: usize,
}

impl<'a> QuantizedMatrix<'a> {
    /// The matrix at the start of `buffer`. The buffer needs usage `STORAGE` and a length that is a
    /// multiple of 4 bytes. The call that uses the matrix checks it.
    pub fn new(buffer: &'a wgpu::Buffer, format: QuantizedFormat, [rows, columns]: [usize; 2]) -> Self {
        QuantizedMatrix { buffer, format, rows, columns, offset: 0 }
    }

    /// Sets the first byte of the matrix in the buffer, a multiple of 4. One buffer may then hold a
    /// whole file.
    pub fn with_offset(mut self, offset: usize) -> Self {
        self.offset = offset;
        self
    }

    /// `[rows, columns]`.
    pub fn shape(&self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    /// The storage format.
    pub fn format(&self) -> QuantizedFormat {
        self.format
    }

    /// Checks everything about the matrix that does not depend on the call.
    fn op(&self, device: &DeviceFacts) -> Result<QuantizedOp<'a>, Error> {
        let QuantizedMatrix { buffer, format, rows, columns, offset } = *self;
        let row_bytes = format.row_bytes(columns)?;
        if !offset.is_multiple_of(4) {
            let (what, by) = ("the offset of a quantised matrix", "the bytes of a word");
            return Err(Error::NotDivisible { what, value: offset, by, divisor: 4 });
        }
        if rows == 0 {
            return Err(Error::ZeroSize { tensor: "weight", axis: "out (rows)" });
        }
        let words = rows.saturating_mul(row_bytes).div_ceil(4);
        let layout = Layout { offset: offset / 4, ..Layout::dense([1, 1, 1, words]) };
        let words = TensorView::with_layout(buffer, DType::U32, layout);
        words.check("weight", Access::Read, device)?;
        Ok(QuantizedOp { format, rows, columns, row_bytes, words })
    }
}

/// One product. It maps `[batch, 1, length, features]` directly to heads.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct QuantizedForward<'a> {
    x: TensorView<'a>,
    weight: QuantizedMatrix<'a>,
    out: TensorView<'a>,
}

impl<'a> QuantizedForward<'a> {
    /// A product of `x`, `[batch, 1, length, features]` (see [`TensorView::sequence`]), and a
    /// weight, `[heads · dim, features]`. `out` is `[batch, heads, length, dim]` with any strides.
    /// `x` and `out` are F32, F16 or BF16. With one head it is a plain linear layer.
    pub fn new(x: TensorView<'a>, weight: QuantizedMatrix<'a>, out: TensorView<'a>) -> Self {
        QuantizedForward { x, weight, out }
    }

    fn dispatch(&self, kernel_options: &KernelOptions, device: &DeviceFacts) -> Result<Dispatch<'a>, Error> {
        let QuantizedForward { x, weight, out } = *self;
        let mut tensors = CallTensors::new(device);
        let [batch, _, length, features] = x.shape();
        let [_, heads, _, dim] = out.shape();
        tensors.read("x", x, Element::Float, [batch, 1, length, features])?;
        tensors.write("out", out, Element::Float, [batch, heads, length, dim])?;
        let op = weight.op(device)?;
        let wanted = [1, 1, heads.saturating_mul(dim), features];
        expect_shape("linear.weight", [1, 1, op.rows, op.columns], wanted)?;
        tensors.read_checked([("weight", op.words)]);
        tensors.finish()?;
        Ok(op.product(x, out, kernel_options, device))
    }
}

/// A look-up of rows of a table by their ids.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct QuantizedRows<'a> {
    table: QuantizedMatrix<'a>,
    ids: TensorView<'a>,
    out: TensorView<'a>,
}

impl<'a> QuantizedRows<'a> {
    /// A look-up of the rows `ids`, `[batch, 1, length, 1]`, U32. `out` is `[batch, 1, length,
    /// columns]` (see [`TensorView::sequence`]), F32, F16 or BF16. An id outside the table gives a
    /// row of NaN.
    pub fn new(table: QuantizedMatrix<'a>, ids: TensorView<'a>, out: TensorView<'a>) -> Self {
        QuantizedRows { table, ids, out }
    }

    fn dispatch(&self, device: &DeviceFacts) -> Result<Dispatch<'a>, Error> {
        let QuantizedRows { table, ids, out } = *self;
        let mut tensors = CallTensors::new(device);
        let [batch, _, length, _] = ids.shape();
        tensors.read("ids", ids, DType::U32, [batch, 1, length, 1])?;
        let op = table.op(device)?;
        tensors.write("out", out, Element::Float, [batch, 1, length, op.columns])?;
        tensors.read_checked([("table", op.words)]);
        tensors.finish()?;
        Ok(op.rows(ids, out, device))
    }
}

/// Linear layers with the quantised weights of a GGUF file, and look-ups in quantised tables. Use
/// it to run a decoder that reads only the file's bytes for each token.
///
/// The kernels unpack weights exactly to f32 and accumulate in f32. Activations are not quantised.
/// For up to eight rows, as in generation, each weight is read and unpacked once for all rows. With
/// more rows the kernels compute tiles of a product. There is no bias and no gradient.
///
/// ```no_run
/// # use wgpu_attention::{DType, Error, TensorView, wgpu};
/// # use wgpu_attention::matmul::{QuantizedFormat, QuantizedForward, QuantizedMatrix, QuantizedProjection};
/// # fn f(device: &wgpu::Device, encoder: &mut wgpu::CommandEncoder, file: &wgpu::Buffer, x: TensorView, out: TensorView)
/// # -> Result<(), Error> {
/// // x [batch, 1, length, 576], out [batch, 9, length, 64]
/// let weight = QuantizedMatrix::new(file, QuantizedFormat::Q4_1, [9 * 64, 576]).with_offset(31_862_784);
/// QuantizedProjection::new(device).forward(encoder, &[QuantizedForward::new(x, weight, out)])
/// # }
/// ```
///
/// The operator stores the bindings of recent calls, so that a repeated call creates nothing. The
/// bindings keep some buffers alive: see [`forget`](Self::forget).
#[doc(alias = "GGUF")]
#[doc(alias = "QMatMul")]
#[derive(Clone, Debug)]
pub struct QuantizedProjection {
    pipelines: Pipelines,
    bindings: Arc<BindingCache>,
    kernel_options: KernelOptions,
}

impl QuantizedProjection {
    /// Creates the operator with separate pipelines.
    pub fn new(device: &wgpu::Device) -> Self {
        Self::with_pipelines(&Pipelines::new(device))
    }

    /// Creates the operator with pipelines that other operators of the device share.
    pub fn with_pipelines(pipelines: &Pipelines) -> Self {
        QuantizedProjection {
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

    /// Sets the class of kernels. The other [`KernelOptions`] do not apply to quantised
    /// projections.
    pub fn kernel_options(mut self, kernel_options: KernelOptions) -> Self {
        self.kernel_options = kernel_options;
        self
    }

    /// Records the products into an encoder or a pass.
    ///
    /// # Errors
    /// Every [`Error`] of tensors, and weights whose rows are not whole blocks or that do not start
    /// at a word. Shapes that do not match, and an `out` that overlaps an input.
    /// After an error nothing has been recorded.
    pub fn forward(&self, into: &mut impl Recorder, products: &[QuantizedForward]) -> Result<(), Error> {
        self.prepare(products)?.record(into);
        Ok(())
    }

    /// Checks the products, then compiles and binds their kernels. [`Prepared::record`] can then
    /// record them any number of times.
    ///
    /// # Errors
    /// See [`forward`](Self::forward).
    pub fn prepare(&self, products: &[QuantizedForward]) -> Result<Prepared, Error> {
        self.pipelines.bind("quantized projection", &self.products(products)?, &self.bindings)
    }

    /// Records a look-up into an encoder or a pass.
    ///
    /// # Errors
    /// See [`forward`](Self::forward).
    #[doc(alias = "embedding")]
    pub fn rows(&self, into: &mut impl Recorder, rows: &QuantizedRows) -> Result<(), Error> {
        self.prepare_rows(rows)?.record(into);
        Ok(())
    }

    /// Checks a look-up, then compiles and binds its kernel. [`Prepared::record`] can then record
    /// it any number of times.
    ///
    /// # Errors
    /// See [`forward`](Self::forward).
    pub fn prepare_rows(&self, rows: &QuantizedRows) -> Result<Prepared, Error> {
        let rows = rows.dispatch(&self.pipelines.facts())?;
        self.pipelines.bind("quantized rows", &[rows], &self.bindings)
    }

    fn products<'a>(&self, products: &[QuantizedForward<'a>]) -> Result<Vec<Dispatch<'a>>, Error> {
        let device = &self.pipelines.facts();
        products.iter().map(|product| product.dispatch(&self.kernel_options, device)).collect()
    }
}
