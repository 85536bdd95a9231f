// The gradient of φ(q), times the slope of φ: the gradient of q. Its first part is the state before
// the chunk, times the gradients of result and norm. Its second part is the products with the keys
// of the chunk.
//
// q, d_q [batch, heads, q_len, features]   k [batch, kv_heads, kv_len, features]
// d_out [batch, heads, q_len, value_dim]   stats [batch, heads, q_len, 4]
// states: as in linear_out.wgsl   scores: products of gradients
//
// Bindings (declared by the host): q if φ has a slope, d_out, states, stats. If causal, also k and
// scores. Then chunks if there is a table, and `written`, which is d_q.
// Floors: (value_dim + 1 + chunk_len / 2) · features multiply-adds a row. The kernel reads each
// tensor once, and scores and states once for every tile of columns.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let h = group.z % p.heads;
    let b = group.z / p.heads;
    let kv = h / p.group;
    let chunk = chunk_of(b, kv, p.first_slot + group.y);
    let tile = tile_of(group.x, index, p.features);
    if tile.row >= chunk.count || tile.column >= p.features {
        return;
    }
    clear_sums();
    clear_norms();
    if chunk.ordinal != HIDDEN {
        /* unrolled */ for (var r = 0u; r < ROWS; r++) {
            let stats = stats_of(b, h, chunk.first + row_of(tile.row + r, chunk.count));
            norms[r] = stats.y * stats.w;
            value_factors[r] = stats.x * stats.w;
        }
        add_state(b, h, chunk, tile, state_at(b, kv, group.y, chunk));
        if IS_CAUSAL {
            add_before(b, kv, chunk, tile, (group.z * p.slots + group.y) * p.chunk_len);
        }
    }
    /* unrolled */ for (var r = 0u; r < ROWS; r++) {
        if tile.row + r < chunk.count {
            let i = chunk.first + tile.row + r;
            store_row(b, h, i, tile.column, sums[r] * slope4(b, h, i, tile.column));
        }
    }
}
