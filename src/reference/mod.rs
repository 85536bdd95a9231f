//! The specification: what every kernel must compute, on the CPU, in plain loops.
//!
//! Slices in, `Vec` out, no wgpu; one file per stage. Every function is generic over [`Real`]: with
//! `f64` it is the truth that tests compare with, with `f32` it is the naive computation whose own
//! error says how much of a kernel's error is the arithmetic's (see [`compare`]).
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

mod additive;
mod attention;
mod attentional;
mod backward;
mod block;
mod block_sums;
pub mod cache;
pub mod compare;
mod decoder;
mod dropout;
mod embedding;
mod encoder;
mod linear;
mod linformer;
mod local;
mod logits;
mod lsh;
mod mask;
mod mean_pool;
mod merge;
mod multi_head;
mod multi_head_backward;
mod norm;
mod pointwise;
mod position;
mod project;
mod quantized;
mod real;
mod scores;
mod softmax;
mod weight_norm;
mod weighted_sum;

pub use additive::{additive_attention, additive_scores, additive_scores_at};
pub use attention::{Attended, Options, attention, scores_at};
pub use attentional::{AttentionalGradients, attentional, attentional_backward};
pub use backward::{
    Gradients, additive_attention_backward, additive_attention_backward_magnitudes, attention_backward,
    attention_backward_magnitudes,
};
pub use block::{Encoded, FeedForwardGradients, HostFeedForward, HostNorm, HostNormGradients, feed_forward};
pub use decoder::{
    DecoderGradients, DecoderLayerGradients, HostDecoderLayer, decoder, decoder_backward, decoder_by_layer,
    decoder_by_layer_backward,
};
pub use dropout::dropout;
pub use embedding::{embedding, embedding_backward};
pub use encoder::{
    EncoderGradients, EncoderLayerGradients, HostEncoderLayer, encoder, encoder_backward, encoder_by_layer,
    encoder_by_layer_backward,
};
pub use linear::{
    FeatureRow, LinearAttended, LinearAttentionGradients, LinearOptions, Seen, features, linear_attention,
    linear_attention_backward, linear_attention_backward_magnitudes, linear_attention_magnitude,
    linear_recurrence,
};
pub use linformer::{
    LengthProjections, LinformerGradients, linformer, linformer_backward, linformer_backward_magnitudes,
};
pub use local::{
    LocalAttended, LocalGradients, LocalOptions, PredictorGradients, local_attention,
    local_attention_backward, local_attention_backward_magnitudes, predict_positions,
    predict_positions_backward,
};
pub use logits::{log_softmax, log_softmax_backward, top_k};
pub use lsh::{
    LshAttended, LshGradients, LshHashed, LshShape, lsh_attention, lsh_attention_backward,
    lsh_attention_backward_magnitudes, lsh_buckets, lsh_pairs,
};
pub use mask::classify;
pub(crate) use mask::pair_answers;
pub use mean_pool::{mean_pool, mean_pool_backward};
pub use merge::{PartGradients, merge, merge_backward};
pub use multi_head::{
    HostLinear, HostWeights, LayerShape, average_heads, join_heads, multi_head, split_heads,
};
pub use multi_head_backward::{LayerGradients, LinearGradients, multi_head_backward};
pub use norm::{NormGradients, norm, norm_backward};
pub use pointwise::{activate, activation_slope};
pub use position::{
    PositionGradients, add_positions, add_positions_backward, rotate, rotate_backward, rotate_by,
    rotate_by_backward, sinusoid,
};
pub use project::{ProjectGradients, project, project_backward};
pub use quantized::{dequantize, quantize};
pub(crate) use real::expect_length;
pub use real::{Real, widen};
pub use scores::scores;
pub use softmax::{Normalised, softmax};
pub use weight_norm::{weight_norm, weight_norm_backward};
pub use weighted_sum::weighted_sum;
