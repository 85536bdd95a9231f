// The gradients of an indexer's queries and weights, from those of its scores. With
// x = scale · q · k, they are
//
//   d_q[i, h] = scale · w[i, h] · Σ d_scores[i, j] · k[j]   over keys j with x > 0
//   d_w[i, h] = Σ d_scores[i, j] · relu(x)                  over keys j
//
// q, d_q [batch, heads, queries, head_dim]   k [batch, 1, keys, head_dim]
// w, d_w [batch, 1, queries, heads]   ranges [all batches, all queries, 2]
// d_scores [batch, 1, queries, keys], or [batch, 1, queries, k] with indices of the same shape
//
// A workgroup processes a head of a query, and LANES vectors of channels. It computes the products
// of CHUNK keys, an invocation for each. It then adds the rows of these keys, an invocation for
// four channels. Keys outside the range of the query, and keys with a gradient of 0, are skipped.
//
// Constants: LANES, CHUNK.
//
// Bindings (declared by the host): q, k, w, ranges, d_scores, indices if HAS_INDICES, d_q if
// HAS_D_Q, d_w if HAS_D_W. Work: 4 · head_dim per head and key that is listed, or in the range.

// The gradients of a chunk's products, and its keys.
var<workgroup> factors: array<f32, CHUNK>;
var<workgroup> keys: array<u32, CHUNK>;
var<workgroup> weight_sums: array<f32, LANES>;

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = group.x;
    let i = row / p.heads;
    let h = row % p.heads;
    let b = group.z;
    let range = range_of(b, i);
    let d = (group.y * LANES + lane) * 4u;
    // The entries of the list, or the keys themselves.
    let end = select(range.y, p.listed, HAS_INDICES);
    var sum = vec4<f32>();
    var weight_sum = 0.0;
    for (var start = select(range.x, 0u, HAS_INDICES); start < end; start += CHUNK) {
        for (var n = lane; n < CHUNK; n += LANES) {
            let entry = start + n;
            var factor = 0.0;
            var j = entry;
            if entry < end {
                if HAS_INDICES {
                    j = indices_at(view_at(p.indices, b, 0u, i, entry));
                }
                let d_score = d_scores_at(view_at(p.d_scores, b, 0u, i, entry));
                if j >= range.x && j < range.y && d_score != 0.0 {
                    let x = product(b, h, i, j);
                    if x > 0.0 {
                        factor = d_score;
                        weight_sum += d_score * x;
                    }
                }
            }
            factors[n] = factor;
            keys[n] = j;
        }
        workgroupBarrier();
        if HAS_D_Q && d < p.head_dim {
            for (var n = 0u; n < CHUNK; n++) {
                if factors[n] != 0.0 {
                    sum += factors[n] * k_four(b, keys[n], d);
                }
            }
        }
        workgroupBarrier();
    }
    if HAS_D_Q && d < p.head_dim {
        let d_q = sum * (p.scale * w_at(view_at(p.w, b, 0u, i, h)));
        for (var c = 0u; c < min(4u, p.head_dim - d); c++) {
            d_q_store(view_at(p.d_q, b, h, i, d + c), component(d_q, c));
        }
    }
    if HAS_D_W {
        weight_sums[lane] = weight_sum;
        workgroupBarrier();
        if lane == 0u && group.y == 0u {
            var total = 0.0;
            for (var n = 0u; n < LANES; n++) {
                total += weight_sums[n];
            }
            d_w_store(view_at(p.d_w, b, 0u, i, h), total);
        }
    }
}
