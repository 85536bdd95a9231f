// Products of rows with random directions, from which linear_map.wgsl computes features.
//
// rows [batch, heads, length, head_dim]   directions [1, 1 or kv_heads, directions, head_dim]
// features [batch, heads, length, features]: the products are the first `directions` of them
//
// Bindings (declared by the host): rows, directions, `written`, which is the features. heads and
// group belong to the rows. Each y index of a dispatch has chunk_len rows of a head.
// Floors: head_dim · directions multiply-adds a row. The kernel writes features once, and reads
// rows once for every tile of columns.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let h = group.z % p.heads;
    let b = group.z / p.heads;
    let first = group.y * p.chunk_len;
    let count = min(p.chunk_len, p.q_len - first);
    let tile = tile_of(group.x, index, p.direction_count);
    if tile.row >= count || tile.column >= p.direction_count {
        return;
    }
    clear_sums();
    let last = p.direction_count - 1u;
    let head = h / p.group;
    for (var d = 0u; d < p.head_dim; d += 4u) {
        let columns = mat4x4<f32>(
            direction4(0u, head, tile.column, d),
            direction4(0u, head, min(tile.column + 1u, last), d),
            direction4(0u, head, min(tile.column + 2u, last), d),
            direction4(0u, head, min(tile.column + 3u, last), d),
        );
        /* unrolled */ for (var r = 0u; r < ROWS; r++) {
            sums[r] += row4(b, h, first + row_of(tile.row + r, count), d) * columns;
        }
    }
    /* unrolled */ for (var r = 0u; r < ROWS; r++) {
        if tile.row + r < count {
            store_row(b, h, first + tile.row + r, tile.column, sums[r]);
        }
    }
}
