// Sums of products with earlier rows. Each row of a tile sums over itself and the earlier rows of
// its chunk. The weights are products in memory.
//
// Needs: Chunk, Tile; ROWS; norms, other4, p.chunk_len, scores_at, scores_at4, sums; IS_SCALED.
// Gives: add_before, seen_term.

// A hidden row may hold any bits, so it adds 0.
fn seen_term(weight: f32, value: vec4<f32>) -> vec4<f32> {
    if IS_SCALED {
        return select(vec4<f32>(), weight * value, weight != 0.0);
    } else {
        return weight * value;
    }
}

// `scores_row`: the row of the chunk's first row in `scores`.
fn add_before(b: u32, kv: u32, chunk: Chunk, tile: Tile, scores_row: u32) {
    // Rows that all rows of the tile see.
    for (var t = 0u; t < tile.row; t += 4u) {
        let others = array<vec4<f32>, 4>(
            other4(b, kv, chunk.first + t, tile.column),
            other4(b, kv, chunk.first + t + 1u, tile.column),
            other4(b, kv, chunk.first + t + 2u, tile.column),
            other4(b, kv, chunk.first + t + 3u, tile.column),
        );
        /* unrolled */ for (var r = 0u; r < ROWS; r++) {
            let weights = scores_at4((scores_row + min(tile.row + r, chunk.count - 1u)) * p.chunk_len + t, 1u, 4u);
            sums[r] += seen_term(weights.x, others[0]) + seen_term(weights.y, others[1])
                + seen_term(weights.z, others[2]) + seen_term(weights.w, others[3]);
            norms[r] += (weights.x + weights.y) + (weights.z + weights.w);
        }
    }
    // Rows that only a part of the tile's rows sees.
    for (var t = tile.row; t < min(tile.row + ROWS, chunk.count); t++) {
        let other = other4(b, kv, chunk.first + t, tile.column);
        /* unrolled */ for (var r = 0u; r < ROWS; r++) {
            if t <= tile.row + r {
                let weight = scores_at((scores_row + min(tile.row + r, chunk.count - 1u)) * p.chunk_len + t);
                sums[r] += seen_term(weight, other);
                norms[r] += weight;
            }
        }
    }
}
