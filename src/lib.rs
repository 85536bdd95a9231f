//! Multi-head attention for any wgpu application: WGSL kernels, a host layer that records into your
//! encoder, and a CPU reference that says what every kernel must compute.
//!
//! | you have | use |
//! |---|---|
//! | slices, and want a `Vec` | [`Gpu::attend`] |
//! | a `wgpu::Device`, and q, k, v in buffers | [`Attention`] |
//! | activations and a layer's weights | [`MultiHeadAttention`] |
//! | something to do between projection and attention | [`Projection`], then [`Attention`] |
//! | weights in the blocks of a GGUF file | [`QuantizedProjection`](matmul::QuantizedProjection) |
//! | queries and keys to rotate, activations to give positions | [`Positions`](position::Positions) |
//! | tokens that come one by one, and a cache of keys and values | [`Cache`], [`Forward::with_cache`] |
//! | attention over parts of the keys, to be combined | [`Merge`](attention::Merge) |
//! | a context and a decoder's state, and Luong's attentional vector to make of them | [`AttentionalVector`](layers::AttentionalVector) |
//! | a decoder's position in the source, predicted or known, to attend around: Luong's local-p | [`LocalAttention`](local::LocalAttention), [`PositionPredictor`](local::PositionPredictor) |
//! | scores that are `v · tanh(W_q q + W_k k)`: Bahdanau's, Luong's concat | [`AdditiveAttention`](additive::AdditiveAttention) |
//! | sequences too long for the square of their length | [`LinearAttention`](linear_attention::LinearAttention) |
//! | a decoder-only model, as GPT-2 or Llama | [`TransformerEncoder`] with [`Mask::causal`], [`EncoderForward::cache`](layers::EncoderForward::cache), `examples/gpt.rs` |
//! | a whole encoder, as BERT, or its parts | [`TransformerEncoder`], [`Norm`](rows::Norm), [`Elementwise`](rows::Elementwise) |
//! | a decoder with a memory to attend to, token by token | [`TransformerDecoder`] |
//! | token ids, rows to average, logits | [`Embedding`](rows::Embedding), [`MeanPool`](rows::MeanPool), [`LogSoftmax`](rows::LogSoftmax), [`TopK`](rows::TopK) |
//! | long sequences, and attention that need not be exact | [`Linformer`](linformer::Linformer), [`LshAttention`](lsh::LshAttention) |
//! | a loss to train by | [`TransformerEncoder::backward`], [`TransformerDecoder::backward`], [`MultiHeadAttention::backward`], [`Attention::backward`], [`Projection::backward`], [`Positions::rotate_backward`](position::Positions::rotate_backward), [`Merge::backward`](attention::Merge::backward), [`Linformer::backward`](linformer::Linformer::backward), [`LshAttention::backward`](lsh::LshAttention::backward) |
//! | sequences of different lengths in one call | [`Mask::packed`] |
//! | a block-sparse pattern, or a mask that leaves whole blocks out | [`Mask::blocks`], [`Attention::classify`] |
//! | hardware that nobody has tried | [`Pipelines::check`], [`Pipelines::tune`] |
//! | a test of your own to write | [`mod@reference`] and [`reference::compare`] |
//!
//! # From data to result
//!
//! A [`TensorView`] is a window of your buffer with any strides. A call ([`Forward`],
//! [`MultiHeadForward`](layers::MultiHeadForward)) names the tensors and the [`Mask`]. The operator
//! checks everything, compiles what it needs the first time ([`Pipelines`]) and records dispatches
//! into your encoder or pass; temporary memory is yours ([`Scratch`]). It never submits, copies or
//! reads back. Whatever is wrong is an [`Error`] before anything is recorded, with three
//! exceptions:
//!
//! * an encoder or a pass of another device: wgpu does not tell whose it is, so the call is `Ok`, and wgpu refuses the encoder's
//!   `finish` or the submission;
//! * a buffer that was destroyed after it was bound: wgpu refuses the submission;
//! * in browsers, what only wgpu finds: it reaches the application's own handler.
//!
//! A call's first submission may take long, because some drivers compile then: see [`Pipelines`].
//!
//! # Cargo features
//!
//! All are on by default. Attention, masks, caches, positions, products and [`rows`] need none of
//! them.
//!
//! | feature | module |
//! |---|---|
//! | `additive` | [`additive`] |
//! | `layers` | [`layers`], [`Gpu::multi_head`] |
//! | `linear-attention` | [`linear_attention`] |
//! | `linformer` | [`linformer`] |
//! | `local` | [`local`] |
//! | `lsh` | [`lsh`] |
//! | `presets` | [`presets`], [`Gpu::upload_tables`] |
//!
//! Fewer features compile faster. The binary hardly shrinks: the linker leaves out operators that
//! an application does not call.
//!
//! # What is computed
//!
//! Scaled dot-product attention (Vaswani et al. 2017, "Attention is all you need"):
//! `score = scale · q·k`, then softcap, then bias, ALiBi and relative bias, then the mask; weights
//! are the softmax of a query's permitted scores; the output is their weighted sum of values. Sums
//! are f32, f16 and bf16 are storage types. A query that sees no key has output 0 and lse −∞, never
//! NaN. The same call on the same device gives the same bits, by the same plan
//! ([`KernelOptions::fixed`]).
//!
//! Two algorithms compute it ([`Algorithm`](tuning::Algorithm)): the fused one in a single pass,
//! without a score matrix, and the staged one, which has that matrix in memory and takes over where
//! the attention weights themselves are asked for. Where few queries meet many keys, as in
//! generation, the fused path splits the keys among workgroups and merges what they found.

#![warn(missing_docs)]
// Items that operators share may have no user without a feature.
#![cfg_attr(not(feature = "default"), allow(dead_code, unused_imports))]

#[cfg(feature = "additive")]
pub mod additive;
#[cfg(test)]
mod agreement;
pub mod attention;
pub mod cache;
mod check;
mod device;
mod gpu;
#[cfg(feature = "inspect")]
pub mod inspect;
mod kernel;
#[cfg(any(test, feature = "inspect"))]
mod kernel_list;
#[cfg(feature = "layers")]
pub mod layers;
#[cfg(feature = "linear-attention")]
pub mod linear_attention;
#[cfg(feature = "linformer")]
pub mod linformer;
#[cfg(feature = "local")]
pub mod local;
#[cfg(feature = "lsh")]
pub mod lsh;
pub mod mask;
pub mod matmul;
pub mod position;
#[cfg(feature = "presets")]
pub mod presets;
pub mod reference;
pub mod rows;
mod tensor;
mod tune;

pub use attention::{Attention, Backward, Config, Forward};
pub use cache::{Cache, CacheConfig};
pub use gpu::{Gpu, UploadedMask};
pub use kernel::{KernelOptions, Pipelines, Prepared, Recorder, Scratch, ScratchSize};
#[cfg(feature = "layers")]
pub use layers::{MultiHeadAttention, TransformerDecoder, TransformerEncoder};
pub use mask::{Alignment, Dropout, Mask};
pub use matmul::{Linear, Projection};
pub use tensor::{DType, Error, HostTensor, Shape, TensorView};

pub use wgpu;

/// Kernels on a device: which are right, which plans are fastest, what a caller may say about
/// either.
pub mod tuning {
    pub use crate::device::{Family, Report, TuningCache, Verdict};
    pub use crate::kernel::{Algorithm, KernelOptions, MatrixUnits, Target};
    pub use crate::tune::{Measured, TuningBudget, Workload};
}

/// Code in the README and in docs/ is compiled with the documentation tests.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../README.md")]
    struct Readme;
    #[doc = include_str!("../docs/README.md")]
    struct Index;
    #[doc = include_str!("../docs/guide/attentions.md")]
    struct Attentions;
    #[doc = include_str!("../docs/guide/caches.md")]
    struct Caches;
    #[doc = include_str!("../docs/guide/coming-from.md")]
    struct ComingFrom;
    #[doc = include_str!("../docs/guide/devices.md")]
    struct Devices;
    #[doc = include_str!("../docs/guide/embedding.md")]
    struct Embedding;
    #[doc = include_str!("../docs/guide/masks.md")]
    struct Masks;
    #[doc = include_str!("../docs/guide/own-functions.md")]
    struct OwnFunctions;
    #[doc = include_str!("../docs/guide/start.md")]
    struct Start;
    #[doc = include_str!("../docs/guide/training.md")]
    struct Training;
    #[doc = include_str!("../docs/internals/architecture.md")]
    struct Architecture;
    #[doc = include_str!("../docs/internals/kernels.md")]
    struct Kernels;
    #[doc = include_str!("../docs/internals/rings.md")]
    struct Rings;
    #[doc = include_str!("../docs/internals/testing.md")]
    struct Testing;
    #[doc = include_str!("../docs/notebook/benchmarks.md")]
    struct Benchmarks;
    #[doc = include_str!("../docs/notebook/devices.md")]
    struct DeviceRecords;
    #[doc = include_str!("../CONTRIBUTING.md")]
    struct Contributing;
}
