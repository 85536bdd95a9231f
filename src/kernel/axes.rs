//! Values for the axes of kernel variants, and the texts of shaders.

use super::Width;
use crate::device::Fragment;
use crate::tensor::DType;

/// The text of a shader, by its path in `shaders` without the extension.
macro_rules! shader {
    ($path:literal) => {
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/shaders/", $path, ".wgsl"))
    };
}
pub(crate) use shader;

/// The WGSL of the workgroup memory that matrix fragments are loaded from and stored to.
pub(crate) fn memory_of(fragment: Fragment) -> &'static str {
    match fragment {
        Fragment::Eight => shader!("matmul/memory_scalars"),
        Fragment::Sixteen => shader!("matmul/memory_vectors"),
    }
}

/// Values of axes that many variants share.
pub(crate) const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
pub(crate) const FLOATS_OR_NONE: [Option<DType>; 4] =
    [None, Some(DType::F32), Some(DType::F16), Some(DType::BF16)];
pub(crate) const WIDTHS: [Width; 2] = [Width::One, Width::Four];
