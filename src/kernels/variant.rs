//! Any of the kernels.

use crate::family::{Families, Family, GRADIENTS, PRODUCT_GRADIENTS, PRODUCTS, STAGED};
use crate::kernel::{Kernel, Variant};
use crate::plan::{BackwardTiles, FusedTiles, GradientsOf, Tiles};
use crate::tensor::DType;

/// The list of kernels: the module of each, whose name is that of its shader and of its label, and its variants.
macro_rules! kernels {
    ($($stem:ident::$name:ident,)*) => {
        /// Every kernel variant of the crate.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub(crate) enum KernelVariant {
            $($name(super::$stem::$name),)*
        }

        $(impl From<super::$stem::$name> for KernelVariant {
            fn from(key: super::$stem::$name) -> Self {
                KernelVariant::$name(key)
            }
        })*

        impl Variant for KernelVariant {
            fn label(&self) -> &'static str {
                match self {
                    $(KernelVariant::$name(_) => concat!("attention.", stringify!($stem)),)*
                }
            }

            fn describe(&self) -> Kernel {
                match self {
                    $(KernelVariant::$name(kernel) => kernel.describe(),)*
                }
            }
        }

        /// One variant of every kernel along each of its axes.
        pub(crate) fn all() -> Vec<KernelVariant> {
            let mut all = Vec::new();
            $(all.extend(super::$stem::$name::all().into_iter().map(KernelVariant::$name));)*
            all
        }
    };
}

kernels! {
    project::Project,
    scores::Scores,
    additive_scores::AdditiveScores,
    additive_pairs::AdditivePairs,
    additive_backward::AdditiveBackward,
    score_stage::ScoreStage,
    softmax::Softmax,
    weighted_sum::WeightedSum,
    average_weights::AverageWeights,
    append_keys::AppendKeys,
    fused::Fused,
    row_stats::RowStats,
    row_totals::RowTotals,
    fused_backward::FusedBackward,
    score_gradients::ScoreGradients,
    captured_gradients::CapturedGradients,
    merge::Merge,
    merge_splits::MergeSplits,
    classify::Classify,
    cache_advance::CacheAdvance,
    cache_append::CacheAppend,
    cache_copy::CacheCopy,
    cache_read::CacheRead,
    cache_reorder::CacheReorder,
    rotate::Rotate,
    add_positions::AddPositions,
    project_backward::ProjectBackward,
    column_sums::ColumnSums,
    part_sums::PartSums,
    ask_mask::AskMask,
    table_backward::TableBackward,
    merge_backward::MergeBackward,
    keep_rows::KeepRows,
    lsh_codes::LshCodes,
    lsh_gather::LshGather,
    lsh_gradients::LshGradients,
    lsh_hash::LshHash,
    lsh_merge::LshMerge,
    radix_sort_count::RadixSortCount,
    radix_sort_scan::RadixSortScan,
    radix_sort_scatter::RadixSortScatter,
    norm::Norm,
    norm_backward::NormBackward,
    norm_sums::NormSums,
    pointwise::Pointwise,
    pointwise_backward::PointwiseBackward,
    linear_chunks::LinearChunks,
    linear_features::LinearFeatures,
    linear_map::LinearMap,
    linear_map_backward::LinearMapBackward,
    linear_d_rows::LinearDRows,
    linear_logs::LinearLogs,
    linear_carry::LinearCarry,
    linear_state::LinearState,
    linear_prefix::LinearPrefix,
    linear_scores::LinearScores,
    linear_recurrent::LinearRecurrent,
    linear_out::LinearOut,
    linear_stats::LinearStats,
    linear_d_queries::LinearDQueries,
    linear_d_keys::LinearDKeys,
    linear_d_values::LinearDValues,
    quantized_project::QuantizedProject,
    quantized_rows::QuantizedRows,
    tanh_sum::TanhSum,
    tanh_backward::TanhBackward,
    weight_norm::WeightNorm,
    weight_norm_backward::WeightNormBackward,
    local_columns::LocalColumns,
    local_gradients::LocalGradients,
    local_positions::LocalPositions,
    local_positions_backward::LocalPositionsBackward,
    local_rows::LocalRows,
    local_weights::LocalWeights,
    embedding::Embedding,
    embedding_backward::EmbeddingBackward,
    mean_pool::MeanPool,
    mean_pool_backward::MeanPoolBackward,
    log_softmax::LogSoftmax,
    log_softmax_backward::LogSoftmaxBackward,
    top_k::TopK,
}

impl KernelVariant {
    /// The families that it is of.
    pub fn families(&self) -> Families {
        let of = |families: &[Option<Family>]| families.iter().flatten().copied().collect();
        let with_tensors = |families: &[Option<Family>], dtypes: &[DType]| {
            let tensors = [(DType::F16, Family::F16Tensors), (DType::BF16, Family::BF16Tensors)];
            let used = tensors.map(|(dtype, family)| dtypes.contains(&dtype).then_some(family));
            families.iter().chain(&used).flatten().copied().collect()
        };
        let staged = |tiles: Tiles| Some(STAGED.of(matches!(tiles, Tiles::Cpu { .. })));
        match self {
            KernelVariant::Project(v) => {
                let family = match v.tiles {
                    Tiles::Matrix(_) => Family::MatrixProducts,
                    tiles => PRODUCTS.of(matches!(tiles, Tiles::Cpu { .. })),
                };
                with_tensors(&[Some(family)], &[v.x.dtype, v.w.dtype, v.y])
            }
            KernelVariant::ProjectBackward(v) => {
                let family = PRODUCT_GRADIENTS.of(matches!(v.tiles, Tiles::Cpu { .. }));
                with_tensors(&[Some(family)], &[v.d_y, v.other, v.result])
            }
            KernelVariant::Scores(v) => with_tensors(&[staged(v.tiles)], &[v.q, v.k]),
            KernelVariant::AdditivePairs(_) => of(&[Some(Family::RowStats)]),
            KernelVariant::AdditiveBackward(v) => {
                let tensors = [Some(v.others), v.score_vector, v.gradient];
                with_tensors(&[Some(GRADIENTS.of(v.cpu))], &tensors.map(|t| t.unwrap_or(DType::F32)))
            }
            KernelVariant::AdditiveScores(v) => {
                with_tensors(&[Some(STAGED.of(v.cpu))], &[v.q, v.k, v.score_vector])
            }
            KernelVariant::Softmax(v) => of(&[Some(STAGED.of(v.rows.lanes == 1))]),
            KernelVariant::WeightedSum(v) => with_tensors(&[staged(v.tiles)], &[v.v, v.out]),
            KernelVariant::Fused(v) => {
                let family = match v.tiles {
                    FusedTiles::Gpu { .. } | FusedTiles::AdditiveGpu { .. } => Family::FusedGpu,
                    FusedTiles::Cpu { .. } | FusedTiles::AdditiveCpu { .. } => Family::FusedCpu,
                    FusedTiles::DecodeGpu(_) => Family::DecodeGpu,
                    FusedTiles::DecodeCpu(_) => Family::DecodeCpu,
                    FusedTiles::Matrix(_) => Family::MatrixAttention,
                };
                let shuffles = matches!(v.tiles, FusedTiles::DecodeGpu(decode) if decode.subgroups);
                let families = [
                    Some(family),
                    shuffles.then_some(Family::SubgroupReductions),
                    v.partial.map(|_| Family::SplitKeys),
                    v.cached.map(|cache| cache.storage.family()),
                ];
                with_tensors(&families, &[v.q])
            }
            KernelVariant::RowStats(v) => with_tensors(&[Some(Family::RowStats)], &[v.out, v.d_out]),
            KernelVariant::RowTotals(v) => with_tensors(&[Some(Family::RowStats)], &[v.q, v.k]),
            KernelVariant::FusedBackward(v) => {
                let joint = v.of == GradientsOf::KeysAndValues;
                let family = match v.tiles {
                    BackwardTiles::Matrix(_) => Family::MatrixGradients,
                    tiles => GRADIENTS.of(tiles.is_cpu()),
                };
                let families = [Some(family), joint.then_some(Family::JointGradients)];
                let tensors = [Some(v.q), v.d_scored, v.d_v].map(|t| t.unwrap_or(DType::F32));
                with_tensors(&families, &tensors)
            }
            KernelVariant::ScoreGradients(v) => {
                with_tensors(&[Some(Family::ScoreGradients)], &[v.q.unwrap_or(DType::F32), v.gradient])
            }
            KernelVariant::CapturedGradients(v) => {
                with_tensors(&[Some(Family::ScoreGradients)], &[v.q, v.gradient])
            }
            KernelVariant::ColumnSums(v) => with_tensors(&[Some(Family::RowSums)], &[v.d_y, v.sums]),
            KernelVariant::PartSums(v) => with_tensors(&[Some(Family::ScoreGradients)], &[v.sums]),
            KernelVariant::TableBackward(v) => with_tensors(&[Some(Family::RowSums)], &[v.d_out, v.d_table]),
            KernelVariant::MergeSplits(_) => of(&[Some(Family::SplitKeys)]),
            KernelVariant::CacheAppend(v) => of(&[Some(v.cached.storage.family())]),
            KernelVariant::CacheRead(v) => of(&[Some(v.cached.storage.family())]),
            _ => Families::NONE,
        }
    }
}
