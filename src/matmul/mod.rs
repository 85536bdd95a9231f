//! Matrix products: projections, quantised projections, and the parts that kernels of products
//! share.

pub(crate) mod activation;
pub(crate) mod plan;
pub(crate) mod product;
pub(crate) mod projection;
pub(crate) mod quantized;
pub(crate) mod side_shape;

pub use activation::Activation;
pub(crate) use activation::activation_parts;
pub use projection::{Linear, Projection, ProjectionBackward, ProjectionForward};
pub use quantized::format::QuantizedFormat;
pub use quantized::{QuantizedForward, QuantizedMatrix, QuantizedProjection, QuantizedRows};
pub(crate) use side_shape::SideShape;
