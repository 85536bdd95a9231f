// What pairs give to gradients, in place: of a score and the gradient of a weight, that of the
// score, and the weight as dropout leaves it. A pair that is not seen gives zeros.
//
// TOTALS: the sums of the weights of queries instead, all of whose keys are in the rectangle; a
// workgroup has a query. row_stats then has what weights are multiplied by, as fused_backward.wgsl
// says.
//
// d_scores [batch, heads, q_len, kv_len], f32: scores, then their gradients
// weights  [batch, heads, q_len, kv_len], f32: d_out · v, then weights
// row_stats [batch, heads, q_len, 4] (row_stats.wgsl)
//
// Bindings (declared by the host): d_scores, weights, row_stats; the mask's, dropout where used.
// Two reads and two writes for a pair, and a power.

// Of each invocation, the sum of its keys' weights.
var<workgroup> lane_sums: array<f32, WORKGROUP>;

fn sum_weights(b: u32, h: u32, i: u32, lane: u32) {
    let q = query_of(b, h, i);
    let o = stats_offset(b, h, i);
    let stats = vec3<f32>(row_stats_at(o), row_stats_at(o + 1u), 1.0);
    var sum = 0.0;
    // Every invocation makes the same number of turns.
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
    // Where no query of its tile sees a key, the score was not written.
    if j >= q.first && j < q.end {
        pair = pair_of(q, j, d_scores_at(of_score), weights_at(of_weight), stats_of(b, h, i));
    }
    d_scores_store(of_score, pair.d_score);
    weights_store(of_weight, pair.weight);
}
