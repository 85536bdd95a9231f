// The gradients of an indexer's scores as a matrix, from those at listed keys. Keys that are listed
// twice add up.
//
// indices, d_scores [batch, 1, queries, k]   dense [batch, queries, keys], f32
//
// A workgroup processes a query. Invocation n owns the keys j with j % LANES = n, so that sums have
// one order.
//
// Constants: LANES
//
// Bindings (declared by the host): indices, d_scores, dense. Bytes: 4 written for each pair, and
// the lists once from memory and LANES times from caches.

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let i = group.x;
    let b = group.y;
    let row = (b * p.queries + i) * p.keys;
    for (var j = lane; j < p.keys; j += LANES) {
        dense_store(row + j, 0.0);
    }
    for (var n = 0u; n < p.k; n++) {
        let j = indices_at(view_at(p.indices, b, 0u, i, n));
        if j < p.keys && j % LANES == lane {
            dense_store(row + j, dense_at(row + j) + d_scores_at(view_at(p.d_scores, b, 0u, i, n)));
        }
    }
}
