//! From Burn's tensor primitives to their handles and back, with and without fusion.

use burn::backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn_cubecl::Cube;
use burn_cubecl::tensor::CubeTensor;

#[cfg(not(feature = "fusion"))]
mod direct {
    use super::*;

    pub fn float(tensor: FloatTensor<Cube>) -> CubeTensor {
        tensor
    }

    pub fn int(tensor: IntTensor<Cube>) -> CubeTensor {
        tensor
    }

    pub fn bool(tensor: BoolTensor<Cube>) -> CubeTensor {
        tensor
    }

    pub fn publish(tensor: CubeTensor) -> FloatTensor<Cube> {
        tensor
    }
}

#[cfg(feature = "fusion")]
mod fused {
    use super::*;
    use burn::backend::TensorMetadata;
    use burn::backend::ir::{BackendIr, InitOperationIr, OperationIr, OperationOutput};
    use burn_cubecl::CubeBackend;
    use burn_fusion::NoOp;
    use burn_fusion::client::GlobalFusionClient;
    use burn_fusion::stream::StreamId;

    /// Runs the operations that the tensor waits for, and returns its handle.
    pub fn float(tensor: FloatTensor<Cube>) -> CubeTensor {
        tensor.client.clone().resolve_tensor_float::<CubeBackend>(tensor)
    }

    /// As [`float`].
    pub fn int(tensor: IntTensor<Cube>) -> CubeTensor {
        tensor.client.clone().resolve_tensor_int::<CubeBackend>(tensor)
    }

    /// As [`float`].
    pub fn bool(tensor: BoolTensor<Cube>) -> CubeTensor {
        tensor.client.clone().resolve_tensor_bool::<CubeBackend>(tensor)
    }

    /// Makes a tensor of computed memory known to fusion.
    pub fn publish(tensor: CubeTensor) -> FloatTensor<Cube> {
        let client = GlobalFusionClient::load(&tensor.device);
        let (shape, dtype) = (tensor.shape(), tensor.dtype);
        let handle = CubeBackend::float_tensor_handle(tensor);
        let init = InitOperationIr::create(shape, dtype, || client.register_tensor_handle(handle));
        client.register(StreamId::current(), OperationIr::Init(init), NoOp::<CubeBackend>::new()).output()
    }
}

#[cfg(not(feature = "fusion"))]
pub(crate) use direct::*;
#[cfg(feature = "fusion")]
pub(crate) use fused::*;
