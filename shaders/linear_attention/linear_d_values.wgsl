// The gradient of v. Its first part is φ(k) times the gradient of the state after the chunk. Its
// second part is the products within the chunk times d_out / norm.
//
// k [batch, kv_heads, kv_len, features]   d_v [batch, kv_heads, kv_len, value_dim]
// d_out [batch, heads, q_len, value_dim]   stats [batch, heads, q_len, 4]
// states: the gradients of states, as linear_prefix.wgsl writes them   scores: products of features
//
// Bindings (declared by the host): k, states. If causal, also d_out, stats and scores. Then logs
// and chunks if there are any, and `written`, which is d_v.
// Floors: (features + group · chunk_len / 2) · value_dim multiply-adds a row. The kernel reads each
// tensor once, and scores and states once for every tile of columns.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let kv = group.z % p.kv_heads;
    let b = group.z / p.kv_heads;
    let slot = p.first_slot + group.y;
    let chunk = chunk_of(b, kv, slot);
    let tile = tile_of(group.x, index, p.value_dim);
    if tile.row >= chunk.count || tile.column >= p.value_dim {
        return;
    }
    clear_sums();
    clear_norms();
    if chunk.ordinal != HIDDEN {
        add_state(b, kv, chunk, tile, state_at(b, kv, group.y, chunk));
        if IS_SCALED {
            /* unrolled */ for (var r = 0u; r < ROWS; r++) {
                let log = log_at(b, kv, chunk.first + row_of(tile.row + r, chunk.count));
                sums[r] = select(sums[r] * exp(log - log_after(b, kv, slot)), vec4<f32>(), is_hidden(log));
            }
        }
        if IS_CAUSAL {
            add_after(b, kv, group.y, chunk, tile);
        }
    }
    /* unrolled */ for (var r = 0u; r < ROWS; r++) {
        if tile.row + r < chunk.count {
            store_row(b, kv, chunk.first + tile.row + r, tile.column, sums[r]);
        }
    }
}
