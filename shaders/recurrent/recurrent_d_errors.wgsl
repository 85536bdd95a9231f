// The gradient of the errors within a chunk: the transposed scores times the gradient of out.
//
// memory: scores [chunk_len], d_out [values] and the result [values] of each row
//
// Bindings (declared by the host): memory. Floors: chunk_len / 2 · values multiply-adds a row; 4 ·
// (chunk_len / 2 + 2 · values) bytes read or written.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let tile = tile_of(group.x, index, p.values);
    if tile.row >= p.chunk_len || tile.column >= p.values {
        return;
    }
    let row = row_at(group.z, group.y);
    clear_sums();
    add_columns(
        p.left + row * p.chunk_len + tile.row,
        p.chunk_len,
        p.right + row * p.values + tile.column,
        p.values,
        tile.row,
        p.chunk_len,
    );
    store_sums(p.result + (row + tile.row) * p.values + tile.column, p.values);
}
