// The products of the rows of a chunk with the row and earlier rows, times the decay between both.
// The forward pass computes queries · keys and, for delta rules, keys · keys, with the key's β. The
// backward pass computes the gradients of both.
//
// If each channel has its own decay, it is a running product from the key's row to the query's.
//
// With MULTIPLIES_SCORES, it also multiplies the scores at p.scores and behind it by their
// gradients. The products are terms of the gradients of decays.
//
// memory: two arrays of rows [chunk_len], at p.result and behind it. The second is 0 on the
// diagonal, the first is not. Both are 0 above.
//
// Bindings (declared by the host): chunks, memory. Floors: half of chunk_len · channels
// multiply-adds a row and array; 8 · channels bytes read and 4 · chunk_len written.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let z = group.z;
    let is_second = group.x >= p.tiles;
    let tile = tile_of(group.x % p.tiles, index, p.chunk_len);
    if tile.row >= p.chunk_len || tile.column >= p.chunk_len {
        return;
    }
    let row = row_at(z, group.y);
    clear_sums();
    let columns = vec4<u32>(tile.column) + vec4<u32>(0u, 1u, 2u, 3u);
    if tile.column < tile.row + ROWS {
        let left = select(p.left, p.second_left, is_second) + (row + tile.row) * p.depth;
        let right = p.right + (row + tile.column) * p.depth;
        if IS_BY_CHANNEL {
            add_decayed_dots(left, right, p.factors + row * p.depth, columns, tile.row);
        } else {
            add_dots(left, p.depth, right, p.depth, p.depth);
        }
    }
    var factors = vec4<f32>(select(1.0, p.second_sign, is_second));
    if HAS_RATES {
        let at = p.rates + 4u * (row + tile.column) + 3u;
        factors *= vec4<f32>(memory_at(at), memory_at(at + 4u), memory_at(at + 8u), memory_at(at + 12u));
    }
    // The sums of logarithms from the rows of the keys to the row of the query.
    var logs = vec4<f32>();
    if IS_DECAYED {
        for (var t = 1u; t < tile.row; t++) {
            logs = select(logs, logs + memory_at(p.rates + 4u * (row + t)), columns < vec4<u32>(t));
        }
    }
    let array = select(0u, p.second_result, is_second);
    /* unrolled */ for (var r = 0u; r < ROWS; r++) {
        let t = tile.row + r;
        var products = sums[r] * factors;
        let at = array + (row + t) * p.chunk_len + tile.column;
        if MULTIPLIES_SCORES {
            memory_store4(p.scores + at, at4(p.scores + at) * products);
        }
        if IS_DECAYED {
            logs = select(logs, logs + memory_at(p.rates + 4u * (row + t)), columns < vec4<u32>(t));
            products *= decay_factor4(logs);
        }
        let is_seen = columns < vec4<u32>(t + select(1u, 0u, is_second));
        memory_store4(p.result + at, select(vec4<f32>(), products, is_seen));
    }
}

// The scalar products of the left rows with four right rows. Each channel of a right row first
// decays from its row to the left row.
fn add_decayed_dots(left: u32, right: u32, factors: u32, columns: vec4<u32>, first: u32) {
    for (var k = 0u; k < p.depth; k += 4u) {
        let o = right + k;
        var rows = mat4x4<f32>(at4(o), at4(o + p.depth), at4(o + 2u * p.depth), at4(o + 3u * p.depth));
        for (var t = 1u; t < first; t++) {
            rows = decayed(rows, at4(factors + t * p.depth + k), columns < vec4<u32>(t));
        }
        /* unrolled */ for (var r = 0u; r < ROWS; r++) {
            rows = decayed(rows, at4(factors + (first + r) * p.depth + k), columns < vec4<u32>(first + r));
            sums[r] += at4(left + r * p.depth + k) * rows;
        }
    }
}

fn decayed(rows: mat4x4<f32>, factor: vec4<f32>, are_earlier: vec4<bool>) -> mat4x4<f32> {
    let one = vec4<f32>(1.0);
    return mat4x4<f32>(
        rows[0] * select(one, factor, are_earlier.x),
        rows[1] * select(one, factor, are_earlier.y),
        rows[2] * select(one, factor, are_earlier.z),
        rows[3] * select(one, factor, are_earlier.w),
    );
}
