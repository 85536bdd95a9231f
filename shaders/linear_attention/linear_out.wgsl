// out = φ(q) · (state before the chunk) + (products within the chunk) · v, divided by the norm. The
// norm is the same sum without values.
//
// q [batch, heads, q_len, features]   v [batch, kv_heads, kv_len, value_dim]
// out [batch, heads, q_len, value_dim]   scores [batch · heads, span's slots, chunk_len, chunk_len]
// states [batch · kv_heads, slots of the span, features, state_stride]
// or totals [sequences, kv_heads, features, state_stride]
//
// Bindings (declared by the host): q, states. If causal, also v and scores. Then logs if keys have
// logarithmic weights, chunks if there is a table, and `written`, which is out.
// Floors: (features + chunk_len / 2) · (value_dim + 1) multiply-adds a row. The kernel reads or
// writes q, v and out once, and scores and states once for every tile of columns.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let h = group.z % p.heads;
    let b = group.z / p.heads;
    let kv = h / p.group;
    let slot = p.first_slot + group.y;
    let chunk = chunk_of(b, kv, slot);
    let tile = tile_of(group.x, index, p.value_dim);
    if tile.row >= chunk.count || tile.column >= p.value_dim {
        return;
    }
    clear_sums();
    clear_norms();
    if chunk.ordinal != HIDDEN {
        add_state(b, h, chunk, tile, state_at(b, kv, group.y, chunk));
        if IS_CAUSAL {
            if IS_SCALED {
                begin_rows(b, kv, slot, chunk, tile.row);
                /* unrolled */ for (var r = 0u; r < ROWS; r++) {
                    let before = hidden_or_exp(log_before(b, kv, slot), row_logs[r]);
                    sums[r] *= before;
                    norms[r] *= before;
                }
            }
            add_before(b, kv, chunk, tile, (group.z * p.slots + group.y) * p.chunk_len);
        }
    }
    /* unrolled */ for (var r = 0u; r < ROWS; r++) {
        if tile.row + r < chunk.count {
            var value = sums[r] * p.scale;
            if IS_NORMALISED {
                // A query that sees no key gets 0.
                let mean = sums[r] / (norms[r] + p.eps);
                value = mean * p.value_scale;
                if !all_finite(value) {
                    value = mean_of_half(lowered(mean, 1u) * p.value_scale);
                }
                value = select(value, vec4<f32>(), norms[r] == 0.0);
            }
            store_row(b, h, chunk.first + tile.row + r, tile.column, value);
        }
    }
}
