//! Tensors as windows of buffers: dtype, shape, strides and offset, all counted in elements.

pub(crate) mod call_tensors;
pub(crate) mod dtype;
pub(crate) mod error;
pub(crate) mod host;
pub(crate) mod real;
pub(crate) mod shape;

pub(crate) use call_tensors::CallTensors;
pub use dtype::DType;
pub(crate) use dtype::Element;
use dtype::FLOAT;
pub use error::Error;
pub use host::HostTensor;
pub use real::{Real, widen};
pub(crate) use real::{eps_in_f32, expect_length};
pub use shape::Shape;

use crate::device::{DeviceFacts, Family};

/// The names of a tensor's four axes in error messages. The names for tensors of masks are in
/// `mask/rules.rs`.
pub(crate) fn axes(tensor: &str) -> [&'static str; 4] {
    match tensor {
        "weights" | "scores" | "dropout" => ["batch", "heads", "q_len", "kv_len"],
        "cos" | "sin" => ["batch", "heads", "length", "pairs"],
        "lse" => ["batch", "heads", "q_len", "dim"],
        "d_relative" => ["batch", "heads", "length", "distances"],
        t if t == "linear.weight"
            || t == "d_weight"
            || t.trim_start_matches("d_").starts_with("weights.") =>
        {
            ["batch", "heads", "out (rows)", "in (columns)"]
        }
        _ => ["batch", "heads", "length", "dim"],
    }
}

/// Shape, strides and offset of a tensor, without its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Layout {
    pub shape: [usize; 4],
    pub strides: [usize; 4],
    pub offset: usize,
}

/// Strides of a dense row-major tensor.
pub(crate) const fn dense_strides(shape: [usize; 4]) -> [usize; 4] {
    let d = 1;
    let l = d * shape[3];
    let h = l.saturating_mul(shape[2]);
    let b = h.saturating_mul(shape[1]);
    [b, h, l, d]
}

/// Elements of a tensor; `usize::MAX` if the product overflows.
pub(crate) fn count(shape: [usize; 4]) -> usize {
    shape.into_iter().fold(1, usize::saturating_mul)
}

/// Longest axis: the sum or difference of two indices plus a tile fits in an i32.
pub(crate) const LONGEST_AXIS: usize = (i32::MAX / 4) as usize;

impl Layout {
    pub const fn dense(shape: [usize; 4]) -> Self {
        Layout { shape, strides: dense_strides(shape), offset: 0 }
    }

    /// Index of the last element, if it fits in 64 bits.
    fn last(&self) -> Option<u64> {
        let mut last = self.offset as u64;
        // An axis of stride 0 adds nothing to the last index. But kernels count along it too, in
        // signed 32-bit integers.
        if self.shape.iter().any(|n| *n > LONGEST_AXIS) {
            return None;
        }
        for (n, s) in self.shape.iter().zip(self.strides) {
            last = last.checked_add((*n as u64).checked_sub(1)?.checked_mul(s as u64)?)?;
        }
        Some(last)
    }

    /// True if no two indices address the same element. The test is sufficient, not necessary: it
    /// requires that axes nest, as in every transposed, sliced or padded dense tensor.
    fn is_injective(&self) -> bool {
        let mut axes: Vec<(usize, usize)> =
            self.strides.into_iter().zip(self.shape).filter(|(_, n)| *n > 1).collect();
        axes.sort_unstable();
        let mut reach = 0u64;
        axes.into_iter().all(|(stride, n)| {
            let nests = stride as u64 > reach;
            reach = reach.saturating_add((n as u64 - 1).saturating_mul(stride as u64));
            nests
        })
    }

    /// True if a kernel can load four consecutive elements along `axis` as one aligned vec4 from
    /// every position.
    pub fn in_fours(&self, axis: usize) -> bool {
        self.in_groups(axis, 4)
    }

    /// True if a kernel can load `n` consecutive elements along `axis` as one aligned vector.
    pub fn in_groups(&self, axis: usize, n: usize) -> bool {
        self.strides[axis] == 1
            && self.shape[axis].is_multiple_of(n)
            && self.offset.is_multiple_of(n)
            && (0..4).all(|a| a == axis || self.shape[a] == 1 || self.strides[a].is_multiple_of(n))
    }
}

/// The first mistake in a view. Builder methods return a view, so the call that uses the view
/// reports the mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ViewFault {
    /// A slice that ends outside its axis of `size` elements.
    Slice { axis: usize, start: usize, length: usize, size: usize },
    /// A method was called with an axis above 3.
    Axis { method: &'static str, axis: usize },
}

impl ViewFault {
    fn error(self, tensor: &'static str) -> Error {
        match self {
            ViewFault::Slice { axis, start, length, size } => {
                Error::Slice { tensor, axis, name: axes(tensor)[axis], start, length, size }
            }
            ViewFault::Axis { method, axis } => Error::Axis { tensor, method, axis },
        }
    }
}

/// A window of a buffer, seen as `[batch, heads, length, dim]`.
///
/// Strides and offset count elements of `dtype`. `[B, H, L, D]`, `[B, L, H, D]`, one third of a
/// packed `[B, L, 3, H, D]` buffer or part of a cache are all views, never copies. Inputs may
/// repeat elements (stride 0). Written tensors may not.
///
/// The tensors of one call may lie in one buffer, as arena allocators place them. The binding of a
/// tensor begins at a multiple of `min_storage_buffer_offset_alignment` bytes, at or before its
/// first element. In a buffer that a call reads and writes, bindings may not overlap: WebGPU
/// forbids it. Inputs that are the same view are the exception.
///
/// Buffers need usage `STORAGE`. Views of [`DType::F16`], [`DType::BF16`] and [`DType::Bool`] are
/// bound in whole words: make their buffers a multiple of 4 bytes long. The call that uses the view
/// checks it; the constructors do not. A view remembers the first method that was called wrongly.
/// Every call that uses the view then returns this error.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    pub(crate) buffer: &'a wgpu::Buffer,
    pub(crate) dtype: DType,
    pub(crate) layout: Layout,
    pub(crate) fault: Option<ViewFault>,
}

impl<'a> TensorView<'a> {
    /// The usages that the buffer of a tensor needs. A call refuses other buffers with
    /// [`Error::Usage`].
    ///
    /// To fill the buffer with `Queue::write_buffer`, add `COPY_DST`. To read results back, add
    /// `COPY_SRC`.
    pub const USAGES: wgpu::BufferUsages = wgpu::BufferUsages::STORAGE;

    pub(crate) fn with_layout(buffer: &'a wgpu::Buffer, dtype: DType, layout: Layout) -> Self {
        TensorView { buffer, dtype, layout, fault: None }
    }

    /// A dense row-major tensor at the start of `buffer`.
    pub fn new(buffer: &'a wgpu::Buffer, dtype: DType, shape: [usize; 4]) -> Self {
        Self::with_layout(buffer, dtype, Layout::dense(shape))
    }

    /// A view of memory in the order `[batch, length, heads, dim]`. `shape` is the shape of the
    /// view, `[batch, heads, length, dim]`.
    pub fn blhd(buffer: &'a wgpu::Buffer, dtype: DType, shape: [usize; 4]) -> Self {
        let [b, h, l, d] = shape;
        Self::new(buffer, dtype, [b, l, h, d]).transposed(1, 2)
    }

    /// Queries, keys and values of one packed `[batch, length, 3, heads, dim]` buffer. The numbers
    /// of query heads and key/value heads are equal. `shape` is the shape of each view, `[batch,
    /// heads, length, dim]`.
    pub fn packed_qkv(buffer: &'a wgpu::Buffer, dtype: DType, shape: [usize; 4]) -> [Self; 3] {
        let [_, h, l, d] = shape;
        let third = h.saturating_mul(d);
        [0, 1, 2].map(|part| {
            Self::new(buffer, dtype, shape)
                .with_strides([l.saturating_mul(third).saturating_mul(3), d, third.saturating_mul(3), 1])
                .with_offset(third.saturating_mul(part))
        })
    }

    /// Activations `[batch, length, features]` as the view `[batch, 1, length, features]`, the
    /// input of a layer.
    ///
    /// For memory in the order `[length, batch, features]`, use `sequence(.., [length, batch,
    /// features]).transposed(0, 2)`. This is `batch_first=False` of `nn.MultiheadAttention`. There
    /// is no such option, because strides describe the order of the axes.
    #[doc(alias = "batch_first")]
    pub fn sequence(buffer: &'a wgpu::Buffer, dtype: DType, [b, l, e]: [usize; 3]) -> Self {
        Self::new(buffer, dtype, [b, 1, l, e])
    }

    /// A matrix `[rows, columns]` as the view `[1, 1, rows, columns]`, for weights `[out, in]`.
    pub fn matrix(buffer: &'a wgpu::Buffer, dtype: DType, [rows, columns]: [usize; 2]) -> Self {
        Self::new(buffer, dtype, [1, 1, rows, columns])
    }

    /// A vector as the view `[1, 1, 1, n]`, for biases.
    pub fn vector(buffer: &'a wgpu::Buffer, dtype: DType, n: usize) -> Self {
        Self::new(buffer, dtype, [1, 1, 1, n])
    }

    /// Replaces the strides of the view, in elements.
    pub fn with_strides(mut self, strides: [usize; 4]) -> Self {
        self.layout.strides = strides;
        self
    }

    /// Replaces the offset of the view: its first element, counted from the start of the buffer.
    pub fn with_offset(mut self, offset: usize) -> Self {
        self.layout.offset = offset;
        self
    }

    /// Exchanges two axes. The call that uses the view refuses axes above 3 with [`Error::Axis`].
    pub fn transposed(mut self, a: usize, b: usize) -> Self {
        if a.max(b) > 3 {
            return self.or_fault(ViewFault::Axis { method: "transposed", axis: a.max(b) });
        }
        self.layout.shape.swap(a, b);
        self.layout.strides.swap(a, b);
        self
    }

    /// Takes `length` indices of `axis` from `start` on. The call that uses the view refuses a
    /// range past the end of the axis with [`Error::Slice`]. It refuses axes above 3 with
    /// [`Error::Axis`].
    pub fn slice(mut self, axis: usize, start: usize, length: usize) -> Self {
        let Some(&size) = self.layout.shape.get(axis) else {
            return self.or_fault(ViewFault::Axis { method: "slice", axis });
        };
        if start.checked_add(length).is_none_or(|end| end > size) {
            self = self.or_fault(ViewFault::Slice { axis, start, length, size });
        }
        let skipped = start.saturating_mul(self.layout.strides[axis]);
        self.layout.offset = self.layout.offset.saturating_add(skipped);
        self.layout.shape[axis] = length;
        self
    }

    /// Adds a fault to the view, unless the view already has one.
    fn or_fault(mut self, fault: ViewFault) -> Self {
        self.fault = self.fault.or(Some(fault));
        self
    }

    /// The buffer of the view.
    pub fn buffer(&self) -> &'a wgpu::Buffer {
        self.buffer
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// `[batch, heads, length, dim]`.
    pub fn shape(&self) -> [usize; 4] {
        self.layout.shape
    }

    /// Strides of the four axes, in elements.
    pub fn strides(&self) -> [usize; 4] {
        self.layout.strides
    }

    /// First element, counted from the start of the buffer.
    pub fn offset(&self) -> usize {
        self.layout.offset
    }

    pub(crate) fn to_owned(self) -> Tensor {
        Tensor { buffer: self.buffer.clone(), dtype: self.dtype, layout: self.layout, fault: self.fault }
    }

    /// The first byte, and the end in bytes, rounded up to whole words.
    fn bytes(&self, tensor: &'static str) -> Result<(u64, u64), Error> {
        let Layout { shape, strides, offset } = self.layout;
        let size = self.dtype.bytes() as u64;
        let last = self.layout.last().filter(|last| *last < u64::from(u32::MAX));
        let last = last.ok_or(Error::Overflow { tensor, shape, strides, offset })?;
        Ok((offset as u64 * size, ((last + 1) * size).next_multiple_of(4)))
    }

    /// Refuses sizes of 0.
    pub(crate) fn check_size(&self, tensor: &'static str) -> Result<(), Error> {
        match self.layout.shape.iter().position(|n| *n == 0) {
            Some(axis) => Err(Error::ZeroSize { tensor, axis: axes(tensor)[axis] }),
            None => Ok(()),
        }
    }

    /// Makes the checks of a view that do not depend on the call.
    pub(crate) fn check(
        &self,
        tensor: &'static str,
        access: Access,
        device: &DeviceFacts,
    ) -> Result<(), Error> {
        if let Some(fault) = self.fault {
            return Err(fault.error(tensor));
        }
        self.check_size(tensor)?;
        let Layout { shape, strides, .. } = self.layout;
        let (_, end) = self.bytes(tensor)?;
        if end > self.buffer.size() {
            return Err(Error::OutOfBounds { tensor, end, size: self.buffer.size() });
        }
        if access == Access::Write && !self.layout.is_injective() {
            return Err(Error::Overlap { tensor, shape, strides });
        }
        let missing = Self::USAGES - self.buffer.usage();
        if !missing.is_empty() {
            return Err(Error::Usage { tensor, missing });
        }
        if self.dtype == DType::F16 && device.lacks(Family::F16Tensors) {
            return Err(Error::Disabled { family: Family::F16Tensors });
        }
        if self.dtype == DType::BF16 && device.lacks(Family::BF16Tensors) {
            return Err(Error::Disabled { family: Family::BF16Tensors });
        }
        let window = self.window(device);
        if window.size > device.max_binding_bytes {
            return Err(Error::BindingLimit { tensor, bytes: window.size, limit: device.max_binding_bytes });
        }
        Ok(())
    }

    /// Requires a dtype that stores elements of this kind.
    pub(crate) fn check_element(&self, tensor: &'static str, element: Element) -> Result<(), Error> {
        let got = self.dtype;
        let (right, expected) = match element {
            Element::Number => (got == DType::U32, "U32"),
            Element::Bool => (got == DType::Bool, "Bool"),
            Element::Float => (got.is_float(), FLOAT),
        };
        if right { Ok(()) } else { Err(Error::Type { tensor, expected: expected.into(), got }) }
    }

    /// Checks the dtype, then calls [`check`](Self::check).
    pub(crate) fn check_as(
        &self,
        tensor: &'static str,
        dtype: DType,
        access: Access,
        device: &DeviceFacts,
    ) -> Result<(), Error> {
        same_dtype(tensor, self, dtype)?;
        self.check(tensor, access, device)
    }

    /// The part of the buffer to bind, and the view's offset in this part. Use it after `check`.
    pub(crate) fn window(&self, device: &DeviceFacts) -> Window<'a> {
        let (start, end) = self.bytes("").unwrap_or((0, 4));
        let start = start - start % device.offset_alignment;
        let skipped = (start / self.dtype.bytes() as u64) as usize;
        let mut layout = self.layout;
        layout.offset -= skipped;
        Window { buffer: self.buffer, start, size: end - start, layout }
    }

    /// True if the bindings of both views have a byte in common.
    pub(crate) fn meets(&self, other: &TensorView, device: &DeviceFacts) -> bool {
        self.buffer == other.buffer && self.window(device).meets(&other.window(device))
    }

    /// The byte range of the view in the buffer.
    pub(crate) fn extent(&self) -> (u64, u64) {
        self.bytes("").unwrap_or((0, u64::MAX))
    }
}

/// The access of a call to a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// A bindable range of a buffer and the view's layout relative to its start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window<'a> {
    pub buffer: &'a wgpu::Buffer,
    pub start: u64,
    pub size: u64,
    pub layout: Layout,
}

impl Window<'_> {
    /// True if both windows have a byte in common.
    pub fn meets(&self, other: &Window) -> bool {
        let meet = self.start < other.start + other.size && other.start < self.start + self.size;
        meet && self.buffer == other.buffer
    }
}

/// A tensor that keeps its buffer alive, for example the weights of a layer.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub buffer: wgpu::Buffer,
    pub dtype: DType,
    pub layout: Layout,
    pub fault: Option<ViewFault>,
}

impl Tensor {
    pub fn view(&self) -> TensorView<'_> {
        let Tensor { buffer, dtype, layout, fault } = self;
        TensorView { buffer, dtype: *dtype, layout: *layout, fault: *fault }
    }
}

/// True if two views address the same elements in the same order.
pub(crate) fn same_view(a: &TensorView, b: &TensorView) -> bool {
    a.buffer == b.buffer && a.dtype == b.dtype && a.layout == b.layout
}

/// Requires the dtype that the call needs.
pub(crate) fn same_dtype(tensor: &'static str, view: &TensorView, dtype: DType) -> Result<(), Error> {
    if view.dtype() == dtype {
        return Ok(());
    }
    Err(Error::Type { tensor, expected: format!("{dtype:?}"), got: view.dtype() })
}

/// Requires a float type.
pub(crate) fn check_float(tensor: &'static str, view: &TensorView) -> Result<(), Error> {
    if view.dtype().is_float() {
        return Ok(());
    }
    Err(Error::Type { tensor, expected: FLOAT.into(), got: view.dtype() })
}

/// Refuses a written tensor that shares memory with another tensor of the call.
///
/// A written tensor and inputs may lie in one buffer. Their bindings are then all writable and must
/// be apart ([`Sharing`](crate::kernel::Sharing)).
pub(crate) fn check_aliasing<'a>(
    written: &[(&'static str, TensorView<'a>)],
    read: &[(&'static str, TensorView<'a>)],
    device: &DeviceFacts,
) -> Result<(), Error> {
    let alignment = device.offset_alignment;
    for (n, (tensor, view)) in written.iter().enumerate() {
        for (other, input) in read {
            if view.meets(input, device) {
                return Err(Error::Alias { tensor, other, alignment });
            }
        }
        for (other, output) in &written[n + 1..] {
            if view.buffer == output.buffer {
                let ((a, b), (c, d)) = (view.extent(), output.extent());
                if a < d && c < b {
                    return Err(Error::OutputsOverlap { tensor, other });
                }
            }
        }
    }
    Ok(())
}

/// Refuses tensors of one dispatch whose separate bindings overlap. Bindings start at multiples of
/// the device's alignment, and WebGPU requires written bindings to be disjoint.
pub(crate) fn check_apart<'a>(
    written: &[(&'static str, TensorView<'a>)],
    device: &DeviceFacts,
) -> Result<(), Error> {
    for (n, (tensor, view)) in written.iter().enumerate() {
        for (other, output) in &written[n + 1..] {
            if view.meets(output, device) {
                return Err(Error::OutputsOverlap { tensor, other });
            }
        }
    }
    Ok(())
}

/// Refuses sizes of 0.
pub(crate) fn check_sizes(tensor: &'static str, sizes: &[(&'static str, usize)]) -> Result<(), Error> {
    match sizes.iter().find(|(_, n)| *n == 0) {
        Some((axis, _)) => Err(Error::ZeroSize { tensor, axis }),
        None => Ok(()),
    }
}

/// Requires `shape[axis]` to be `expected`.
pub(crate) fn expect(
    tensor: &'static str,
    shape: [usize; 4],
    axis: usize,
    expected: usize,
) -> Result<(), Error> {
    expect_any(tensor, shape, axis, &[expected])
}

/// Requires `shape` to be `expected`.
pub(crate) fn expect_shape(
    tensor: &'static str,
    shape: [usize; 4],
    expected: [usize; 4],
) -> Result<(), Error> {
    (0..4).try_for_each(|axis| expect(tensor, shape, axis, expected[axis]))
}

/// Requires each axis of `shape` to be the size in `to`, or 1, which is then repeated.
pub(crate) fn expect_broadcast(tensor: &'static str, shape: [usize; 4], to: [usize; 4]) -> Result<(), Error> {
    (0..4).try_for_each(|axis| expect_any(tensor, shape, axis, &[to[axis], 1]))
}

fn expect_any(tensor: &'static str, shape: [usize; 4], axis: usize, expected: &[usize]) -> Result<(), Error> {
    if expected.contains(&shape[axis]) {
        return Ok(());
    }
    let mut expected: Vec<_> = expected.iter().map(usize::to_string).collect();
    expected.dedup();
    let expected = expected.join(" or ");
    Err(Error::Shape { tensor, axis: axes(tensor)[axis], expected, got: shape[axis], shape, wanted: None })
}

/// Sets the strides of axes of one element to 0, so that the element is repeated.
pub(crate) fn broadcast(mut layout: Layout) -> Layout {
    for axis in 0..4 {
        if layout.shape[axis] == 1 {
            layout.strides[axis] = 0;
        }
    }
    layout
}
