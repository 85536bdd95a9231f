// The gradients that go through the state: rows of a chunk times the transposed state. They are
// d_out · state for queries, −d_errors · state for keys, and errors · d_state for suffix_keys.
//
// memory: rows [values] at p.left, states [features, values] at p.right, the result [features] of
// each row at p.result
//
// Bindings (declared by the host): memory. Floors: features · values multiply-adds a row; 4 ·
// (features + values) bytes read or written, and a state for each chunk.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let tile = tile_of(group.x, index, p.features);
    if tile.row >= p.chunk_len || tile.column >= p.features {
        return;
    }
    let row = row_at(group.z, group.y) + tile.row;
    clear_sums();
    add_dots(
        p.left + row * p.values,
        p.values,
        p.right + ((group.z * p.slots + group.y) * p.features + tile.column) * p.values,
        p.values,
        p.values,
    );
    /* unrolled */ for (var r = 0u; r < ROWS; r++) {
        sums[r] *= p.second_sign;
    }
    store_sums(p.result + row * p.features + tile.column, p.features);
}
