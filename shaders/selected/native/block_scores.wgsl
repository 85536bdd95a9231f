// The scores by which a query selects blocks of keys, from its weights of compressed keys.
//
// weights [batch, 1, queries, compressed]   scores [batch, 1, queries, columns], f32
//
//   score[j] = Σ weight[c] · strides that compressed block c and block j have in common
//
// The first blocks and the blocks at the query's position are always selected: +∞. Later blocks
// never are: −∞.
//
// Constants: WORKGROUP
//
// Bindings (declared by the host): weights, scores. Bytes: scores once; weights once from memory,
// and 1 + length / block times from caches.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let j = group.x * WORKGROUP + lane;
    let i = group.y;
    let b = group.z;
    if j < p.columns {
        // The block of the query's own key.
        let own = (p.position + i) / p.block;
        var score = p.neg_inf;
        if j <= own {
            score = p.inf;
            if j >= p.initial && j + p.local <= own {
                score = 0.0;
                let start = j * p.block_strides;
                let end = start + p.block_strides;
                var c = 0u;
                if start >= p.compressed_strides {
                    c = start - p.compressed_strides + 1u;
                }
                for (; c < min(end, p.compressed); c++) {
                    let overlap = min(c + p.compressed_strides, end) - max(c, start);
                    score += f32(overlap) * weights_at(view_at(p.weights, b, 0u, i, c));
                }
            }
        }
        scores_store(view_at(p.scores, b, 0u, i, j), score);
    }
}
