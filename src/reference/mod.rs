//! The specification: the result of every kernel, computed on the CPU in plain loops.
//!
//! The functions take slices and return `Vec`, without wgpu. Each operator has one file,
//! `reference.rs` in its folder. Every function is generic over [`Real`]. With `f64` it is the
//! reference that tests compare with. With `f32` it is the naive computation. Its error shows how
//! much of a kernel's error is due to f32 arithmetic (see [`compare`]).
//!
//! ```
//! use wgpu_attention::{Mask, Shape, reference};
//! let shape = Shape::new(1, 1, 2, 2); // batch, heads, length, head_dim
//! let (q, k, v) = ([1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 1.0], [1.0, 2.0, 3.0, 4.0]);
//! let causal = reference::Options::new().mask(Mask::causal());
//! let got = reference::attention::<f64>(&q, &k, &v, shape, &causal)?;
//! assert_eq!(got.out[..2], [1.0, 2.0]); // the first query sees the first key only
//! # Ok::<(), wgpu_attention::Error>(())
//! ```

pub mod compare;

pub use crate::attention::merge::reference::{PartGradients, merge, merge_backward};
pub use crate::attention::reference::additive::{additive_attention, additive_scores, additive_scores_at};
pub use crate::attention::reference::attention::{Attended, attention, scores_at};
pub use crate::attention::reference::backward::{
    Gradients, additive_attention_backward, attention_backward, attention_backward_magnitudes,
};
pub use crate::attention::reference::heads::{average_heads, join_heads, split_heads};
pub use crate::attention::reference::mask::classify;
pub use crate::attention::reference::options::Options;
pub use crate::attention::reference::scores::scores;
pub use crate::attention::reference::softmax::{Normalised, softmax};
pub use crate::attention::reference::weighted_sum::weighted_sum;
pub use crate::cache::reference as cache;
#[cfg(feature = "layers")]
pub use crate::layers::attentional::reference::{AttentionalGradients, attentional, attentional_backward};
#[cfg(feature = "layers")]
pub use crate::layers::decoder::reference::{
    DecoderGradients, DecoderLayerGradients, HostDecoderLayer, decoder, decoder_backward, decoder_by_layer,
    decoder_by_layer_backward,
};
#[cfg(feature = "layers")]
pub use crate::layers::encoder::reference::{
    EncoderGradients, EncoderLayerGradients, HostEncoderLayer, encoder, encoder_backward, encoder_by_layer,
    encoder_by_layer_backward,
};
#[cfg(all(feature = "layers", feature = "linear-attention"))]
pub use crate::layers::gated_delta_net::reference::{
    GatedDeltaNetGradients, HostGatedDeltaNetState, gated_delta_net, gated_delta_net_backward,
};
#[cfg(feature = "layers")]
pub use crate::layers::multi_head::reference::{HostWeights, MultiHeadShape, multi_head};
#[cfg(feature = "layers")]
pub use crate::layers::multi_head::reference_backward::{
    LinearGradients, MultiHeadGradients, multi_head_backward,
};
#[cfg(feature = "layers")]
pub use crate::layers::stack::reference::{Encoded, FeedForwardGradients, HostFeedForward, feed_forward};
#[cfg(feature = "linear-attention")]
pub use crate::linear_attention::reference::{
    FeatureRow, LinearAttended, LinearAttentionGradients, LinearOptions, Seen, features, linear_attention,
    linear_attention_backward, linear_recurrence,
};
#[cfg(feature = "linformer")]
pub use crate::linformer::reference::{LengthProjections, LinformerGradients, linformer, linformer_backward};
#[cfg(feature = "local")]
pub use crate::local::reference::{
    LocalAttended, LocalGradients, LocalOptions, PredictorGradients, local_attention,
    local_attention_backward, predict_positions, predict_positions_backward,
};
#[cfg(feature = "lsh")]
pub use crate::lsh::reference::{
    LshAttended, LshGradients, LshHashed, LshShape, lsh_attention, lsh_attention_backward, lsh_buckets,
    lsh_pairs,
};
pub use crate::mask::reference::dropout;
pub use crate::matmul::projection::reference::{HostLinear, ProjectGradients, project, project_backward};
pub use crate::matmul::quantized::reference::{dequantize, quantize};
pub use crate::position::reference::{
    PositionGradients, add_positions, add_positions_backward, rotate, rotate_backward, rotate_by,
    rotate_by_backward, sinusoid,
};
#[cfg(feature = "linear-attention")]
pub use crate::recurrent::reference::{
    RecurrentAttended, RecurrentGradients, RecurrentInputs, RecurrentOptions, recurrent_attention,
    recurrent_attention_backward,
};
pub use crate::rows::causal_conv::reference::{
    CausalConvGradients, CausalConvInputs, CausalConvOutput, causal_conv, causal_conv_backward,
};
pub use crate::rows::elementwise::reference::{activate, activation_slope};
pub use crate::rows::embedding::reference::{embedding, embedding_backward};
pub use crate::rows::logits::reference::{log_softmax, log_softmax_backward, top_k};
pub use crate::rows::mean_pool::reference::{mean_pool, mean_pool_backward};
pub use crate::rows::norm::reference::{
    GatedNormGradients, HostNorm, HostNormGradients, NormGradients, gated_norm, gated_norm_backward, norm,
    norm_backward,
};
pub use crate::rows::weight_norm::reference::{weight_norm, weight_norm_backward};
#[cfg(feature = "selected-attention")]
pub use crate::selected::indexer::reference::{
    IndexerGradients, IndexerInputs, indexer_backward, indexer_indices, indexer_scatter, indexer_scores,
};
#[cfg(feature = "selected-attention")]
pub use crate::selected::native::reference::{
    NativeSparseAttended, NativeSparseGradients, NativeSparseInputs, native_sparse_attention,
    native_sparse_attention_backward, native_sparse_attention_backward_magnitudes, native_sparse_indices,
    native_sparse_scores,
};
#[cfg(feature = "selected-attention")]
pub use crate::selected::reference::SelectedKeys;
pub use crate::tensor::{Real, widen};
