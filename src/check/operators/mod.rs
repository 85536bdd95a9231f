//! The problems of a check that are of one operator each: a small call, compared with the operator's reference.
//! Gradients are computed from forward results of the reference.

mod attention;
mod caches;
mod linear;
mod local;
mod rows;

use super::data::Outcome;
use crate::device::Family;
use crate::gpu::Gpu;
use crate::tensor::Error;

/// Families that are checked with a call of their operator, those that others build on first.
pub(super) const OPERATORS: [Family; 33] = [
    Family::RadixSort,
    Family::TopK,
    Family::LogSoftmax,
    Family::LogSoftmaxGradients,
    Family::Norms,
    Family::NormGradients,
    Family::Elementwise,
    Family::ElementwiseGradients,
    Family::Embeddings,
    Family::EmbeddingGradients,
    Family::MeanPools,
    Family::MeanPoolGradients,
    Family::WeightNorms,
    Family::WeightNormGradients,
    Family::Rotations,
    Family::Positions,
    Family::QuantizedProducts,
    Family::Masks,
    Family::CacheCopies,
    Family::ScoreOutputs,
    Family::AppendedKeys,
    Family::Merges,
    Family::MergeGradients,
    Family::LinearAttention,
    Family::LinearRecurrence,
    Family::LinearGradients,
    Family::LocalAttention,
    Family::LocalGradients,
    Family::AbsentRows,
    Family::Lsh,
    Family::LshGradients,
    Family::Attentional,
    Family::AttentionalGradients,
];

/// Computes a call that needs `family`.
///
/// # Errors
/// What refuses the call, and a device that does not answer.
pub(super) async fn run(family: Family, gpu: &Gpu) -> Result<Outcome, Error> {
    match family {
        Family::RadixSort => rows::radix_sort(gpu).await,
        Family::TopK => rows::top_k(gpu).await,
        Family::LogSoftmax => rows::log_softmax(gpu).await,
        Family::LogSoftmaxGradients => rows::log_softmax_gradients(gpu).await,
        Family::Norms => rows::norm(gpu).await,
        Family::NormGradients => rows::norm_gradients(gpu).await,
        Family::Elementwise => rows::elementwise(gpu).await,
        Family::ElementwiseGradients => rows::elementwise_gradients(gpu).await,
        Family::Embeddings => rows::embedding(gpu).await,
        Family::EmbeddingGradients => rows::embedding_gradients(gpu).await,
        Family::MeanPools => rows::mean_pool(gpu).await,
        Family::MeanPoolGradients => rows::mean_pool_gradients(gpu).await,
        Family::WeightNorms => rows::weight_norm(gpu).await,
        Family::WeightNormGradients => rows::weight_norm_gradients(gpu).await,
        Family::Rotations => rows::rotate(gpu).await,
        Family::Positions => rows::add_positions(gpu).await,
        Family::QuantizedProducts => rows::quantized(gpu).await,
        Family::CacheLengths => caches::lengths(gpu).await,
        Family::CacheCopies => caches::copies(gpu).await,
        Family::Masks => attention::masks(gpu).await,
        Family::ScoreOutputs => attention::scores(gpu).await,
        Family::AppendedKeys => attention::appended_keys(gpu).await,
        Family::Merges => attention::merge(gpu).await,
        Family::MergeGradients => attention::merge_gradients(gpu).await,
        Family::LinearAttention => linear::forward(gpu).await,
        Family::LinearRecurrence => linear::recurrence(gpu).await,
        Family::LinearGradients => linear::gradients(gpu).await,
        Family::LocalAttention => local::forward(gpu).await,
        Family::LocalGradients => local::gradients(gpu).await,
        Family::AbsentRows => attention::linformer(gpu).await,
        Family::Lsh => attention::lsh(gpu).await,
        Family::LshGradients => attention::lsh_gradients(gpu).await,
        Family::Attentional => rows::attentional(gpu).await,
        Family::AttentionalGradients => rows::attentional_gradients(gpu).await,
        // The problems of attention, of projections and of caches use the others.
        _ => Err(Error::PutAside { family }),
    }
}
