//! The kernels: tensors, numbers, variant and text of each kernel.

pub(crate) mod causal_conv;
pub(crate) mod causal_conv_backward;
pub(crate) mod causal_conv_state;
pub(crate) mod causal_conv_sums;
