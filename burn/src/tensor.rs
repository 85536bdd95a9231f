//! Burn's tensors as views of their buffers.

use std::any::Any;

use burn::backend::DType as BurnDType;
use burn::backend::autodiff::Autodiff;
use burn::backend::tensor::FloatTensor;
use burn::backend::{BackendTensor, DispatchAutodiffContext, DispatchTensor, DispatchTensorKind};
use burn::tensor::{Bool, Int, Shape, Tensor};
use burn_cubecl::Cube;
use burn_cubecl::cubecl::wgpu::{AutoCompiler, WgpuResource, WgpuServer};
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use wgpu_attention::{DType, TensorView};

use crate::error::{Error, Result};
use crate::primitive;

/// A float tensor in Burn's graph of gradients.
pub(crate) type GraphTensor = FloatTensor<Autodiff<Cube>>;

/// A float tensor of a call, with its place in the graph of gradients.
pub(crate) struct Float {
    pub tensor: GraphTensor,
    pub context: DispatchAutodiffContext,
}

impl Float {
    pub fn new<const D: usize>(name: &'static str, tensor: Tensor<D>) -> Result<Self> {
        let DispatchTensor { kind, autodiff: context } = tensor.into_dispatch();
        let kind = match kind {
            DispatchTensorKind::Autodiff(kind) => *kind,
            kind => kind,
        };
        match kind {
            DispatchTensorKind::Cube(BackendTensor::Float(t)) => {
                Ok(Float { tensor: GraphTensor::new(t), context })
            }
            DispatchTensorKind::Cube(BackendTensor::Autodiff(tensor)) => Ok(Float { tensor, context }),
            other => Err(Error::Backend { tensor: name, found: kind_of(&other) }),
        }
    }
}

/// Returns the buffer of an int tensor.
pub(crate) fn int<const D: usize>(name: &'static str, tensor: Tensor<D, Int>) -> Result<CubeTensor> {
    match tensor.into_dispatch().kind {
        DispatchTensorKind::Cube(BackendTensor::Int(t)) => Ok(primitive::int(t)),
        other => Err(Error::Backend { tensor: name, found: kind_of(&other) }),
    }
}

/// Returns the buffer of a bool tensor.
pub(crate) fn bool<const D: usize>(name: &'static str, tensor: Tensor<D, Bool>) -> Result<CubeTensor> {
    match tensor.into_dispatch().kind {
        DispatchTensorKind::Cube(BackendTensor::Bool(t)) => Ok(primitive::bool(t)),
        other => Err(Error::Backend { tensor: name, found: kind_of(&other) }),
    }
}

fn kind_of(kind: &DispatchTensorKind) -> String {
    match kind {
        DispatchTensorKind::Cube(tensor) => format!("a {} tensor", tensor.name().to_lowercase()),
        _ => "on another backend".to_owned(),
    }
}

/// A tensor and its buffer. While it lives, Burn does not reuse the memory.
pub(crate) struct Bound {
    resource: WgpuResource,
    /// Burn's lock of the memory: it is not freed, reused or moved.
    _lock: Box<dyn Any + Send>,
    dtype: DType,
    shape: [usize; 4],
    strides: [usize; 4],
    /// In elements.
    offset: usize,
}

impl Bound {
    /// Finds the buffer of `tensor`. Missing leading axes become axes of 1.
    pub fn new(name: &'static str, tensor: &CubeTensor) -> Result<Self> {
        let rank = tensor.meta.shape().num_dims();
        if tensor.meta.is_tiled() || rank > 4 {
            let found =
                if rank > 4 { format!("a tensor of {rank} axes") } else { "stored in tiles".to_owned() };
            return Err(Error::Backend { tensor: name, found });
        }
        let (dtype, step) = element(name, tensor.dtype)?;
        let server = tensor.client.get_resource::<WgpuServer<AutoCompiler>>(tensor.handle.clone());
        let lock = server.map_err(|e| Error::Runtime(format!("`{name}`: {e}")))?;
        let resource = lock.resource().clone();
        let (shape, strides) = (dims(tensor), tensor.meta.strides());
        // The stride of a missing axis, or of an axis of 1, does not matter.
        let strides = std::array::from_fn(|n| if shape[n] == 1 { 0 } else { strides[n + rank - 4] * step });
        let offset = resource.offset as usize / dtype.bytes();
        Ok(Bound { resource, _lock: Box::new(lock), dtype, shape, strides, offset })
    }

    pub fn view(&self) -> TensorView<'_> {
        let buffer = &self.resource.buffer;
        TensorView::new(buffer, self.dtype, self.shape).with_strides(self.strides).with_offset(self.offset)
    }

    /// The view of a sequence: `[batch, length, features]` as `[batch, 1, length, features]`.
    pub fn sequence(&self) -> TensorView<'_> {
        self.view().transposed(0, 1)
    }
}

/// Returns the library's type of an element, and the elements from one value of Burn to the next.
fn element(name: &'static str, dtype: BurnDType) -> Result<(DType, usize)> {
    use burn::tensor::BoolStore;
    Ok(match dtype {
        BurnDType::F32 | BurnDType::Flex32 => (DType::F32, 1),
        BurnDType::F16 => (DType::F16, 1),
        BurnDType::BF16 => (DType::BF16, 1),
        // Burn's bits of an int that is not negative are the bits of the same u32.
        BurnDType::I32 | BurnDType::U32 => (DType::U32, 1),
        // Burn stores 0 or 1 in four bytes, of which the first has the value.
        BurnDType::Bool(BoolStore::U32) => (DType::Bool, 4),
        BurnDType::Bool(_) => (DType::Bool, 1),
        other => {
            return Err(Error::DType {
                tensor: name,
                dtype: other.name(),
                accepted: "f32, f16, bf16, i32, u32 or bool",
            });
        }
    })
}

/// Allocates a contiguous tensor on the device of `like`. Its memory has no defined content.
pub(crate) fn empty(like: &CubeTensor, shape: Vec<usize>, dtype: BurnDType) -> CubeTensor {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), Shape::from(shape), dtype)
}

/// Allocates a contiguous tensor with the shape and type of `like`.
pub(crate) fn empty_like(like: &CubeTensor) -> CubeTensor {
    empty(like, like.meta.shape().iter().copied().collect(), like.dtype)
}

/// Returns the four axes of a tensor. Missing leading axes become axes of 1.
pub(crate) fn dims(tensor: &CubeTensor) -> [usize; 4] {
    let shape = tensor.meta.shape();
    let rank = shape.num_dims();
    std::array::from_fn(|n| if n + rank < 4 { 1 } else { shape[n + rank - 4] })
}

/// Checks that all tensors are on the device of the first.
pub(crate) fn same_device(tensors: &[(&'static str, &CubeTensor)]) -> Result<()> {
    let Some(((_, first), rest)) = tensors.split_first() else { return Ok(()) };
    match rest.iter().find(|(_, t)| t.device != first.device) {
        None => Ok(()),
        Some((tensor, t)) => Err(Error::Devices {
            tensor,
            device: format!("{:?}", t.device),
            first: format!("{:?}", first.device),
        }),
    }
}

/// Runs `task` in the thread that owns the device, where calls of Burn's runtime need no messages.
/// Other threads' operations wait.
pub(crate) fn on_device<R: Send + 'static>(
    tensor: &CubeTensor,
    task: impl FnOnce() -> Result<R> + Send,
) -> Result<R> {
    tensor.client.exclusive(task).map_err(|e| Error::Runtime(e.to_string()))?
}

/// Submits all work that Burn has queued for these tensors.
pub(crate) fn flush<'a>(tensors: impl IntoIterator<Item = &'a CubeTensor>) -> Result<()> {
    let mut flushed = Vec::new();
    for tensor in tensors {
        if flushed.contains(&tensor.handle.stream) {
            continue;
        }
        let mut client = tensor.client.clone();
        // SAFETY: the stream is the one that the tensor was made on; the client only flushes it.
        unsafe { client.set_stream(tensor.handle.stream) };
        client.flush().map_err(|e| Error::Runtime(e.to_string()))?;
        flushed.push(tensor.handle.stream);
    }
    Ok(())
}

/// Returns a tensor that no gradient reaches.
pub(crate) fn untracked<const D: usize>(tensor: CubeTensor) -> Tensor<D> {
    Tensor::from_dispatch(DispatchTensor {
        kind: DispatchTensorKind::Cube(BackendTensor::Float(primitive::publish(tensor))),
        autodiff: DispatchAutodiffContext::Disabled,
    })
}
