//! Operators on rows: norms, activations, embeddings, means, causal convolutions, logits, sorting.

pub(crate) mod causal_conv;
pub(crate) mod elementwise;
pub(crate) mod embedding;
pub(crate) mod logits;
pub(crate) mod mean_pool;
pub(crate) mod norm;
pub(crate) mod plan;
pub(crate) mod radix_sort;
pub(crate) mod totals;
pub(crate) mod weight_norm;

pub use causal_conv::{CausalConv, CausalConvBackward, CausalConvForward};
pub use elementwise::{Elementwise, ElementwiseBackward, ElementwiseForward};
pub use embedding::{Embedding, EmbeddingBackward, EmbeddingForward};
pub use logits::{LogSoftmax, LogSoftmaxBackward, LogSoftmaxForward, MAX_TOP_K, TopK, TopKForward};
pub use mean_pool::{MeanPool, MeanPoolBackward, MeanPoolForward, PoolMask};
pub use norm::config::NormConfig;
pub use norm::{Norm, NormBackward, NormForward, NormGate, NormGradients, NormWeights};
pub use radix_sort::{RadixSort, Sort};
pub use weight_norm::{WeightNorm, WeightNormBackward, WeightNormForward};
