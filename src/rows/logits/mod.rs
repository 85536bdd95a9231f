//! Operators on rows of logits: log-softmax and top-k.

pub(crate) mod dispatch;
pub(crate) mod kernels;
mod log_softmax;
pub(crate) mod reference;
mod top_k;

pub use log_softmax::{LogSoftmax, LogSoftmaxBackward, LogSoftmaxForward};
pub use top_k::{MAX_TOP_K, TopK, TopKForward};
