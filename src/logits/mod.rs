//! Operators: what is asked of logits, row by row.

mod log_softmax;
mod top_k;

pub use log_softmax::{LogSoftmax, LogSoftmaxBackward, LogSoftmaxForward};
pub use top_k::{MAX_TOP_K, TopK, TopKForward};
