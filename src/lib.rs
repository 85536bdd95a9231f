//! Attention for wgpu applications. WGSL kernels compute it, and a host layer records them into
//! your command encoder. A CPU reference specifies every result.
//!
//! | you want | use |
//! |---|---|
//! | attention of slices, as a `Vec` | [`Gpu::attend`] |
//! | attention of buffers on your `wgpu::Device` | [`Attention`] |
//! | a multi-head layer: projections and attention | [`MultiHeadAttention`] |
//! | a whole model such as BERT, GPT-2 or Llama | [`TransformerEncoder`] |
//! | a decoder that attends to a memory | [`TransformerDecoder`] |
//! | token-by-token generation | [`Cache`], [`Forward::with_cache`] |
//! | masks, biases, packed sequences, functions of scores | [`Mask`] |
//! | linear layers | [`Projection`] |
//! | weights in the blocks of a GGUF file | [`matmul::QuantizedProjection`] |
//! | rotary, sinusoidal or learned positions | [`position::Positions`] |
//! | norms, activations, embeddings, logits | [`rows`] |
//! | linear attention, for very long sequences | [`linear_attention`] |
//! | layers with decays and delta rules: Mamba-2, KDA, gated DeltaNet | [`recurrent`] |
//! | approximate attention, for long sequences | [`linformer`], [`lsh`] |
//! | local or additive attention | [`local`], [`additive`] |
//! | gradients, to train | [`Attention::backward`] and each operator's `backward` |
//! | a check of the kernels on a device | [`Pipelines::check`] |
//! | faster plans on a device | [`Pipelines::tune`] |
//! | expected results, for your tests | [`mod@reference`], [`reference::compare`] |
//!
//! # From data to result
//!
//! A [`TensorView`] is a window of your buffer with any strides. A call ([`Forward`],
//! [`MultiHeadForward`](layers::MultiHeadForward)) names the tensors and the [`Mask`]. The operator
//! checks the call, and compiles the kernels that it needs the first time ([`Pipelines`]). Then it
//! records dispatches into your encoder or pass. You own the temporary memory ([`Scratch`]).
//! Operators never submit, copy or read back. Every fault is an [`Error`] before anything is
//! recorded, with three exceptions:
//!
//! * The encoder or pass belongs to another device. wgpu does not report its device, so the call is
//!   `Ok`. Later wgpu refuses the encoder's `finish` or the submission.
//! * A buffer was destroyed after it was bound. wgpu refuses the submission.
//! * In browsers, errors that only wgpu finds reach the application's error handler.
//!
//! The first submission of a call may take long, because some drivers compile then: see
//! [`Pipelines`].
//!
//! # More operators
//!
//! | you have | use |
//! |---|---|
//! | rows to change between projection and attention | [`Projection`], then [`Attention`] |
//! | attention over parts of the keys, to combine | [`attention::Merge`] |
//! | a decoder-only model | [`TransformerEncoder`] with [`Mask::causal`], `examples/gpt.rs` |
//! | a cache for a decoder-only model | [`layers::EncoderForward::cache`] |
//! | token ids | [`rows::Embedding`] |
//! | a short convolution along rows, as in Mamba | [`rows::CausalConv`] |
//! | rows to average | [`rows::MeanPool`] |
//! | logits | [`rows::LogSoftmax`], [`rows::TopK`] |
//! | keys to select for each query, as in DeepSeek V3.2 | [`selected::Indexer`] |
//! | rows to normalise or activate | [`rows::Norm`], [`rows::Elementwise`] |
//! | sequences of different lengths in one call | [`Mask::packed`] |
//! | a block-sparse pattern | [`Mask::blocks`] |
//! | a mask that hides whole blocks | [`Attention::classify`] |
//! | scores `v · tanh(W_q q + W_k k)` (Bahdanau, Luong) | [`additive::AdditiveAttention`] |
//! | a source position to attend around (Luong's local-p) | [`local::LocalAttention`] |
//! | that position, to predict | [`local::PositionPredictor`] |
//! | a context and a decoder's state (Luong) | [`layers::AttentionalVector`] |
//! | sequences too long for quadratic attention | [`linear_attention::LinearAttention`] |
//! | long sequences, with approximate attention | [`linformer::Linformer`], [`lsh::LshAttention`] |
//! | keys or blocks that an indexer selects | [`selected::SelectedAttention`] |
//! | a model with native sparse attention (NSA) | [`selected::NativeSparseAttention`] |
//! | a loss of an encoder or decoder-only model | [`TransformerEncoder::backward`] |
//! | a loss of a decoder with a memory | [`TransformerDecoder::backward`] |
//! | a loss of layers | [`MultiHeadAttention::backward`], [`Projection::backward`] |
//! | gradients of rotated rows | [`position::Positions::rotate_backward`] |
//! | gradients of merges | [`attention::Merge::backward`] |
//! | gradients of Linformer | [`linformer::Linformer::backward`] |
//! | gradients of LSH attention | [`lsh::LshAttention::backward`] |
//!
//! # Cargo features
//!
//! All features except `inspect` and `unchecked-vulkan` are on by default. Attention, masks,
//! caches, positions, products and [`rows`] need none of them.
//!
//! | feature | module |
//! |---|---|
//! | `additive` | [`additive`] |
//! | `inspect` | `inspect`: texts of kernels, for tools and tests, without a stable interface |
//! | `layers` | [`layers`], [`Gpu::multi_head`] |
//! | `linear-attention` | [`linear_attention`], [`recurrent`]; with `layers`, `GatedDeltaNet` |
//! | `linformer` | [`linformer`] |
//! | `local` | [`local`] |
//! | `lsh` | [`lsh`] |
//! | `presets` | [`presets`], [`Gpu::upload_tables`] |
//! | `selected-attention` | [`selected`] |
//! | `unchecked-vulkan` | `unchecked_vulkan`, a Vulkan device without robust access to buffers |
//!
//! Fewer features compile faster. The binary hardly shrinks: the linker leaves out operators that
//! an application does not call.
//!
//! # The computation
//!
//! The operators compute scaled dot-product attention (Vaswani et al. 2017, "Attention is all you
//! need"). The score is `scale · q·k`, then softcap, then bias, ALiBi and relative bias, then the
//! mask. The weights are the softmax of a query's permitted scores. The output is the weighted sum
//! of the values. Sums are f32; f16 and bf16 are storage types. A query that sees no key has output
//! 0 and lse −∞, never NaN. The same call with the same plan on the same device gives the same bits
//! ([`KernelOptions::fixed`]).
//!
//! Two algorithms compute it ([`Algorithm`](tuning::Algorithm)). The fused algorithm takes a single
//! pass, without a score matrix. The staged algorithm writes the score matrix to memory, for calls
//! that output the attention weights. If few queries meet many keys, as in generation, the fused
//! path splits the keys among workgroups. A second kernel merges the results.

#![warn(missing_docs)]
// Operators share items. Without some features these items have no user.
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
#[cfg(feature = "linear-attention")]
pub mod recurrent;
pub mod reference;
pub mod rows;
#[cfg(feature = "selected-attention")]
pub mod selected;
mod tensor;
mod tune;

pub use attention::{Attention, Backward, Config, Forward};
pub use cache::{Cache, CacheConfig};
#[cfg(all(
    feature = "unchecked-vulkan",
    any(windows, target_os = "linux", target_os = "android", target_os = "freebsd")
))]
pub use device::unchecked_vulkan;
pub use gpu::{Gpu, UploadedMask};
pub use kernel::{KernelOptions, Pipelines, Prepared, Recorder, Requirements, Scratch, ScratchSize, WarmUp};
#[cfg(feature = "layers")]
pub use layers::{MultiHeadAttention, TransformerDecoder, TransformerEncoder};
pub use mask::{Alignment, Dropout, Mask};
pub use matmul::{Linear, Projection};
pub use tensor::{DType, Error, HostTensor, Shape, TensorView};

pub use wgpu;

/// Kernels on a device: verdicts of checks, fastest plans, and options for both.
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
    #[doc = include_str!("../docs/guide/layers.md")]
    struct Layers;
    #[doc = include_str!("../docs/guide/masks.md")]
    struct Masks;
    #[doc = include_str!("../docs/guide/own-functions.md")]
    struct OwnFunctions;
    #[doc = include_str!("../docs/guide/recurrent.md")]
    struct Recurrent;
    #[doc = include_str!("../docs/guide/selected.md")]
    struct Selected;
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
