// The gradient of φ(k), times the slope of φ: the gradient of k. Its first part is the gradient of
// the state after the chunk, times value and norm. Its second part is the products with the queries
// of the chunk.
//
// k, d_k [batch, kv_heads, kv_len, features]   q [batch, heads, q_len, features]
// v [batch, kv_heads, kv_len, value_dim]   scores: products of gradients
// states: the gradients of states, as linear_prefix.wgsl writes them
//
// Bindings (declared by the host): k if φ has a slope, v, states. If causal, also q and scores.
// Then logs and chunks if there are any, and `written`, which is d_k.
// Floors: (value_dim + 1 + group · chunk_len / 2) · features multiply-adds a row. The kernel reads
// each tensor once, and scores and states once for every tile of columns.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let kv = group.z % p.kv_heads;
    let b = group.z / p.kv_heads;
    let slot = p.first_slot + group.y;
    let chunk = chunk_of(b, kv, slot);
    let tile = tile_of(group.x, index, p.features);
    if tile.row >= chunk.count || tile.column >= p.features {
        return;
    }
    clear_sums();
    clear_norms();
    if chunk.ordinal != HIDDEN {
        /* unrolled */ for (var r = 0u; r < ROWS; r++) {
            norms[r] = 1.0;
            value_factors[r] = 1.0;
        }
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
            let j = chunk.first + tile.row + r;
            store_row(b, kv, j, tile.column, sloped(sums[r], slope4(b, kv, j, tile.column)));
        }
    }
}

// If the gradient of the feature is 0, the gradient of the key is 0, whatever the key holds.
fn sloped(gradient: vec4<f32>, slope: vec4<f32>) -> vec4<f32> {
    if IS_SCALED {
        return select(gradient * slope, vec4<f32>(), gradient == vec4<f32>());
    } else {
        return gradient * slope;
    }
}
