// The products within each chunk: of every query row with the rows of keys up to its position. For
// the forward pass they are φ(q) · φ(k). For the backward pass they are d_out · v / norm, plus the
// gradient of the norm.
//
// scores [batch · heads, slots of the span, chunk_len, chunk_len]
//
// Bindings (declared by the host): the tensors of both sides, chunks if there is a table, scores.
// Floors: half of chunk_len · channels multiply-adds a row; 2 · chunk_len bytes written a row.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let h = group.z % p.heads;
    let b = group.z / p.heads;
    let kv = h / p.group;
    let slot = p.first_slot + group.y;
    let chunk = chunk_of(b, kv, slot);
    let tile = tile_of(group.x, index, p.chunk_len);
    if chunk.count == 0u || chunk.ordinal == HIDDEN || tile.row >= chunk.count || tile.column >= tile.row + ROWS {
        return;
    }
    clear_sums();
    for (var c = 0u; c < side_channels(); c += 4u) {
        let keys = mat4x4<f32>(
            key_side4(b, kv, chunk.first + row_of(tile.column, chunk.count), c),
            key_side4(b, kv, chunk.first + row_of(tile.column + 1u, chunk.count), c),
            key_side4(b, kv, chunk.first + row_of(tile.column + 2u, chunk.count), c),
            key_side4(b, kv, chunk.first + row_of(tile.column + 3u, chunk.count), c),
        );
        /* unrolled */ for (var r = 0u; r < ROWS; r++) {
            sums[r] += query_side4(b, h, chunk.first + row_of(tile.row + r, chunk.count), c) * keys;
        }
    }
    if IS_SCALED {
        begin_rows(b, kv, slot, chunk, tile.row);
    }
    let first = ((group.z * p.slots + group.y) * p.chunk_len + tile.row) * p.chunk_len + tile.column;
    /* unrolled */ for (var r = 0u; r < ROWS; r++) {
        if tile.row + r < chunk.count {
            var products = side_product(b, h, chunk.first + tile.row + r, sums[r]);
            if IS_SCALED {
                let logs_here = vec4<f32>(
                    log_at(b, kv, chunk.first + row_of(tile.column, chunk.count)),
                    log_at(b, kv, chunk.first + row_of(tile.column + 1u, chunk.count)),
                    log_at(b, kv, chunk.first + row_of(tile.column + 2u, chunk.count)),
                    log_at(b, kv, chunk.first + row_of(tile.column + 3u, chunk.count)),
                );
                let hidden = bitcast<vec4<u32>>(logs_here) == vec4<u32>(bitcast<u32>(p.neg_inf));
                products = select(products * exp(logs_here - row_logs[r]), vec4<f32>(), hidden);
            }
            scores_store4(first + r * p.chunk_len, products);
        }
    }
}
