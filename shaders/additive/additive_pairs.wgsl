// The gradients of scores and the weights of pairs, in place. The kernel replaces a score by its
// gradient. It replaces the gradient of a weight by the weight after dropout. A hidden pair gives
// zeros.
//
// With TOTALS the kernel instead sums the weights of queries, all of whose keys are in the
// rectangle. A workgroup computes a query. row_stats then has the factor of the weights, as in
// fused_backward.wgsl.
//
// d_scores  [batch, heads, q_len, kv_len], f32:   scores, then their gradients
// weights   [batch, heads, q_len, kv_len], f32:   d_out · v, then weights
// row_stats [batch, heads, q_len, 4]   (row_stats.wgsl)
//
// Bindings (declared by the host): d_scores, weights, row_stats; the mask tensors and dropout if
// used.
// Work: two reads, two writes and a power for a pair.

// The sum of the weights of each invocation's keys.
var<workgroup> lane_sums: array<f32, WORKGROUP>;

fn sum_weights(b: u32, h: u32, i: u32, lane: u32) {
    let q = query_of(b, h, i);
    let o = stats_offset(b, h, i);
    let stats = vec3<f32>(row_stats_at(o), row_stats_at(o + 1u), 1.0);
    var sum = 0.0;
    // Every invocation repeats the loop equally often.
    for (var first = q.first; first < q.end; first += WORKGROUP) {
        let j = min(first + lane, q.end - 1u);
        let pair = pair_of(q, j, d_scores_at(view_at(p.d_scores, b, h, i, j)), 0.0, stats);
        sum += select(0.0, pair.probability, first + lane < q.end);
    }
    lane_sums[lane] = sum;
    workgroupBarrier();
    if lane == 0u {
        var all = row_stats_at(o + 3u);
        for (var n = 0u; n < WORKGROUP; n++) {
            all += lane_sums[n];
        }
        row_stats_store(o + 2u, select(1.0 / all, 1.0, all == 0.0));
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    if TOTALS {
        sum_weights(p.first.x + group.z / p.heads, group.z % p.heads, p.first.y + group.y, lane);
        return;
    }
    let j = p.first.z + group.x * WORKGROUP + lane;
    if j >= p.end.z {
        return;
    }
    let i = p.first.y + group.y;
    let b = p.first.x + group.z / p.heads;
    let h = group.z % p.heads;
    let q = query_of(b, h, i);
    let of_score = view_at(p.d_scores, b, h, i, j);
    let of_weight = view_at(p.weights, b, h, i, j);
    var pair = Pair(0.0, 0.0, 0.0, 0.0);
    // If no query of its tile sees a key, no kernel wrote the score.
    if j >= q.first && j < q.end {
        pair = pair_of(q, j, d_scores_at(of_score), weights_at(of_weight), stats_of(b, h, i));
    }
    d_scores_store(of_score, pair.d_score);
    weights_store(of_weight, pair.weight);
}
