// The gradient of an indexer's keys, from that of its scores. With x = scale · q · k, it is
//
//   d_k[j] = scale · Σ d_scores[i, j] · w[i, h] · q[i, h]   over queries i and heads h with x > 0
//
// q [batch, heads, queries, head_dim]   k, d_k [batch, 1, keys, head_dim]
// w [batch, 1, queries, heads]   ranges [all batches, all queries, 2]
// d_scores [batch, 1, queries, keys]   sums [batch, 1, keys, head_dim], f32
//
// A workgroup processes a key and LANES vectors of channels. It skips groups of p.group queries
// without a gradient for the key. A row is a head of a query. The workgroup computes the products
// of CHUNK rows, an invocation for each. It then adds these rows, an invocation for four channels.
// If the queries are cut into spans, `sums` holds the sum of earlier spans.
//
// Constants: LANES, CHUNK.
//
// Bindings (declared by the host): q, k, w, ranges, d_scores, sums if HAS_SUMS, d_k if HAS_D_K.
// Work: 4 · head_dim per pair and head whose gradient is not 0, and a load for each other pair.

// The gradients of a chunk's products.
var<workgroup> factors: array<f32, CHUNK>;

fn d_score_at(b: u32, i: u32, j: u32) -> f32 {
    let range = range_of(b, i);
    let d_score = d_scores_at(view_at(p.d_scores, b, 0u, i, j));
    return select(0.0, d_score, j >= range.x && j < range.y);
}

// True if one of the queries first .. end has a gradient for key j. It is the same for all
// invocations.
fn is_needed(b: u32, first: u32, end: u32, j: u32) -> bool {
    var count = 0u;
    for (var i = first; i < end; i++) {
        count += select(0u, 1u, d_score_at(b, i, j) != 0.0);
    }
    return count != 0u;
}

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let j = group.x;
    let b = group.z;
    let d = (group.y * LANES + lane) * 4u;
    var sum = vec4<f32>();
    for (var first = 0u; first < p.queries; first += p.group) {
        let end = min(first + p.group, p.queries);
        let rows = select(0u, (end - first) * p.heads, is_needed(b, first, end, j));
        for (var start = 0u; start < rows; start += CHUNK) {
            for (var n = lane; n < CHUNK; n += LANES) {
                let i = first + (start + n) / p.heads;
                let h = (start + n) % p.heads;
                var factor = 0.0;
                if start + n < rows {
                    let d_score = d_score_at(b, i, j);
                    if d_score != 0.0 {
                        if product(b, h, i, j) > 0.0 {
                            factor = d_score * w_at(view_at(p.w, b, 0u, i, h));
                        }
                    }
                }
                factors[n] = factor;
            }
            workgroupBarrier();
            if d < p.head_dim {
                for (var n = 0u; n < min(CHUNK, rows - start); n++) {
                    if factors[n] != 0.0 {
                        let row = start + n;
                        sum += factors[n] * q_four(b, row % p.heads, first + row / p.heads, d);
                    }
                }
            }
            workgroupBarrier();
        }
    }
    sum *= p.scale;
    for (var c = 0u; c < min(4u, max(p.head_dim, d) - d); c++) {
        var total = component(sum, c);
        if HAS_SUMS {
            let o = view_at(p.sums, b, 0u, j, d + c);
            if p.adds != 0u {
                total += sums_at(o);
            }
            sums_store(o, total);
        }
        d_k_store(view_at(p.d_k, b, 0u, j, d + c), total);
    }
}
