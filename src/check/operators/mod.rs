//! The problems of a check that concern one operator each: a small call, compared with the
//! operator's reference. Gradients use the reference's forward results.

mod attention;
mod caches;
#[cfg(feature = "selected-attention")]
mod indexer;
#[cfg(feature = "layers")]
mod layers;
#[cfg(feature = "linear-attention")]
mod linear;
#[cfg(feature = "linformer")]
mod linformer;
#[cfg(feature = "local")]
mod local;
#[cfg(feature = "lsh")]
mod lsh;
#[cfg(feature = "selected-attention")]
mod native;
#[cfg(feature = "linear-attention")]
mod recurrent;
mod rows;
#[cfg(feature = "selected-attention")]
mod selected;

use super::data::Outcome;
use crate::device::Family;
use crate::gpu::Gpu;
use crate::tensor::Error;

/// Each family with the call that checks it, and the cargo feature that the call needs.
macro_rules! operators {
    ($($family:ident => $check:path $(, $feature:literal)?;)*) => {
        /// Families that a call of their operator checks. A family comes after the families that it
        /// uses.
        pub(super) const OPERATORS: &[Family] = &[$($(#[cfg(feature = $feature)])? Family::$family),*];

        /// Computes a call that needs `family`.
        ///
        /// # Errors
        /// An error of the call, and a device that does not answer.
        pub(super) async fn run(family: Family, gpu: &Gpu) -> Result<Outcome, Error> {
            match family {
                $($(#[cfg(feature = $feature)])? Family::$family => $check(gpu).await,)*
                // The table omits this family: `Problem::FIRST` needs it before the problems of
                // caches.
                Family::CacheLengths => caches::lengths(gpu).await,
                // The problems of attention, projections and caches use the other families.
                _ => Err(Error::Disabled { family }),
            }
        }
    };
}

operators! {
    RadixSort => rows::radix_sort;
    TopK => rows::top_k;
    LogSoftmax => rows::log_softmax;
    LogSoftmaxGradients => rows::log_softmax_gradients;
    Norms => rows::norm;
    NormGradients => rows::norm_gradients;
    Elementwise => rows::elementwise;
    ElementwiseGradients => rows::elementwise_gradients;
    Embeddings => rows::embedding;
    EmbeddingGradients => rows::embedding_gradients;
    MeanPools => rows::mean_pool;
    MeanPoolGradients => rows::mean_pool_gradients;
    CausalConvs => rows::causal_conv;
    CausalConvGradients => rows::causal_conv_gradients;
    WeightNorms => rows::weight_norm;
    WeightNormGradients => rows::weight_norm_gradients;
    Rotations => rows::rotate;
    Positions => rows::add_positions;
    QuantizedProducts => rows::quantized;
    Masks => attention::masks;
    CacheCopies => caches::copies;
    Hadamard => caches::hadamard;
    ScoreOutputs => attention::scores;
    AppendedKeys => layers::appended_keys, "layers";
    Merges => attention::merge;
    MergeGradients => attention::merge_gradients;
    LinearAttention => linear::forward, "linear-attention";
    LinearRecurrence => linear::recurrence, "linear-attention";
    LinearGradients => linear::gradients, "linear-attention";
    Recurrence => recurrent::forward, "linear-attention";
    RecurrenceGradients => recurrent::gradients, "linear-attention";
    Indexers => indexer::forward, "selected-attention";
    IndexerGradients => indexer::gradients, "selected-attention";
    LocalAttention => local::forward, "local";
    LocalGradients => local::gradients, "local";
    AbsentRows => linformer::forward, "linformer";
    Lsh => lsh::forward, "lsh";
    LshGradients => lsh::gradients, "lsh";
    SelectedKeys => selected::forward, "selected-attention";
    SelectedGradients => selected::gradients, "selected-attention";
    NativeSparse => native::native_sparse, "selected-attention";
    Attentional => layers::attentional, "layers";
    AttentionalGradients => layers::attentional_gradients, "layers";
}
