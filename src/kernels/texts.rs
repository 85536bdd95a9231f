//! The text of every shader file.

use super::shader;

/// All of them, by path: what measurements of kernels hold for.
pub(crate) const TEXTS: &[&str] = &[
    shader!("activation/exp"),
    shader!("activation/gelu"),
    shader!("activation/gelu_tanh"),
    shader!("activation/none"),
    shader!("activation/relu"),
    shader!("activation/silu"),
    shader!("add_positions"),
    shader!("additive/cpu"),
    shader!("additive/gpu"),
    shader!("additive/score"),
    shader!("additive/tanh"),
    shader!("additive_backward"),
    shader!("additive_pairs"),
    shader!("additive_scores"),
    shader!("append_keys"),
    shader!("ask_mask"),
    shader!("average_weights"),
    shader!("backward/additive"),
    shader!("backward/pair"),
    shader!("backward/product"),
    shader!("backward/rows"),
    shader!("backward/stats"),
    shader!("cache/is_kept"),
    shader!("cache/params"),
    shader!("cache/sequence_table"),
    shader!("cache_advance"),
    shader!("cache_append"),
    shader!("cache_copy"),
    shader!("cache_read"),
    shader!("captured_gradients"),
    shader!("classify"),
    shader!("column_sums"),
    shader!("decode/cpu"),
    shader!("decode/gpu"),
    shader!("decode/reduce_subgroup"),
    shader!("decode/reduce_workgroup"),
    shader!("dropout/given"),
    shader!("dropout/none"),
    shader!("dropout/seeded"),
    shader!("fused"),
    shader!("fused/cpu"),
    shader!("fused/dot"),
    shader!("fused/gpu"),
    shader!("fused/matrix"),
    shader!("fused/tile_state"),
    shader!("fused/tiles"),
    shader!("fused_backward"),
    shader!("fused_backward/cpu"),
    shader!("fused_backward/gpu"),
    shader!("fused_backward/matrix"),
    shader!("fused_backward/tiles"),
    shader!("keep_rows"),
    shader!("keys/by_channel"),
    shader!("keys/cache"),
    shader!("keys/tensor_words"),
    shader!("keys/packed_words"),
    shader!("keys/storage"),
    shader!("keys/tensors"),
    shader!("lsh_codes"),
    shader!("lsh_gather"),
    shader!("lsh_gradients"),
    shader!("lsh_hash"),
    shader!("lsh_merge"),
    shader!("mask/alibi"),
    shader!("mask/blocks"),
    shader!("mask/lengths"),
    shader!("mask/packed"),
    shader!("mask/pattern"),
    shader!("mask/prefix"),
    shader!("mask/query"),
    shader!("mask/query_offsets"),
    shader!("mask/relative"),
    shader!("mask/sink_logits"),
    shader!("mask/softcap"),
    shader!("mask/tree"),
    shader!("matmul/cpu"),
    shader!("matmul/gpu"),
    shader!("matmul/matrix"),
    shader!("matrix/memory_scalars"),
    shader!("matrix/memory_vectors"),
    shader!("merge"),
    shader!("merge_backward"),
    shader!("merge_splits"),
    shader!("norm"),
    shader!("norm/row_per_invocation"),
    shader!("norm/row_per_workgroup"),
    shader!("norm/statistics"),
    shader!("norm_backward"),
    shader!("norm_sums"),
    shader!("part_sums"),
    shader!("pointwise"),
    shader!("pointwise_backward"),
    shader!("position/cos_sin"),
    shader!("position/rotation_table"),
    shader!("position/row_positions"),
    shader!("project"),
    shader!("project_backward"),
    shader!("radix_sort/digits"),
    shader!("radix_sort_count"),
    shader!("radix_sort_scan"),
    shader!("radix_sort_scatter"),
    shader!("rotate"),
    shader!("row_stats"),
    shader!("row_totals"),
    shader!("score_gradients"),
    shader!("score_gradients/lanes"),
    shader!("score_gradients/pairs"),
    shader!("score_gradients/sinks"),
    shader!("score_stage"),
    shader!("scores"),
    shader!("softmax"),
    shader!("softmax/online"),
    shader!("softmax/row_per_invocation"),
    shader!("softmax/row_per_workgroup"),
    shader!("table_backward"),
    shader!("tensor/bf16"),
    shader!("tensor/out"),
    shader!("tensor/view"),
    shader!("weighted_sum"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn texts(folder: &Path) -> Vec<String> {
        let entries =
            std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
        let of = |path: std::path::PathBuf| {
            if path.is_dir() { texts(&path) } else { vec![std::fs::read_to_string(path).expect("text")] }
        };
        entries.flat_map(of).collect()
    }

    #[test]
    fn no_file_is_missing() {
        let mut files = texts(&Path::new(env!("CARGO_MANIFEST_DIR")).join("shaders"));
        let mut listed: Vec<String> = TEXTS.iter().map(|text| text.to_string()).collect();
        files.sort();
        listed.sort();
        assert!(files == listed, "{} files, {} listed", files.len(), listed.len());
    }
}
