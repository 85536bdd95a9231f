// The weight of every index: the probability of its key, or the sum for the keys of its block.
//
// q [batch, heads, queries, head_dim]   k [batch, kv_heads, kv_len, head_dim]
// lse [batch, heads, queries, 1]   indices [batch, list heads, queries, count]
// weights [batch, heads or 1, queries, count]: with one head, the mean over all heads
//
//   weight = Σ exp(scale · q · k − lse) over the permitted keys that the index names
//
// An index that names no permitted key has the weight 0. Equal indices have equal weights.
//
// Constants: WORKGROUP
//
// Bindings (declared by the host): q, k, lse, indices, weights; the mask's. Floors: head_dim
// multiply-adds for each head and key of an index; a row of k for each key.

const LOG2_E: f32 = 1.4426950408889634;

fn score_of(b: u32, h: u32, i: u32, j: u32) -> f32 {
    let query = view_at(p.q, b, h, i, 0u);
    let key = view_at(p.k, b, h / p.group, j, 0u);
    var sums = vec4<f32>();
    for (var d = 0u; d < p.head_dim; d += 4u) {
        sums += q_at4(query + d * p.q.strides.w, p.q.strides.w, p.head_dim - d)
            * k_at4(key + d * p.k.strides.w, p.k.strides.w, p.head_dim - d);
    }
    return ((sums.x + sums.y) + (sums.z + sums.w)) * p.scale;
}

// The weight of an index for one head.
fn weight_of(b: u32, h: u32, i: u32, index: u32) -> f32 {
    let query = query_of(b, h, i);
    let lse = lse_at(view_at(p.lse, b, h, i, 0u));
    var weight = 0.0;
    if index <= query.end / p.block {
        let end = min((index + 1u) * p.block, query.end);
        for (var j = max(index * p.block, query.first); j < end; j++) {
            var is_seen = true;
            if PER_PAIR_MASK {
                is_seen = mask_mod(query, j);
            }
            if is_seen {
                weight += exp2((score_of(b, h, i, j) - lse) * LOG2_E);
            }
        }
    }
    return weight;
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let n = group.x * WORKGROUP + lane;
    let i = group.y;
    let b = group.z / p.out_heads;
    let h = group.z % p.out_heads;
    if n < p.count {
        let step = p.heads / p.out_heads;
        var sum = 0.0;
        for (var r = h * step; r < (h + 1u) * step; r++) {
            sum += weight_of(b, r, i, indices_at(view_at(p.indices, b, r / p.heads_each, i, n)));
        }
        weights_store(view_at(p.weights, b, h, i, n), sum / f32(step));
    }
}
