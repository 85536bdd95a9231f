// The reference points of weights: the number that is subtracted from a query's scores. Also the
// weight of the head's sink relative to that number. An invocation computes one query.
//
// The number is lse, unless lse is too large. The next f32 after 4096 is 4096.0005, so exp(score −
// lse) has an error of that size. For a large lse, the number is the largest score. The kernel then
// also computes the sum of the weights relative to that score. Most queries need no sum.
//
// q [batch, heads, q_len, head_dim]   k [batch, kv_heads, kv_len, head_dim]
// row_stats [batch, heads, q_len, 4]: lse, dot, 1, 0 before (row_stats.wgsl)
//   after                      lse, dot, 1, exp(sink − lse)
//   after, with a large lse    largest score, dot, 1 / Σⱼ exp(score − largest), exp(sink − largest)
//
// Constants: WORKGROUP
//
// The score before the mask is in backward/product.wgsl or backward/additive.wgsl.
//
// Bindings (declared by the host): q, k, score_vector of additive scores, row_stats; the mask's.

const LARGEST_EXACT: f32 = 4096.0;

// The weight of the sink, if the head has one, relative to `reference`.
fn store_sink(row: u32, reference: f32, b: u32, h: u32) {
    let sink = with_sink(vec2<f32>(reference, 0.0), b, h);
    row_stats_store(row * 4u + 3u, sink.y * exp2((sink.x - reference) * LOG2_E));
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = (workgroup.x + p.first) * WORKGROUP + lane;
    if row >= p.rows {
        return;
    }
    let neg_inf = p.mask.neg_inf;
    let lse = row_stats_at(row * 4u);
    let b = row / p.mask.q_len / p.heads;
    let h = row / p.mask.q_len % p.heads;
    if lse == neg_inf {
        return;
    }
    if !(abs(lse) > LARGEST_EXACT) {
        store_sink(row, lse, b, h);
        return;
    }
    let q = query_of(b, h, row % p.mask.q_len);
    var total = vec2<f32>(neg_inf, 0.0);
    for (var j = q.first; j < q.end; j++) {
        if PER_PAIR_MASK {
            if !mask_mod(q, j) {
                continue;
            }
        }
        var score = raw_score(q, j);
        if PER_PAIR_MASK {
            score = score_mod(score, q, j);
        }
        total = merged(total, vec2<f32>(score, select(1.0, 0.0, score == neg_inf)), neg_inf);
    }
    total = with_sink(total, b, h);
    row_stats_store(row * 4u, total.x);
    row_stats_store(row * 4u + 2u, 1.0 / total.y);
    store_sink(row, total.x, b, h);
}
