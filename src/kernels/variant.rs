//! Any of the kernels.

use super::{
    add_positions, additive_backward, additive_pairs, additive_scores, append_keys, ask_mask,
    average_weights, cache_advance, cache_append, cache_copy, cache_read, cache_reorder, captured_gradients,
    classify, column_sums, embedding, embedding_backward, fused, fused_backward, keep_rows, linear_carry,
    linear_chunks, linear_d_keys, linear_d_queries, linear_d_rows, linear_d_values, linear_features,
    linear_logs, linear_map, linear_map_backward, linear_out, linear_prefix, linear_recurrent, linear_scores,
    linear_state, linear_stats, local_columns, local_gradients, local_positions, local_positions_backward,
    local_rows, local_weights, log_softmax, log_softmax_backward, lsh_codes, lsh_gather, lsh_gradients,
    lsh_hash, lsh_merge, mean_pool, mean_pool_backward, merge, merge_backward, merge_splits, norm,
    norm_backward, norm_sums, part_sums, pointwise, pointwise_backward, project, project_backward,
    quantized_project, quantized_rows, radix_sort_count, radix_sort_scan, radix_sort_scatter, rotate,
    row_stats, row_totals, score_gradients, score_stage, scores, softmax, table_backward, tanh_backward,
    tanh_sum, top_k, weight_norm, weight_norm_backward, weighted_sum,
};
use crate::family::{Families, Family, GRADIENTS, PRODUCT_GRADIENTS, PRODUCTS, STAGED};
use crate::kernel::{Kernel, Variant};
use crate::plan::{BackwardTiles, FusedTiles, GradientsOf, Tiles};
use crate::tensor::DType;

/// Every kernel variant of the crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum KernelVariant {
    Project(project::Project),
    Scores(scores::Scores),
    AdditiveScores(additive_scores::AdditiveScores),
    AdditivePairs(additive_pairs::AdditivePairs),
    AdditiveBackward(additive_backward::AdditiveBackward),
    ScoreStage(score_stage::ScoreStage),
    Softmax(softmax::Softmax),
    WeightedSum(weighted_sum::WeightedSum),
    AverageWeights(average_weights::AverageWeights),
    AppendKeys(append_keys::AppendKeys),
    Fused(fused::Fused),
    RowStats(row_stats::RowStats),
    RowTotals(row_totals::RowTotals),
    FusedBackward(fused_backward::FusedBackward),
    ScoreGradients(score_gradients::ScoreGradients),
    CapturedGradients(captured_gradients::CapturedGradients),
    Merge(merge::Merge),
    MergeSplits(merge_splits::MergeSplits),
    Classify(classify::Classify),
    CacheAdvance(cache_advance::CacheAdvance),
    CacheAppend(cache_append::CacheAppend),
    CacheCopy(cache_copy::CacheCopy),
    CacheRead(cache_read::CacheRead),
    CacheReorder(cache_reorder::CacheReorder),
    Rotate(rotate::Rotate),
    AddPositions(add_positions::AddPositions),
    ProjectBackward(project_backward::ProjectBackward),
    ColumnSums(column_sums::ColumnSums),
    PartSums(part_sums::PartSums),
    AskMask(ask_mask::AskMask),
    TableBackward(table_backward::TableBackward),
    MergeBackward(merge_backward::MergeBackward),
    KeepRows(keep_rows::KeepRows),
    LshCodes(lsh_codes::LshCodes),
    LshGather(lsh_gather::LshGather),
    LshGradients(lsh_gradients::LshGradients),
    LshHash(lsh_hash::LshHash),
    LshMerge(lsh_merge::LshMerge),
    RadixSortCount(radix_sort_count::RadixSortCount),
    RadixSortScan(radix_sort_scan::RadixSortScan),
    RadixSortScatter(radix_sort_scatter::RadixSortScatter),
    Norm(norm::Norm),
    NormBackward(norm_backward::NormBackward),
    NormSums(norm_sums::NormSums),
    Pointwise(pointwise::Pointwise),
    PointwiseBackward(pointwise_backward::PointwiseBackward),
    LinearChunks(linear_chunks::LinearChunks),
    LinearFeatures(linear_features::LinearFeatures),
    LinearMap(linear_map::LinearMap),
    LinearMapBackward(linear_map_backward::LinearMapBackward),
    LinearDRows(linear_d_rows::LinearDRows),
    LinearLogs(linear_logs::LinearLogs),
    LinearCarry(linear_carry::LinearCarry),
    LinearState(linear_state::LinearState),
    LinearPrefix(linear_prefix::LinearPrefix),
    LinearScores(linear_scores::LinearScores),
    LinearRecurrent(linear_recurrent::LinearRecurrent),
    LinearOut(linear_out::LinearOut),
    LinearStats(linear_stats::LinearStats),
    LinearDQueries(linear_d_queries::LinearDQueries),
    LinearDKeys(linear_d_keys::LinearDKeys),
    LinearDValues(linear_d_values::LinearDValues),
    QuantizedProject(quantized_project::QuantizedProject),
    QuantizedRows(quantized_rows::QuantizedRows),
    TanhSum(tanh_sum::TanhSum),
    TanhBackward(tanh_backward::TanhBackward),
    WeightNorm(weight_norm::WeightNorm),
    WeightNormBackward(weight_norm_backward::WeightNormBackward),
    LocalColumns(local_columns::LocalColumns),
    LocalGradients(local_gradients::LocalGradients),
    LocalPositions(local_positions::LocalPositions),
    LocalPositionsBackward(local_positions_backward::LocalPositionsBackward),
    LocalRows(local_rows::LocalRows),
    LocalWeights(local_weights::LocalWeights),
    Embedding(embedding::Embedding),
    EmbeddingBackward(embedding_backward::EmbeddingBackward),
    MeanPool(mean_pool::MeanPool),
    MeanPoolBackward(mean_pool_backward::MeanPoolBackward),
    LogSoftmax(log_softmax::LogSoftmax),
    LogSoftmaxBackward(log_softmax_backward::LogSoftmaxBackward),
    TopK(top_k::TopK),
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
                with_tensors(&[Some(family)], &[v.a, v.b, v.c])
            }
            KernelVariant::Scores(v) => with_tensors(&[staged(v.tiles)], &[v.dtype]),
            KernelVariant::AdditivePairs(_) => of(&[Some(Family::RowStats)]),
            KernelVariant::AdditiveBackward(v) => {
                with_tensors(&[Some(GRADIENTS.of(v.cpu))], &[v.own, v.score_vector, v.gradient])
            }
            KernelVariant::AdditiveScores(v) => {
                with_tensors(&[Some(STAGED.of(v.cpu))], &[v.dtype, v.score_vector])
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
                    v.splits.then_some(Family::SplitKeys),
                    v.cache.map(|cache| cache.storage.family()),
                ];
                with_tensors(&families, &[v.dtype])
            }
            KernelVariant::RowStats(v) => with_tensors(&[Some(Family::RowStats)], &[v.dtype]),
            KernelVariant::RowTotals(v) => with_tensors(&[Some(Family::RowStats)], &[v.dtype]),
            KernelVariant::FusedBackward(v) => {
                let joint = v.of == GradientsOf::KeysAndValues;
                let family = match v.tiles {
                    BackwardTiles::Matrix(_) => Family::MatrixGradients,
                    tiles => GRADIENTS.of(tiles.is_cpu()),
                };
                let families = [Some(family), joint.then_some(Family::JointGradients)];
                with_tensors(&families, &[v.dtype, v.scored, v.valued])
            }
            KernelVariant::ScoreGradients(v) => {
                with_tensors(&[Some(Family::ScoreGradients)], &[v.dtype, v.gradient])
            }
            KernelVariant::CapturedGradients(v) => {
                with_tensors(&[Some(Family::ScoreGradients)], &[v.dtype, v.gradient])
            }
            KernelVariant::ColumnSums(v) => with_tensors(&[Some(Family::RowSums)], &[v.d_y, v.sums]),
            KernelVariant::PartSums(v) => with_tensors(&[Some(Family::ScoreGradients)], &[v.sums]),
            KernelVariant::TableBackward(v) => with_tensors(&[Some(Family::RowSums)], &[v.d_out, v.d_table]),
            KernelVariant::MergeSplits(_) => of(&[Some(Family::SplitKeys)]),
            KernelVariant::CacheAppend(v) => of(&[Some(v.cache.storage.family())]),
            KernelVariant::CacheRead(v) => of(&[Some(v.cache.storage.family())]),
            _ => Families::NONE,
        }
    }
}

impl Variant for KernelVariant {
    fn label(&self) -> &'static str {
        match self {
            KernelVariant::Project(_) => "attention.project",
            KernelVariant::Scores(_) => "attention.scores",
            KernelVariant::AdditiveScores(_) => "attention.additive_scores",
            KernelVariant::AdditivePairs(_) => "attention.additive_pairs",
            KernelVariant::AdditiveBackward(_) => "attention.additive_backward",
            KernelVariant::ScoreStage(_) => "attention.score_stage",
            KernelVariant::Softmax(_) => "attention.softmax",
            KernelVariant::WeightedSum(_) => "attention.weighted_sum",
            KernelVariant::AverageWeights(_) => "attention.average_weights",
            KernelVariant::AppendKeys(_) => "attention.append_keys",
            KernelVariant::Fused(_) => "attention.fused",
            KernelVariant::RowStats(_) => "attention.row_stats",
            KernelVariant::RowTotals(_) => "attention.row_totals",
            KernelVariant::FusedBackward(_) => "attention.fused_backward",
            KernelVariant::ScoreGradients(_) => "attention.score_gradients",
            KernelVariant::CapturedGradients(_) => "attention.captured_gradients",
            KernelVariant::Merge(_) => "attention.merge",
            KernelVariant::MergeSplits(_) => "attention.merge_splits",
            KernelVariant::Classify(_) => "attention.classify",
            KernelVariant::CacheAdvance(_) => "attention.cache_advance",
            KernelVariant::CacheAppend(_) => "attention.cache_append",
            KernelVariant::CacheCopy(_) => "attention.cache_copy",
            KernelVariant::CacheRead(_) => "attention.cache_read",
            KernelVariant::CacheReorder(_) => "attention.cache_reorder",
            KernelVariant::Rotate(_) => "attention.rotate",
            KernelVariant::AddPositions(_) => "attention.add_positions",
            KernelVariant::ProjectBackward(_) => "attention.project_backward",
            KernelVariant::ColumnSums(_) => "attention.column_sums",
            KernelVariant::PartSums(_) => "attention.part_sums",
            KernelVariant::AskMask(_) => "attention.ask_mask",
            KernelVariant::TableBackward(_) => "attention.table_backward",
            KernelVariant::MergeBackward(_) => "attention.merge_backward",
            KernelVariant::KeepRows(_) => "attention.keep_rows",
            KernelVariant::LshCodes(_) => "attention.lsh_codes",
            KernelVariant::LshGather(_) => "attention.lsh_gather",
            KernelVariant::LshGradients(_) => "attention.lsh_gradients",
            KernelVariant::LshHash(_) => "attention.lsh_hash",
            KernelVariant::LshMerge(_) => "attention.lsh_merge",
            KernelVariant::RadixSortCount(_) => "attention.radix_sort_count",
            KernelVariant::RadixSortScan(_) => "attention.radix_sort_scan",
            KernelVariant::RadixSortScatter(_) => "attention.radix_sort_scatter",
            KernelVariant::Norm(_) => "attention.norm",
            KernelVariant::NormBackward(_) => "attention.norm_backward",
            KernelVariant::NormSums(_) => "attention.norm_sums",
            KernelVariant::Pointwise(_) => "attention.pointwise",
            KernelVariant::PointwiseBackward(_) => "attention.pointwise_backward",
            KernelVariant::LinearChunks(_) => "attention.linear_chunks",
            KernelVariant::LinearFeatures(_) => "attention.linear_features",
            KernelVariant::LinearMap(_) => "attention.linear_map",
            KernelVariant::LinearMapBackward(_) => "attention.linear_map_backward",
            KernelVariant::LinearDRows(_) => "attention.linear_d_rows",
            KernelVariant::LinearLogs(_) => "attention.linear_logs",
            KernelVariant::LinearCarry(_) => "attention.linear_carry",
            KernelVariant::LinearState(_) => "attention.linear_state",
            KernelVariant::LinearPrefix(_) => "attention.linear_prefix",
            KernelVariant::LinearScores(_) => "attention.linear_scores",
            KernelVariant::LinearRecurrent(_) => "attention.linear_recurrent",
            KernelVariant::LinearOut(_) => "attention.linear_out",
            KernelVariant::LinearStats(_) => "attention.linear_stats",
            KernelVariant::LinearDQueries(_) => "attention.linear_d_queries",
            KernelVariant::LinearDKeys(_) => "attention.linear_d_keys",
            KernelVariant::LinearDValues(_) => "attention.linear_d_values",
            KernelVariant::QuantizedProject(_) => "attention.quantized_project",
            KernelVariant::QuantizedRows(_) => "attention.quantized_rows",
            KernelVariant::TanhSum(_) => "attention.tanh_sum",
            KernelVariant::TanhBackward(_) => "attention.tanh_backward",
            KernelVariant::WeightNorm(_) => "attention.weight_norm",
            KernelVariant::WeightNormBackward(_) => "attention.weight_norm_backward",
            KernelVariant::LocalColumns(_) => "attention.local_columns",
            KernelVariant::LocalGradients(_) => "attention.local_gradients",
            KernelVariant::LocalPositions(_) => "attention.local_positions",
            KernelVariant::LocalPositionsBackward(_) => "attention.local_positions_backward",
            KernelVariant::LocalRows(_) => "attention.local_rows",
            KernelVariant::LocalWeights(_) => "attention.local_weights",
            KernelVariant::Embedding(_) => "attention.embedding",
            KernelVariant::EmbeddingBackward(_) => "attention.embedding_backward",
            KernelVariant::MeanPool(_) => "attention.mean_pool",
            KernelVariant::MeanPoolBackward(_) => "attention.mean_pool_backward",
            KernelVariant::LogSoftmax(_) => "attention.log_softmax",
            KernelVariant::LogSoftmaxBackward(_) => "attention.log_softmax_backward",
            KernelVariant::TopK(_) => "attention.top_k",
        }
    }

    fn describe(&self) -> Kernel {
        match self {
            KernelVariant::Project(v) => v.describe(),
            KernelVariant::Scores(v) => v.describe(),
            KernelVariant::AdditiveScores(v) => v.describe(),
            KernelVariant::AdditivePairs(v) => v.describe(),
            KernelVariant::AdditiveBackward(v) => v.describe(),
            KernelVariant::ScoreStage(v) => v.describe(),
            KernelVariant::Softmax(v) => v.describe(),
            KernelVariant::WeightedSum(v) => v.describe(),
            KernelVariant::AverageWeights(v) => v.describe(),
            KernelVariant::AppendKeys(v) => v.describe(),
            KernelVariant::Fused(v) => v.describe(),
            KernelVariant::RowStats(v) => v.describe(),
            KernelVariant::RowTotals(v) => v.describe(),
            KernelVariant::FusedBackward(v) => v.describe(),
            KernelVariant::ScoreGradients(v) => v.describe(),
            KernelVariant::CapturedGradients(v) => v.describe(),
            KernelVariant::Merge(v) => v.describe(),
            KernelVariant::MergeSplits(v) => v.describe(),
            KernelVariant::Classify(v) => v.describe(),
            KernelVariant::CacheAdvance(v) => v.describe(),
            KernelVariant::CacheAppend(v) => v.describe(),
            KernelVariant::CacheCopy(v) => v.describe(),
            KernelVariant::CacheRead(v) => v.describe(),
            KernelVariant::CacheReorder(v) => v.describe(),
            KernelVariant::Rotate(v) => v.describe(),
            KernelVariant::AddPositions(v) => v.describe(),
            KernelVariant::ProjectBackward(v) => v.describe(),
            KernelVariant::ColumnSums(v) => v.describe(),
            KernelVariant::PartSums(v) => v.describe(),
            KernelVariant::AskMask(v) => v.describe(),
            KernelVariant::TableBackward(v) => v.describe(),
            KernelVariant::MergeBackward(v) => v.describe(),
            KernelVariant::KeepRows(v) => v.describe(),
            KernelVariant::LshCodes(v) => v.describe(),
            KernelVariant::LshGather(v) => v.describe(),
            KernelVariant::LshGradients(v) => v.describe(),
            KernelVariant::LshHash(v) => v.describe(),
            KernelVariant::LshMerge(v) => v.describe(),
            KernelVariant::RadixSortCount(v) => v.describe(),
            KernelVariant::RadixSortScan(v) => v.describe(),
            KernelVariant::RadixSortScatter(v) => v.describe(),
            KernelVariant::Norm(v) => v.describe(),
            KernelVariant::NormBackward(v) => v.describe(),
            KernelVariant::NormSums(v) => v.describe(),
            KernelVariant::Pointwise(v) => v.describe(),
            KernelVariant::PointwiseBackward(v) => v.describe(),
            KernelVariant::LinearChunks(v) => v.describe(),
            KernelVariant::LinearFeatures(v) => v.describe(),
            KernelVariant::LinearMap(v) => v.describe(),
            KernelVariant::LinearMapBackward(v) => v.describe(),
            KernelVariant::LinearDRows(v) => v.describe(),
            KernelVariant::LinearLogs(v) => v.describe(),
            KernelVariant::LinearCarry(v) => v.describe(),
            KernelVariant::LinearState(v) => v.describe(),
            KernelVariant::LinearPrefix(v) => v.describe(),
            KernelVariant::LinearScores(v) => v.describe(),
            KernelVariant::LinearRecurrent(v) => v.describe(),
            KernelVariant::LinearOut(v) => v.describe(),
            KernelVariant::LinearStats(v) => v.describe(),
            KernelVariant::LinearDQueries(v) => v.describe(),
            KernelVariant::LinearDKeys(v) => v.describe(),
            KernelVariant::LinearDValues(v) => v.describe(),
            KernelVariant::QuantizedProject(v) => v.describe(),
            KernelVariant::QuantizedRows(v) => v.describe(),
            KernelVariant::TanhSum(v) => v.describe(),
            KernelVariant::TanhBackward(v) => v.describe(),
            KernelVariant::WeightNorm(v) => v.describe(),
            KernelVariant::WeightNormBackward(v) => v.describe(),
            KernelVariant::LocalColumns(v) => v.describe(),
            KernelVariant::LocalGradients(v) => v.describe(),
            KernelVariant::LocalPositions(v) => v.describe(),
            KernelVariant::LocalPositionsBackward(v) => v.describe(),
            KernelVariant::LocalRows(v) => v.describe(),
            KernelVariant::LocalWeights(v) => v.describe(),
            KernelVariant::Embedding(v) => v.describe(),
            KernelVariant::EmbeddingBackward(v) => v.describe(),
            KernelVariant::MeanPool(v) => v.describe(),
            KernelVariant::MeanPoolBackward(v) => v.describe(),
            KernelVariant::LogSoftmax(v) => v.describe(),
            KernelVariant::LogSoftmaxBackward(v) => v.describe(),
            KernelVariant::TopK(v) => v.describe(),
        }
    }
}

/// One variant of every kernel along each of its axes.
pub(crate) fn all() -> Vec<KernelVariant> {
    let mut all = Vec::new();
    all.extend(project::Project::all().map(KernelVariant::Project));
    all.extend(scores::Scores::all().map(KernelVariant::Scores));
    all.extend(additive_scores::AdditiveScores::all().map(KernelVariant::AdditiveScores));
    all.extend(additive_pairs::AdditivePairs::all().map(KernelVariant::AdditivePairs));
    all.extend(additive_backward::AdditiveBackward::all().into_iter().map(KernelVariant::AdditiveBackward));
    all.extend(score_stage::ScoreStage::all().map(KernelVariant::ScoreStage));
    all.extend(softmax::Softmax::all().map(KernelVariant::Softmax));
    all.extend(weighted_sum::WeightedSum::all().map(KernelVariant::WeightedSum));
    all.extend(average_weights::AverageWeights::all().map(KernelVariant::AverageWeights));
    all.extend(append_keys::AppendKeys::all().map(KernelVariant::AppendKeys));
    all.extend(fused::Fused::all().into_iter().map(KernelVariant::Fused));
    all.extend(row_stats::RowStats::all().map(KernelVariant::RowStats));
    all.extend(row_totals::RowTotals::all().map(KernelVariant::RowTotals));
    all.extend(fused_backward::FusedBackward::all().into_iter().map(KernelVariant::FusedBackward));
    all.extend(score_gradients::ScoreGradients::all().into_iter().map(KernelVariant::ScoreGradients));
    all.extend(
        captured_gradients::CapturedGradients::all().into_iter().map(KernelVariant::CapturedGradients),
    );
    all.extend(merge::Merge::all().map(KernelVariant::Merge));
    all.extend(merge_splits::MergeSplits::all().map(KernelVariant::MergeSplits));
    all.extend(classify::Classify::all().map(KernelVariant::Classify));
    all.extend(cache_advance::CacheAdvance::all().map(KernelVariant::CacheAdvance));
    all.extend(cache_append::CacheAppend::all().map(KernelVariant::CacheAppend));
    all.push(KernelVariant::CacheCopy(cache_copy::CacheCopy));
    all.extend(cache_read::CacheRead::all().map(KernelVariant::CacheRead));
    all.push(KernelVariant::CacheReorder(cache_reorder::CacheReorder));
    all.extend(rotate::Rotate::all().map(KernelVariant::Rotate));
    all.extend(add_positions::AddPositions::all().map(KernelVariant::AddPositions));
    all.extend(project_backward::ProjectBackward::all().map(KernelVariant::ProjectBackward));
    all.extend(column_sums::ColumnSums::all().map(KernelVariant::ColumnSums));
    all.extend(part_sums::PartSums::all().map(KernelVariant::PartSums));
    all.extend(ask_mask::AskMask::all().map(KernelVariant::AskMask));
    all.extend(table_backward::TableBackward::all().map(KernelVariant::TableBackward));
    all.extend(merge_backward::MergeBackward::all().map(KernelVariant::MergeBackward));
    all.extend(keep_rows::KeepRows::all().map(KernelVariant::KeepRows));
    all.extend(lsh_codes::LshCodes::all().map(KernelVariant::LshCodes));
    all.extend(lsh_gather::LshGather::all().map(KernelVariant::LshGather));
    all.extend(lsh_gradients::LshGradients::all().map(KernelVariant::LshGradients));
    all.extend(lsh_hash::LshHash::all().map(KernelVariant::LshHash));
    all.extend(lsh_merge::LshMerge::all().map(KernelVariant::LshMerge));
    all.extend(radix_sort_count::RadixSortCount::all().map(KernelVariant::RadixSortCount));
    all.extend(radix_sort_scan::RadixSortScan::all().map(KernelVariant::RadixSortScan));
    all.extend(radix_sort_scatter::RadixSortScatter::all().map(KernelVariant::RadixSortScatter));
    all.extend(norm::Norm::all().map(KernelVariant::Norm));
    all.extend(norm_backward::NormBackward::all().map(KernelVariant::NormBackward));
    all.extend(norm_sums::NormSums::all().map(KernelVariant::NormSums));
    all.extend(pointwise::Pointwise::all().map(KernelVariant::Pointwise));
    all.extend(pointwise_backward::PointwiseBackward::all().map(KernelVariant::PointwiseBackward));
    all.extend(linear_chunks::LinearChunks::all().map(KernelVariant::LinearChunks));
    all.extend(linear_features::LinearFeatures::all().map(KernelVariant::LinearFeatures));
    all.extend(linear_map::LinearMap::all().map(KernelVariant::LinearMap));
    all.extend(linear_map_backward::LinearMapBackward::all().map(KernelVariant::LinearMapBackward));
    all.extend(linear_d_rows::LinearDRows::all().map(KernelVariant::LinearDRows));
    all.extend(linear_logs::LinearLogs::all().map(KernelVariant::LinearLogs));
    all.extend(linear_carry::LinearCarry::all().into_iter().map(KernelVariant::LinearCarry));
    all.extend(linear_state::LinearState::all().into_iter().map(KernelVariant::LinearState));
    all.extend(linear_prefix::LinearPrefix::all().map(KernelVariant::LinearPrefix));
    all.extend(linear_scores::LinearScores::all().into_iter().map(KernelVariant::LinearScores));
    all.extend(linear_recurrent::LinearRecurrent::all().into_iter().map(KernelVariant::LinearRecurrent));
    all.extend(linear_out::LinearOut::all().into_iter().map(KernelVariant::LinearOut));
    all.extend(linear_stats::LinearStats::all().into_iter().map(KernelVariant::LinearStats));
    all.extend(linear_d_queries::LinearDQueries::all().into_iter().map(KernelVariant::LinearDQueries));
    all.extend(linear_d_keys::LinearDKeys::all().into_iter().map(KernelVariant::LinearDKeys));
    all.extend(linear_d_values::LinearDValues::all().into_iter().map(KernelVariant::LinearDValues));
    all.extend(local_columns::LocalColumns::all().map(KernelVariant::LocalColumns));
    all.extend(local_gradients::LocalGradients::all().map(KernelVariant::LocalGradients));
    all.extend(local_positions::LocalPositions::all().map(KernelVariant::LocalPositions));
    all.extend(
        local_positions_backward::LocalPositionsBackward::all().map(KernelVariant::LocalPositionsBackward),
    );
    all.extend(local_rows::LocalRows::all().map(KernelVariant::LocalRows));
    all.extend(local_weights::LocalWeights::all().map(KernelVariant::LocalWeights));
    all.extend(weight_norm::WeightNorm::all().map(KernelVariant::WeightNorm));
    let gradients = weight_norm_backward::WeightNormBackward::all();
    all.extend(gradients.map(KernelVariant::WeightNormBackward));
    all.extend(quantized_project::QuantizedProject::all().map(KernelVariant::QuantizedProject));
    all.extend(quantized_rows::QuantizedRows::all().map(KernelVariant::QuantizedRows));
    all.extend(tanh_sum::TanhSum::all().map(KernelVariant::TanhSum));
    all.extend(tanh_backward::TanhBackward::all().map(KernelVariant::TanhBackward));
    all.extend(embedding::Embedding::all().map(KernelVariant::Embedding));
    all.extend(embedding_backward::EmbeddingBackward::all().map(KernelVariant::EmbeddingBackward));
    all.extend(mean_pool::MeanPool::all().map(KernelVariant::MeanPool));
    all.extend(mean_pool_backward::MeanPoolBackward::all().map(KernelVariant::MeanPoolBackward));
    all.extend(log_softmax::LogSoftmax::all().map(KernelVariant::LogSoftmax));
    all.extend(log_softmax_backward::LogSoftmaxBackward::all().map(KernelVariant::LogSoftmaxBackward));
    all.extend(top_k::TopK::all().map(KernelVariant::TopK));
    all
}
