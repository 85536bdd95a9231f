//! Multi-head attention for any wgpu application: WGSL kernels, a host layer that records into your
//! encoder, and a CPU reference that says what every kernel must compute.
//!
//! | you have | use |
//! |---|---|
//! | slices, and want a `Vec` | [`Gpu::attend`] |
//! | a `wgpu::Device`, and q, k, v in buffers | [`Attention`] |
//! | activations and a layer's weights | [`MultiHeadAttention`] |
//! | something to do between projection and attention | [`Projection`], then [`Attention`] |
//! | weights in the blocks of a GGUF file | [`QuantizedProjection`] |
//! | queries and keys to rotate, activations to give positions | [`Positions`] |
//! | tokens that come one by one, and a cache of keys and values | [`Cache`], [`Forward::with_cache`] |
//! | attention over parts of the keys, to be combined | [`Merge`] |
//! | a context and a decoder's state, and Luong's attentional vector to make of them | [`AttentionalVector`] |
//! | a decoder's position in the source, predicted or known, to attend around: Luong's local-p | [`LocalAttention`], [`PositionPredictor`] |
//! | scores that are `v · tanh(W_q q + W_k k)`: Bahdanau's, Luong's concat | [`AdditiveAttention`] |
//! | sequences too long for the square of their length | [`LinearAttention`] |
//! | a decoder-only model, as GPT-2 or Llama | [`TransformerEncoder`] with [`Mask::causal`], [`EncoderForward::cache`], `examples/gpt.rs` |
//! | a whole encoder, as BERT, or its parts | [`TransformerEncoder`], [`Norm`], [`Pointwise`] |
//! | a decoder with a memory to attend to, token by token | [`TransformerDecoder`] |
//! | token ids, rows to average, logits | [`Embedding`], [`MeanPool`], [`LogSoftmax`], [`TopK`] |
//! | long sequences, and attention that need not be exact | [`Linformer`], [`LshAttention`] |
//! | a loss to train by | [`TransformerEncoder::backward`], [`TransformerDecoder::backward`], [`MultiHeadAttention::backward`], [`Attention::backward`], [`Projection::backward`], [`Positions::rotate_backward`], [`Merge::backward`], [`Linformer::backward`], [`LshAttention::backward`] |
//! | sequences of different lengths in one call | [`Mask::packed`] |
//! | a block-sparse pattern, or a mask that leaves whole blocks out | [`Mask::blocks`], [`Attention::classify`] |
//! | hardware that nobody has tried | [`Pipelines::check`], [`Pipelines::tune`] |
//! | a test of your own to write | [`mod@reference`] and [`reference::compare`] |
//!
//! # From data to result
//!
//! A [`TensorView`] is a window of your buffer with any strides. A call ([`Forward`], [`LayerForward`])
//! names the tensors and the [`Mask`]. The operator checks everything, compiles what it needs the first
//! time ([`Pipelines`]) and records dispatches into your encoder or pass; temporary memory is yours
//! ([`Scratch`]). It never submits, copies or reads back. Whatever is wrong is an [`Error`] before anything
//! is recorded, with three exceptions:
//!
//! * an encoder or a pass of another device: wgpu does not tell whose it is, so the call is `Ok`, and wgpu refuses the encoder's
//!   `finish` or the submission;
//! * a buffer that was destroyed after it was bound: wgpu refuses the submission;
//! * in browsers, what only wgpu finds: it reaches the application's own handler.
//!
//! A call's first submission may take long, because some drivers compile then: see [`Pipelines`].
//!
//! # What is computed
//!
//! Scaled dot-product attention (Vaswani et al. 2017, "Attention is all you need"):
//! `score = scale · q·k`, then softcap, then bias, ALiBi and relative bias, then the mask; weights are the
//! softmax of a query's permitted scores; the output is their weighted sum of values. Sums are f32, f16 and
//! bf16 are storage types. A query that sees no key has output 0 and lse −∞, never NaN. The same call on the same device
//! gives the same bits, by the same plan ([`Tuning::fixed`]).
//!
//! Two paths compute it ([`Path`]): the fused one in a single pass, without a score matrix, and the staged one, which
//! has that matrix in memory and takes over where the attention weights themselves are asked for. Where few queries
//! meet many keys, as in generation, the fused path splits the keys among workgroups and merges what they found.

#![warn(missing_docs)]
// Lists of variants and structs are for `inspect` alone; with it, what is dead is told.
#![cfg_attr(not(feature = "inspect"), allow(dead_code))]

mod additive;
#[cfg(test)]
mod agreement;
mod attention;
mod cache;
mod check;
mod device;
mod gpu;
#[cfg(feature = "inspect")]
pub mod inspect;
mod kernel;
mod kernel_list;
mod layers;
mod linear_attention;
mod linformer;
mod local;
mod lsh;
mod mask;
mod matmul;
mod position;
pub mod presets;
pub mod reference;
mod rows;
mod tensor;
mod tune;

pub use additive::{AdditiveAttention, AdditiveBackward, AdditiveConfig, AdditiveForward};
pub use attention::merge::{Merge, MergeBackward, PartGradients, Partial};
pub use attention::{Attention, Backward, Config, Forward, ScoreStage};
pub use cache::{Append, Cache, CacheConfig, CacheLayout, CacheRead, CacheStorage, ScaleGroup, Tokens};
pub use device::{Family, Report, Tuned, Verdict};
pub use gpu::{Gpu, UploadedMask};
pub use kernel::{KernelForm, MatrixUnits, Path, Pipelines, Scratch, ScratchSize, Tuning};
pub use layers::attentional::{AttentionalBackward, AttentionalForward, AttentionalVector};
pub use layers::block::config::{BlockConfig, NormOrder};
pub use layers::block::{FeedForwardGradients, FeedForwardWeights, LayerCall};
pub use layers::decoder::{
    DecoderBackward, DecoderForward, DecoderLayerGradients, DecoderLayerWeights, DecoderMemory,
    TransformerDecoder,
};
pub use layers::encoder::{
    EncoderBackward, EncoderForward, EncoderLayerGradients, EncoderLayerWeights, TransformerEncoder,
};
pub use layers::multi_head::config::{LayerConfig, OutputGate};
pub use layers::multi_head::{
    LayerBackward, LayerForward, LayerGradients, LayerWeights, LinearGradients, MultiHeadAttention,
};
pub use linear_attention::feature_map::{FeatureMap, RandomFeatures, UpdateRule, random_features};
pub use linear_attention::{LinearAttention, LinearBackward, LinearConfig, LinearForward, LinearState};
pub use linformer::{Linformer, LinformerBackward, LinformerForward};
pub use local::{
    LocalAttention, LocalBackward, LocalConfig, LocalForward, PositionPredictor, PredictorBackward,
    PredictorForward,
};
pub use lsh::{LshAttention, LshBackward, LshConfig, LshForward};
pub use mask::mods::{
    At, BoundMaskMod, BoundScoreMod, Captured, DeviceMods, FeatureMod, HostMods, MaskMod, ScoreMod,
};
pub use mask::{Alignment, Blocks, DeviceMask, Dropout, HostMask, Mask, Pattern, PatternPart, block_map};
pub use matmul::quantized::format::QuantizedFormat;
pub use matmul::quantized::{QuantizedForward, QuantizedMatrix, QuantizedProjection, QuantizedRows};
pub use matmul::{Activation, Linear, Projection, ProjectionBackward, ProjectionForward};
pub use position::{
    AddPositions, MAX_POSITION, PositionTable, Positions, Rope, RopeConfig, RopeOrder, RopeScaling, Rotate,
    Rotation, RowPositions, Sinusoid, TableBackward,
};
pub use rows::embedding::{Embedding, EmbeddingBackward, EmbeddingForward};
pub use rows::logits::{LogSoftmax, LogSoftmaxBackward, LogSoftmaxForward, MAX_TOP_K, TopK, TopKForward};
pub use rows::mean_pool::{MeanPool, MeanPoolBackward, MeanPoolForward, PooledRows};
pub use rows::norm::config::NormConfig;
pub use rows::norm::{Norm, NormBackward, NormForward, NormGradients, NormWeights};
pub use rows::pointwise::{Pointwise, PointwiseBackward, PointwiseForward};
pub use rows::radix_sort::{RadixSort, Sort};
pub use rows::weight_norm::{WeightNorm, WeightNormBackward, WeightNormForward};
pub use tensor::{DType, Error, HostTensor, Shape, TensorView};
pub use tune::{Measured, TuneLimits, Workload};

pub use wgpu;

/// Code in the README and in docs/ is compiled with the documentation tests.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../README.md")]
    struct Readme;
    #[doc = include_str!("../docs/architecture.md")]
    struct Architecture;
    #[doc = include_str!("../docs/attentions.md")]
    struct Attentions;
    #[doc = include_str!("../docs/benchmarks.md")]
    struct Benchmarks;
    #[doc = include_str!("../docs/coming-from.md")]
    struct ComingFrom;
    #[doc = include_str!("../docs/devices.md")]
    struct Devices;
    #[doc = include_str!("../docs/kernels.md")]
    struct Kernels;
    #[doc = include_str!("../docs/masks.md")]
    struct Masks;
    #[doc = include_str!("../docs/rings.md")]
    struct Rings;
    #[doc = include_str!("../docs/testing.md")]
    struct Testing;
    #[doc = include_str!("../CONTRIBUTING.md")]
    struct Contributing;
}
