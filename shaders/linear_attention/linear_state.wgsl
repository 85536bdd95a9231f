// The state of each chunk of rows: Σ feature(row)ᵀ value(row), and the norm Σ feature(row). For
// keys it is φ(k)ᵀ v. For queries, in the backward pass, it is φ(q)ᵀ d_out / norm and the gradient
// of the norm. The sums for queries are over the heads of the group.
//
// features [batch, heads, length, features]   values [batch, heads, length, value_dim]
// states [batch · kv_heads, slots of the span, features, state_stride]
// a row of states: values, then the norm and three zeros
//
// Bindings (declared by the host): the tensors of the rows, chunks if there is a table, states.
// Floors: features · (value_dim + 1) multiply-adds a row. The kernel reads a row once for every
// tile of the state, and writes a state once a chunk.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let kv = group.z % p.kv_heads;
    let b = group.z / p.kv_heads;
    let chunk = chunk_of(b, kv, p.first_slot + group.y);
    let tile = tile_of(group.x, index, p.state_stride);
    if chunk.count == 0u || chunk.ordinal == HIDDEN || tile.row >= p.features || tile.column >= p.state_stride {
        return;
    }
    let origin = origin_of(b, kv, p.first_slot + group.y);
    let is_norm = tile.column + 4u == p.state_stride;
    clear_sums();
    for (var n = 0u; n < item_heads(); n++) {
        let h = item_head(kv, n);
        for (var t = 0u; t < chunk.count; t++) {
            let value = item_value4(b, h, chunk.first + t, tile.column, is_norm, origin);
            /* unrolled */ for (var r = 0u; r < ROWS; r += 4u) {
                let feature = item_feature4(b, h, chunk.first + t, select(0u, tile.row + r, tile.row + r < p.features));
                sums[r] += feature.x * value;
                sums[r + 1u] += feature.y * value;
                sums[r + 2u] += feature.z * value;
                sums[r + 3u] += feature.w * value;
            }
        }
    }
    let first = ((group.z * p.slots + group.y) * p.features + tile.row) * p.state_stride + tile.column;
    /* unrolled */ for (var r = 0u; r < ROWS; r++) {
        if tile.row + r < p.features {
            states_store4(first + r * p.state_stride, sums[r]);
        }
    }
}
