// The gradient of rows, from the gradients of their products with random directions.
//
// rows, d_rows [batch, heads, length, head_dim]   d_features [batch, heads, length, features + 4]
// directions [1, 1 or kv_heads, directions, head_dim]
//
// linear_map_backward.wgsl writes d_features.
//
// Bindings (declared by the host): rows, directions, d_features, `written`, which is d_rows.
// Floors: head_dim · directions multiply-adds a row. The kernel reads each tensor once, and
// d_features once for every tile of columns.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let h = group.z % p.heads;
    let b = group.z / p.heads;
    let first = group.y * p.chunk_len;
    let count = min(p.chunk_len, p.q_len - first);
    let tile = tile_of(group.x, index, p.head_dim);
    if tile.row >= count || tile.column >= p.head_dim {
        return;
    }
    clear_sums();
    let head = h / p.group;
    for (var n = 0u; n < p.direction_count; n++) {
        let direction = direction4(0u, head, n, tile.column);
        /* unrolled */ for (var r = 0u; r < ROWS; r++) {
            sums[r] += d_features_at(view_at(p.d_features, b, h, first + row_of(tile.row + r, count), n)) * direction;
        }
    }
    /* unrolled */ for (var r = 0u; r < ROWS; r++) {
        if tile.row + r < count {
            let i = first + tile.row + r;
            let factors = view_at(p.d_features, b, h, i, p.features);
            let along = d_features_at(factors + 1u) * row4(b, h, i, tile.column);
            store_row(b, h, i, tile.column, sums[r] * d_features_at(factors) + along);
        }
    }
}
