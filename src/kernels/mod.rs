//! The Rust twin of every shader: parameters, bindings, variants, grid.

pub(crate) mod add_positions;
pub(crate) mod additive_backward;
pub(crate) mod additive_pairs;
pub(crate) mod additive_scores;
#[cfg(test)]
mod agreement;
pub(crate) mod append_keys;
pub(crate) mod ask_mask;
pub(crate) mod average_weights;
pub(crate) mod cache;
pub(crate) mod cache_advance;
pub(crate) mod cache_append;
pub(crate) mod cache_copy;
pub(crate) mod cache_read;
pub(crate) mod cache_reorder;
pub(crate) mod captured_gradients;
pub(crate) mod classify;
pub(crate) mod column_sums;
pub(crate) mod dropout;
pub(crate) mod embedding;
pub(crate) mod embedding_backward;
pub(crate) mod fused;
pub(crate) mod fused_backward;
pub(crate) mod keep_rows;
pub(crate) mod linear;
pub(crate) mod linear_carry;
pub(crate) mod linear_chunks;
pub(crate) mod linear_d_keys;
pub(crate) mod linear_d_queries;
pub(crate) mod linear_d_rows;
pub(crate) mod linear_d_values;
pub(crate) mod linear_features;
pub(crate) mod linear_logs;
pub(crate) mod linear_map;
pub(crate) mod linear_map_backward;
pub(crate) mod linear_out;
pub(crate) mod linear_prefix;
pub(crate) mod linear_recurrent;
pub(crate) mod linear_scores;
pub(crate) mod linear_state;
pub(crate) mod linear_stats;
pub(crate) mod local;
pub(crate) mod local_columns;
pub(crate) mod local_gradients;
pub(crate) mod local_positions;
pub(crate) mod local_positions_backward;
pub(crate) mod local_rows;
pub(crate) mod local_weights;
pub(crate) mod log_softmax;
pub(crate) mod log_softmax_backward;
pub(crate) mod lsh_codes;
pub(crate) mod lsh_gather;
pub(crate) mod lsh_gradients;
pub(crate) mod lsh_hash;
pub(crate) mod lsh_merge;
pub(crate) mod mask;
pub(crate) mod matmul;
pub(crate) mod mean_pool;
pub(crate) mod mean_pool_backward;
pub(crate) mod merge;
pub(crate) mod merge_backward;
pub(crate) mod merge_splits;
pub(crate) mod norm;
pub(crate) mod norm_backward;
pub(crate) mod norm_sums;
pub(crate) mod part_sums;
pub(crate) mod pointwise;
pub(crate) mod pointwise_backward;
pub(crate) mod project;
pub(crate) mod project_backward;
pub(crate) mod quantized_project;
pub(crate) mod quantized_rows;
pub(crate) mod radix_sort_count;
pub(crate) mod radix_sort_scan;
pub(crate) mod radix_sort_scatter;
pub(crate) mod rotate;
pub(crate) mod rotation_table;
pub(crate) mod row_positions;
pub(crate) mod row_stats;
pub(crate) mod row_totals;
pub(crate) mod score_gradients;
pub(crate) mod score_stage;
pub(crate) mod scores;
pub(crate) mod softmax;
pub(crate) mod table_backward;
pub(crate) mod tanh_backward;
pub(crate) mod tanh_sum;
mod texts;
pub(crate) mod top_k;
pub(crate) mod totals;
mod variant;
pub(crate) mod weight_norm;
pub(crate) mod weight_norm_backward;
pub(crate) mod weighted_sum;

pub(crate) use texts::TEXTS;
#[cfg(feature = "inspect")]
pub(crate) use variant::all;

use crate::device::Fragment;
use crate::kernel::Width;
use crate::tensor::DType;

/// A shader's text and its twin's name, by stem.
macro_rules! shader {
    ($path:literal) => {
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/shaders/", $path, ".wgsl"))
    };
}
pub(crate) use shader;

/// The text of the memory that fragments are loaded from and stored to.
pub(crate) fn memory_of(fragment: Fragment) -> &'static str {
    match fragment {
        Fragment::Eight => shader!("matrix/memory_scalars"),
        Fragment::Sixteen => shader!("matrix/memory_vectors"),
    }
}

/// Values of a variant's axes.
pub(crate) const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
pub(crate) const FLOATS_OR_NONE: [Option<DType>; 4] =
    [None, Some(DType::F32), Some(DType::F16), Some(DType::BF16)];
pub(crate) const WIDTHS: [Width; 2] = [Width::One, Width::Four];
pub(crate) use mask::floats_beside;
