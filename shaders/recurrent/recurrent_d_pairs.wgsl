// Adds to the gradients of queries, keys and suffix_keys what comes from the other rows of the
// chunk. The gradients of scores contain the decays.
//
// memory: three arrays of rows [features], which hold the gradients through the state: d_queries,
// d_keys and d_suffix_keys. The last is without β. Two arrays of rows [chunk_len] at p.result: the
// gradients of scores. queries and keys
//
// Bindings (declared by the host): memory. Floors: 2 · chunk_len · features multiply-adds a row; 32
// · features bytes read or written.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let which = group.x / p.tiles;
    let tile = tile_of(group.x % p.tiles, index, p.features);
    if tile.row >= p.chunk_len || tile.column >= p.features {
        return;
    }
    let row = row_at(group.z, group.y);
    let of_keys = p.result + p.second_result;
    let keys = p.keys + row * p.features + tile.column;
    var to = p.d_queries;
    if which == 1u {
        to = p.d_suffix_keys;
    } else if which == 2u {
        to = p.d_keys;
    }
    to += (row + tile.row) * p.features + tile.column;
    let part = select(1u, 2u, which == 1u);
    /* unrolled */ for (var r = 0u; r < ROWS; r++) {
        sums[r] = memory_at(p.rates + 4u * (row + tile.row + r) + part) * at4(to + r * p.features);
    }
    if which == 1u {
        add_columns(
            p.result + row * p.chunk_len + tile.row,
            p.chunk_len,
            p.queries + row * p.features + tile.column,
            p.features,
            tile.row,
            p.chunk_len,
        );
        if IS_DELTA {
            add_columns(of_keys + row * p.chunk_len + tile.row, p.chunk_len, keys, p.features, tile.row, p.chunk_len);
        }
    } else {
        let pairs = select(p.result, of_keys, which == 2u) + (row + tile.row) * p.chunk_len;
        let end = min(tile.row + ROWS, p.chunk_len);
        for (var s = 0u; s < end; s += 4u) {
            let rates = p.rates + 4u * (row + s) + 3u;
            let o = keys + s * p.features;
            let rows = mat4x4<f32>(
                memory_at(rates) * at4(o),
                memory_at(rates + 4u) * at4(o + p.features),
                memory_at(rates + 8u) * at4(o + 2u * p.features),
                memory_at(rates + 12u) * at4(o + 3u * p.features),
            );
            /* unrolled */ for (var r = 0u; r < ROWS; r++) {
                sums[r] += rows * at4(pairs + r * p.chunk_len + s);
            }
        }
    }
    store_sums(to, p.features);
}
