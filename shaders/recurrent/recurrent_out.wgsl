// out = prefix_queries · (state before the chunk) + scores · errors. Rows outside of all sequences
// get 0.
//
// out [batch, value_heads, length, value_dim]
// memory: prefix_queries [features], scores [chunk_len] and errors [values] of each row, states
//
// Bindings (declared by the host): chunks, memory, `written`, which is out.
// Floors: (features + chunk_len / 2) · values multiply-adds a row. The kernel reads or writes 4 ·
// (features + chunk_len / 2 + 2 · values) bytes a row, and a state for each chunk.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let z = group.z;
    let chunk = chunk_of(z, group.y);
    let tile = tile_of(group.x, index, p.values);
    if tile.row >= chunk.rows || tile.column >= p.value_dim {
        return;
    }
    let row = row_at(z, group.y);
    clear_sums();
    if tile.row < chunk.count {
        add_rows(
            p.prefix_queries + (row + tile.row) * p.features,
            p.features,
            p.states + (z * p.slots + group.y) * p.features * p.values + tile.column,
            p.values,
            p.features,
        );
        add_rows(
            p.result + (row + tile.row) * p.chunk_len,
            p.chunk_len,
            p.right + row * p.values + tile.column,
            p.values,
            min(tile.row + ROWS, p.chunk_len),
        );
    }
    /* unrolled */ for (var r = 0u; r < ROWS; r++) {
        if tile.row + r < chunk.rows {
            let value = select(vec4<f32>(), sums[r], vec4<bool>(tile.row + r < chunk.count));
            store_row(z / p.value_heads, z % p.value_heads, chunk.first + tile.row + r, tile.column, value);
        }
    }
}
