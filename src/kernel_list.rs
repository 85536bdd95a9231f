//! The list of all kernels, for tools and tests.

use crate::kernel::{KernelVariant, Variant};

/// All variants of each listed kernel.
macro_rules! kernels {
    ($($kernel:ty,)*) => {
        /// Every kernel along each axis of its variants.
        pub(crate) fn all() -> Vec<KernelVariant> {
            let mut all = Vec::new();
            $(all.extend(<$kernel as Variant>::all().into_iter().map(KernelVariant::new));)*
            all
        }
    };
}

kernels! {
    crate::matmul::projection::kernels::project::Project,
    crate::attention::kernels::scores::Scores,
    crate::attention::kernels::additive_scores::AdditiveScores,
    crate::additive::kernels::additive_pairs::AdditivePairs,
    crate::additive::kernels::additive_backward::AdditiveBackward,
    crate::attention::kernels::score_stage::ScoreStage,
    crate::attention::kernels::softmax::Softmax,
    crate::attention::kernels::weighted_sum::WeightedSum,
    crate::attention::kernels::average_weights::AverageWeights,
    crate::attention::kernels::append_keys::AppendKeys,
    crate::attention::kernels::fused::Fused,
    crate::attention::kernels::row_stats::RowStats,
    crate::attention::kernels::row_totals::RowTotals,
    crate::attention::kernels::fused_backward::FusedBackward,
    crate::attention::kernels::score_gradients::ScoreGradients,
    crate::attention::kernels::captured_gradients::CapturedGradients,
    crate::attention::merge::kernels::merge::Merge,
    crate::attention::kernels::merge_splits::MergeSplits,
    crate::mask::kernels::classify::Classify,
    crate::cache::kernels::cache_advance::CacheAdvance,
    crate::cache::kernels::cache_append::CacheAppend,
    crate::cache::kernels::cache_compact::CacheCompact,
    crate::cache::kernels::cache_copy::CacheCopy,
    crate::cache::kernels::cache_read::CacheRead,
    crate::cache::kernels::cache_reorder::CacheReorder,
    crate::cache::kernels::cache_words::CacheWords,
    crate::position::kernels::rotate::Rotate,
    crate::position::kernels::add_positions::AddPositions,
    crate::matmul::projection::kernels::project_backward::ProjectBackward,
    crate::matmul::projection::kernels::column_sums::ColumnSums,
    crate::matmul::projection::kernels::part_sums::PartSums,
    crate::mask::kernels::ask_mask::AskMask,
    crate::position::kernels::table_backward::TableBackward,
    crate::attention::merge::kernels::merge_backward::MergeBackward,
    crate::linformer::kernels::keep_rows::KeepRows,
    crate::lsh::kernels::lsh_codes::LshCodes,
    crate::lsh::kernels::lsh_gather::LshGather,
    crate::lsh::kernels::lsh_gradients::LshGradients,
    crate::lsh::kernels::lsh_hash::LshHash,
    crate::lsh::kernels::lsh_merge::LshMerge,
    crate::rows::radix_sort::kernels::radix_sort_count::RadixSortCount,
    crate::rows::radix_sort::kernels::radix_sort_scan::RadixSortScan,
    crate::rows::radix_sort::kernels::radix_sort_scatter::RadixSortScatter,
    crate::rows::norm::kernels::norm::Norm,
    crate::rows::norm::kernels::norm_backward::NormBackward,
    crate::rows::norm::kernels::norm_sums::NormSums,
    crate::rows::elementwise::kernels::elementwise::Elementwise,
    crate::rows::elementwise::kernels::elementwise_backward::ElementwiseBackward,
    crate::linear_attention::kernels::linear_chunks::LinearChunks,
    crate::linear_attention::kernels::linear_features::LinearFeatures,
    crate::linear_attention::kernels::linear_map::LinearMap,
    crate::linear_attention::kernels::linear_map_backward::LinearMapBackward,
    crate::linear_attention::kernels::linear_d_rows::LinearDRows,
    crate::linear_attention::kernels::linear_logs::LinearLogs,
    crate::linear_attention::kernels::linear_carry::LinearCarry,
    crate::linear_attention::kernels::linear_state::LinearState,
    crate::linear_attention::kernels::linear_prefix::LinearPrefix,
    crate::linear_attention::kernels::linear_scores::LinearScores,
    crate::linear_attention::kernels::linear_recurrent::LinearRecurrent,
    crate::linear_attention::kernels::linear_out::LinearOut,
    crate::linear_attention::kernels::linear_stats::LinearStats,
    crate::linear_attention::kernels::linear_d_queries::LinearDQueries,
    crate::linear_attention::kernels::linear_d_keys::LinearDKeys,
    crate::linear_attention::kernels::linear_d_values::LinearDValues,
    crate::recurrent::kernels::recurrent_chunks::RecurrentChunks,
    crate::recurrent::kernels::recurrent_norms::RecurrentNorms,
    crate::recurrent::kernels::recurrent_rows::RecurrentRows,
    crate::recurrent::kernels::recurrent_values::RecurrentValues,
    crate::recurrent::kernels::recurrent_scores::RecurrentScores,
    crate::recurrent::kernels::recurrent_solve::RecurrentSolve,
    crate::recurrent::kernels::recurrent_chain::RecurrentChain,
    crate::recurrent::kernels::recurrent_out::RecurrentOut,
    crate::recurrent::kernels::recurrent_carry::RecurrentCarry,
    crate::recurrent::kernels::recurrent_step::RecurrentStep,
    crate::recurrent::kernels::recurrent_d_errors::RecurrentDErrors,
    crate::recurrent::kernels::recurrent_d_states::RecurrentDStates,
    crate::recurrent::kernels::recurrent_d_ends::RecurrentDEnds,
    crate::recurrent::kernels::recurrent_d_decays::RecurrentDDecays,
    crate::recurrent::kernels::recurrent_d_channel_decays::RecurrentDChannelDecays,
    crate::recurrent::kernels::recurrent_d_pairs::RecurrentDPairs,
    crate::recurrent::kernels::recurrent_d_channels::RecurrentDChannels,
    crate::recurrent::kernels::recurrent_d_rows::RecurrentDRows,
    crate::recurrent::kernels::recurrent_d_rates::RecurrentDRates,
    crate::recurrent::kernels::recurrent_d_values::RecurrentDValues,
    crate::layers::gated_delta_net::kernels::delta_gates::DeltaGates,
    crate::layers::gated_delta_net::kernels::delta_gates_backward::DeltaGatesBackward,
    crate::matmul::quantized::kernels::quantized_project::QuantizedProject,
    crate::matmul::quantized::kernels::quantized_rows::QuantizedRows,
    crate::layers::attentional::kernels::tanh_sum::TanhSum,
    crate::layers::attentional::kernels::tanh_backward::TanhBackward,
    crate::rows::weight_norm::kernels::weight_norm::WeightNorm,
    crate::rows::weight_norm::kernels::weight_norm_backward::WeightNormBackward,
    crate::selected::indexer::kernels::indexer_d_keys::IndexerDKeys,
    crate::selected::indexer::kernels::indexer_d_queries::IndexerDQueries,
    crate::selected::indexer::kernels::indexer_ranges::IndexerRanges,
    crate::selected::indexer::kernels::indexer_scatter::IndexerScatter,
    crate::selected::indexer::kernels::indexer_scores::IndexerScores,
    crate::local::kernels::local_columns::LocalColumns,
    crate::local::kernels::local_gradients::LocalGradients,
    crate::local::kernels::local_positions::LocalPositions,
    crate::local::kernels::local_positions_backward::LocalPositionsBackward,
    crate::local::kernels::local_rows::LocalRows,
    crate::local::kernels::local_weights::LocalWeights,
    crate::rows::embedding::kernels::embedding::Embedding,
    crate::rows::embedding::kernels::embedding_backward::EmbeddingBackward,
    crate::rows::mean_pool::kernels::mean_pool::MeanPool,
    crate::rows::mean_pool::kernels::mean_pool_backward::MeanPoolBackward,
    crate::rows::causal_conv::kernels::causal_conv::CausalConv,
    crate::rows::causal_conv::kernels::causal_conv_backward::CausalConvBackward,
    crate::rows::causal_conv::kernels::causal_conv_state::CausalConvState,
    crate::rows::causal_conv::kernels::causal_conv_sums::CausalConvSums,
    crate::rows::logits::kernels::log_softmax::LogSoftmax,
    crate::rows::logits::kernels::log_softmax_backward::LogSoftmaxBackward,
    crate::rows::logits::kernels::top_k::TopK,
    crate::cache::kernels::hadamard_rows::HadamardRows,
    crate::selected::native::kernels::block_means::BlockMeans,
    crate::selected::native::kernels::block_scores::BlockScores,
    crate::selected::native::kernels::gated_sum::GatedSum,
    crate::selected::kernels::selected_keys::SelectedKeys,
    crate::selected::kernels::selected_sums::SelectedSums,
    crate::selected::kernels::selected_weights::SelectedWeights,
    crate::rows::logits::kernels::top_k_merge::TopKMerge,
    crate::rows::logits::kernels::top_k_select::TopKSelect,
    crate::rows::logits::kernels::top_k_sort::TopKSort,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Families;

    #[test]
    fn every_kernel_has_a_family() {
        let all = all();
        let without = all.iter().filter(|variant| variant.families() == Families::NONE);
        let labels: std::collections::BTreeSet<_> = without.map(|variant| variant.label()).collect();
        assert!(labels.is_empty() && all.len() > 1000, "{labels:?} of {} variants", all.len());
    }
}
